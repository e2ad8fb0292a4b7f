"""What serving costs: the same mocker engine in process, over the token bus, through decode and through generate.

The mocker makes one token for each running request and step, at a pace that is given, so that everything
missing from streams/step was lost on the way. n closed-loop streams (64 prompt ids in, 128 tokens out,
every token checked); server, stubs, engine and client share the machine; nothing is pinned.

- share: tokens/s over streams/step (at 0 ms: over the in-process figure of the same run); the median of all runs
- TTFT as the client sees it; ITL: mean gap within a request
- step: the engine's own step times, from its log
- target: share asked for, and ok, BELOW, or STEP (the share is there, but the step's p99 is over 1.3x)
- aim: the same for the worst start of the server, where there are several (--starts): they differ more than runs do
- CPU in cores; `foreign` is what the rest of the machine took meanwhile

    python benchmarks/serving_overhead.py                                    # all cells, a quarter of an hour
    python benchmarks/serving_overhead.py --streams 64,256 --step-ms 5 --paths decode,generate,bus --repeat 3
    python benchmarks/serving_overhead.py --streams 256 --step-ms 5 --paths generate --seconds 4 --starts 10

A table comes first; the very last line is one JSON document. Exit code 1 when any token was wrong.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import statistics
import sys
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.chart import Panel, draw
from benchmarks.load.load_process import LoadProcess
from benchmarks.load.meter import percentile
from benchmarks.load.processes import FOREIGN, CpuMeter, roles
from benchmarks.options import chosen, numbers
from bireme.launch import Ports, Server, free_ports, start_server
from bireme.launch.override import add_settings

PATHS = ("engine", "bus", "decode", "generate")
TITLES = {"engine": "in process", "bus": "token bus", "decode": "decode", "generate": "generate"}
# (path, streams) -> least share at TARGET_STEP_MS; and the step's p99 over the step.
TARGETS = {
    ("decode", 64): 0.88,
    ("decode", 256): 0.82,
    ("generate", 64): 0.88,
    ("generate", 256): 0.82,
    ("generate", 1024): 0.9,
    ("bus", 64): 0.93,
    ("bus", 256): 0.93,
}
TARGET_STEP_MS = 5.0
TARGET_STEP_P99 = 1.3
FOREIGN_CORES = 0.15  # what the rest of the machine may take before a cell is called disturbed


@dataclass(slots=True)
class Cell:
    """One measured combination; figures are medians of its runs."""

    path: str
    step_ms: float
    streams: int
    tokens_per_s: float
    tokens_per_s_range: tuple[float, float]
    tokens_per_s_of_starts: list[float]  # the median of each
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    gap_p99_ms: float | None
    step_p50_ms: float | None
    step_p99_ms: float | None
    cpu_cores: dict[str, float]
    share: float | None = None
    target: float | None = None
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def step_ratio(self) -> float | None:
        """The step's p99 over the step asked for."""
        return self.step_p99_ms / self.step_ms if self.step_p99_ms and self.step_ms else None

    @property
    def ideal(self) -> float:
        """Tokens/s of an engine that keeps its pace; 0 without one."""
        return self.streams * 1e3 / self.step_ms if self.step_ms else 0.0

    @property
    def aim(self) -> str:
        """What the worst start reached; empty where there is no target, or only one start."""
        starts = self.tokens_per_s_of_starts
        if self.target is None or len(starts) < 2:
            return ""
        shares = [rate / self.ideal for rate in starts]
        missed = sum(share < self.target for share in shares)
        return (
            f"aim: {self.path} at {self.streams} streams: worst of {len(shares)} starts {min(shares):.1%}"
            f" (to {max(shares):.1%}, median {statistics.median(shares):.1%}), {self.target:.0%} asked for:"
            f" {f'BELOW in {missed}' if missed else 'ok'}"
        )

    @property
    def verdict(self) -> str:
        """What to print beside the target; empty where there is none."""
        if self.target is None or self.share is None:
            return ""
        if self.share < self.target:
            return "BELOW"
        return "ok" if (self.step_ratio or 0) <= TARGET_STEP_P99 else "STEP"


def main() -> int:
    arguments = parse_arguments()
    cells = list(measure(arguments))
    add_shares(cells)
    print_table(cells)
    if arguments.plot:
        plot(cells, arguments.plot)
    document = {
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "prompt_tokens": arguments.prompt_tokens,
        "max_tokens": arguments.max_tokens,
        "seconds": arguments.seconds,
        "repeat": arguments.repeat,
        "cells": [asdict(cell) for cell in cells],
    }
    print(json.dumps(document, separators=(",", ":")))
    return 1 if any(cell.errors for cell in cells) else 0


def measure(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Yield the cells; one server for all cells of a step time, or as many as starts were asked for."""
    for step_ms in arguments.step_ms:
        cells = list(itertools.product(arguments.streams, arguments.paths))
        runs: dict[tuple[int, str], list[list[Run]]] = {cell: [] for cell in cells}
        for _ in range(arguments.starts):
            with tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder, ExitStack() as stack:
                step_log = Path(folder) / "steps.f32"
                server: Server | None = None
                if set(arguments.paths) - {"engine"}:
                    server = stack.enter_context(start(arguments, step_ms, step_log))
                for streams, path in cells:
                    of_start = [
                        run_once(arguments, path, step_ms, streams, server, step_log) for _ in range(arguments.repeat)
                    ]
                    runs[streams, path].append(of_start)
                    note(combine(path, step_ms, streams, [of_start]))
        yield from (combine(path, step_ms, streams, runs[streams, path]) for streams, path in cells)


def start(arguments: argparse.Namespace, step_ms: float, step_log: Path) -> Any:
    settings = {"engine_config": {"mocker": {"step_ms": step_ms}}, "env": {"BIREME_STEP_LOG": str(step_log)}}
    ports = Ports(*range(arguments.port, arguments.port + 3)) if arguments.port else free_ports()
    override = add_settings(json.dumps({"workers": {"decode": settings}}), arguments.set)
    return start_server(arguments.recipe, ports=ports, override=override)


@dataclass(frozen=True, slots=True)
class Run:
    report: dict[str, Any]
    cpu_cores: dict[str, float]
    steps_s: list[float]  # sorted


def run_once(
    arguments: argparse.Namespace, path: str, step_ms: float, streams: int, server: Server | None, step_log: Path
) -> Run:
    """Load one path for a while; CPU and steps are those of the measured time alone."""
    if path == "engine":
        step_log = step_log.with_name("in-process.f32")
    options = {
        "target": server.grpc if server else None,
        "streams": streams,
        "seconds": arguments.seconds,
        "warmup_s": arguments.warmup_s,
        "prompt_tokens": arguments.prompt_tokens,
        "max_tokens": arguments.max_tokens,
        "step_ms": step_ms if path == "engine" else None,
        "step_log": step_log if path == "engine" else None,
    }
    report: dict[str, Any] = {}
    cores: dict[str, float] = {}
    cpu, offset, end = CpuMeter({}), 0, 0
    with LoadProcess(path, options) as load:
        for event in load.events():
            if event["event"] == "measuring":
                watched = {"client": load.pid} | (roles(server.pid) if server and path != "engine" else {})
                cpu, offset = CpuMeter(watched), log_size(step_log)
            elif event["event"] == "measured":
                cores, end = cpu.cores(), log_size(step_log)
            elif event["event"] == "report":
                report = event
    return Run(report, by_kind(cores), read_steps(step_log, offset, end))


def by_kind(cores: dict[str, float]) -> dict[str, float]:
    """Keep the roles that work; idle stubs are added up."""
    working = {role: share for role, share in cores.items() if share >= 0.005 or role in ("server", "client")}
    idle = sum(share for role, share in cores.items() if role not in working and role != FOREIGN)
    return working | ({"other": round(idle, 3)} if idle else {})


def log_size(path: Path) -> int:
    return path.stat().st_size // 4 * 4 if path.exists() else 0


def read_steps(path: Path, begin: int, end: int) -> list[float]:
    """Return the sorted step times (seconds) of a stretch of the log; none without a log."""
    steps = array("f")
    if path.exists():
        with path.open("rb") as file:
            file.seek(begin)
            steps.frombytes(file.read(end - begin))
    return sorted(steps)


def combine(path: str, step_ms: float, streams: int, starts: list[list[Run]]) -> Cell:
    runs = list(itertools.chain.from_iterable(starts))
    reports = [run.report for run in runs]
    rates = [report["tokens_per_s"] for report in reports]
    names = {role for run in runs for role in run.cpu_cores}
    errors: dict[str, int] = {}
    for message, count in itertools.chain.from_iterable(report["errors"].items() for report in reports):
        errors[message] = errors.get(message, 0) + count
    figures = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "gap_p99_ms")
    return Cell(
        path=path,
        step_ms=step_ms,
        streams=streams,
        tokens_per_s=statistics.median(rates),
        tokens_per_s_range=(min(rates), max(rates)),
        tokens_per_s_of_starts=[statistics.median(run.report["tokens_per_s"] for run in one) for one in starts],
        **{name: median([report[name] for report in reports]) for name in figures},
        step_p50_ms=median([in_ms(percentile(run.steps_s, 0.50)) for run in runs]),
        step_p99_ms=median([in_ms(percentile(run.steps_s, 0.99)) for run in runs]),
        cpu_cores={name: median([run.cpu_cores.get(name, 0.0) for run in runs]) or 0.0 for name in sorted(names)},
        target=TARGETS.get((path, streams)) if step_ms == TARGET_STEP_MS else None,
        errors=errors,
    )


def median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 3) if known else None


def in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def add_shares(cells: list[Cell]) -> None:
    """Share of what the engine's pace allows; without a pace, of what it does in process."""
    in_process = {(cell.step_ms, cell.streams): cell.tokens_per_s for cell in cells if cell.path == "engine"}
    for cell in cells:
        ideal = cell.ideal or in_process.get((cell.step_ms, cell.streams))
        cell.share = round(cell.tokens_per_s / ideal, 4) if ideal else None


HEADER = (
    f"{'step':>5} {'streams':>7} {'path':<10} {'tok/s':>9} {'share':>6} {'target':>9} {'TTFT p50/p99 ms':>17}"
    f" {'ITL p50/p99 ms':>16} {'step p50/p99 ms':>16}  CPU cores"
)


def print_table(cells: list[Cell]) -> None:
    print(HEADER)
    for cell in cells:
        print(row(cell))
        for message, count in cell.errors.items():
            print(f"      {count} x {message}")
    for cell in cells:
        if cell.aim:
            print(cell.aim)
    busy = sum(cell.cpu_cores.get(FOREIGN, 0.0) > FOREIGN_CORES for cell in cells)
    if busy:
        print(f"{busy} of {len(cells)} cells had more than {FOREIGN_CORES} cores taken by others: measure them again")


def row(cell: Cell) -> str:
    target = f"{cell.target:.0%} {cell.verdict}" if cell.target is not None else ""
    cpu = " ".join(f"{role} {share:.2f}" for role, share in cell.cpu_cores.items() if share >= 0.005)
    return (
        f"{cell.step_ms:>5g} {cell.streams:>7} {TITLES[cell.path]:<10} {cell.tokens_per_s:>9,.0f}"
        f" {'' if cell.share is None else f'{cell.share:.1%}':>6} {target:>9}"
        f" {pair(cell.ttft_p50_ms, cell.ttft_p99_ms):>17} {pair(cell.itl_p50_ms, cell.itl_p99_ms):>16}"
        f" {pair(cell.step_p50_ms, cell.step_p99_ms):>16}  {cpu}"
    )


def pair(first: float | None, second: float | None) -> str:
    return "/".join("-" if value is None else f"{value:.2f}" for value in (first, second))


def note(cell: Cell) -> None:
    """Progress for whoever waits; the table comes at the end."""
    print(
        f"measured step_ms={cell.step_ms:g} streams={cell.streams} path={cell.path}"
        f" tokens_per_s={cell.tokens_per_s:.0f} errors={sum(cell.errors.values())}",
        file=sys.stderr,
        flush=True,
    )


def plot(cells: list[Cell], path: str) -> None:
    panels = []
    for step_ms in sorted({cell.step_ms for cell in cells if cell.step_ms}):
        lines = {
            TITLES[name]: [
                (cell.streams, cell.share)
                for cell in cells
                if (cell.path, cell.step_ms) == (name, step_ms) and cell.share is not None
            ]
            for name in PATHS
        }
        panels.append(Panel(f"{step_ms:g} ms a step", lines))
    draw(path, panels, "tokens/s over streams/step", share_y=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=numbers(int), default=[1, 16, 64, 256])
    parser.add_argument("--step-ms", type=numbers(float), default=[0.0, 5.0, 10.0, 30.0])
    parser.add_argument("--paths", type=chosen(PATHS), default=list(PATHS), help=f"of {','.join(PATHS)}")
    parser.add_argument("--seconds", type=float, default=8.0, help="measured time of a run")
    parser.add_argument("--warmup-s", type=float, default=1.5)
    parser.add_argument("--repeat", type=int, default=1, help="runs a cell; the median is shown")
    parser.add_argument("--starts", type=int, default=1, help="starts of the server; each runs all cells")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--recipe", default="recipes/mocker", help="its decode worker must be a mocker")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="pipeline.instances.generate=4, workers.decode.replicas=2; may repeat",
    )
    parser.add_argument("--port", type=int, default=0, help="first of three ports; 0: any free ones")
    parser.add_argument("--plot", default="", help="PNG to write, when matplotlib is installed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
