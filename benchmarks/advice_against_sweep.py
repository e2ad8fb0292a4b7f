"""Does the advice from a table of one GPU agree with what a sweep has measured on two?

A sweep with --rates of two aggregated workers, and of one for prefill with one for decode. This simulates the same
arrivals from the table, and compares at which rates the target was held, and which way held it at the higher one:

    python tools/make_recipe.py --model MODEL --engine torch --gpu h100 --gpus 2 --mode aggregated \\
        --isl 2000 --osl 200 --concurrency 64 --out out/both
    python tools/make_recipe.py --model MODEL --engine torch --gpu h100 --gpus 2 --mode disaggregated \\
        --prefill-workers 1 --decode-workers 1 --isl 2000 --osl 200 --concurrency 64 --out out/apart
    python tools/sweep.py out/both out/apart --lengths 2000/200 --rates 6,10,14,18,22,26 --loads bireme \\
        --rate-seconds 60 --ttft-ms 400 --itl-ms 12 --out out/two-gpus
    python benchmarks/advice_against_sweep.py out/two-gpus --times h100-8b-bf16 --hop-ms 3 \\
        --recipe out/both --recipe out/apart

The target is the sweep's. "?" marks what hangs on the error of the table of step times. The table comes first, then the
aims, the last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

from bireme.errors import ConfigError
from bireme.recipe_files import load_recipe
from bireme.sizing.advice import TOKENS_PER_BLOCK, Bench, Layout, LayoutFigures, Loads, Question, ServiceTarget, Way
from bireme.sizing.simulator.cluster import ClusterSettings
from bireme.sizing.simulator.trace import SimulatedRequest, spread
from bireme.sizing.simulator.worker import SimulatedEngine
from bireme.sizing.step_times import StepTimes
from tools.advise import layout_of, with_recipe
from tools.sweeping.matrix import Cell
from tools.sweeping.own_load import arrival_times
from tools.sweeping.report import keeps_limits
from tools.sweeping.results import Results

LAYOUTS = {"aggregated": Layout(0, 2), "disaggregated": Layout(1, 1)}
EQUAL, CLOSE = "equal", "too close to call"
SHARE = 0.9  # of requests, as the sweep counts
AIM_RATES = 0.8  # of the cells, whether the target is held: the others are at the edge


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        rows = compared(options)
    except ConfigError as error:
        print(f"advice_against_sweep: {error}", file=sys.stderr)
        return 2
    print(f"{'':<32}{'req/s':>7}{'held':>7}{'advised':>9}{'TTFT p90':>10}{'advised':>9}{'ITL p90':>9}{'advised':>9}")
    for row in rows:
        print(
            f"{row['lengths'] + ', ' + row['kind']:<32}{row['rate']:>7g}{row['held']!s:>7}{advised_word(row):>9}"
            f"{row['ttft_p90_ms']:>10.0f}{row['advised_ttft_p90_ms']:>9.0f}"
            f"{row['itl_p90_ms']:>9.1f}{row['advised_itl_p90_ms']:>9.1f}"
        )
    for line in aims(rows):
        print(line)
    print(json.dumps({"benchmark": "advice_against_sweep", "options": vars(options), "rows": rows}))
    return 0


def advised_word(row: dict[str, Any]) -> str:
    """Return whether a cell is told to hold the target, with a mark where that hangs on the table's error."""
    is_edge = row["surely_held"] != row["perhaps_held"]
    return f"{row['advised_held']}{'?' if is_edge else ''}"


def compared(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each way and rate. Raises ConfigError for a sweep that can't be compared."""
    results, times = Results(Path(options.sweep)), StepTimes.read(options.times)
    plan = results.plan()
    matrix = plan.matrix
    if not matrix.ttft_ms or not matrix.itl_ms:
        raise ConfigError(f"{options.sweep}: a sweep without a target; give it --ttft-ms and --itl-ms with --resume")
    runs = defaultdict[tuple[str, str, float], list[Any]](list)
    for run in results.read_all(plan):
        kind, workers = run.deployment.kind, run.deployment.workers
        counts = Layout(workers.get("prefill", 0), workers.get("decode", 0))
        if run.cell.rate and run.figures is not None and LAYOUTS[kind] == counts:
            runs[run.cell.lengths, kind, run.cell.rate].append(run)
    kinds = {kind for _, kind, _ in runs}
    if kinds != LAYOUTS.keys():
        raise ConfigError(
            f"{options.sweep}: measured at a rate: {', '.join(sorted(kinds)) or 'nothing'}; both ways are needed, two"
            " aggregated workers and one for prefill with one for decode"
        )
    target = ServiceTarget(matrix.ttft_ms, matrix.itl_ms, SHARE)
    engine = SimulatedEngine(times, max(options.kv_tokens // 64, 1), 64)
    base = ClusterSettings(prefill=engine, decode=engine, hop_s=options.hop_ms / 1e3)
    settings: dict[Way, ClusterSettings] = {"aggregated": base, "apart": base}
    for recipe in map(load_recipe, options.recipe):
        settings[layout_of(recipe).way] = with_recipe(base, recipe, times, base.decode.tokens_per_block)
    rows = []
    for (lengths, kind, rate), alike in sorted(runs.items()):
        asked = [Bench(loads_of(one.cell), settings).ask(LAYOUTS[kind], Question(target)) for one in alike]
        advised = sorted(asked, key=lambda one: one.ttft_p90_ms)[len(asked) // 2]
        quick, slow = (
            [
                Bench(loads_of(one.cell), settings).ask(LAYOUTS[kind], Question(target, step_factor=factor))
                for one in alike
            ]
            for factor in (1 - times.error, 1 + times.error)
        )
        held = sum(keeps_limits(one.figures, matrix) for one in alike) * 2 > len(alike)
        middle = sorted(alike, key=lambda one: one.figures.ttft_p90_ms or 0.0)[len(alike) // 2].figures
        rows.append({
            "lengths": lengths, "kind": kind, "rate": rate, "held": held,
            "advised_held": most_held(asked), "surely_held": most_held(slow), "perhaps_held": most_held(quick),
            "ttft_p90_ms": middle.ttft_p90_ms or 0.0, "itl_p90_ms": middle.itl_p90_ms or 0.0,
            "advised_ttft_p90_ms": advised.ttft_p90_ms, "advised_itl_p90_ms": advised.itl_p90_ms,
        })  # fmt: skip
    return rows


def loads_of(cell: Cell) -> Loads:
    """Return the requests of a cell as its load sent them; a minute's load of that rate may have a longer queue."""
    num_blocks = cell.input_tokens // TOKENS_PER_BLOCK
    times = arrival_times(cell.requests, cell.rate, cell.seed)
    fresh = (range(first, first + num_blocks) for first in itertools.count(1 << 20, num_blocks))
    requests = [
        SimulatedRequest(at, cell.input_tokens, cell.output_tokens, spread(np.array(blocks, np.uint64)))
        for at, blocks in zip(times, fresh, strict=False)
    ]
    return lambda draw, speed: requests


def most_held(found: Sequence[LayoutFigures]) -> bool:
    return sum(one.is_held for one in found) * 2 > len(found)


def better(rows: Sequence[dict[str, Any]], held: str) -> str:
    """Return the way that held the target at the higher rate."""
    if (first := highest(rows, "aggregated", held)) == (second := highest(rows, "disaggregated", held)):
        return EQUAL
    return "aggregated" if first > second else "disaggregated"


def advised_better(rows: Sequence[dict[str, Any]]) -> str:
    """Return the way that is told to hold it at the higher rate, unless it does so by less than the table's error."""
    if (way := better(rows, "advised_held")) == EQUAL:
        return EQUAL
    other = next(kind for kind in LAYOUTS if kind != way)
    is_sure = highest(rows, way, "surely_held") > highest(rows, other, "perhaps_held")
    return way if is_sure else CLOSE


def highest(rows: Sequence[dict[str, Any]], kind: str, held: str) -> float:
    """Return the rate up to which a way held the target; 0: at none."""
    return max((row["rate"] for row in rows if row["kind"] == kind and row[held]), default=0)


def aims(rows: Sequence[dict[str, Any]]) -> list[str]:
    found = []
    for lengths in dict.fromkeys(row["lengths"] for row in rows):
        alike = [row for row in rows if row["lengths"] == lengths]
        measured, advised = better(alike, "held"), advised_better(alike)
        is_same = measured == (EQUAL if advised == CLOSE else advised)
        word = "ok" if is_same else "BELOW"
        found.append(f"aim: {lengths}: better on two GPUs {measured}, advised {advised}, the same asked for: {word}")
        share = sum(row["held"] == row["advised_held"] for row in alike) / len(alike)
        word = "ok" if share >= AIM_RATES else "BELOW"
        found.append(f"aim: {lengths}: cells told rightly {share:.2f}, {AIM_RATES} or more asked for: {word}")
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", metavar="FOLDER", help="of tools/sweep.py, with --rates and a target")
    parser.add_argument("--times", default="h100-8b-bf16", help="step times of one GPU")
    parser.add_argument(
        "--recipe", action="append", default=[], metavar="FOLDER", help="of the sweep: its limits count; may repeat"
    )
    parser.add_argument("--hop-ms", type=float, default=3.0, help="to a worker and back, beside its work")
    parser.add_argument("--kv-tokens", type=int, default=400_000, help="that a worker's KV pool holds")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
