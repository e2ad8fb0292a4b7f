"""The planner, Dynamo's rule and the best fixed size on three days of requests, in the simulator.

`chats` and `agents` are made. `recorded` is an hour of Mooncake's conversations (--recorded FILE), shaped to a day.
docs/sizing.md says which of them the planner's rules were chosen on. All begin with one worker of each stage, which
takes --start-s to come. The best fixed size has the fewest workers of those
that hold the targets as often as any, within 0.1% of requests: some 25 simulations a day, of ten seconds each.

    python benchmarks/planner_days.py --days chats,agents
    python benchmarks/planner_days.py --recorded mooncake_conversation.jsonl --jobs 2
    python benchmarks/planner_days.py --days chats --hours 3      # in a minute
    python benchmarks/planner_days.py --days agents --bound 3+5   # how many fewer hours who knows the day needs

The table comes first, then the aims; the last line of stdout is one JSON document. A last request, alone, comes a
quarter of an hour after the others: by then sizes are to be back at the minimum.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

from benchmarks.options import chosen
from benchmarks.planner_oracle import Schedule, Witness, needs_of
from bireme.config import MockerConfig, RouterConfig
from bireme.conversion import convert
from bireme.planner.capacity import PlannedEngine
from bireme.planner.dynamo_rule import DynamoProfile, DynamoRule
from bireme.planner.planner import WorkerPlanner
from bireme.planner.planner_settings import PlannerSettings, StageBounds
from bireme.planner.predictors import PredictorName, make_predictor
from bireme.planner.simulated import SimulatedScaler
from bireme.sizing.simulator.cluster import ClusterSettings, simulate
from bireme.sizing.simulator.days import DAY_S, HOUR_S, agents_day, chats_day, recorded_day
from bireme.sizing.simulator.outcome import Outcome
from bireme.sizing.simulator.scaling import Scaler
from bireme.sizing.simulator.trace import SimulatedRequest, endless_hits, read_traces, spread_out
from bireme.sizing.simulator.worker import SimulatedEngine
from bireme.sizing.step_times import StepTimes, TransferTimes

DAYS = ("chats", "agents", "recorded")
TTFT_MS = {"chats": 15_000.0, "agents": 15_000.0, "recorded": 30_000.0}  # the last as in Mooncake's paper
ITL_MS = {"chats": 60.0, "agents": 150.0, "recorded": 60.0}
MODEL = MockerConfig(step_ms=30.0, step_ms_per_request=4.0, prefill_ms_per_token=0.5)  # a large model's pace
TIMES = StepTimes.of_mocker(MODEL, TransferTimes(start_ms=5.0))
ENGINE = SimulatedEngine(TIMES, num_blocks=1024)
ROUTER = {"transfer_ms": 0}  # every prompt is computed by prefill
ALONE_S = 900.0  # until the last request
MOST = 10  # workers of each stage
DYNAMO_INTERVAL_S = 180.0  # its default
EQUAL_SHARES = 0.001  # of requests within the targets
AIM_HOURS = 0.90
AIM_REVERSALS = 1  # of a stage, in ten minutes
# What the oracle tries: margins of both stages, 0 for as many as the fixed size has, and the least of decode
BOUNDS = ((0.0, 1.0, 1), (0.0, 1.0, 2), (0.0, 1.4, 3), (0.0, 1.4, 4), (1.0, 0.0, 1), (2.0, 0.0, 1), (2.0, 1.4, 3))
AIM_IDLE = 2  # intervals without a request until sizes are at their minimum


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if "recorded" in options.days and options.recorded is None:
        print("planner_days: --recorded FILE, Mooncake's conversation trace, or --days chats,agents", file=sys.stderr)
        return 2
    if options.bound is not None:
        return tell_bound(options)
    rows = list[dict[str, Any]]()
    print(f"{'':<32}{'sizes':>8}{'SLO held':>10}{'worker-hours':>14}{'in 10 min':>11}{'most GPUs':>11}{'CPU s':>8}")
    with ProcessPoolExecutor(options.jobs) as pool:
        for day in options.days:
            run = functools.partial(run_one, day, options)
            found = [pool.submit(run, name) for name in ("planner", "dynamo")]
            fixed = best_fixed(lambda sizes, run=run: pool.submit(run, sizes).result(), options.most)  # type: ignore[misc]
            alike = [*(one.result() for one in found), fixed]
            for row in alike:
                print_row(row)
            rows += alike
    print()
    for line in aims(rows, options):
        print(line)
    print(json.dumps({"benchmark": "planner_days", "options": vars(options), "rows": rows}))
    return 0


@functools.cache
def requests_of(day: str, recorded: str | None, seed: int, hours: float) -> list[SimulatedRequest]:
    if day == "recorded":
        assert recorded is not None
        found = recorded_day(seed, spread_out(read_traces([Path(recorded)]).requests))
    else:
        end_s = min((9 + hours) * HOUR_S, DAY_S) if hours < 24 else DAY_S
        found = {"chats": chats_day, "agents": agents_day}[day](seed, end_s=end_s)
    if hours < 24:  # from 9 o'clock on
        found = [
            dataclasses.replace(one, arrival_s=one.arrival_s - 9 * HOUR_S)
            for one in found
            if 9 * HOUR_S <= one.arrival_s < (9 + hours) * HOUR_S
        ]
    last = found[-1]
    return [*found, dataclasses.replace(last, arrival_s=last.arrival_s + ALONE_S)]


def settings_of(day: str, options: argparse.Namespace) -> PlannerSettings:
    bounds = StageBounds(maximum=options.most)
    return PlannerSettings(
        ttft_ms=TTFT_MS[day], itl_ms=ITL_MS[day], max_gpus=2 * options.most, prefill=bounds, decode=bounds,
        interval_s=options.interval_s, start_s=options.start_s, idle_s=options.idle_s,
    )  # fmt: skip


def run_one(day: str, options: argparse.Namespace, what: str | tuple[int, int]) -> dict[str, Any]:
    """Simulate a day with the planner, Dynamo's rule or a fixed size; a row of figures."""
    bounds, planned = settings_of(day, options), planned_engine()
    begin_s = time.process_time()
    scaler, interval_s, sizes = None, bounds.interval_s, (1, 1)
    if what == "planner":
        planner = WorkerPlanner(bounds, planned, planned, make_predictor(options.predictor))
        scaler = SimulatedScaler(planner.decide)
    elif what == "dynamo":
        rule = DynamoRule(bounds, DynamoProfile(planned, planned))
        scaler = SimulatedScaler(lambda observation, now: rule.decide(observation))
        interval_s = DYNAMO_INTERVAL_S
    else:
        sizes = what  # type: ignore[assignment]
    outcome = run_day(day, options, sizes, interval_s, scaler)
    return figures_of(day, what, outcome, scaler, bounds) | {"cpu_s": time.process_time() - begin_s}


def planned_engine() -> PlannedEngine:
    return PlannedEngine(TIMES, kv_tokens=ENGINE.num_blocks * 512)


def run_day(
    day: str, options: argparse.Namespace, sizes: tuple[int, int], interval_s: float, scaler: Scaler | None
) -> Outcome:
    """Simulate a day that begins with these sizes."""
    cluster = ClusterSettings(
        *sizes, ENGINE, ENGINE, router=convert(ROUTER, RouterConfig, "ROUTER"), start_s=options.start_s,
        interval_s=interval_s, ttft_s=TTFT_MS[day] / 1e3, itl_s=ITL_MS[day] / 1e3, seed=options.seed,
    )  # fmt: skip
    requests = requests_of(day, options.recorded, options.seed, options.hours)
    return simulate(requests, "kv", cluster, lambda done: None, scaler)


def tell_bound(options: argparse.Namespace) -> int:
    """Print what a fixed size holds, and what schedules of one that knows the day do."""
    print(f"{'':<32}{'sizes':>8}{'SLO held':>10}{'worker-hours':>14}{'in 10 min':>11}{'most GPUs':>11}{'CPU s':>8}")
    rows = list[dict[str, Any]]()
    for day in options.days:
        settings, witness = settings_of(day, options), Witness(options.bound)
        seen = run_day(day, options, options.bound, settings.interval_s, witness)
        fixed = figures_of(day, options.bound, seen, None, settings) | {"cpu_s": 0.0}
        print_row(fixed)
        rows.append(fixed)
        requests = requests_of(day, options.recorded, options.seed, options.hours)
        hopeless, limit_s = {id(one) for one in too_long(requests, settings)}, settings.ttft_ms / 1e3
        late = {id(one) for one, ttft_s in zip(seen.requests, seen.ttft_s, strict=True) if ttft_s > limit_s}
        print(
            f"{day}: {len(hopeless)} prompts take longer than {settings.ttft_ms:g} ms on idle workers with all caches;"
            f" {len(late & hopeless)} of the {len(late)} late ones"
        )
        holds = list[float]()
        for prefill, decode, least in BOUNDS:
            begin_s = time.process_time()
            needs = needs_of(witness, seen, planned_engine(), settings, (prefill, decode))
            schedule = Schedule((needs[0], [max(one, least) for one in needs[1]]), settings)
            scaler = SimulatedScaler(lambda observation, now, schedule=schedule: schedule.decide(now))  # type: ignore[misc]
            outcome = run_day(day, options, schedule.at(0.0), settings.interval_s, scaler)
            row = figures_of(day, f"oracle {prefill:g} {decode:g} {least}", outcome, scaler, settings)
            print_row(row | {"cpu_s": time.process_time() - begin_s})
            rows.append(row)
            if row["good_share"] >= fixed["good_share"]:
                holds.append(row["worker_hours"] / fixed["worker_hours"])
        told = f"{min(holds):.0%} of its hours" if holds else "in none of these schedules"
        print(f"{day}: {fixed['good_share']:.2%} held as by {options.bound[0]}+{options.bound[1]}: {told}")
    print(json.dumps({"benchmark": "planner_days", "options": vars(options), "rows": rows}))
    return 0


def too_long(requests: Sequence[SimulatedRequest], settings: PlannerSettings) -> list[SimulatedRequest]:
    """Return whose prompt alone takes longer than the target, where all prompts before it are in the caches."""
    return [
        one
        for one, cached in zip(requests, endless_hits(requests), strict=True)
        if planned_engine().prompt_ms(one.num_prompt - cached) > settings.ttft_ms
    ]


def sizes_of(text: str) -> tuple[int, int]:
    prefill, _, decode = text.partition("+")
    if not (prefill.isdecimal() and decode.isdecimal() and min(int(prefill), int(decode)) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r}: prefill and decode workers, as 3+5")
    return int(prefill), int(decode)


def figures_of(
    day: str, what: str | tuple[int, int], outcome: Outcome, scaler: SimulatedScaler | None, bounds: PlannerSettings
) -> dict[str, Any]:
    summary = outcome.summary()
    late = sum(one > bounds.ttft_ms / 1e3 for one in outcome.ttft_s)
    decisions = [one for _, one in scaler.decisions] if scaler else []
    sizes = [(one.prefill, one.decode) for one in decisions] or [what]
    most = tuple(max(one[stage] for one in sizes) for stage in (0, 1))
    return {
        "day": day,
        "way": what if isinstance(what, str) else "fixed",
        "sizes": most,
        "requests": summary["requests"],
        "good_share": summary["good_share"],
        "late_share": late / len(outcome.ttft_s),
        "slow_share": sum(one > bounds.itl_ms / 1e3 for one in outcome.itl_s) / len(outcome.itl_s),
        "worker_hours": summary["worker_hours"],
        "most_reversals_in_10_min": scaler.reversals(600.0)[1] if scaler else 0,
        "most_gpus": max(bounds.gpus_of(*one) for one in sizes),
        "budget": bounds.max_gpus,
        "idle_intervals": idle_intervals(outcome, scaler, bounds) if scaler else None,
    }


def idle_intervals(outcome: Outcome, scaler: SimulatedScaler, bounds: PlannerSettings) -> int | None:
    """Return how many intervals without a request there were until the minimum was decided; None: it was not."""
    alone_s = max(one.arrival_s for one in outcome.requests)
    end_s = max(
        one.arrival_s + ttft_s + itl_s * (one.num_output - 1)
        for one, ttft_s, itl_s in zip(outcome.requests, outcome.ttft_s, outcome.itl_s, strict=True)
        if one.arrival_s < alone_s
    )
    least = bounds.prefill.minimum, bounds.decode.minimum
    quiet = [one for at, one in scaler.decisions if end_s + bounds.interval_s <= at < alone_s]
    return next((number for number, one in enumerate(quiet, 1) if (one.prefill, one.decode) == least), None)


def best_fixed(run: Callable[[tuple[int, int]], dict[str, Any]], most: int) -> dict[str, Any]:
    """Return the fewest workers that hold the targets as often as any fixed size.

    More of decode hold them as often, but for chance. More of prefill need not: they share out what caches hold. So
    each number of these is tried with the most of decode, then with fewer.
    """
    widest = [run((prefill, most)) for prefill in range(1, most + 1)]
    enough = max(row["good_share"] for row in widest) - EQUAL_SHARES
    best: dict[str, Any] | None = None
    for prefill, row in enumerate(widest, 1):
        most_decode = most if best is None else min(sum(best["sizes"]) - prefill - 1, most)
        if row["good_share"] < enough or most_decode < 1:
            continue
        tried = {most: row}

        def holds(decode: int, prefill: int = prefill, tried: dict[int, dict[str, Any]] = tried) -> bool:
            if decode not in tried:
                tried[decode] = run((prefill, decode))
            return bool(tried[decode]["good_share"] >= enough)

        if holds(most_decode):  # else no fewer workers than the best's
            best = tried[bisect.bisect_left(range(1, most_decode), True, key=holds) + 1]
    assert best is not None  # that with the highest share is enough
    return best


def print_row(row: dict[str, Any]) -> None:
    name, sizes = f"{row['day']}, {row['way']}", "+".join(map(str, row["sizes"]))
    print(
        f"{name:<32}{sizes:>8}{row['good_share']:>10.2%}{row['worker_hours']:>14.1f}"
        f"{row['most_reversals_in_10_min']:>11}{row['most_gpus']:>11}{row['cpu_s']:>8.0f}",
        flush=True,
    )


def aims(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> Iterator[str]:
    for day in options.days:
        planner, dynamo, fixed = (row for row in rows if row["day"] == day)
        for other in (dynamo, fixed):
            yield aim(f"{day}: requests within the targets, over {other['way']}'s",
                      planner["good_share"] - other["good_share"], 0.0, is_least=True)  # fmt: skip
            if other["good_share"] >= planner["good_share"] - EQUAL_SHARES:  # else it has fewer by what it misses
                hours = planner["worker_hours"] / other["worker_hours"]
                yield aim(f"{day}: worker-hours over {other['way']}'s", hours, AIM_HOURS)
        yield aim(f"{day}: reversals in ten minutes", planner["most_reversals_in_10_min"], AIM_REVERSALS)
        idle = planner["idle_intervals"]
        yield aim(f"{day}: intervals until the minimum", math.inf if idle is None else idle, AIM_IDLE)
        yield aim(f"{day}: GPUs over the budget", planner["most_gpus"] / planner["budget"], 1.0)


def aim(what: str, figure: float, limit: float, is_least: bool = False) -> str:
    is_met = figure >= limit if is_least else figure <= limit
    bound, word = "more" if is_least else "less", "ok" if is_met else "BELOW"
    return f"aim: {what} {figure:.4f}, {limit:g} or {bound} asked for: {word}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=chosen(DAYS), default=list(DAYS))
    parser.add_argument("--recorded", metavar="FILE", help="Mooncake's conversation trace")
    parser.add_argument("--hours", type=float, default=24.0, help="of the day, from 9 o'clock on")
    parser.add_argument("--predictor", default="constant", choices=get_args(PredictorName))
    parser.add_argument("--interval-s", type=float, default=60.0)
    parser.add_argument("--start-s", type=float, default=60.0)
    parser.add_argument(
        "--idle-s", type=float, help="without requests, until the minimum; otherwise by the load's own pauses"
    )
    parser.add_argument("--most", type=int, default=MOST, help="workers of each stage")
    parser.add_argument("--bound", type=sizes_of, metavar="P+D", help="a fixed size, and what knowing the day saves")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="simulations at a time")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
