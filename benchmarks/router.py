"""The router's prefix index beside the one of ai-dynamo's wheel, on the same blocks, in turns, on one core.

Two processes are pinned to one core: bireme's KvIndex, and the RadixTree of ai-dynamo-runtime as its Python users have
it (its own environment is made at the first run). 1,000 workers hold chains of 64 blocks. For each size:
    match       a prompt of 64 blocks that one worker holds
    shared      a prefix of 64 blocks that all workers hold; staggered: each holds another part of it
    memory      resident bytes for each (block, worker), of a fresh process
    events      blocks/s from the wire: msgpack in the form of the event plane, JSON for the RadixTree
    one by one  events of one block each
and for bireme alone the whole decision of a pipeline's router, WorkerRouter.place (hashes, match, costs, choice and the
accounts of it), over 64 workers that hold different parts of the prompts.

    python benchmarks/router.py
    python benchmarks/router.py --sizes 10000,100000,1000000,10000000 --repeat 5
    python benchmarks/router.py --contenders bireme

The table comes first, then the aims; the last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

from benchmarks.contenders import dynamo
from benchmarks.options import chosen, numbers

CHECKOUT = Path(__file__).resolve().parents[1]
CONTENDERS = ("bireme", "dynamo")
DEPTH = 64
AIM_SIZE = 1_000_000
AIM_SPEED = 2.0  # times the RadixTree's, of matches and events
AIM_MEMORY = 0.5
AIM_DECISION_US = {2_000: 150.0, 100_000: 3_000.0}
Figures = dict[str, float]


def main() -> None:
    options = parse()
    os.sched_setaffinity(0, {options.core})  # inherited
    rows = [row for size in options.sizes for row in measure(size, options)]
    decisions = decide(options) if "bireme" in options.contenders else {}
    print_table(rows)
    for what, figures in decisions.items():
        print(
            f"placement of {what}: {figures['p50_us']:,.0f}/{figures['p99_us']:,.0f} us p50/p99, "
            f"its end {figures['end_p50_us']:,.0f} us"
        )
    for line in aims(rows, decisions):
        print(line)
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    print(json.dumps({"benchmark": "router", "rows": rows, "decisions": decisions} | machine))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", type=chosen(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--sizes", type=numbers(int), default=[10_000, 100_000, AIM_SIZE], help="blocks in the index")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=3, help="rounds; the median counts")
    parser.add_argument("--matches", type=int, default=3000, help="in a round")
    parser.add_argument("--core", type=int, default=0)
    return parser.parse_args()


class Contender:
    """An index in a process of its own."""

    def __init__(self, name: str) -> None:
        python = sys.executable if name == "bireme" else dynamo.environment()
        command = [python, "-m", "benchmarks.contenders.index_process", name]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=CHECKOUT)
        self.name = name

    def ask(self, do: str, **arguments: Any) -> Figures:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"{self.name}: its process ended at {do} {arguments}")
        found: Figures = json.loads(line)
        return found

    def close(self) -> None:
        self._process.communicate()


def measure(size: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of an index of this many blocks, by contender."""
    per_worker = max(1, round(size / options.workers / DEPTH))
    contenders = [Contender(name) for name in options.contenders]
    rows: list[dict[str, Any]] = []
    for one in contenders:
        print(f"load contender={one.name} blocks={size}", file=sys.stderr, flush=True)
        loaded = one.ask("load", workers=options.workers, per_worker=per_worker, depth=DEPTH, form="wire")
        rows.append({"contender": one.name, "blocks": int(loaded.pop("memberships")), **loaded})
    asked: dict[str, dict[str, Any]] = {
        "match": {"do": "match", "depth": DEPTH, "count": options.matches},
        "shared": {"do": "share", "workers": options.workers, "depth": DEPTH, "form": "wire", "staggered": False},
        "staggered": {"do": "share", "workers": options.workers, "depth": DEPTH, "form": "wire", "staggered": True},
        "one_by_one": {"do": "grow_one_by_one", "count": 20_000, "form": "wire"},
    }
    for what, order in asked.items():
        turns = [[one.ask(**order) for one in contenders] for _ in range(options.repeat)]
        for row, figures in zip(rows, zip(*turns, strict=True), strict=True):
            row |= {f"{what}_{key}": statistics.median(one[key] for one in figures) for key in figures[0]}
    for one in contenders:
        one.close()
    return rows


def decide(options: argparse.Namespace) -> dict[str, Figures]:
    ours = Contender("bireme")
    found = {
        f"{tokens:,} tokens{', salted' if salt else ''}": {
            **ours.ask("decide", tokens=tokens, workers=64, count=500, salt=salt), "limit_us": limit_us
        }
        for tokens, limit_us in AIM_DECISION_US.items()
        for salt in ("", "tenant")
    }  # fmt: skip
    ours.close()
    return found


def print_table(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'blocks':>10} {'':<7}{'match us p50/p99':>18}{'shared':>14}{'staggered':>16}{'B a holder':>12}"
        f"{'events: blocks/s':>18}{'one by one':>12}"
    )
    for row in rows:
        pairs = [
            f"{row[f'{what}_p50_us']:.1f}/{row[f'{what}_p99_us']:.0f}" for what in ("match", "shared", "staggered")
        ]
        print(
            f"{row['blocks']:>10,} {row['contender']:<7}{pairs[0]:>18}{pairs[1]:>14}{pairs[2]:>16}"
            f"{row['bytes_per_membership']:>12.1f}{row['blocks_per_s']:>18,.0f}{row['one_by_one_blocks_per_s']:>12,.0f}"
        )


def aims(rows: list[dict[str, Any]], decisions: dict[str, Figures]) -> Iterable[str]:
    pairs = {row["contender"]: row for row in rows if abs(row["blocks"] / AIM_SIZE - 1) < 0.1}
    if len(pairs) == len(CONTENDERS):
        ours, theirs = pairs["bireme"], pairs["dynamo"]
        for what in ("match", "shared"):
            yield line(f"{what} x dynamo's", theirs[f"{what}_p50_us"] / ours[f"{what}_p50_us"], AIM_SPEED)
        for what in ("blocks_per_s", "one_by_one_blocks_per_s"):
            yield line(f"events, {what} x dynamo's", ours[what] / theirs[what], AIM_SPEED)
        share = ours["bytes_per_membership"] / theirs["bytes_per_membership"]
        yield line("memory x dynamo's", share, AIM_MEMORY, is_limit=True)
    for what, figures in decisions.items():
        yield line(f"us to place {what}", figures["p50_us"], figures["limit_us"], is_limit=True)


def line(what: str, figure: float, asked: float, is_limit: bool = False) -> str:
    is_reached = figure <= asked if is_limit else figure >= asked
    return f"aim: {what} {figure:.2f}, {asked:g} asked for: {'ok' if is_reached else 'BELOW'}"


if __name__ == "__main__":
    main()
