"""The planner's decisions: bounds, budget, what can't be believed, and what planners elsewhere got wrong."""

import math
import re
import sys
from dataclasses import replace

import msgspec
import pytest

from bireme.config import MockerConfig
from bireme.errors import ConfigError
from bireme.planner import capacity
from bireme.planner.capacity import Load, PlannedEngine
from bireme.planner.observation import Observation, StageObservation
from bireme.planner.planner import Corrections, WorkerPlanner
from bireme.planner.planner_settings import PlannerSettings, StageBounds
from bireme.planner.predictors import ConstantPredictor, make_predictor
from bireme.sizing.step_times import StepTimes

# A prompt of 1,000 tokens takes 110 ms; a step of so many rows 10 ms and 1 more for each.
TIMES = StepTimes.of_mocker(MockerConfig(step_ms=10, step_ms_per_request=1, prefill_ms=0, prefill_ms_per_token=0.1))
ENGINE = PlannedEngine(TIMES)
SETTINGS = PlannerSettings(max_gpus=16, interval_s=60, start_s=60)


def planner(settings=SETTINGS, predictor=None, **changes):
    return WorkerPlanner(msgspec.structs.replace(settings, **changes), ENGINE, ENGINE, predictor)


def stage(ready, starting=0, waiting=0, kv=0.1):
    return StageObservation(ready, starting, waiting, waiting * 1000, kv)


def seen(at, requests=60, prefill=1, decode=1, ttft=110.0, itl=11.0, **changes):
    stages = [one if isinstance(one, StageObservation) else stage(one) for one in (prefill, decode)]
    return replace(Observation(at, 60.0, requests, 1000.0, 100.0, ttft, itl, *stages), **changes)


def sizes(decision):
    return decision.prefill, decision.decode


def played(one, loads, begin=(1, 1), **observed):
    """Run a deployment that does at once what it is told; return the sizes of each interval."""
    have, found = begin, []
    for number, load in enumerate(loads, 1):
        have = sizes(one.decide(seen(number * 60.0, load, *have, **observed), number * 60.0))
        found.append(have)
    return found


def reversals(counts, window):
    """Return the most changes of direction within so many intervals."""
    at, way = [], 0
    for number, (before, after) in enumerate(zip(counts, counts[1:], strict=False)):
        if (after - before) * way < 0:
            at.append(number)
        way = after - before or way
    return max((sum(begin <= one < begin + window for one in at) for begin in at), default=0)


def test_more_load_needs_more_workers_and_the_reason_says_why():
    decision = planner().decide(seen(60.0, requests=1200), 60.0)
    assert decision.prefill > 2 and decision.decode > 1
    assert "22.00 requests/s of 1000/100 tokens need" in decision.reason


@pytest.mark.parametrize(("target", "needs"), [("throughput", 3), ("latency", 5), ("sla", 5)])
def test_targets_differ_in_how_busy_prefill_may_be(target, needs):
    assert planner(target=target).decide(seen(60.0, requests=1200), 60.0).prefill == needs


def test_the_load_target_goes_one_by_one_by_queues_and_kv():
    one = planner(target="load")
    assert sizes(one.decide(seen(60.0, prefill=stage(2, waiting=9), decode=stage(2, kv=0.9)), 60.0)) == (3, 3)
    starting = one.decide(seen(120.0, prefill=stage(2, 1, 9), decode=stage(2, 1, kv=0.9)), 120.0)
    assert sizes(starting) == (3, 3)


def test_a_budget_below_the_minimum_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"planner.max_gpus: 3; the minimum of 1 prefill and 2 decode .* needs 5"):
        planner(max_gpus=3, decode=StageBounds(minimum=2, gpus=2))
    one = planner()
    with pytest.raises(ConfigError, match="planner.max_gpus: 1"):
        one.set_budget(1)
    assert one.settings.max_gpus == 16


def test_a_minimum_above_the_maximum_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"planner.decode.minimum: 5 is above the maximum, 4"):
        planner(decode=StageBounds(minimum=5, maximum=4))


def test_the_budget_changes_while_it_runs_and_holds_at_once():
    one = planner()
    (have,) = played(one, [2400])
    assert sum(have) > 4
    one.set_budget(4)
    decision = one.decide(seen(120.0, 2400, *have), 120.0)
    assert sum(sizes(decision)) == 4 and "4 GPUs" in decision.reason


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_requests": None}, "missing: num_requests"),
        ({"decode": None}, "missing: decode"),
        ({"num_requests": -3}, "absurd: num_requests -3"),
        ({"ttft_ms": math.nan}, "absurd: ttft_ms nan"),
        ({"cached_tokens": -1.0}, "absurd: cached_tokens -1.0"),
        ({"itl_ms": math.inf}, "absurd: itl_ms inf"),
        ({"slow_share": 1.5}, "absurd: slow_share 1.5"),
        ({"interval_s": 0.0}, "absurd: interval_s 0.0"),
        ({"decode": stage(3, kv=7.0)}, "absurd: decode"),
        ({"prefill": stage(-1)}, "absurd: prefill"),
        ({"at_s": 60.0}, "stale: figures are 240 s old"),
        ({"at_s": 900.0}, "clocks apart: figures are from 600 s ahead"),
        ({"at_s": math.nan}, "absurd: at_s nan"),
    ],
)
def test_what_can_t_be_believed_changes_nothing_and_is_told(changes, says):
    one = planner()
    before = sizes(one.decide(seen(240.0, requests=1200), 240.0))
    decision = one.decide(replace(seen(300.0, 9000, *before), **changes), 300.0)
    assert sizes(decision) == before
    assert decision.reason.startswith(f"hold: {says}")


def test_the_same_figures_twice_are_nothing_new():
    one = planner()
    have = sizes(one.decide(seen(60.0, requests=1200), 60.0))
    assert one.decide(seen(60.0, requests=1200), 90.0).reason == "hold: nothing new since 60"
    assert sizes(one.decide(seen(60.0, requests=1200), 90.0)) == have


def test_before_any_lengths_are_known_it_holds():
    decision = planner().decide(seen(60.0, prompt_tokens=None, output_tokens=None, prefill=3), 60.0)
    assert sizes(decision) == (3, 1) and "missing: prompt_tokens" in decision.reason


def test_a_worker_that_never_becomes_ready_counts_once():
    """Ready workers stay too few; as many as are needed are asked for, and no more."""
    one, ready = planner(), stage(1)
    wanted = one.decide(seen(60.0, 1200), 60.0).prefill
    for number in range(2, 40):
        stuck = seen(number * 60.0, 1200, prefill=stage(1, wanted - 1), decode=ready, ttft=5000.0)
        decision = one.decide(stuck, number * 60.0)
        assert decision.prefill == wanted
    assert f"{wanted - 1} prefill not ready for 2220 s: counted, not asked for again" in decision.reason


@pytest.mark.parametrize("pattern", [(1200, 0), (1200, 60), (1200, 1200, 0, 0), (600, 60, 1200, 0, 300)])
@pytest.mark.parametrize("target", ["sla", "throughput", "latency"])
def test_a_flapping_load_reverses_at_most_once_in_ten_minutes(pattern, target):
    found = played(planner(target=target), pattern * 40)
    for stage_sizes in zip(*found, strict=True):
        assert reversals(stage_sizes, 10) <= 1
    assert max(found) > (1, 1)


def test_after_the_load_it_is_back_at_the_minimum_within_two_intervals():
    found = played(planner(), [1200] * 15 + [0, 0])
    assert found[-3] > (1, 1) and found[-1] == (1, 1)


def test_a_falling_load_is_followed_once_a_whole_window_needed_less():
    found = [prefill for prefill, _ in played(planner(), [2400] * 10 + [300] * 140)]
    first_down = next(at for at in range(10, 150) if found[at] < found[at - 1])
    needed_s = SETTINGS.down_window_s
    assert first_down * 60 >= needed_s  # all of that time needed less
    assert found[first_down] == found[first_down - 1] - 1  # a turn takes one
    assert found[first_down + 9] == found[first_down]  # until it may turn up again
    assert found[-1] <= 2


def test_up_is_faster_than_down():
    one = planner()
    up = [prefill for prefill, _ in played(one, [300, 2400])]
    assert up[1] - up[0] >= 3


def test_a_pause_no_longer_than_those_before_is_not_the_load_s_end():
    load = [1200] * 3 + [0] * 4
    found = played(planner(), [*load, *load, 1200, 0, 0, 0, 0])
    assert found[4] == (1, 1)  # the first pause is not known to be one
    assert found[-2] == found[-1] > (1, 1)


@pytest.mark.parametrize(("missed", "more"), [(0.02, True), (0.0, False), (None, False)])
def test_slow_requests_give_decode_more_room(missed, more):
    one = planner()
    played(one, [300] * 3, slow_share=missed)
    assert (one.room.workers > 0) is more


def test_slow_requests_are_counted_over_hours_and_against_the_share_that_the_table_allows():
    few, many = planner(), planner()
    played(few, [300] * 5, slow_share=1 / 300)
    played(many, [9000] * 5, begin=(20, 9), slow_share=1 / 9000)
    assert few.room.workers > 0.9 and many.room.workers == 0


def test_no_room_is_made_for_gaps_that_a_request_alone_misses():
    one = planner(itl_ms=5.0)
    played(one, [300] * 3, slow_share=1.0)
    assert one.room.workers == 0


def test_late_prompts_give_no_room():
    """They are long, or no cache has their beginning."""
    calm, late = planner(), planner()
    assert played(late, [300] * 3, late_share=0.9) == played(calm, [300] * 3) and late.room.workers == 0


def test_prefill_is_sized_by_the_bursts_in_which_requests_came():
    steady, bursts = planner(), planner()
    played(steady, [150] * 60)
    played(bursts, [600, 0, 0, 0] * 15)
    reasons = [one.decide(seen(61 * 60.0, 150, 9, 9), 61 * 60.0).reason for one in (steady, bursts)]
    needs = [int(re.search(r" need (\d+)\+", reason)[1]) for reason in reasons]
    assert "bursts 1.0" in reasons[0] and needs[1] > needs[0]


def test_bursts_whose_beginning_a_cache_has_ask_for_no_more_prefill():
    """They are computed where that is, however many workers there are."""
    apart, alike, calm = (
        Load(4.0, 1000.0, 100.0, 0.0, 20.0),
        Load(4.0, 1000.0, 100.0, 39_000.0, 20.0),
        Load(4.0, 1000.0, 100.0),
    )
    late = [capacity.late_share(ENGINE, load, 2, 2000.0, 1.0) for load in (apart, alike, calm)]
    assert late[0] > 10 * late[1] > late[2] > 0


def test_steps_read_what_caches_had_as_well():
    slower = PlannedEngine(replace(TIMES, ms_per_context_token=1e-3))
    short, long = (Load(4.0, 1000.0, 100.0, cached) for cached in (0.0, 40_000.0))
    assert capacity.expected_itl_ms(slower, long, 2) > 40 > 20 > capacity.expected_itl_ms(slower, short, 2)
    assert capacity.most_rows(slower, long) == capacity.most_rows(slower, short)


def test_requests_that_are_under_way_in_bursts_need_more_decode():
    """Most where one worker has the beginning of all: elsewhere they are shared out."""

    def needs(running, cached):
        one = planner()
        for number in range(1, 61):
            decode = replace(stage(2), num_running=running(number))
            decision = one.decide(seen(number * 60.0, 300, 2, decode, cached_tokens=cached), number * 60.0)
        return decision

    def in_bursts(number):
        return 160 if number % 4 == 0 else 0

    steady, apart, alike = needs(lambda number: 6, 0.0), needs(in_bursts, 0.0), needs(in_bursts, 99_000.0)
    assert alike.decode > apart.decode > steady.decode
    assert re.search(r"bursts 1\.0, \d\d\d\.\d", alike.reason)


def test_few_intervals_do_not_correct_ttft():
    """At a day's beginning a burst has prompts wait: that is no slow engine."""
    found = Corrections()
    told = []
    for _ in range(5):
        found.saw_ttft(330.0, 110.0)
        told.append(found.ttft)
    assert told == [1.0, 1.0, 1.0, 1.0, 3.0]


def test_idle_s_says_when_a_load_has_ended():
    loads = [300] * 15 + [0] * 5
    assert played(planner(), [*([300, 0, 0, 0] * 15), *loads])[-1] != (1, 1)
    by_clock = played(planner(idle_s=180.0), [*([300, 0, 0, 0] * 15), *loads])
    assert by_clock[-4] == by_clock[-6] != (1, 1) and by_clock[-3:] == [(1, 1)] * 3
    assert played(planner(idle_s=600.0), loads)[-1] != (1, 1)


@pytest.mark.parametrize("idle_s", [None, 120.0])
def test_without_load_answers_under_way_keep_a_worker(idle_s):
    """Who ends its workers waits for them a while, and then breaks them off."""
    one = planner(idle_s=idle_s, decode=StageBounds(minimum=0))
    one.decide(seen(60.0, 300, 2, 2), 60.0)
    for number in range(2, 8):
        under_way = replace(stage(2), num_running=int(number < 6))
        decision = one.decide(seen(number * 60.0, 0, 2, under_way), number * 60.0)
        assert (decision.decode > 0) is (number < 6)


def test_a_measured_ttft_below_the_table_s_asks_for_no_fewer_workers():
    one = planner()
    played(one, [300] * 10, begin=(3, 2), ttft=20.0)
    assert one.corrections.ttft == 1.0


def test_what_cold_workers_miss_gives_no_room():
    one = planner()
    one.decide(seen(60.0, 300, decode=stage(1, 1), slow_share=0.9), 60.0)
    assert one.room.workers == 0


def test_one_long_prompt_says_little_of_those_that_follow():
    one = planner()
    before = played(one, [300] * 5)[-1]
    long = one.decide(seen(360.0, 1, *before, prompt_tokens=16_000.0), 360.0)
    assert "of 1450/100 tokens" in long.reason


def test_a_burst_that_ready_workers_compute_in_time_needs_no_others():
    calm = planner().decide(seen(60.0, 300), 60.0)
    burst = planner().decide(seen(60.0, 300, prefill=stage(1, waiting=300)), 60.0)
    assert burst.prefill == calm.prefill


def test_what_is_measured_corrects_the_table():
    slow, right = planner(), planner()
    as_expected = played(right, [1200] * 12, begin=(6, 2), itl=25.0)
    slower = played(slow, [1200] * 12, begin=(6, 2), itl=75.0)
    assert slow.corrections.itl > 1.5 > right.corrections.itl
    assert slower[-1][1] > as_expected[-1][1]


def test_prompts_that_wait_in_some_intervals_do_not_make_prefill_slow():
    """Workers more would have no caches, prompts would take longer, and that would ask for more again."""
    one = planner()
    for number in range(1, 41):
        ttft = 5000.0 if number % 3 == 0 else 120.0
        decision = one.decide(seen(number * 60.0, 300, 3, 2, ttft=ttft), number * 60.0)
    assert one.corrections.ttft < 1.2 and decision.prefill == 3


def test_load_that_comes_back_finds_as_many_as_it_needed_before():
    found = played(planner(), [1200] * 15 + [0] * 30 + [120] * 2)
    assert found[-3] == (1, 1) and found[-1][0] == found[14][0] > 2


def test_a_prediction_counts_until_workers_that_are_asked_for_are_there():
    class Asked(ConstantPredictor):
        def predict(self, steps=1):
            self.steps = steps
            return super().predict(steps)

    asked = Asked()
    planner(start_s=150.0, predictor=asked).decide(seen(60.0), 60.0)
    assert asked.steps == 4


# What users of Dynamo's planner reported (github.com/ai-dynamo/dynamo)


def test_12430_samples_of_cold_workers_do_not_scale_up():
    one = planner()
    one.decide(seen(60.0, 300, 2, 2), 60.0)
    cold = one.decide(seen(120.0, 300, prefill=stage(3), decode=2, ttft=9000.0, itl=400.0), 120.0)
    assert one.corrections.ttft == one.corrections.itl == 1.0
    assert sizes(cold) == (3, 2)
    assert one.decide(seen(180.0, 300, prefill=stage(3), decode=2, ttft=130.0, itl=16.0), 180.0).prefill <= 3


def test_12430_a_few_requests_say_nothing_of_the_engine():
    one = planner()
    played(one, [3] * 10, ttft=9000.0, itl=400.0)
    assert (one.corrections.ttft, one.corrections.itl) == (1.0, 1.0)


def test_9294_no_oscillation_between_two_and_one():
    """A load at the edge: with two it looks as if one would do, and with one as if two were needed."""
    one = planner(decode=StageBounds(maximum=1))
    edge = next(load for load in range(60, 1200, 10) if planner().decide(seen(60.0, load), 60.0).prefill == 2)
    found = played(one, [edge, edge - 10] * 60)
    assert reversals([size for size, _ in found], 10) == 0


@pytest.mark.parametrize("target", ["sla", "throughput", "latency", "load"])
def test_6985_zero_traffic_goes_down_although_no_time_was_measured(target):
    quiet = seen(60.0, 0, 5, 4, ttft=None, itl=None, prompt_tokens=None, output_tokens=None)
    one = planner(target=target)
    assert sizes(one.decide(quiet, 60.0)) == (5, 4)  # a pause, it may be
    decision = one.decide(replace(quiet, at_s=120.0), 120.0)
    assert sizes(decision) == (1, 1) and "no requests" in decision.reason


@pytest.mark.parametrize("target", ["sla", "throughput", "latency", "load"])
@pytest.mark.parametrize(("prefill_gpus", "decode_gpus"), [(1, 1), (2, 1), (1, 4), (3, 5)])
def test_12428_never_above_the_budget(target, prefill_gpus, decode_gpus):
    bounds = {"prefill": StageBounds(gpus=prefill_gpus), "decode": StageBounds(gpus=decode_gpus)}
    one = planner(target=target, max_gpus=13, **bounds)
    for number, load in enumerate([100, 90_000, 0, 5000, 90_000], 1):
        observed = seen(number * 60.0, load, prefill=stage(3, 2, load), decode=stage(4, 1, load, kv=0.95))
        decision = one.decide(observed, number * 60.0)
        assert decision.prefill * prefill_gpus + decision.decode * decode_gpus <= 13


def test_10528_those_that_wait_count_in_a_burst():
    calm = planner().decide(seen(60.0, 300), 60.0)
    burst = planner().decide(seen(60.0, 300, prefill=stage(1, waiting=900)), 60.0)
    assert burst.prefill > calm.prefill


def test_11624_a_target_out_of_reach_is_told_and_does_not_keep_all_workers():
    one = planner(ttft_ms=50.0, itl_ms=5.0)
    found = played(one, [1200] * 5 + [60] * 150)
    assert found[4][0] > found[-1][0] and found[-1] == (1, 1)
    reason = one.decide(seen(12000.0), 12000.0).reason
    assert "ttft_ms 50 is out of reach: a prompt alone takes" in reason and "itl_ms 5 is out of reach" in reason


def test_insufficient_data_passes():
    """1.4's load scaler stayed in it for ever: an interval without figures is no reason to hold the next."""
    one = planner()
    assert "hold" in one.decide(replace(seen(60.0), num_requests=None), 60.0).reason
    assert one.decide(seen(120.0, 1200), 120.0).prefill > 1


@pytest.mark.parametrize("name", ["constant", "arima", "kalman"])
def test_predictors_follow_a_trend_and_stay_within_bounds(name):
    if name != "constant":
        pytest.importorskip("statsmodels")
    one = make_predictor(name)
    assert one.predict() == 0.0
    for value in range(1, 31):
        one.observe(float(value))
    assert 29.0 <= one.predict(2) <= 60.0
    assert name == "constant" or one.predict(2) > 30.5
    for _ in range(30):
        one.observe(0.0)
    assert 0.0 <= one.predict(3) < 5.0


def test_an_unknown_predictor_is_refused():
    with pytest.raises(ConfigError, match=r"planner.predictor: 'prophet'; one of constant, arima, kalman"):
        make_predictor("prophet")


def test_a_missing_library_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "statsmodels.tsa.statespace.structural", None)
    with pytest.raises(ConfigError, match=r"kalman needs statsmodels .*pip install 'bireme\[planner\]'"):
        make_predictor("kalman")


@pytest.mark.parametrize("target", ["sla", "throughput", "load"])
def test_a_minimum_of_none_holds_while_nobody_asks_and_the_first_request_brings_one_back(target):
    bounds = StageBounds(minimum=0)
    one = planner(target=target, prefill=bounds, decode=bounds)
    assert sizes(one.decide(seen(60.0, requests=15), 60.0)) == (1, 1)
    one.decide(seen(120.0, requests=0), 120.0)
    assert sizes(one.decide(seen(180.0, requests=0), 180.0)) == (0, 0)
    asked = seen(240.0, requests=1, prefill=stage(0), decode=stage(0, waiting=1))
    assert sizes(one.decide(asked, 240.0)) == (1, 1)  # whatever direction it has just taken


def test_a_planner_that_begins_without_any_worker_has_a_first_one_for_whom_waits():
    one = planner(prefill=StageBounds(minimum=0), decode=StageBounds(minimum=0))
    asked = {"prefill": stage(0), "decode": stage(0, waiting=1), "prompt_tokens": None, "output_tokens": None}
    decision = one.decide(seen(60.0, requests=1, **asked), 60.0)
    assert sizes(decision) == (1, 1) and "requests wait for a first worker" in decision.reason


@pytest.mark.parametrize("limit", ["max_num_tokens", "max_batch_size", "kv_tokens"])
def test_an_engine_that_could_compute_nothing_is_refused_rather_than_sized_for_ever(limit):
    with pytest.raises(ValueError, match="computes nothing"):
        PlannedEngine(TIMES, **{limit: 0})
