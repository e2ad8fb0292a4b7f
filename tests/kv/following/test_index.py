"""The prefix index: who holds how much of a prompt."""

import os
import subprocess
import sys

import numpy as np
import pytest

from bireme.errors import ConfigError
from bireme.kv.following.index import KvIndex
from tests.kv.following.naive_index import DEVICE, DISK, HOST, Clock, Pair, dump


@pytest.fixture
def index():
    return KvIndex()


def depths_of(index, hashes):
    """Depths in any tier by worker, of those that hold anything."""
    depths = index.match(hashes)[-1]
    return {name: int(depths[slot]) for name, slot in index.slots.items() if depths[slot]}


def test_workers_that_share_a_beginning_have_the_golden_depths(index):
    a, b = index.add_worker("a"), index.add_worker("b")
    index.stored(a, None, [1, 2])
    index.stored(b, None, [1, 3])
    assert depths_of(index, [1]) == {"a": 1, "b": 1}
    assert depths_of(index, [1, 2]) == {"a": 2, "b": 1}


def test_a_prompt_that_goes_on_elsewhere_has_the_golden_depth(index):
    a = index.add_worker("a")
    index.stored(a, None, [1, 2, 3])
    assert depths_of(index, [1, 2, 999]) == {"a": 2}
    index.removed(a, [3])
    assert depths_of(index, [1, 2, 3]) == {"a": 2}


def test_a_hole_ends_what_counts_until_it_is_filled(index):
    a = index.add_worker("a")
    index.stored(a, None, [1, 2, 3, 4])
    index.removed(a, [2])
    assert depths_of(index, [1, 2, 3, 4]) == {"a": 1}
    index.stored(a, 1, [2])
    assert depths_of(index, [1, 2, 3, 4]) == {"a": 4}


def test_events_told_twice_or_of_unknown_blocks_change_nothing(index):
    a, b = index.add_worker("a"), index.add_worker("b")
    index.stored(a, None, [1, 2])
    index.stored(a, None, [1, 2])
    index.removed(b, [1, 2, 99])
    index.removed(a, [99])
    assert (depths_of(index, [1, 2]), index.num_blocks, index.num_memberships) == ({"a": 2}, 2, 2)


def test_a_parent_that_the_worker_does_not_hold_is_told(index):
    a, b = index.add_worker("a"), index.add_worker("b")
    assert index.stored(a, None, [1, 2])
    assert index.stored(a, 2, [3])
    assert not index.stored(b, 2, [3])
    assert depths_of(index, [1, 2, 3]) == {"a": 3}


def test_one_prefix_of_a_thousand_workers_is_kept_once(index):
    chain = list(range(1, 65))
    for number in range(1000):
        index.stored(index.add_worker(f"w{number}"), None, chain[: 1 + number % 64])
    depths = index.match(chain)[DEVICE]
    assert depths[:1000].tolist() == [1 + number % 64 for number in range(1000)]
    assert index.num_memberships == sum(1 + number % 64 for number in range(1000))
    assert index.nbytes < 300_000


def test_tiers_count_from_where_the_better_one_ends(index):
    a, b = index.add_worker("a"), index.add_worker("b")
    index.stored(a, None, [1, 2])
    index.stored(a, 2, [3, 4], HOST)
    index.stored(a, 4, [5], DISK)
    index.stored(b, None, [1, 2, 3, 4, 5], HOST)
    index.stored(b, None, [1, 2, 3, 4, 5])
    assert index.match([1, 2, 3, 4, 5, 6])[:, a].tolist() == [2, 4, 5]
    assert index.match([1, 2, 3, 4, 5, 6])[:, b].tolist() == [5, 5, 5]
    index.removed(b, [2])
    assert index.match([1, 2, 3, 4, 5, 6])[:, b].tolist() == [1, 5, 5]


def test_what_was_predicted_counts_until_its_time_is_over():
    clock = Clock()
    index = KvIndex(clock=clock)
    a = index.add_worker("a")
    index.predicted(a, np.array([1, 2], np.uint64), 2.0)
    assert depths_of(index, [1, 2]) == {"a": 2}
    clock.now += 1.5
    index.predicted(a, np.array([1], np.uint64), 2.0)
    clock.now += 1.0
    assert depths_of(index, [1, 2]) == {"a": 1}
    clock.now += 1.5
    assert (index.num_blocks, index.num_memberships, index.num_predicted) == (1, 1, 1)  # nothing has looked since
    assert depths_of(index, [1, 2]) == {}
    assert (index.num_blocks, index.num_memberships, index.num_predicted) == (0, 0, 0)


def test_what_comes_true_stays_and_what_is_removed_goes_at_once():
    clock = Clock()
    index = KvIndex(clock=clock)
    a = index.add_worker("a")
    index.predicted(a, np.array([1, 2, 3], np.uint64), 2.0)
    index.stored(a, None, [1, 2])
    index.removed(a, [3])
    assert depths_of(index, [1, 2, 3]) == {"a": 2}
    clock.now += 10
    assert depths_of(index, [1, 2, 3]) == {"a": 2}


def test_too_many_guesses_drop_the_oldest_and_the_ends_of_prompts_first():
    index = KvIndex(max_predicted=10, clock=Clock())
    a = index.add_worker("a")
    index.predicted(a, np.array([1, 2, 3, 4], np.uint64), 5)
    index.predicted(a, np.array([11, 12, 13, 14, 15, 16, 17], np.uint64), 6)
    assert index.num_predicted == 8
    assert depths_of(index, [1, 2, 3, 4]) == {"a": 1}
    assert depths_of(index, [11, 12, 13, 14, 15, 16, 17]) == {"a": 7}


def test_a_worker_that_left_leaves_nothing_and_its_slot_is_used_again(index):
    a, b = index.add_worker("a"), index.add_worker("b")
    index.stored(a, None, [1, 2])
    index.stored(b, None, [1])
    index.remove_worker(a)
    assert (index.num_blocks, index.num_memberships, dict(index.slots)) == (1, 1, {"b": b})
    assert index.add_worker("c") == a
    assert depths_of(index, [1, 2]) == {"b": 1}


def test_a_name_is_taken_once(index):
    index.add_worker("decode")
    with pytest.raises(ConfigError, match="decode"):
        index.add_worker("decode")


def test_there_is_a_limit_of_workers_and_it_is_said(index):
    for number in range(8191):
        index.add_worker(f"w{number}")
    with pytest.raises(ConfigError, match="8191"):
        index.add_worker("one more")
    index.remove_worker(17)
    assert index.add_worker("instead") == 17


def test_memory_is_given_back_when_workers_come_and_go(index):
    """Each life holds other blocks, as under another LoRA."""
    random = np.random.default_rng(1)
    sizes = []
    for _ in range(30):
        slots = [index.add_worker(f"w{number}") for number in range(70)]
        shared = random.integers(1, 1 << 63, 500, np.uint64)
        for number, slot in enumerate(slots):
            index.stored(slot, None, shared[: 10 + number * 5])
            index.stored(slot, None, random.integers(1, 1 << 63, 100, np.uint64))
        sizes.append(index.nbytes)
        for slot in slots:
            index.remove_worker(slot)
        assert index.num_memberships == index.num_blocks == 0
        assert index.nbytes < 100_000
    assert max(sizes) <= 1.1 * min(sizes)


def test_blocks_that_come_and_go_one_by_one_leave_nothing(index):
    a, b = index.add_worker("a"), index.add_worker("b")
    random = np.random.default_rng(2)
    window = [random.integers(1, 1 << 63, 10, np.uint64) for _ in range(100)]
    for number in range(3000):
        index.removed(a, window[number % 100])
        index.removed(b, window[number % 100])
        window[number % 100] = random.integers(1, 1 << 63, 10, np.uint64)
        index.stored(a, None, window[number % 100])
        index.stored(b, None, window[number % 100])
    assert (index.num_blocks, index.num_memberships) == (1000, 2000)
    assert index.nbytes < 120_000


def test_a_dump_makes_the_same_index_again(index):
    a, b = index.add_worker("a"), index.add_worker("b")
    index.stored(a, None, [1, 2, 3])
    index.stored(a, 3, [4], HOST)
    index.stored(b, None, [1, 2])
    late = KvIndex()
    for name, slot in index.slots.items():
        assert late.add_worker(name) == slot
        for block_hash, tier in dump(index, slot):
            late.stored(slot, None, [block_hash], tier)
    assert (late.match([1, 2, 3, 4]) == index.match([1, 2, 3, 4])).all()
    assert late.num_memberships == index.num_memberships


@pytest.mark.parametrize("hashes", [[], np.zeros(0, np.uint64)])
def test_no_blocks_are_no_depth_and_no_fault(index, hashes):
    a = index.add_worker("a")
    index.stored(a, None, hashes)
    index.removed(a, hashes)
    index.predicted(a, hashes, 1)
    assert index.match(hashes).max() == 0


def test_hashes_of_all_values_and_arrays_that_cannot_be_written_are_taken(index):
    a = index.add_worker("a")
    hashes = np.frombuffer(np.array([0, (1 << 64) - 1, 1 << 63], np.uint64).tobytes(), np.uint64)
    index.stored(a, None, hashes)
    assert depths_of(index, hashes) == {"a": 3}


@pytest.mark.parametrize("seed", range(20))
def test_it_equals_the_naive_index_after_any_operations(seed):
    pair = Pair(seed)
    for number in range(1000):
        pair.step()
        if number % 20 == 0:
            pair.check()
    pair.check()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(200))
def test_it_equals_the_naive_index_after_ten_thousand_operations(seed):
    pair = Pair(seed)
    for number in range(10_000):
        pair.step()
        if number % 50 == 0:
            pair.check()
    pair.check()


def test_it_is_the_same_where_nothing_is_compiled():
    program = "from tests.kv.following.naive_index import Pair\npair = Pair(3)\n"
    program += "for _ in range(150): pair.step()\npair.check()"
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", program], check=True, env=env)


def test_numba_is_loaded_by_an_index_and_not_before():
    program = "import sys; import bireme.kv.following.index; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_no_operation_of_a_new_index_waits_for_a_compiler():
    """Everything was compiled, or read from disk, when the index was made: what follows loads no code."""
    program = """
import sys
from tests.kv.following.naive_index import Pair
import numpy as np
from bireme.kv.routing.placement import RoutingRequest
from bireme.pipelines.routing import prompt_hashes
from bireme.serving_options import ServingOptions
from bireme.kv.routing.block_uses import BlockUses
from bireme.kv.wire.event_reading import EventReader
from bireme.kv.wire.event_wire import BlockRemoved, EventBatch, encode_payload
pair, hash_prompt, uses, reader = Pair(1), prompt_hashes(b"key"), BlockUses(), EventReader()
from numba.core.event import install_recorder
loaded = set(sys.modules)
with install_recorder("numba:compile") as recorder:
    for _ in range(300): pair.step()
    pair.check()
    hash_prompt(RoutingRequest(np.arange(500, dtype=np.int32)), 16)
    hashes = hash_prompt(RoutingRequest(np.arange(500, dtype=np.int32), ServingOptions(cache_salt="tenant")), 16)
    user, depth = np.array([uses.new_user()]), np.array([9.0])
    uses.add(0, hashes), uses.shared(user, hashes), uses.last(user, hashes, depth), uses.subtract(0, hashes)
    pair.index.apply(reader.read([encode_payload(EventBatch(0.0, [BlockRemoved([7])], 0))])[0].changes.of_slot(0))
assert set(sys.modules) == loaded, set(sys.modules) - loaded
assert not recorder.buffer, recorder.buffer
"""
    pytest.importorskip("numba")
    subprocess.run([sys.executable, "-c", program], check=True)
