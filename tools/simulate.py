"""Replay requests through bireme's router and prefix index in virtual time, for each routing mode.

The router and the index are the real ones; workers have an engine's measured step times, or the mocker's timing model,
its rules of scheduling and a cache of KV blocks; what routers know of them comes late by --lag-ms. The same --seed
gives the same figures, whatever the machine.

    python tools/simulate.py conversations
    python tools/simulate.py mooncake_conversation.jsonl --modes kv,round_robin --plot modes.png
    python tools/simulate.py shared_prefix --requests 4000 --rate 12 --workers 8
    python tools/simulate.py agentic --routers 8 --config '{"decode_weight": 0.3}'
    python tools/simulate.py /tmp/dynamo-request-trace.*.jsonl.gz
    python tools/simulate.py conversations --prefill-workers 0,2,4 --workers 8 --step-times h100-8b-bf16 --modes kv
    python tools/simulate.py log/requests.*.jsonl --workers 2,4,8 --modes kv --speed 2     # for twice the traffic
    python tools/simulate.py day --prefill-workers 1,2 --workers 2,4 --modes kv --planner sla
    python tools/simulate.py day --prefill-workers 4 --workers 8 --modes kv --planner sla --compare none

Good are requests within --slo-ttft-ms and --slo-itl-ms. Traces have Mooncake's form (kvcache-ai/Mooncake,
FAST25-release/traces), where what came in the same three seconds is spread over them, or the request log's,
`dynamo.request.trace.v1`, Dynamo's own and compressed ones too. --planner runs the planner and Dynamo's rule as well,
from the minimum up to the largest of the sizes, and compares them with the best of these; --compare says with which.
Progress goes to stderr; the table comes first, the last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

import msgspec
import numpy as np

from benchmarks.options import chosen, count, not_negative, numbers, positive, positive_count
from bireme.config import MockerConfig, RouterConfig, RoutingMode
from bireme.conversion import convert
from bireme.errors import ConfigError
from bireme.planner.capacity import PlannedEngine
from bireme.planner.dynamo_rule import DynamoProfile, DynamoRule
from bireme.planner.planner import WorkerPlanner
from bireme.planner.planner_settings import PlannerSettings, PlannerTarget, StageBounds
from bireme.planner.predictors import PredictorName, make_predictor
from bireme.planner.simulated import SimulatedScaler
from bireme.sizing.simulator.cluster import AsleepRule, ClusterSettings, simulate
from bireme.sizing.simulator.outcome import Outcome
from bireme.sizing.simulator.synthetic import GENERATORS
from bireme.sizing.simulator.trace import (
    TOKENS_PER_BLOCK,
    SimulatedRequest,
    Trace,
    endless_hits,
    faster,
    read_traces,
    spread_out,
)
from bireme.sizing.simulator.worker import SimulatedEngine
from bireme.sizing.step_times import StepTimes, published

COMPARED = ("fixed", "dynamo")  # beside the planner
MODES = tuple(mode for mode in get_args(RoutingMode) if mode != "direct")
BACKGROUND = 0.2  # priority
DYNAMO_INTERVAL_S = 180.0  # its default
EQUAL_SHARES = 0.001  # of requests within the SLO
COLUMNS = {
    "ttft_p50_ms": "TTFT p50", "ttft_p99_ms": "p99 ms", "itl_p50_ms": "ITL p50", "itl_p99_ms": "p99 ms",
    "hit_rate": "hit rate", "hits_of_endless": "of endless", "load_cov": "load CoV", "tokens_per_s": "tokens/s",
    "goodput_per_s": "goodput/s", "good_share": "good share",
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        router = convert(tree_of(options.config), RouterConfig, "--config")
        trace = load(options)
        times = step_times(options)
        for option, least in (("workers", 1), ("prefill_workers", 0)):
            if (found := min(getattr(options, option))) < least:
                raise ValueError(f"--{option.replace('_', '-')} {found}: {least} or more")
        if options.background > 1:
            raise ValueError(f"--background {options.background:g}: a share of the requests, 1 at most")
        if options.plot and not Path(options.plot).parent.is_dir():
            raise ValueError(f"--plot {options.plot}: {Path(options.plot).parent} is no folder; make it first")
        bounds = planner_settings(options)
    except (ConfigError, ValueError, OSError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    requests, size = trace.requests, trace.tokens_per_block
    engine = SimulatedEngine(
        times, options.blocks * TOKENS_PER_BLOCK // size, size, options.max_num_tokens, options.max_batch_size
    )
    settings = ClusterSettings(
        prefill=engine,
        decode=engine,
        num_routers=options.routers,
        router=router,
        enforce_disaggregation=options.enforce_disaggregation,
        lag_s=options.lag_ms / 1e3,
        hop_s=options.hop_ms / 1e3,
        ttft_s=options.slo_ttft_ms / 1e3,
        itl_s=options.slo_itl_ms / 1e3,
        start_s=options.start_s,
        asleep=options.asleep,
        interval_s=options.interval_s,
        seed=options.seed,
    )
    try:
        say_plan(len(requests), options)
        has_fixed = bounds is None or "fixed" in compared(options)
        outcomes, rows = run_all(requests, settings, options) if has_fixed else ([], [])
        if bounds is not None:
            planned_outcomes, planned_rows = run_planners(requests, settings, options, bounds)
            outcomes, rows = outcomes + planned_outcomes, rows + planned_rows
    except ConfigError as error:
        print(f"\nsimulate: {error}", file=sys.stderr)
        return 2
    print_table(rows)
    if bounds is not None:
        print_planners(rows)
    if options.plot:
        draw(options.plot, outcomes)
    statistics = statistics_of(requests, size)
    print(json.dumps({"simulation": " ".join(options.requests_from), "statistics": statistics, "rows": rows}))
    return 0


def run_all(
    requests: Sequence[SimulatedRequest], settings: ClusterSettings, options: argparse.Namespace
) -> tuple[list[tuple[str, Outcome]], list[dict[str, Any]]]:
    """Return what became of each mode and size, by its name, and a row of figures for each."""
    outcomes, rows = [], []
    for mode, prefill, workers in itertools.product(options.modes, options.prefill_workers, options.workers):
        sizes = f"{prefill}+{workers}" if any(options.prefill_workers) else str(workers)
        has_one_size = len(options.workers) == len(options.prefill_workers) == 1
        name = mode if has_one_size else f"{mode}, {sizes}"
        sized = dataclasses.replace(settings, num_prefill=prefill, num_decode=workers)
        outcomes.append((name, simulate(requests, mode, sized, Progress(name, len(requests)))))
        rows.append(outcomes[-1][1].summary() | {"workers": workers, "prefill_workers": prefill})
    return outcomes, rows


def compared(options: argparse.Namespace) -> Sequence[str]:
    """Return what runs beside the planner."""
    return COMPARED if options.compare is None else options.compare


def say_plan(num_requests: int, options: argparse.Namespace) -> None:
    """Say how many simulations there will be: of a long day each takes a minute or two."""
    fixed = len(options.prefill_workers) * len(options.workers)
    if options.planner is not None:
        fixed = fixed * ("fixed" in compared(options)) + 1 + ("dynamo" in compared(options))
    total = fixed * len(options.modes)
    print(f"{total} simulation{'s' if total > 1 else ''} of {num_requests:,} requests", file=sys.stderr, flush=True)


def planner_settings(options: argparse.Namespace) -> PlannerSettings | None:
    """None: without a planner. Raises ConfigError."""
    if options.planner is None:
        if options.compare is not None:
            raise ConfigError("--compare: needs --planner TARGET")
        return None
    if min(options.prefill_workers) < 1:
        raise ConfigError("--planner: --prefill-workers 1 or more; it sizes prefill and decode apart")
    num_prefill, num_decode = max(options.prefill_workers), max(options.workers)
    tree = {
        "target": options.planner,
        "ttft_ms": options.slo_ttft_ms,
        "itl_ms": options.slo_itl_ms,
        "max_gpus": options.max_gpus or num_prefill + num_decode,
        "interval_s": options.interval_s,
        "start_s": options.start_s,
    }
    bounds = {
        "prefill": StageBounds(minimum=options.minimum, maximum=num_prefill),
        "decode": StageBounds(minimum=options.minimum, maximum=num_decode),
    }
    found: PlannerSettings = msgspec.structs.replace(convert(tree, PlannerSettings, "--planner"), **bounds)
    found.check()
    make_predictor(options.predictor)  # its library is there
    return found


def run_planners(
    requests: Sequence[SimulatedRequest],
    settings: ClusterSettings,
    options: argparse.Namespace,
    bounds: PlannerSettings,
) -> tuple[list[tuple[str, Outcome]], list[dict[str, Any]]]:
    """Run the planner and Dynamo's rule, each from the minimum on; a row of figures for each."""
    engines = [
        PlannedEngine(one.times, one.max_num_tokens, one.max_batch_size, one.num_blocks * one.tokens_per_block)
        for one in (settings.prefill, settings.decode)
    ]
    outcomes, rows = [], []
    least = dataclasses.replace(settings, num_prefill=1, num_decode=1)
    for mode in options.modes:
        planner = WorkerPlanner(bounds, *engines, make_predictor(options.predictor))
        rule = DynamoRule(bounds, DynamoProfile(*engines))
        deciders = [
            ("planner", planner.decide, bounds.interval_s),
            ("dynamo", lambda observation, now, rule=rule: rule.decide(observation), DYNAMO_INTERVAL_S),
        ]
        for name, decide, interval_s in deciders if "dynamo" in compared(options) else deciders[:1]:
            scaler = SimulatedScaler(decide)
            sized = dataclasses.replace(least, interval_s=interval_s)
            outcome = simulate(requests, mode, sized, Progress(f"{mode}, {name}", len(requests)), scaler)
            outcomes.append((f"{mode}, {name}", outcome))
            rows.append(outcome.summary() | planned_figures(name, scaler, bounds))
    return outcomes, rows


def planned_figures(name: str, scaler: SimulatedScaler, bounds: PlannerSettings) -> dict[str, Any]:
    """Return what was decided; of sizes, the most at one time."""
    decisions = [decision for _, decision in scaler.decisions]
    num_reversals, most = scaler.reversals(600.0) if decisions else (0, 0)
    return {
        "planner": name,
        "workers": max((one.decode for one in decisions), default=bounds.decode.minimum),
        "prefill_workers": max((one.prefill for one in decisions), default=bounds.prefill.minimum),
        "most_gpus": max((bounds.gpus_of(one.prefill, one.decode) for one in decisions), default=0),
        "reversals": num_reversals,
        "most_reversals_in_10_min": most,
        "decisions": [[at, one.prefill, one.decode, one.reason] for at, one in scaler.decisions],
    }


def best_fixed(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the one with the fewest worker-hours among those that hold the SLO as often as any."""
    most = max(row["good_share"] for row in rows)
    return min((row for row in rows if row["good_share"] >= most - EQUAL_SHARES), key=lambda row: row["worker_hours"])


def print_planners(rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{'':<26}{'SLO held':>10}{'worker-hours':>14}{'reversals':>11}{'in 10 min':>11}")
    for mode in dict.fromkeys(row["mode"] for row in rows):
        alike = [row for row in rows if row["mode"] == mode]
        fixed = [row for row in alike if "planner" not in row]
        for row in [*(row for row in alike if "planner" in row), *([best_fixed(fixed)] if fixed else [])]:
            name = f"{mode}, {row.get('planner') or 'best fixed ' + sizes_of(row)}"
            counts = (row.get("reversals", 0), row.get("most_reversals_in_10_min", 0))
            print(f"{name:<26}{row['good_share']:>10.2%}{row['worker_hours']:>14.1f}{counts[0]:>11}{counts[1]:>11}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "requests_from", nargs="+", help=f"files of a trace, as they are or .gz, or one of {', '.join(GENERATORS)}"
    )
    parser.add_argument("--modes", type=chosen(MODES), default=list(MODES))
    parser.add_argument("--requests", type=positive_count, default=12_000, help="how many, at the most")
    parser.add_argument("--rate", type=positive, default=3.4, help="generated requests a second")
    parser.add_argument("--speed", type=positive, default=1.0, help="how much faster than recorded they come")
    parser.add_argument("--workers", type=numbers(int), default=[8], metavar="N,N", help="several: a row for each")
    parser.add_argument(
        "--prefill-workers", type=numbers(int), default=[0], metavar="N,N", help="0: decode computes all prompts"
    )
    parser.add_argument("--routers", type=positive_count, default=1, help="each request comes to one of them")
    parser.add_argument(
        "--blocks", type=positive_count, default=16_384, help=f"of {TOKENS_PER_BLOCK} tokens, that a worker can hold"
    )
    parser.add_argument("--max-num-tokens", type=positive_count, default=8192, help="of a step")
    parser.add_argument("--max-batch-size", type=positive_count, default=256, help="requests that a worker runs")
    parser.add_argument(
        "--step-times", metavar="FILE", help=f"of an engine (docs/sizing.md), or one of {', '.join(published())}"
    )
    parser.add_argument("--step-ms", type=not_negative, default=8.0, help="without it: as in engine_config.mocker")
    parser.add_argument("--step-ms-per-request", type=not_negative, default=0.05)
    parser.add_argument("--prefill-ms-per-token", type=not_negative, default=0.03)
    parser.add_argument("--config", default="{}", help="the recipe's block `router`, as JSON")
    parser.add_argument("--enforce-disaggregation", action="store_true", help="as pipeline.enforce_disaggregation")
    parser.add_argument("--background", type=not_negative, default=0.0, metavar="SHARE", help="of all: priority 0.2")
    parser.add_argument("--hop-ms", type=not_negative, default=0.0, help="to a worker and back, beside its work")
    parser.add_argument("--lag-ms", type=not_negative, default=5.0, help="until routers know of an event or a load")
    parser.add_argument("--slo-ttft-ms", type=positive, default=2000.0)
    parser.add_argument("--slo-itl-ms", type=positive, default=25.0)
    parser.add_argument("--planner", choices=get_args(PlannerTarget), help="its target: it, and Dynamo's rule, as well")
    parser.add_argument(
        "--compare", type=chosen((*COMPARED, "none")), metavar="NAME,NAME",
        help="with the planner: fixed sizes, dynamo's rule, none; both without it",
    )  # fmt: skip
    parser.add_argument("--predictor", choices=get_args(PredictorName), default="constant", help="of the planner")
    parser.add_argument("--max-gpus", type=positive_count, help="its budget, one a worker; default: the largest size's")
    parser.add_argument("--interval-s", type=positive, default=60.0, help="between two of its decisions")
    parser.add_argument("--start-s", type=not_negative, default=30.0, help="until a worker that joins is ready")
    parser.add_argument("--minimum", type=int, choices=(0, 1), default=1, help="of each stage; 0: all may sleep")
    parser.add_argument(
        "--asleep", choices=get_args(AsleepRule), default="wait", help="what becomes of requests that come then"
    )
    parser.add_argument("--seed", type=count, default=1)
    parser.add_argument("--plot", help="write a PNG")
    return parser.parse_args(arguments)


def step_times(options: argparse.Namespace) -> StepTimes:
    """Raises ConfigError."""
    if options.step_times:
        return StepTimes.read(options.step_times)
    return StepTimes.of_mocker(
        MockerConfig(
            step_ms=options.step_ms,
            step_ms_per_request=options.step_ms_per_request,
            prefill_ms_per_token=options.prefill_ms_per_token,
        )
    )


def tree_of(config: str) -> Any:
    """Raises ConfigError."""
    try:
        return json.loads(config)
    except ValueError as error:
        raise ConfigError(f"--config {config[:60]}: no JSON ({error})") from error


def load(options: argparse.Namespace) -> Trace:
    """Raises ValueError for a trace that can't be read."""
    name = " ".join(options.requests_from)
    if (make := GENERATORS.get(name)) is not None:
        trace = Trace(make(options.seed, options.requests, options.rate))
    else:
        trace = read_traces([Path(path) for path in options.requests_from])
        if not trace.requests:
            raise ValueError(f"{name}: no requests; name files of a request log or a trace")
        trace = Trace(spread_out(trace.requests)[: options.requests], trace.tokens_per_block)
    requests = faster(trace.requests, options.speed)
    if options.background:
        random_ = random.Random(options.seed)
        requests = [
            dataclasses.replace(one, priority=BACKGROUND) if random_.random() < options.background else one
            for one in requests
        ]
    return Trace(requests, trace.tokens_per_block)


def statistics_of(requests: Sequence[SimulatedRequest], tokens_per_block: int = TOKENS_PER_BLOCK) -> dict[str, float]:
    prompts, answers = [one.num_prompt for one in requests], [one.num_output for one in requests]
    return {
        "requests": len(requests),
        "seconds": requests[-1].arrival_s - requests[0].arrival_s,
        "prompt_mean": float(np.mean(prompts)),
        "prompt_p50": float(np.median(prompts)),
        "prompt_p90": float(np.percentile(prompts, 90)),
        "answer_mean": float(np.mean(answers)),
        "endless_hit_rate": sum(endless_hits(list(requests), tokens_per_block)) / sum(prompts),
    }


class Progress:
    """On a terminal a line that is written over; into a file one a quarter of a minute."""

    def __init__(self, name: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._total, self._clock = name, total, clock
        self._began = self._shown_at = clock()
        self._is_terminal = sys.stderr.isatty()
        self._gap_s = 0.2 if self._is_terminal else 15.0

    def __call__(self, done: int) -> None:
        if done % 64 and done < self._total:
            return  # a clock is dear beside a request
        now = self._clock()
        if now - self._shown_at < self._gap_s and done < self._total:
            return
        self._shown_at = now
        if not self._is_terminal:
            said = f"{self._name}: {done:,} of {self._total:,} in {now - self._began:.0f} s"
            print(said, file=sys.stderr, flush=True)
            return
        bar = "#" * (30 * done // self._total)
        end = "\n" if done == self._total else ""
        print(f"\r{self._name:<14}[{bar:<30}] {done:,} of {self._total:,}", end=end, file=sys.stderr, flush=True)


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'mode':<14}{'workers':>8}" + "".join(f"{title:>12}" for title in COLUMNS.values()))
    for row in rows:
        print(
            f"{row.get('planner', row['mode']):<14}{sizes_of(row):>8}"
            + "".join(f"{row[name]:>12,.3g}" if row[name] < 10 else f"{row[name]:>12,.0f}" for name in COLUMNS)
        )


def sizes_of(row: dict[str, Any]) -> str:
    return f"{row['prefill_workers']}+{row['workers']}" if row["prefill_workers"] else str(row["workers"])


def draw(path: str, outcomes: Sequence[tuple[str, Outcome]]) -> None:
    """Write a PNG of outcomes by name. Says so where there is no matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 5, figsize=(22, 4))
    for axis, title, values in (
        (axes[0], "TTFT, ms", [outcome.ttft_s for _, outcome in outcomes]),
        (axes[1], "ITL of a request, ms", [outcome.itl_s for _, outcome in outcomes]),
    ):
        for (name, _), one in zip(outcomes, values, strict=True):
            axis.plot(np.sort(one) * 1e3, np.linspace(0, 1, len(one)), label=name)
        axis.set(title=title, xscale="log", ylabel="share of requests")
        axis.legend()
    rows = [outcome.summary() for _, outcome in outcomes]
    for axis, name in zip(axes[2:], ("hits_of_endless", "load_cov", "goodput_per_s"), strict=True):
        axis.bar([name for name, _ in outcomes], [float(row[name]) for row in rows])
        axis.set(title=COLUMNS[name])
        axis.tick_params(axis="x", rotation=30)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
