"""Tiers below the device: tokens are those of an engine without them, whatever is evicted or comes back."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter

import pytest

from bireme.errors import ConfigError, RequestError
from bireme.kv.blocks.events import DEVICE, DISK, HOST
from bireme.serving_options import KvCacheRetentionConfig, TokenRangeRetention
from tests.engines.torch.torch_harness import WAIT_S, Harness, make_prompts, request
from tests.kv.blocks.naive_cache import NaiveCache

SMALL = {"max_batch_size": 4, "max_num_tokens": 32, "max_seq_len": 160, "tokens_per_block": 16, "max_tokens": 16 * 14}
FIRST, *OTHERS = make_prompts(100, 100, 100, 100)
MANY = [FIRST, *OTHERS, *make_prompts(100, 100, 100, 100, seed=1)]


@pytest.fixture(scope="module")
def llama(tiny):
    return tiny("llama")


@pytest.fixture
def engine(llama):
    with Harness(llama.path, **SMALL, host_cache_size=1 << 20) as harness:
        yield harness


@pytest.fixture
def with_disk(llama, tmp_path):
    """Less host memory than MANY take: what came first is on disk at the end."""
    keys = {"host_cache_size": 16 * block_bytes(llama), "disk_cache_size": 1 << 20, "disk_cache_path": str(tmp_path)}
    with Harness(llama.path, **SMALL, **keys) as harness:
        yield harness


def block_bytes(model):
    config = model.module.config
    return 2 * 16 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4


def settle(engine):
    """Wait until no copy is under way."""
    tiers, until = engine.manager.tiers, time.monotonic() + WAIT_S
    while True:
        engine.settle()
        if not tiers._coming and not any(moving for pools in tiers._moving for moving in pools):
            return
        assert time.monotonic() < until, "copies do not end"
        time.sleep(0.002)


def run_apart(engine, prompts, num_tokens=4):
    """Run one after the other; what each leaves has been copied before the next comes."""
    found = []
    for prompt in prompts:
        found += engine.run([request(prompt, num_tokens)])
        settle(engine)
    return found


def hold(engine, name="onboard"):
    """Keep a thread of the mover from its next copy until the returned event is set."""
    gate = threading.Event()
    engine.core._parts.mover._threads[name].call(gate.wait)
    return gate


def disk(engine):
    return engine.core._parts.mover._disk


def assert_nothing_is_held(engine):
    settle(engine)
    assert all(pool.num_referenced == 0 for pools in engine.manager.tiers.pools for pool in pools)


def test_a_prefix_that_was_evicted_comes_back_from_host_memory(engine, llama):
    run_apart(engine, [FIRST, *OTHERS])
    result = engine.submit(request(FIRST, 4))
    assert (result.finish.usage.cached_tokens, [result.tokens]) == (96, llama.expect([FIRST], 4))
    assert sum(engine.manager.tiers.counts.onboarded.values()) == 6
    assert not engine.manager.tiers.counts.missed
    assert_nothing_is_held(engine)


def test_an_engine_runs_on_while_blocks_of_a_request_are_coming(engine, llama):
    run_apart(engine, [FIRST, *OTHERS])
    gate = hold(engine)
    waits = engine.submit(request(FIRST, 4))
    assert engine.run([request(OTHERS[2], 4)]) == llama.expect([OTHERS[2]], 4)
    assert not waits.is_over.is_set()
    gate.set()
    assert waits.finish.error == "" and [waits.tokens] == llama.expect([FIRST], 4)


def test_requests_of_one_prefix_bring_it_back_once(engine, llama):
    run_apart(engine, [FIRST, *OTHERS])
    gate = hold(engine)
    prompts = [[*FIRST[:90], 7], [*FIRST[:90], 8], FIRST]
    results = [engine.submit(request(prompt, 4)) for prompt in prompts]
    engine.settle()
    gate.set()
    assert [result.finish.error for result in results] == [""] * 3
    assert [result.tokens for result in results] == llama.expect(prompts, 4)
    assert engine.manager.tiers.counts.onboarded[HOST, 0] == 6
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("salts", [("a", "b"), ("", "b"), ("a", "")])
def test_another_salt_finds_nothing_in_host_memory(engine, salts):
    engine.run([request(FIRST, 4, cache_salt=salts[0])])
    settle(engine)
    run_apart(engine, OTHERS)
    assert engine.submit(request(FIRST, 4, cache_salt=salts[1])).finish.usage.cached_tokens == 0
    assert engine.submit(request(FIRST, 4, cache_salt=salts[0])).finish.usage.cached_tokens == 96


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_a_request_that_ends_while_its_blocks_are_coming_gives_all_back(engine, llama, how):
    run_apart(engine, [FIRST, *OTHERS])
    gate = hold(engine)
    result = engine.submit(request(FIRST, 4, timeout_ms=50 if how == "deadline" else 0))
    waits = engine.submit(request([*FIRST[:90], 7], 4))
    if how == "abort":
        engine.abort(result)
    else:
        time.sleep(0.06)
    engine.settle()
    gate.set()
    assert result.finish.reason == ("cancelled" if how == "abort" else "timeout")
    assert waits.finish.error == "" and [waits.tokens] == llama.expect([[*FIRST[:90], 7]], 4)
    assert_nothing_is_held(engine)


def test_an_engine_that_stops_while_blocks_are_coming_ends_their_request(llama):
    with Harness(llama.path, **SMALL, host_cache_size=1 << 20) as engine:
        run_apart(engine, [FIRST, *OTHERS])
        gate = hold(engine)
        result = engine.submit(request(FIRST, 4))
        engine.settle()
        timer = threading.Timer(0.2, gate.set)
        timer.start()
        engine.engine.stop()
        assert result.finish.error.startswith("UNAVAILABLE: engine lost")
        timer.join()


def test_a_block_that_is_evicted_before_its_copy_is_lost_and_computed_again(engine, llama):
    gate = hold(engine, "offload")
    for prompt in (FIRST, *OTHERS):
        engine.run([request(prompt, 4)])
    gate.set()
    settle(engine)
    assert sum(engine.manager.tiers.counts.missed.values()) > 0
    result = engine.submit(request(FIRST, 4))
    assert result.finish.error == "" and [result.tokens] == llama.expect([FIRST], 4)
    assert_nothing_is_held(engine)


def test_decode_fetches_what_neither_device_nor_host_memory_has(llama):
    from tests.engines.torch.test_disaggregated import Pair

    keys = {name: value for name, value in SMALL.items() if name != "tokens_per_block"}
    with Pair(llama.path, 16, 16, **keys, host_cache_size=1 << 20) as pair:
        run_apart(pair.decode, [FIRST, *OTHERS])
        asked = []
        fetch = pair.transfers[1].fetch
        pair.transfers[1].fetch = lambda params, firsts, *rest: asked.append(firsts) or fetch(params, firsts, *rest)
        assert pair.run([FIRST], max_tokens=20) == llama.expect([FIRST], 20)
        assert asked == [[96]]
        pair.assert_nothing_is_held()


def test_metrics_are_those_of_a_naive_cache(llama):
    """Host memory for all that there is: one that is full is the naive cache's business in tests/kv."""
    draw, naive, found = random.Random(3), NaiveCache(14, 1000, 16), Counter()
    with Harness(llama.path, **SMALL, host_cache_size=2000 * block_bytes(llama)) as engine:
        prompts = [
            [*draw.choice(MANY)[: draw.choice([32, 64, 96])], *range(9, 9 + draw.randrange(2, 30))] for _ in range(40)
        ]
        for prompt in prompts:
            found.update(naive.run(prompt))
            run_apart(engine, [prompt], 1)
        delta = engine.metrics.take_delta()
    counters = {(name, *labels[1:]): value for name, labels, value in delta.counters}
    rates = {labels[1]: value for name, labels, value in delta.gauges if name == "bireme_kv_hit_rate"}
    assert found[DEVICE] and found[HOST]
    for tier, name in ((DEVICE, "device"), (HOST, "host")):
        assert counters["bireme_kv_matched_tokens_total", name] == 16 * found[tier]
        assert rates[name] == pytest.approx(16 * found[tier] / sum(map(len, prompts)))
    assert counters["bireme_kv_onboarded_blocks_total", "host"] == found[HOST]
    assert counters["bireme_kv_onboarded_bytes_total", "host"] == found[HOST] * block_bytes(llama)
    offloaded = counters["bireme_kv_offloaded_blocks_total", "host"]
    assert counters["bireme_kv_offloaded_bytes_total", "host"] == offloaded * block_bytes(llama)
    assert counters["bireme_kv_offload_missed_blocks_total", "host"] == 0


def keep(priority, end=None, **fields):
    ranges = (TokenRangeRetention(token_start=0, token_end=end, priority=priority),)
    return KvCacheRetentionConfig(token_range_retention_configs=ranges, **fields)


def test_a_prompt_of_high_priority_stays_while_others_are_evicted(llama):
    with Harness(llama.path, **SMALL) as engine:
        engine.run([request(FIRST, 4, kv_cache_retention_config=keep(90, 64))])
        run_apart(engine, OTHERS)
        assert engine.submit(request(FIRST, 4)).finish.usage.cached_tokens == 64


def test_generated_blocks_of_low_priority_go_first(llama):
    with Harness(llama.path, **SMALL) as engine:
        engine.run([request(OTHERS[0], 4)])  # the least recently used
        low = KvCacheRetentionConfig(decode_retention_priority=1)
        [output] = engine.run([request(FIRST, 40, kv_cache_retention_config=low)])  # the last full block is generated
        engine.run([request(OTHERS[1][:20], 4)])  # two blocks, where one is free
        assert engine.submit(request([*FIRST, *output], 4)).finish.usage.cached_tokens == 112


def test_blocks_of_low_priority_are_not_copied_down(engine):
    engine.run([request(FIRST, 4, kv_cache_retention_config=keep(10))])
    run_apart(engine, OTHERS)
    assert engine.submit(request(FIRST, 4)).finish.usage.cached_tokens == 0


def test_the_gate_refuses_a_retention_that_no_cache_can_do(engine):
    with pytest.raises(RequestError, match="kv_cache_retention_config.*priority: 101; 0 to 100"):
        engine.submit(request(FIRST, 4, kv_cache_retention_config=keep(101)))


def test_blocks_go_on_to_disk_and_come_back(with_disk, llama):
    run_apart(with_disk, MANY)
    result = with_disk.submit(request(FIRST, 4))
    assert (result.finish.usage.cached_tokens, [result.tokens]) == (96, llama.expect([FIRST], 4))
    assert with_disk.manager.tiers.counts.onboarded[DISK, 0] == 6
    assert_nothing_is_held(with_disk)


def flip(file, size):
    for at in range(0, size, 512):
        os.pwrite(file, bytes([os.pread(file, 1, at)[0] ^ 4]), at)


@pytest.mark.parametrize("harm", ["flipped", "truncated", "unreadable"])
def test_a_disk_that_gives_back_something_else_is_not_believed(with_disk, llama, harm):
    run_apart(with_disk, MANY)
    file = disk(with_disk)._file
    if harm == "flipped":
        flip(file, os.fstat(file).st_size)
    elif harm == "truncated":
        os.ftruncate(file, 100)
    else:
        os.dup2(os.open("/", os.O_RDONLY), file)  # reading a folder fails
    assert run_apart(with_disk, MANY) == llama.expect(MANY, 4)
    assert with_disk.manager.tiers.counts.failed[DISK, 0] > 0
    assert_nothing_is_held(with_disk)


def test_a_full_disk_takes_nothing_and_is_asked_again_later(with_disk, llama):
    os.dup2(os.open("/dev/full", os.O_RDWR), disk(with_disk)._file)
    assert run_apart(with_disk, MANY) == llama.expect(MANY, 4)
    counts = with_disk.manager.tiers.counts
    assert counts.failed[DISK, 0] == 1 and not counts.offloaded[DISK, 0]
    assert_nothing_is_held(with_disk)


def test_the_file_of_the_disk_tier_has_no_name_and_is_its_owners(with_disk, tmp_path):
    run_apart(with_disk, MANY)
    status = os.fstat(disk(with_disk)._file)
    assert (status.st_mode & 0o777, status.st_nlink, list(tmp_path.iterdir())) == (0o600, 0, [])
    assert status.st_size > 0


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"host_cache_size": 10}, "host_cache_size: 10 bytes do not hold one block"),
        ({"host_cache_size": 1 << 20, "enable_block_reuse": False}, "enable_block_reuse: false"),
        ({"disk_cache_size": 1 << 20}, "disk_cache_size: 1048576; blocks get to disk through host memory"),
        ({"host_cache_size": 1 << 20, "disk_cache_size": 1 << 20}, "disk_cache_path: not set"),
        (
            {"host_cache_size": 1 << 20, "disk_cache_size": 1 << 20, "disk_cache_path": "/proc/nowhere"},
            "disk_cache_path: /proc/nowhere: No such file",
        ),
        ({"host_cache_size": 1 << 60}, "this host has .* bytes of memory, ask for less"),
    ],
)
def test_keys_that_make_no_tier_are_refused(llama, keys, match):
    with pytest.raises(ConfigError, match=match):
        Harness(llama.path, **SMALL, **keys)


class GpuOrder:
    """Which step wrote each block, which steps copies down wait for, and which have been waited for."""

    def __init__(self, engine, monkeypatch):
        parts, self.size = engine.core._parts, engine.manager.tokens_per_block
        self.num_given = self.num_noted = self.num_done = 0
        self.windows = [group.window for group in engine.manager.groups]
        self.written, self.copies = {}, []  # (window, block's step, step waited for, steps done, given) of each copy
        for owner, name in [
            (parts.forward.builder, "build"), (parts.forward, "compute"), (parts.sampler, "sample"),
            (parts.mover, "note_computed"), (parts.mover, "offload"),
        ]:  # fmt: skip
            monkeypatch.setattr(owner, name, self._told(getattr(self, name), getattr(owner, name)))

    def _told(self, note, call):
        return lambda *args: (note(*args), call(*args))[1]

    def build(self, plan):
        for sequence, count in [*((one, 1) for one in plan.decodes), *plan.chunks]:
            first, last = sequence.computed // self.size, (sequence.computed + count - 1) // self.size
            for group, blocks in enumerate(sequence.table.blocks):
                self.written.update({(group, block): self.num_given + 1 for block in blocks[first : last + 1]})

    def compute(self, batch):
        self.num_given += 1

    def sample(self, *args):
        self.num_done = self.num_given

    def note_computed(self):
        self.num_noted = self.num_given

    def offload(self, copies, done):
        waited = max(self.num_noted, self.num_done)
        for copy in copies:
            written = self.written[copy.group, copy.source]
            self.copies.append((self.windows[copy.group], written, waited, self.num_done, self.num_given))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_copies_down_wait_for_the_step_that_wrote_their_block(tiny, monkeypatch, name):
    """On a GPU a step of which nothing is read may still run when blocks of its chunk leave a window.

    Copies of other blocks do not wait for it: they would come too late for the evictions of the next.
    """
    num_blocks = {"llama": 24, "gemma3": 14}[name]  # more than are copied ahead; fewer
    keys = SMALL | {"max_num_tokens": 64, "max_tokens": 16 * num_blocks}
    with Harness(tiny(name).path, **keys, host_cache_size=1 << 20) as engine:
        engine.core._parts.forward.mixed = None  # every step with prompts passes by what is watched
        order = GpuOrder(engine, monkeypatch)
        run_apart(engine, [MANY[at] + MANY[at + 1][:50] for at in range(6)], 1)
    assert all(written <= waited for _, written, waited, _, _ in order.copies)
    beside = [copy for copy in order.copies if copy[3] < copy[4]]
    assert all(waited < given for window, _, waited, _, given in beside if not window)
    assert any(written == given for _, written, _, _, given in beside) is (name == "gemma3")
    assert any(written < given for _, written, _, _, given in beside)


@pytest.mark.parametrize("policy", ["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_tokens_are_those_of_an_engine_without_tiers(tiny, tmp_path, name, policy):
    """Prompts of a few beginnings come at random; some are aborted; little is held anywhere."""
    model, draw = tiny(name), random.Random(f"{name} {policy}")
    prompts = [
        [*draw.choice([FIRST, *OTHERS])[: draw.choice([20, 64, 90])], *range(9, 9 + draw.randrange(1, 30))]
        for _ in range(24)
    ]
    with Harness(model.path, **(SMALL | {"max_tokens": None})) as plain:
        expected = plain.run([request(prompt, 16) for prompt in prompts])
    keys = {"host_cache_size": 1 << 18, "disk_cache_size": 1 << 19, "disk_cache_path": str(tmp_path)}
    with Harness(model.path, **SMALL, **keys, queue={"capacity_scheduler_policy": policy}) as engine:
        for _ in range(4):
            order = draw.sample(range(24), 24)
            results = {at: engine.submit(request(prompts[at], 16)) for at in order}
            for at in draw.sample(order, 3):
                engine.abort(results.pop(at))
            assert {at: result.finish.error for at, result in results.items()} == dict.fromkeys(results, "")
            assert all(result.tokens == expected[at] for at, result in results.items())
        settle(engine)
        counts = engine.manager.tiers.counts
        assert counts.onboarded.total() > 20 and any(tier == DISK for tier, _ in counts.onboarded)
        assert (engine.core.scheduler.num_preemptions > 0) == (policy == "MAX_UTILIZATION")
        assert_nothing_is_held(engine)
