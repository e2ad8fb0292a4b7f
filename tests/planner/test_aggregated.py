"""Workers of one stage: how many they should be, in figures that are played and in the simulator."""

import msgspec
import numpy as np
import pytest

from bireme.config import MockerConfig, RouterConfig
from bireme.planner.aggregated import AggregatedPlanner, gap_ms, rows_of
from bireme.planner.capacity import Load, PlannedEngine
from bireme.planner.observation import Observation, StageObservation
from bireme.planner.planner_settings import PlannerSettings, StageBounds
from bireme.planner.simulated import SimulatedScaler
from bireme.sizing.simulator.cluster import ClusterSettings, simulate
from bireme.sizing.simulator.trace import SimulatedRequest
from bireme.sizing.simulator.worker import SimulatedEngine
from bireme.sizing.step_times import StepTimes

# A prompt of 1,000 tokens takes 110 ms; a step of so many rows 10 ms and 1 more for each.
TIMES = StepTimes.of_mocker(MockerConfig(step_ms=10, step_ms_per_request=1, prefill_ms=0, prefill_ms_per_token=0.1))
ENGINE = PlannedEngine(TIMES)
SETTINGS = PlannerSettings(max_gpus=8, interval_s=60, start_s=60, reversal_s=300, down_window_s=120)


def seen(minute, per_s, ready, **more):
    figures = {"prompt_tokens": 1000.0, "output_tokens": 100.0, "ttft_ms": None, "itl_ms": None} | more
    requests = round(60 * per_s)
    return Observation(
        at_s=60.0 * minute, interval_s=60.0, num_requests=requests, prefill=StageObservation(0),
        decode=figures.pop("decode", StageObservation(ready)), **figures,
    )  # fmt: skip


def settled(planner, per_s, minutes=30, ready=1, first=0, **more):
    for minute in range(first, first + minutes):
        decision = planner.decide(seen(minute, per_s, ready, **more), 60.0 * minute)
        assert decision.prefill == 0 and decision.decode <= 8 and decision.reason
        ready = decision.decode
    return decision


def test_prompts_make_gaps_longer_and_more_workers_shorten_them():
    load = Load(4.0, 1000.0, 100.0)
    gaps = [gap_ms(ENGINE, load, count, rows_of(ENGINE, load, count)) for count in (1, 2, 4)]
    assert gaps == sorted(gaps, reverse=True) and gaps[-1] > ENGINE.decode_ms(1, 1050)
    assert rows_of(ENGINE, Load(10.0, 1000.0, 100.0), 1) == float("inf")  # prompts alone take 1.1 s of each


def test_workers_follow_the_load_and_end_at_the_minimum():
    planner = AggregatedPlanner(SETTINGS, ENGINE)
    busy = settled(planner, 8.0)
    assert busy.decode > 2 and "aggregated (sla" in busy.reason
    assert settled(planner, 0.0, 3, busy.decode, first=30).decode == 1


def test_prompts_that_wait_in_some_intervals_do_not_make_an_engine_slow():
    planner = AggregatedPlanner(SETTINGS, ENGINE)
    for minute in range(1, 41):
        planner.decide(seen(minute, 5.0, 3, ttft_ms=5000.0 if minute % 3 == 0 else 150.0), 60.0 * minute)
    assert planner.corrections.ttft < 1.5


def test_slow_answers_give_room_and_late_prompts_do_not():
    planner = AggregatedPlanner(SETTINGS, ENGINE)
    for minute in range(1, 7):
        missed = {"late_share": 0.3, "slow_share": 0.0 if minute < 4 else 0.3}
        decision = planner.decide(seen(minute, 5.0, 3, **missed), 60.0 * minute)
        assert (planner.room.workers > 0) is (minute > 3)
    assert f"bursts 1.0, 1.0, room {planner.room.workers:.1f}" in decision.reason


@pytest.mark.parametrize("target", ["throughput", "latency"])
def test_other_targets_ask_for_no_more_than_a_budget(target):
    settings = msgspec.structs.replace(SETTINGS, target=target, decode=StageBounds(gpus=2))
    assert 1 < settled(AggregatedPlanner(settings, ENGINE), 12.0).decode <= 4


def test_queues_and_kv_decide_where_no_step_times_are_known():
    planner = AggregatedPlanner(msgspec.structs.replace(SETTINGS, target="load"), ENGINE)
    full = StageObservation(1, num_waiting=9, kv_usage=0.5)
    assert planner.decide(seen(0, 1.0, 1, decode=full), 0.0).decode == 2
    assert planner.decide(seen(1, 1.0, 2, decode=StageObservation(1, 1, num_waiting=9)), 60.0).decode == 2


def test_without_any_worker_the_first_request_has_one_come():
    planner = AggregatedPlanner(msgspec.structs.replace(SETTINGS, decode=StageBounds(minimum=0)), ENGINE)
    waiting = StageObservation(0, num_waiting=1)
    first = seen(0, 1 / 60, 0, decode=waiting, prompt_tokens=None, output_tokens=None)
    decision = planner.decide(first, 0.0)
    assert (decision.prefill, decision.decode, decision.reason) == (0, 1, "requests wait for a first worker")


def test_in_the_simulator_targets_are_held_with_fewer_workers_than_the_budget():
    random = np.random.default_rng(4)
    times = np.cumsum(random.exponential(1 / 6.0, 6 * 1800)).tolist()
    requests = [SimulatedRequest(at, 1000, 100, np.zeros(0, np.uint64)) for at in times]
    scaler = SimulatedScaler(AggregatedPlanner(msgspec.structs.replace(SETTINGS, ttft_ms=800), ENGINE).decide)
    engine = SimulatedEngine(TIMES)
    settings = ClusterSettings(0, 1, engine, engine, router=RouterConfig(transfer_ms=0), start_s=60.0, ttft_s=0.8)
    outcome = simulate(requests, "kv", settings, scaler=scaler)
    sizes = [decision.decode for _, decision in scaler.decisions]
    assert 1 < max(sizes) < 8 and {decision.prefill for _, decision in scaler.decisions} == {0}
    assert outcome.num_good > 0.9 * len(requests)  # but for the minutes before the first workers have come
