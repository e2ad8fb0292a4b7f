"""What holds of the planner on any day, on two short ones; and how the best fixed size is found."""

import argparse
import operator
import re

import pytest

from benchmarks import planner_days, planner_oracle
from bireme.planner.simulated import reversals
from bireme.sizing.simulator.days import agents_day, chats_day, recorded_day
from bireme.sizing.simulator.synthetic import conversations


@pytest.mark.parametrize("day", ["chats", "agents"])
def test_bounds_hold_on_a_short_day(day):
    options = planner_days.parse(["--days", day, "--hours", "1.5", "--most", "3"])
    row = planner_days.run_one(day, options, "planner")
    assert row["most_reversals_in_10_min"] <= planner_days.AIM_REVERSALS
    assert 2 < row["most_gpus"] <= row["budget"] == 6
    # Agents that come in bursts pause as well: their end is told from a pause later
    assert 1 <= row["idle_intervals"] <= (planner_days.AIM_IDLE if day == "chats" else 5)


def test_the_best_fixed_size_is_the_smallest_that_holds_as_often_as_any():
    def run(sizes):
        return {"sizes": sizes, "good_share": 0.99 - 0.01 * (sizes[0] < 3) - 0.01 * (sizes[1] < 5)}

    assert planner_days.best_fixed(run, 10)["sizes"] == (3, 5)


def test_the_best_fixed_size_has_one_more_where_both_stages_miss_others():
    def run(sizes):
        return {
            "sizes": sizes,
            "good_share": 0.99 - 0.0008 * (sizes[0] < 4) - 0.0008 * (sizes[1] < 6) - (min(sizes) < 3),
        }

    assert planner_days.best_fixed(run, 10)["sizes"] in [(4, 3), (3, 4)]


def test_more_prefill_workers_may_hold_less_often():
    def run(sizes):
        return {"sizes": sizes, "good_share": 0.99 - 0.002 * abs(sizes[0] - 3) - 0.01 * (sizes[1] < 4)}

    assert planner_days.best_fixed(run, 10)["sizes"] == (3, 4)


def test_an_aim_says_whether_it_is_met():
    assert planner_days.aim("hours", 0.91, 0.9).endswith("0.9 or less asked for: BELOW")
    assert planner_days.aim("held", 0.0, 0.0, is_least=True).endswith("0 or more asked for: ok")


@pytest.mark.parametrize(("make", "rate"), [(chats_day, 0.1), (agents_day, 0.01)])
def test_a_day_is_the_same_for_a_seed_and_has_24_hours(make, rate):
    found, again, other = make(1, rate), make(1, rate), make(2, rate)
    times = [one.arrival_s for one in found]
    assert times == sorted(times) == [one.arrival_s for one in again] != [one.arrival_s for one in other]
    assert 0 <= times[0] < 3600 and 23 * 3600 < times[-1] < 24 * 3600
    assert [one.arrival_s for one in make(1, rate, end_s=7200.0)] == [at for at in times if at < 7200.0]


def test_a_recorded_hour_keeps_whole_chats_and_their_shared_blocks():
    hour = conversations(3, 600, 0.2)
    found = recorded_day(1, hour, share=1.0)
    by_hour = [sum(one.arrival_s // 3600 == number for one in found) for number in range(24)]
    assert by_hour[16] > 2 * by_hour[4]
    chats = {int(one.blocks[1]) for one in hour if len(one.blocks) > 1}
    assert {int(one.blocks[0]) for one in found} == {int(hour[0].blocks[0])}
    assert len({int(one.blocks[1]) for one in found if len(one.blocks) > 1}) > len(chats)


def test_an_oracle_s_workers_come_before_they_are_needed_and_turn_once_in_ten_intervals():
    needs = [1] * 12 + [3] + [1] * 14 + [2] + [1] * 12
    found = planner_oracle.steady(needs, 2, 10)
    assert found[9:24] == [1, *[3] * 13, 2] and found[25:38] == [2] * 13  # the dip between them is too short
    assert reversals(found, range(len(found)), 10)[1] <= 1 and all(map(operator.ge, found, needs))


def test_an_oracle_keeps_a_stage_as_seen_and_sizes_the_other_by_its_busiest_moments():
    options = planner_days.parse(["--days", "agents", "--hours", "0.5", "--most", "4", "--bound", "2+3"])
    settings, witness = planner_days.settings_of("agents", options), planner_oracle.Witness(options.bound)
    outcome = planner_days.run_day("agents", options, options.bound, settings.interval_s, witness)
    engine = planner_days.planned_engine()
    prefill, decode = planner_oracle.needs_of(witness, outcome, engine, settings, (0.0, 1.0))
    assert set(prefill) == {2} and len(prefill) == len(decode) == len(witness.seen)
    assert min(decode) == 1 < max(decode) <= 4
    prefill, decode = planner_oracle.needs_of(witness, outcome, engine, settings, (1.5, 0.0))
    assert set(decode) == {3} and min(prefill) == 1 < max(prefill) <= 4


def test_prompts_that_take_too_long_alone_are_told_from_those_that_wait():
    options = planner_days.parse(["--days", "chats", "--hours", "0.5"])
    requests = planner_days.requests_of("chats", None, 1, 0.5)
    found = planner_days.too_long(requests, planner_days.settings_of("chats", options))
    assert len(found) < len(requests) and all(one.num_prompt > 29_000 for one in found)


@pytest.mark.parametrize("text", ["3", "3+0", "a+b", "+5"])
def test_a_fixed_size_has_workers_of_both_stages(text):
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(repr(text))):
        planner_days.sizes_of(text)
