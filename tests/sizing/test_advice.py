"""Advice: searches on known figures, loads, ranges, constants, and recipes that are written to."""

import math
import shutil
from dataclasses import replace

import numpy as np
import pytest

from bireme.config import CHECKOUT, MockerConfig
from bireme.errors import ConfigError
from bireme.sizing import recipe_constants
from bireme.sizing.advice import (
    Bench,
    Layout,
    LayoutFigures,
    OutOfTimeError,
    Question,
    Range,
    Reason,
    ServiceTarget,
    best_of,
    busiest,
    capacity,
    choose,
    constants_of,
    expect,
    fewest,
    loads_of_lengths,
    loads_of_trace,
    neighbors,
    scaled,
)
from bireme.sizing.simulator.cluster import ClusterSettings
from bireme.sizing.simulator.trace import SimulatedRequest, Trace
from bireme.sizing.simulator.worker import SimulatedEngine
from bireme.sizing.step_times import StepTimes, TransferTimes

TARGET = ServiceTarget(ttft_ms=500, itl_ms=20)
QUESTION = Question(TARGET)
TIMES = StepTimes.of_mocker(
    MockerConfig(step_ms=10, prefill_ms=5, prefill_ms_per_token=0.1),
    TransferTimes(start_ms=2, bytes_per_token=1000, bytes_per_s=1e9),
)
ENGINE = SimulatedEngine(TIMES, tokens_per_block=64, num_blocks=10_000)
SETTINGS = ClusterSettings(prefill=ENGINE, decode=ENGINE)


class KnownBench(Bench):
    """`capacities` tells up to which speed a layout holds the target; answers without simulating."""

    def __init__(self, capacities):
        loads = loads_of_lengths(500, 50, 0.5, 1.0, 5)
        super().__init__(loads, {"aggregated": SETTINGS, "apart": SETTINGS})
        self._capacities = capacities

    def run(self, settings, layout, question):
        self.num_runs += 1
        late = question.speed * question.step_factor / self._capacities(layout)
        share = min(1.0, 0.95 / late)
        return LayoutFigures(layout, question.speed, late, late, 1, 1, share * question.speed, share, 1, late <= 1)


def apart_is(times):
    """Aggregated holds one request/s a GPU; apart so many times as much with a third of its GPUs for prefill."""

    def capacity_of(layout):
        if not layout.prefill:
            return layout.gpus
        balance = min(layout.prefill / (layout.gpus / 3), layout.decode / (layout.gpus * 2 / 3))
        return times * layout.gpus * balance

    return capacity_of


def request(at, num_prompt=100, num_output=5, blocks=()):
    return SimulatedRequest(at, num_prompt, num_output, np.array(blocks, np.uint64))


def test_the_fewest_gpus_that_hold_the_target_are_found():
    bench = KnownBench(apart_is(1.0))
    for speed in (1, 2.5, 5, 8):
        found = fewest(bench, replace(QUESTION, speed=speed), "aggregated", 1, 8)
        assert found.is_held and found.layout == Layout(0, int(np.ceil(speed)))
    lost = fewest(bench, replace(QUESTION, speed=9), "aggregated", 1, 8)
    assert not lost.is_held and lost.layout == Layout(0, 8)
    assert fewest(bench, QUESTION, "apart", 1, 1) is None


def test_the_split_is_climbed_to_from_wherever_it_begins():
    assert best_of(KnownBench(apart_is(1.0)), replace(QUESTION, speed=9), "apart", 9).layout == Layout(3, 6)
    mostly_prefill = KnownBench(lambda layout: layout.prefill)
    assert best_of(mostly_prefill, replace(QUESTION, speed=9), "apart", 9).layout == Layout(8, 1)


@pytest.mark.parametrize("start", [1.0, 20.0, 0.1])
def test_a_capacity_is_found_from_any_start(start):
    found = capacity(KnownBench(lambda layout: 3.7), QUESTION, Layout(0, 1), start)
    assert 3.7 / 1.06 <= found <= 3.7
    assert capacity(KnownBench(lambda layout: 1e-6), QUESTION, Layout(0, 1), start) == 0


@pytest.mark.parametrize(
    ("times", "speed", "layout", "reason"),
    [
        (1.3, 5.7, Layout(2, 3), "fewer"),  # five GPUs apart hold what six hold aggregated
        (1.0, 5.9, Layout(0, 6), "equal"),
        (0.5, 5.9, Layout(0, 6), "fewer"),
        (2.0, 5.9, Layout(1, 2), "fewer"),
        (1.0, 0.9, Layout(0, 1), "only"),
        (1.0, 20.0, Layout(0, 8), "none"),
    ],
)
def test_what_is_chosen_and_why(times, speed, layout, reason):
    found = choose(KnownBench(apart_is(times)), replace(QUESTION, speed=speed), 1, 8)
    assert (found.reason, found.best.layout.way) == (reason, layout.way)
    assert found.best.layout.gpus <= layout.gpus
    assert found.best.is_held == (reason != "none")


def test_with_as_many_gpus_as_there_are_the_higher_capacity_wins():
    found = choose(KnownBench(apart_is(1.5)), QUESTION, 6, 6, draws=2)
    assert found.reason == "more" and found.best.layout == Layout(2, 4)
    assert 1.3 < found.ratio.low <= found.ratio.high < 1.7
    found = choose(KnownBench(apart_is(0.7)), QUESTION, 6, 6)
    assert found.reason == "more" and not found.is_apart and found.ratio.low > 1.2


@pytest.mark.parametrize(
    ("times", "speed", "reason", "is_apart"),
    [
        (1.15, 1.0, Reason.CLOSE, False),  # more than 5% apart, and less than steps may be off by on either side
        (1.5, 1.0, Reason.MORE, True),
        (0.6, 1.0, Reason.MORE, False),
        (1.0, 1.0, Reason.EQUAL, False),
        (1.1, 6.3, Reason.CLOSE, True),  # as told aggregated does not hold it
        (1.4, 7.0, Reason.FEWER, True),
    ],
)
def test_what_lies_within_the_error_of_the_step_times_is_too_close_to_call(times, speed, reason, is_apart):
    found = choose(KnownBench(apart_is(times)), replace(QUESTION, speed=speed), 6, 6, draws=2, error=0.1)
    assert (found.reason, found.is_apart) == (reason, is_apart) and found.best.is_held
    assert (found.ratio.low <= 1 <= found.ratio.high) == (reason in (Reason.CLOSE, Reason.EQUAL))


def test_where_slower_steps_would_lose_the_target_at_any_rate_it_is_too_close_to_call():
    class Edge(KnownBench):
        def run(self, settings, layout, question):
            is_held = layout.way == "apart" and question.step_factor <= 1 and question.speed < 5
            return LayoutFigures(layout, question.speed, 1, 1, 1, 1, 1, float(is_held), 1, is_held)

    found = choose(Edge(apart_is(1.0)), QUESTION, 6, 6, error=0.1)
    assert found.reason is Reason.CLOSE and found.is_apart
    assert found.rates["apart"].low == 0 == found.rates["aggregated"].high and found.ratio == Range(1, math.inf)


def test_each_question_is_simulated_once_and_neighbors_are_other_questions():
    bench = KnownBench(apart_is(1.0))
    for _ in range(2):
        bench.ask(Layout(0, 1), QUESTION)
    assert bench.num_runs == 1
    asked = neighbors(QUESTION)
    assert len(set(asked.values())) == len(asked) and QUESTION not in asked.values()


def test_a_range_says_one_figure_where_both_ends_read_alike():
    assert Range.of([3.01, 2.99]).text(".1f") == "3.0"
    assert Range.of([3, 1, 2]).text(".0f") == "1 to 3"


def test_loads_of_lengths_have_the_means_and_are_the_same_again():
    make = loads_of_lengths(1000, 100, 0.5, 10.0, 2000, prefix=128)
    requests = make(0, 1.0)
    assert np.mean([one.num_prompt for one in requests]) == pytest.approx(1000, rel=0.1)
    assert np.mean([one.num_output for one in requests]) == pytest.approx(100, rel=0.1)
    assert requests[-1].arrival_s == pytest.approx(200)
    assert make(0, 2.0)[-1].arrival_s == pytest.approx(100)
    assert [one.arrival_s for one in make(0, 1.0)] == [one.arrival_s for one in requests]
    assert [one.arrival_s for one in make(1, 1.0)] != [one.arrival_s for one in requests]
    long = [one for one in requests if one.num_prompt >= 256]
    assert len({one.blocks[1] for one in long}) == 1 and len({one.blocks[2] for one in long}) == len(long)


def test_of_a_trace_the_busiest_stretch_counts_and_draws_keep_the_order():
    at = [*range(0, 1000, 10), *np.arange(1000, 1100, 0.5), *range(1100, 2000, 10)]
    trace = Trace([request(float(time), 100 + number) for number, time in enumerate(at)])
    assert [one.num_prompt for one in busiest(trace.requests, 200)] == [100 + number for number in range(100, 300)]
    recorded, drawn = loads_of_trace(trace, 200)(0, 1.0), loads_of_trace(trace, 200)(1, 1.0)
    assert recorded[0].arrival_s == 0 and recorded[-1].arrival_s == pytest.approx(99.5)
    assert [one.num_prompt for one in drawn] == [one.num_prompt for one in recorded]
    times = [one.arrival_s for one in drawn]
    assert times == sorted(times) and times != [one.arrival_s for one in recorded]
    assert sum(time < 60 for time in times) == sum(one.arrival_s < 60 for one in recorded)


def test_scaled_prompts_keep_their_beginnings():
    one = request(0.0, 300, 10, blocks=(1, 2, 3, 4))
    (short,), (long,) = scaled([one], 0.5, 1, 64), scaled([one], 2, 0.5, 64)
    assert (short.num_prompt, list(short.blocks)) == (150, [1, 2])
    assert (long.num_prompt, long.num_output, len(long.blocks)) == (600, 5, 9)
    assert list(long.blocks[:4]) == [1, 2, 3, 4]
    assert scaled([one], 1, 1, 64) == [one]


def test_figures_and_their_ranges_come_from_simulations():
    bench = Bench(loads_of_lengths(500, 20, 0.3, 2.0, 30), {"aggregated": SETTINGS, "apart": SETTINGS})
    found = bench.ask(Layout(0, 2), QUESTION)
    assert found.is_held and found.itl_p50_ms > 9.9 and 50 < found.ttft_p50_ms < 200
    slower = bench.ask(Layout(0, 2), replace(QUESTION, step_factor=2.0))
    assert slower.itl_p50_ms > 19.9
    ranges = expect(bench, QUESTION, Layout(0, 2), draws=2, error=0.2)
    assert ranges.itl_p50_ms.low <= 0.85 * ranges.itl_p50_ms.high and ranges.is_always_held
    assert bench.ask(Layout(1, 1), QUESTION).is_held


def test_a_simulation_stops_when_time_is_over():
    ticks = iter(range(1000))
    bench = Bench(
        loads_of_lengths(500, 20, 0.3, 2.0, 30),
        {"aggregated": SETTINGS, "apart": SETTINGS},
        until=10,
        clock=lambda: next(ticks),
    )
    with pytest.raises(OutOfTimeError):
        bench.ask(Layout(0, 2), QUESTION)
    assert next(ticks) < 15


def test_constants_are_those_of_the_step_times():
    found = constants_of(TIMES, rows=4, prompt=1000, context=1000, hop_ms=3.0)
    assert found == {"prefill_ms_per_token": 0.105, "transfer_ms_per_token": 0.001, "transfer_ms": 5.0}
    assert "transfer_ms" not in constants_of(TIMES, 4, 1000, 1000, None)


NEW = {"prefill_ms_per_token": 0.02, "transfer_ms": 3.5}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("model: a # why\n", "model: a # why\nrouter:\n  {}\n  {}\n"),
        ("router:  # here\n  mode: kv  # it\nmodel: a\n", "router:  # here\n  {}\n  {}\n  mode: kv  # it\nmodel: a\n"),
        ("router: {mode: kv}  # x\nmodel: a", "router: {{{}, {}, mode: kv}}  # x\nmodel: a"),
        ("router: {}\n", "router: {{{}, {}}}\n"),
        ("router:\n  transfer_ms: 9  # old\n", "router:\n  {}\n  {}  # old\n"),
    ],
)
def test_constants_are_set_where_they_belong_and_comments_stay(before, after):
    text, said = recipe_constants.written(before, NEW)
    lines = [line.strip() for line in text.splitlines()]
    assert len(said) == 2
    for part in ("# why", "# here", "# it", "# x", "# old", "model: a", "mode: kv"):
        assert (part in text) == (part in before)
    assert "prefill_ms_per_token: 0.02" in text and "transfer_ms: 3.5" in text
    assert sorted("".join(lines).replace(" ", "")) == sorted(
        after.format("prefill_ms_per_token: 0.02", "transfer_ms: 3.5").replace(" ", "").replace("\n", "")
    )
    assert recipe_constants.written(text, NEW) == (text, [])


def test_a_decision_stays_and_a_block_that_is_none_is_named():
    text, said = recipe_constants.written("router: {transfer_ms: 0}\n", NEW)
    assert "transfer_ms: 0}" in text and "prefill_ms_per_token: 0.02" in text and "stays" in said[-1]
    with pytest.raises(ConfigError, match="router: None"):
        recipe_constants.written("router:\nmodel: a\n", NEW)


def test_a_recipe_that_constants_would_break_stays_as_it_is(tmp_path):
    folder = tmp_path / "mine"
    shutil.copytree(CHECKOUT / "recipes/mocker-disagg", folder)
    before = (folder / "recipe.yaml").read_text()
    with pytest.raises(ConfigError, match="transfer_ms_per_token"):
        recipe_constants.write(folder, {"transfer_ms_per_token": -1.0}, "a table")
    assert (folder / "recipe.yaml").read_text() == before
    assert not list(folder.glob(".recipe*"))
