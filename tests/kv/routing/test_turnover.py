"""New blocks are dear where a pool turns over faster than others' do, so a common prefix keeps nobody on one worker."""

from collections import Counter

import numpy as np
import pytest

from bireme.kv.routing import targets
from bireme.kv.routing.active import SentRequest
from bireme.kv.routing.targets import StageTargets
from tests.kv.routing.router_fixtures import RouterBench, capacity, record

PREFIX = list(range(16))  # four blocks


def make_stage(*names, weight=0.7, num_blocks=100):
    stage = StageTargets({}, None, weight)
    stage.set_workers({name: record(name, capacity=capacity(num_blocks=num_blocks)) for name in names})
    return stage


def send(stage, index, num_new):
    stage.add(stage.targets[index], SentRequest(np.zeros(0, np.uint64), 0, num_new=num_new), 0.0)


def prices(stage):
    return [round(price, 2) for price in stage.block_prices.tolist()]


def converse(bench, number, turn):
    """Place a turn of a conversation when nothing else is running, and let it end."""
    own = [1000 * (number + 1) + token for token in range(16 * turn)]
    placement = bench.place(PREFIX + own)
    bench.router.finished(placement)
    bench.clock.now += 10
    return placement.decode


def test_a_block_costs_more_where_the_pool_turns_over_faster():
    stage = make_stage("a", "b", "c")
    for _ in range(200):
        for index in (0, 1, 0):
            send(stage, index, 5)
    assert prices(stage) == pytest.approx([1.7, 1.0, 0.3], abs=0.03)


def test_pools_that_turn_over_alike_have_one_price_whatever_their_size():
    stage = StageTargets({}, None, 0.7)
    stage.set_workers(
        {name: record(name, capacity=capacity(num_blocks=size)) for name, size in (("a", 50), ("b", 500))}
    )
    for _ in range(200):
        send(stage, 0, 1)
        send(stage, 1, 10)
    assert prices(stage) == pytest.approx([1.0, 1.0], abs=0.02)


def test_a_single_prompt_makes_little_difference():
    stage = make_stage("a", "b", num_blocks=10_000)
    send(stage, 0, 10)
    assert prices(stage) == pytest.approx([1.0, 1.0], abs=0.05)


def test_what_came_a_pool_of_blocks_ago_counts_a_third():
    stage = make_stage("a", "b")
    send(stage, 0, 100)
    before = stage.targets[0].turned_over / stage._unit
    for _ in range(100):
        send(stage, 1, 2)
    after = stage.targets[0].turned_over / stage._unit
    assert after / before == pytest.approx(np.exp(-1))


def test_prices_stay_what_they_are_when_the_unit_begins_anew(monkeypatch):
    monkeypatch.setattr(targets, "_MAX_UNIT", 10.0)
    small, large = make_stage("a", "b"), make_stage("a", "b")
    units = set()
    for number in range(400):
        send(small, number % 3 // 2, 7)
        units.add(small._unit > 9)
    monkeypatch.undo()
    for number in range(400):
        send(large, number % 3 // 2, 7)
    assert units == {True, False} and small._unit < 12 < large._unit
    assert prices(small) == prices(large)


def test_a_worker_that_joins_is_cheap_for_what_nobody_holds():
    stage = make_stage("a", "b")
    for index in (0, 1) * 20:
        send(stage, index, 10)
    records = {name: record(name, capacity=capacity()) for name in ("a", "b", "c")}
    stage.set_workers(records)
    assert prices(stage) == pytest.approx([1.35, 1.35, 0.3], abs=0.05)


def test_conversations_that_share_a_prefix_are_spread_over_idle_workers():
    bench = RouterBench(turnover_weight=0.7)
    bench.set_workers("decode", "decode_1", capacity=capacity())
    placed = [[converse(bench, number, turn) for number in range(12)] for turn in (1, 2, 3)]
    assert max(Counter(worker for turn in placed for worker in turn).values()) <= 22
    assert placed[1] == placed[2]  # each stays where its own blocks are


def test_without_the_weight_the_shared_prefix_decides():
    bench = RouterBench(turnover_weight=0.0)
    bench.set_workers("decode", "decode_1", capacity=capacity())
    assert len({converse(bench, number, 1) for number in range(12)}) == 1


def test_decode_counts_what_it_takes_from_prefill_and_prefill_what_it_computes():
    bench = RouterBench(turnover_weight=0.7, transfer_ms=0)
    bench.set_workers("prefill", "prefill_1", "decode", "decode_1", capacity=capacity())
    placement = bench.place(PREFIX)
    turned = {one.worker for stage in bench.router._stages.values() for one in stage.targets if one.turned_over}
    assert turned == {placement.prefill, placement.decode}
