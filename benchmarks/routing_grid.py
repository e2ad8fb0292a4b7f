"""Mode kv beside round_robin over a grid of load, sharing and cache size, in virtual time (tools/simulate.py).

Conversations of eight turns go on, end and begin anew, one request at a time in random order. A cell is
    load      of what the workers could compute without caches
    sharing   the share of a prompt, in the mean, that is the same in all
    cache     room of all workers together, over what the conversations hold of their own at one time
and beside the grid 24 such conversations with one beginning, from their first turns on, four seconds between two
requests, on two workers.

    python benchmarks/routing_grid.py
    python benchmarks/routing_grid.py --workers 8 --weights 0.7
    python benchmarks/routing_grid.py --plot docs/routing_grid.png

The table comes first, then the aims, of the last of `--weights`; the last line of stdout is one JSON document. The same
--seed gives the same figures, whatever the machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

import numpy as np
import numpy.typing as npt

from benchmarks.options import numbers
from bireme.config import MockerConfig, RouterConfig
from bireme.sizing.simulator.cluster import ClusterSettings, simulate
from bireme.sizing.simulator.outcome import Outcome
from bireme.sizing.simulator.trace import TOKENS_PER_BLOCK, SimulatedRequest, spread
from bireme.sizing.simulator.worker import SimulatedEngine
from bireme.sizing.step_times import StepTimes

TURNS = 8  # of a conversation
QUESTION = 4  # blocks that a turn adds
OWN_BLOCKS = QUESTION * (TURNS + 1) / 2  # of a prompt in the mean, beside what all share
ANSWER_TOKENS = 16
MODEL = MockerConfig(step_ms=5.0, step_ms_per_request=0.05, prefill_ms_per_token=0.05)
TIMES = StepTimes.of_mocker(MODEL)
PACED_S, PACED_WORKERS, PACED_BLOCKS, PACED_CONVERSATIONS = 4.0, 2, 500, 24
AIM_PACED = 0.75
AIM_HITS = 0.98
AIM_TTFT = 1.02
Blocks = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Cell:
    load: float
    sharing: float
    cache: float

    @property
    def num_shared(self) -> int:
        """Blocks that all prompts begin with."""
        return round(OWN_BLOCKS * self.sharing / (1 - self.sharing))

    def gap_s(self, num_workers: int) -> float:
        """Seconds between two requests, in the mean."""
        prompt_s = TOKENS_PER_BLOCK * (self.num_shared + OWN_BLOCKS) * MODEL.prefill_ms_per_token / 1e3
        return prompt_s / num_workers / self.load

    def num_blocks(self, num_conversations: int, num_workers: int) -> int:
        """Blocks of a worker: what all share, and its part of the rest; the longest prompt fits twice."""
        longest = QUESTION * TURNS + 1
        return self.num_shared + max(round(self.cache * num_conversations * OWN_BLOCKS / num_workers), 2 * longest)


def turns(random: np.random.Generator, begun: Sequence[int], num_shared: int) -> Iterator[Blocks]:
    """Yield the blocks of prompts, without end: in each round every conversation has a turn.

    `begun`: the turns that each has had before.
    """
    fresh = itertools.count(num_shared)
    talks = [list(itertools.islice(fresh, QUESTION * had)) for had in begun]
    while True:
        for number in random.permutation(len(talks)).tolist():
            if len(talks[number]) == QUESTION * TURNS:
                talks[number] = []
            talks[number] += itertools.islice(fresh, QUESTION)
            yield np.array([*range(num_shared), *talks[number]], np.uint64)


def requests_of(prompts: Iterable[Blocks], arrivals: Sequence[float]) -> list[SimulatedRequest]:
    return [
        SimulatedRequest(at, TOKENS_PER_BLOCK * len(blocks), ANSWER_TOKENS, spread(blocks))
        for blocks, at in zip(prompts, arrivals, strict=False)
    ]


def paced(weight: float, seed: int) -> float:
    """Return the hit rate of conversations with one beginning, each request alone."""
    prompts = turns(np.random.default_rng(seed), [0] * PACED_CONVERSATIONS, QUESTION)
    requests = requests_of(prompts, [PACED_S * number for number in range(PACED_CONVERSATIONS * TURNS)])
    settings = ClusterSettings(
        num_decode=PACED_WORKERS,
        decode=SimulatedEngine(TIMES, PACED_BLOCKS),
        router=RouterConfig(turnover_weight=weight),
    )
    return hits(simulate(requests, "kv", settings))


def measure(cell: Cell, options: argparse.Namespace) -> Iterator[dict[str, float]]:
    random, count = np.random.default_rng(options.seed), options.rounds * options.conversations
    arrivals = np.cumsum(random.exponential(cell.gap_s(options.workers), count)).tolist()
    begun = [number % TURNS for number in range(options.conversations)]  # so that they don't end together
    requests = requests_of(turns(random, begun, cell.num_shared), arrivals)
    num_blocks = cell.num_blocks(options.conversations, options.workers)

    def run(mode: Any, weight: float) -> Outcome:
        router = RouterConfig(turnover_weight=weight)
        return simulate(
            requests,
            mode,
            ClusterSettings(
                num_decode=options.workers, num_routers=options.routers, decode=SimulatedEngine(TIMES, num_blocks),
                router=router, seed=options.seed,
            ),
        )  # fmt: skip

    in_turns = run("round_robin", 0.0)
    for weight in options.weights:
        ours = run("kv", weight)
        yield {
            "load": cell.load,
            "sharing": cell.sharing,
            "cache": cell.cache,
            "weight": weight,
            "hit_rate": hits(ours),
            "hits": hits(ours) / max(hits(in_turns), 1e-9),  # over round robin's, as what follows
            "ttft": statistics.fmean(ours.ttft_s) / statistics.fmean(in_turns.ttft_s),
            "ttft_p99": float(np.percentile(ours.ttft_s, 99) / np.percentile(in_turns.ttft_s, 99)),
        }


def hits(outcome: Outcome) -> float:
    return outcome.num_cached_tokens / outcome.num_prompt_tokens


def main() -> None:
    options = parse()
    cells = [Cell(*values) for values in itertools.product(options.loads, options.sharings, options.caches)]
    rows = []
    for cell in cells:
        rows += measure(cell, options)
        print(f"measured load={cell.load} sharing={cell.sharing} cache={cell.cache}", file=sys.stderr, flush=True)
    rates = {weight: paced(weight, options.seed) for weight in options.weights}
    print_table(rows, rates)
    if options.plot:
        draw(options.plot, rows, options)
    weight = options.weights[-1]
    for line in aims([row for row in rows if row["weight"] == weight], rates[weight]):
        print(line)
    print(json.dumps({"benchmark": "routing_grid", "rows": rows, "paced": {str(one): rates[one] for one in rates}}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=numbers(float), default=[0.0, RouterConfig().turnover_weight])
    parser.add_argument("--loads", type=numbers(float), default=[0.02, 0.3, 0.9])
    parser.add_argument("--sharings", type=numbers(float), default=[0.0, 0.2, 0.5, 0.8, 0.9])
    parser.add_argument("--caches", type=numbers(float), default=[0.3, 0.7, 1.2, 3.0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--conversations", type=int, help="at one time; twelve for each worker")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each conversation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", help="write a PNG")
    options = parser.parse_args()
    options.conversations = options.conversations or 12 * options.workers
    return options


def print_table(rows: Sequence[dict[str, float]], rates: dict[float, float]) -> None:
    names = ("load", "sharing", "cache", "weight", "hit_rate", "hits", "ttft", "ttft_p99")
    print("".join(f"{name:>10}" for name in names) + "   hits and TTFT over round robin's")
    for row in rows:
        print("".join(f"{row[name]:>10.3g}" for name in names))
    for weight, rate in rates.items():
        print(f"paced conversations, weight {weight:g}: hit rate {rate:.3f}")


def draw(path: str, rows: Sequence[dict[str, float]], options: argparse.Namespace) -> None:
    """Write a PNG: a panel for each weight and load. Says so where there is no matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import colors, pyplot

    shape = len(options.weights), len(options.loads)
    figure, axes = pyplot.subplots(*shape, figsize=(3.4 * shape[1], 2.9 * shape[0]), squeeze=False)
    for (at, weight), (across, load) in itertools.product(enumerate(options.weights), enumerate(options.loads)):
        axis = axes[at][across]
        found = {
            (row["sharing"], row["cache"]): row["ttft"]
            for row in rows
            if (row["weight"], row["load"]) == (weight, load)
        }
        table = [[found[sharing, cache] for cache in options.caches] for sharing in options.sharings]
        axis.imshow(table, cmap="RdYlGn_r", norm=colors.LogNorm(0.4, 2.5), origin="lower", aspect="auto")
        for (row, column), value in np.ndenumerate(np.array(table)):
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8)
        axis.set_xticks(range(len(options.caches)), [f"{one:g}" for one in options.caches])
        axis.set_yticks(range(len(options.sharings)), [f"{one:g}" for one in options.sharings])
        axis.set_title(f"turnover_weight {weight:g}, load {load:g}", fontsize=9)
        axis.set_xlabel("cache", fontsize=8)
        axis.set_ylabel("sharing", fontsize=8)
    figure.suptitle("mean TTFT of kv over round robin's", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def aims(rows: Sequence[dict[str, float]], rate: float) -> Iterable[str]:
    yield aim("hit rate of paced conversations", rate, AIM_PACED, rate >= AIM_PACED, "at least")
    lowest, highest = min(row["hits"] for row in rows), max(row["ttft"] for row in rows)
    yield aim("hits over round robin's, lowest cell", lowest, AIM_HITS, lowest >= AIM_HITS, "at least")
    yield aim("mean TTFT over round robin's, highest cell", highest, AIM_TTFT, highest <= AIM_TTFT, "at most")


def aim(what: str, figure: float, limit: float, is_reached: bool, word: str) -> str:
    return f"aim: {what} {figure:.3f}, {word} {limit:g}: {'ok' if is_reached else 'MISSED'}"


if __name__ == "__main__":
    main()
