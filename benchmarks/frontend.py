"""Our OpenAI frontend and Triton against ai-dynamo's frontend, side by side on mock engines of the same pace.

Both have the same tokenizer, library to encode with and chat template, the same client (TCP_QUICKACK, closed loop,
streamed answers with usage) and this machine to themselves in turn: each repetition runs one, then the other; medians
are shown.

- fast: engines as fast as they go, answers of 32 tokens: requests/s, and what a request costs
- paced: 5 ms a step, answers of 256 tokens: tokens/s over streams/step (share), ITL over the step
- long: as fast, answers of 16 tokens to prompts of 60,000 that differ in their last words: what all have in common is
  a system message, so that ai-dynamo's cache of tokens, which cuts at special tokens, can know it
- apis: streams of our other endpoints beside chat's, on the same engines: /v1/responses (`kept`: with `store` true) and
  /v1/messages
- us/tok, us/req: CPU time of all server processes; what the machine's other load distorts least
- CPU in cores by process; `foreign` is what the rest of the machine took meanwhile
- ratio: bireme's requests/s (fast) or tokens/s (paced) over dynamo's

    python benchmarks/frontend.py                                        # all cells, about 20 minutes
    python benchmarks/frontend.py --modes fast --streams 64,256 --repeat 5
    python benchmarks/frontend.py --contenders bireme --modes paced --streams 256 --frontend-option=--processes=2
    python benchmarks/frontend.py --contenders bireme --modes fast --streams 64 --apis chat,responses,messages

ai-dynamo comes from PyPI, at the first run, into ~/.cache/bireme. A table comes first; the very last line is one
JSON document. Exit code 1 when any answer was wrong.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from benchmarks.chart import Panel, draw
from benchmarks.contenders.dynamo import TOKENIZERS, dynamo
from benchmarks.contenders.endpoint import Endpoint
from benchmarks.contenders.ours import ours
from benchmarks.load.load_process import LoadProcess
from benchmarks.load.processes import FOREIGN, CpuMeter
from benchmarks.load.sse_client import PATHS
from benchmarks.options import chosen, numbers
from bireme.text.tokenizer import load_tokenizer

CONTENDERS = ("bireme", "dynamo")


@dataclass(frozen=True, slots=True)
class Mode:
    step_ms: float
    max_tokens: int  # of an answer
    num_shared: int = 0  # tokens that all prompts begin with


MODES = {"fast": Mode(0.0, 32), "paced": Mode(5.0, 256), "long": Mode(0.0, 16, 60_000)}
AIM_RATIO, AIM_STREAMS = 2.0, (64, 256)  # fast, over dynamo
AIM_LONG = 1.0  # long, over dynamo
AIM_SHARE = 0.93  # paced, at 256 streams
AIM_API = 1.15  # CPU a request of another endpoint, over a chat's
CLIENT = "client"
_FIGURES = ("requests_per_s", "tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")


@dataclass(slots=True)
class Cell:
    """One contender at one load; figures are medians of its runs."""

    contender: str
    mode: str
    streams: int
    requests_per_s: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    cpu_cores: dict[str, float]
    rates: list[float] = field(default_factory=list)  # tokens/s of each run
    errors: list[str] = field(default_factory=list)
    api: str = "chat"

    @property
    def cpu_us_per_token(self) -> float:
        return 1e6 * self._server_cores / max(self.tokens_per_s, 1e-9)

    @property
    def cpu_us_per_request(self) -> float:
        return 1e6 * self._server_cores / max(self.requests_per_s, 1e-9)

    @property
    def share(self) -> float | None:
        """Return tokens/s over streams/step; None without a pace."""
        step_ms = MODES[self.mode].step_ms
        return self.tokens_per_s * step_ms / (1e3 * self.streams) if step_ms else None

    @property
    def _server_cores(self) -> float:
        return sum(cores for role, cores in self.cpu_cores.items() if role not in (FOREIGN, CLIENT))


def main() -> int:
    arguments = parse_arguments()
    cells = [cell for mode in arguments.modes for cell in measure(arguments, mode)]
    print_table(cells)
    if arguments.plot:
        plot(cells, arguments.plot)
    document = {
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "seconds": arguments.seconds,
        "repeat": arguments.repeat,
        "cells": [asdict(cell) for cell in cells],
    }
    print(json.dumps(document, separators=(",", ":")))
    return 1 if any(cell.errors for cell in cells) else 0


def measure(arguments: argparse.Namespace, mode: str) -> Iterator[Cell]:
    """Yield the cells of a mode; all contenders run for all of it, idle while another has its turn."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bireme-bench-")))
        system = write_shared(folder, MODES[mode].num_shared)
        endpoints = [stack.enter_context(started(name, arguments, mode, folder)) for name in arguments.contenders]
        for endpoint in endpoints:
            check_events(endpoint)
        turns = [(one, api) for api in arguments.apis for one in endpoints if api == "chat" or one.name == "bireme"]
        for streams in arguments.streams:
            runs: dict[tuple[str, str], list[Run]] = {(endpoint.name, api): [] for endpoint, api in turns}
            for _, (endpoint, api) in itertools.product(range(arguments.repeat), turns):
                run = run_once(endpoint, arguments, streams, MODES[mode].max_tokens, system, api)
                runs[endpoint.name, api].append(run)
            for (name, api), found in runs.items():
                cell = combine(name, mode, streams, found, api)
                note(cell)
                yield cell


def started(name: str, arguments: argparse.Namespace, mode: str, folder: Path) -> Any:
    model, step_ms = model_folder(), MODES[mode].step_ms
    if MODES[mode].num_shared:
        model = with_long_context(model, folder / "model")
    if name == "dynamo":
        return dynamo(model, step_ms, arguments.port + 4, arguments.tokenizer)
    return ours(model, step_ms, arguments.port, arguments.tokenizer, tuple(arguments.frontend_option))


def model_folder() -> Path:
    """Return a model whose tokenizer (4,096 tokens, BPE) and chat template both sides use."""
    from make_sample_model import make

    folder: Path = make(Path(__file__).resolve().parents[1] / "models" / "tiny-llama", "llama")
    return folder


def with_long_context(model: Path, folder: Path) -> Path:
    """Return a copy of the model that says it takes 131,072 tokens: ai-dynamo's frontend asks it."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        settings = json.loads((folder / name).read_text()) | {key: 131_072}
        (folder / name).write_text(json.dumps(settings))
    return folder


def write_shared(folder: Path, num_tokens: int) -> Path | None:
    """Write a text of so many tokens, these docs over and over; None: there is none."""
    if not num_tokens:
        return None
    tokenizer = load_tokenizer(str(model_folder()))
    docs = "\n".join(path.read_text() for path in sorted((Path(__file__).resolve().parents[1] / "docs").glob("*.md")))
    ids = tokenizer.encode_plain(docs)
    text = (docs * (num_tokens // len(ids))) + tokenizer.decode(ids[: num_tokens % len(ids)])
    file = folder / "shared.txt"
    file.write_text(text)
    return file


def check_events(endpoint: Endpoint) -> None:
    """Both must show each token as text: a token without text costs nothing to show. Raises ValueError."""
    found = endpoint.num_content_chunks(16)
    if found < 12:  # tokens that come together may share a chunk
        raise ValueError(f"{endpoint.name}: {found} chunks with text for 16 tokens; the comparison would not be fair")


@dataclass(frozen=True, slots=True)
class Run:
    report: dict[str, Any]
    cpu_cores: dict[str, float]


def run_once(
    endpoint: Endpoint, arguments: argparse.Namespace, streams: int, max_tokens: int, system: Path | None, api: str
) -> Run:
    """Load one endpoint; CPU is that of the measured time alone."""
    options = {
        "target": endpoint.address,
        "model": endpoint.model,
        "api": api,
        "streams": streams,
        "seconds": arguments.seconds,
        "warmup_s": arguments.warmup_s,
        "max_tokens": max_tokens,
        "system_file": system,
    }
    report: dict[str, Any] = {}
    cores: dict[str, float] = {}
    cpu = CpuMeter({})
    with LoadProcess("sse_client", options) as load:
        for event in load.events():
            if event["event"] == "measuring":
                cpu = CpuMeter({**endpoint.processes, CLIENT: load.pid})
            elif event["event"] == "measured":
                cores = cpu.cores()
            else:
                report = event
    return Run(report, cores)


def combine(contender: str, mode: str, streams: int, runs: list[Run], api: str = "chat") -> Cell:
    reports = [run.report for run in runs]
    errors = [error for report in reports for error in report["errors"]]
    errors += [f"{report['num_hanging']} streams hang" for report in reports if report["num_hanging"]]
    figures = {name: round(statistics.median(report[name] or 0.0 for report in reports), 3) for name in _FIGURES}
    cores = {role: statistics.median(run.cpu_cores[role] for run in runs) for role in runs[0].cpu_cores}
    rates = [round(report["tokens_per_s"], 1) for report in reports]
    return Cell(contender, mode, streams, **figures, cpu_cores=cores, rates=rates, errors=errors, api=api)


HEADER = (
    f"{'mode':<5} {'streams':>7} {'':<7} {'api':<9} {'req/s':>7} {'tok/s':>8} {'share':>6} {'ratio':>6}"
    f" {'TTFT p50/p99 ms':>17} {'ITL p50/p99 ms':>15} {'us/tok':>7} {'us/req':>7}  CPU cores"
)


def print_table(cells: list[Cell]) -> None:
    print(HEADER)
    for cell in cells:
        print(row(cell, ratio(cell, cells)))
        for error in cell.errors:
            print(f"      {error}")
    for cell in cells:
        if (aim := verdict(cell, cells)) is not None:
            print(aim)


def row(cell: Cell, over_dynamo: float | None) -> str:
    cpu = " ".join(f"{role} {cores:.2f}" for role, cores in cell.cpu_cores.items() if cores >= 0.005)
    return (
        f"{cell.mode:<5} {cell.streams:>7} {cell.contender:<7} {cell.api:<9} {cell.requests_per_s:>7,.0f}"
        f" {cell.tokens_per_s:>8,.0f}"
        f" {'' if cell.share is None else f'{cell.share:.1%}':>6}"
        f" {'' if over_dynamo is None else f'{over_dynamo:.2f}':>6} {pair(cell.ttft_p50_ms, cell.ttft_p99_ms):>17}"
        f" {pair(cell.itl_p50_ms, cell.itl_p99_ms):>15} {cell.cpu_us_per_token:>7.1f} {cell.cpu_us_per_request:>7.0f}"
        f"  {cpu}"
    )


def ratio(cell: Cell, cells: list[Cell]) -> float | None:
    """Return our rate over dynamo's at the same load; None for dynamo's own cells."""
    peers = [peer for peer in cells if (peer.contender, peer.mode, peer.streams) == ("dynamo", cell.mode, cell.streams)]
    if cell.contender == "dynamo" or cell.api != "chat" or not peers:
        return None
    return cell.tokens_per_s / max(peers[0].tokens_per_s, 1e-9)


def over_chat(cell: Cell, cells: list[Cell]) -> float | None:
    """Return CPU a request over that of chats at the same load; None for chats."""
    at = (cell.contender, cell.mode, cell.streams, "chat")
    chats = [peer for peer in cells if (peer.contender, peer.mode, peer.streams, peer.api) == at]
    return cell.cpu_us_per_request / chats[0].cpu_us_per_request if chats and cell.api != "chat" else None


def verdict(cell: Cell, cells: list[Cell]) -> str | None:
    """Return a line where there is an aim for the cell."""
    if (share := over_chat(cell, cells)) is not None:
        word = "ok" if share <= AIM_API else "BELOW"
        at = f"{cell.mode} at {cell.streams} streams"
        return f"aim: {at} {cell.api} {share:.2f} x a chat's CPU, {AIM_API:g} at most: {word}"
    over_dynamo = ratio(cell, cells)
    if cell.mode == "fast" and cell.streams in AIM_STREAMS and over_dynamo is not None:
        word = "ok" if over_dynamo >= AIM_RATIO else "BELOW"
        return f"aim: fast at {cell.streams} streams {over_dynamo:.2f} x dynamo, {AIM_RATIO:g} asked for: {word}"
    if cell.mode == "long" and over_dynamo is not None:
        word = "ok" if over_dynamo >= AIM_LONG else "BELOW"
        return f"aim: long at {cell.streams} streams {over_dynamo:.2f} x dynamo, {AIM_LONG:g} asked for: {word}"
    is_chat = cell.contender == "bireme" and cell.api == "chat"
    if is_chat and cell.mode == "paced" and cell.streams == 256 and cell.share is not None:
        word = "ok" if cell.share >= AIM_SHARE else "BELOW"
        return f"aim: paced at 256 streams {cell.share:.1%} of the ideal tokens/s, {AIM_SHARE:.0%} asked for: {word}"
    return None


def pair(first: float, second: float) -> str:
    return f"{first:.2f}/{second:.2f}"


def note(cell: Cell) -> None:
    """Progress for whoever waits; the table comes at the end."""
    print(
        f"measured mode={cell.mode} streams={cell.streams} contender={cell.contender} api={cell.api}"
        f" tokens_per_s={cell.tokens_per_s:.0f} runs={cell.rates}",
        file=sys.stderr,
        flush=True,
    )


def plot(cells: list[Cell], path: str) -> None:
    panels = []
    for mode in sorted({cell.mode for cell in cells}):
        step_ms, max_tokens = MODES[mode].step_ms, MODES[mode].max_tokens
        pace = f"{step_ms:g} ms a step" if step_ms else "engines as fast as they go"
        lines = {
            name: [
                (cell.streams, cell.tokens_per_s)
                for cell in cells
                if (cell.contender, cell.mode, cell.api) == (name, mode, "chat")
            ]
            for name in CONTENDERS
        }
        panels.append(Panel(f"{pace}, {max_tokens} tokens", lines))
    draw(path, panels, "tokens/s")


def parse_arguments() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contenders", type=chosen(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--modes", type=chosen(list(MODES)), default=["fast", "paced"])
    parser.add_argument("--apis", type=chosen(list(PATHS)), default=["chat"], help="of our frontend")
    parser.add_argument("--streams", type=numbers(int), default=[1, 16, 64, 256])
    parser.add_argument("--seconds", type=float, default=8.0, help="measured time of a run")
    parser.add_argument("--warmup-s", type=float, default=2.0)
    parser.add_argument("--repeat", type=int, default=3, help="runs a cell, in turns; medians are shown")
    parser.add_argument("--tokenizer", choices=TOKENIZERS, default="fastokens", help="what encodes prompts in both")
    parser.add_argument("--port", type=int, default=24600, help="first of five ports")
    parser.add_argument(
        "--frontend-option", action="append", default=[], help="for python -m bireme.openai; may repeat"
    )
    parser.add_argument("--plot", default="", help="PNG to write, when matplotlib is installed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
