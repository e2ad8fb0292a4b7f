"""What a batch of 10,000 lines costs live streams: their TTFT with and without it, in turns on the same servers.

Live streams are chats in a closed loop, as many as --live says, or with pauses: 4/0.5 are four that pause for half a
second on average. First the batch runs alone; then a turn without it, one with it, and so on. Engines are the torch
engine with tiny-chat, and the mocker at the pace of an 8B model on a GPU.

- TTFT, ITL: of live streams; medians of the turns
- lines/s: of the batch meanwhile, mean of the turns, and as a share of what it has alone
- CPU in cores by process without and with the batch; `foreign` is what the rest of the machine took meanwhile

    python benchmarks/batch_beside_live.py                        # about 90 s an engine
    python benchmarks/batch_beside_live.py --engines torch --live 1 --turns 2

A table comes first, then one line of JSON, then the aims: median and mean TTFT, with over without.
"""

from __future__ import annotations

import argparse
import datetime
import http.client
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contenders.endpoint import Endpoint
from benchmarks.contenders.ours import served
from benchmarks.load.load_process import LoadProcess
from benchmarks.load.processes import CpuMeter
from benchmarks.options import chosen

AIM = 1.10  # TTFT beside a batch over TTFT without
CHATS = "/v1/chat/completions"
_FIGURES = ("ttft_p50_ms", "ttft_mean_ms", "ttft_p99_ms", "itl_p50_ms")
_BOUNDARY = "bireme-lines"


@dataclass(frozen=True, slots=True)
class Engine:
    recipe: str
    override: dict[str, Any]
    max_tokens: int  # of live answers
    line_tokens: int  # of a line's answer


ENGINES = {
    "torch": Engine("tiny-chat", {}, 32, 32),
    "mocker": Engine(
        "mocker",
        {
            "workers": {
                "decode": {
                    "engine_config": {
                        "max_batch_size": 64,
                        "max_num_tokens": 2048,
                        "mocker": {
                            "step_ms": 7.0,
                            "step_ms_per_request": 0.05,
                            "prefill_ms": 3.0,
                            "prefill_ms_per_token": 0.05,
                        },
                    }
                }
            }
        },
        64,
        16,
    ),
}


@dataclass(frozen=True, slots=True)
class Live:
    """Streams that ask again when they have been answered, or after a pause of this mean."""

    streams: int
    pause_s: float = 0.0

    @classmethod
    def read(cls, text: str) -> Live:
        streams, _, pause_s = text.partition("/")
        return cls(int(streams), float(pause_s or 0))

    def __str__(self) -> str:
        return f"{self.streams}/{self.pause_s:g}" if self.pause_s else str(self.streams)


@dataclass(frozen=True, slots=True)
class Cell:
    """Live streams of one kind, without and with the batch."""

    engine: str
    live: Live
    alone: dict[str, float]
    beside: dict[str, float]
    lines_per_s: float  # beside live streams
    lines_per_s_alone: float
    runs_ms: list[tuple[float, float]]  # median TTFT of each pair of turns
    cpu_cores: dict[str, tuple[float, float]]
    errors: list[str]

    def ratio(self, figure: str) -> float:
        return self.beside[figure] / self.alone[figure]


class Api:
    """The endpoint's files and batches."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._address, self._model = endpoint.address, endpoint.model

    def upload(self, num_lines: int, max_tokens: int) -> str:
        """Return the id of a file of lines."""
        rows = "\n".join(json.dumps(self._line(number, max_tokens)) for number in range(num_lines))
        parts = (
            f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n'
            f"{rows}\r\n--{_BOUNDARY}--\r\n"
        )
        made = self._ask("POST", "/v1/files", parts.encode(), f"multipart/form-data; boundary={_BOUNDARY}")
        return str(made["id"])

    def _line(self, number: int, max_tokens: int) -> dict[str, Any]:
        text = f"Line {number}: " + "three rows of chairs " * 6
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
        }
        return {"custom_id": str(number), "method": "POST", "url": CHATS, "body": body}

    @contextmanager
    def batch(self, file_id: str) -> Iterator[str]:
        """Run a batch of the file until the block's end; its lines are being run."""
        asked = {"input_file_id": file_id, "endpoint": CHATS, "completion_window": "24h"}
        batch_id = str(self._ask("POST", "/v1/batches", json.dumps(asked).encode())["id"])
        self._wait(batch_id, ("in_progress",))
        try:
            yield batch_id
        finally:
            self._ask("POST", f"/v1/batches/{batch_id}/cancel", b"")
            self._wait(batch_id, ("cancelled",))

    def num_done(self, batch_id: str) -> int:
        """Raises ValueError when lines have failed."""
        counts = self._ask("GET", f"/v1/batches/{batch_id}")["request_counts"]
        if counts["failed"]:
            raise ValueError(f"{counts['failed']} lines of the batch have failed")
        return int(counts["completed"])

    def _wait(self, batch_id: str, statuses: tuple[str, ...]) -> None:
        while (status := self._ask("GET", f"/v1/batches/{batch_id}")["status"]) not in statuses:
            if status in ("failed", "completed", "expired"):
                raise ValueError(f"the batch is {status}")
            time.sleep(0.1)

    def _ask(self, method: str, path: str, data: bytes | None = None, kind: str = "application/json") -> Any:
        connection = http.client.HTTPConnection(self._address, timeout=60)
        try:
            connection.request(method, path, data, {"content-type": kind} if data is not None else {})
            reply = connection.getresponse()
            content = reply.read()
        finally:
            connection.close()
        if reply.status != 200:
            raise ValueError(f"{method} {path}: {reply.status} {content[:300]!r}")
        return json.loads(content)


class Rate:
    """Of a batch's lines, from `begin` on."""

    def __init__(self, api: Api, batch_id: str) -> None:
        self._api, self._batch_id = api, batch_id
        self.begin()

    def begin(self) -> None:
        self._began_at, self._first = time.monotonic(), self._api.num_done(self._batch_id)

    def now(self) -> float:
        """Return lines a second."""
        return (self._api.num_done(self._batch_id) - self._first) / (time.monotonic() - self._began_at)


def main() -> int:
    options = parse()
    cells = [cell for name in options.engines for cell in measure(name, options)]
    report(cells)
    return 1 if any(cell.errors for cell in cells) else 0


def measure(name: str, options: argparse.Namespace) -> Iterator[Cell]:
    engine = ENGINES[name]
    with served(engine.recipe, engine.override, options.port) as endpoint:
        api = Api(endpoint)
        file_id = api.upload(options.lines, engine.line_tokens)
        with api.batch(file_id) as batch_id:
            rate_alone = Rate(api, batch_id)
            time.sleep(options.seconds)
            lines_per_s_alone = rate_alone.now()
        for live in options.live:
            yield measure_live(name, live, endpoint, api, file_id, lines_per_s_alone, options)


def measure_live(
    name: str, live: Live, endpoint: Endpoint, api: Api, file_id: str, lines_per_s_alone: float,
    options: argparse.Namespace,
) -> Cell:  # fmt: skip
    alone: list[Turn] = []
    beside: list[Turn] = []
    for turn in range(options.turns):
        alone.append(load(name, live, endpoint, options))
        with api.batch(file_id) as batch_id:
            beside.append(load(name, live, endpoint, options, Rate(api, batch_id)))
        print(f"measured engine={name} live={live} turn={turn + 1}", file=sys.stderr, flush=True)
    pairs = list(zip(alone, beside, strict=True))
    return Cell(
        name,
        live,
        combine(alone),
        combine(beside),
        round(statistics.fmean(turn.lines_per_s for turn in beside), 2),
        round(lines_per_s_alone, 2),
        [(round(one.found["ttft_p50_ms"], 2), round(two.found["ttft_p50_ms"], 2)) for one, two in pairs],
        {role: (cores(alone, role), cores(beside, role)) for role in alone[0].cores},
        [error for turn in (*alone, *beside) for error in turn.found["errors"]],
    )


@dataclass(frozen=True, slots=True)
class Turn:
    found: dict[str, Any]  # by live streams
    lines_per_s: float
    cores: dict[str, float]


def load(name: str, live: Live, endpoint: Endpoint, options: argparse.Namespace, rate: Rate | None = None) -> Turn:
    """Load with live streams; CPU and the batch's rate are those of the measured time."""
    what = {
        "target": endpoint.address,
        "model": endpoint.model,
        "streams": live.streams,
        "pause_s": live.pause_s,
        "seconds": options.seconds,
        "warmup_s": 1.5,
        "max_tokens": ENGINES[name].max_tokens,
        "extra": json.dumps({"ignore_eos": True}),
    }
    lines_per_s, found, cpu, used = 0.0, dict[str, Any](), CpuMeter({}), dict[str, float]()
    with LoadProcess("sse_client", what) as process:
        for found in process.events():
            if found["event"] == "measuring":
                cpu = CpuMeter({**endpoint.processes, "client": process.pid})
                if rate is not None:
                    rate.begin()
            elif found["event"] == "measured":
                used = cpu.cores()
                lines_per_s = 0.0 if rate is None else rate.now()
    return Turn(found, lines_per_s, used)


def cores(turns: list[Turn], role: str) -> float:
    return round(statistics.median(turn.cores[role] for turn in turns), 3)


def combine(turns: list[Turn]) -> dict[str, float]:
    return {figure: round(statistics.median(turn.found[figure] for turn in turns), 3) for figure in _FIGURES}


def report(cells: list[Cell]) -> None:
    print("engine  live        TTFT p50 ms          mean ms              p99 ms               ITL p50 ms     lines/s")
    for cell in cells:
        figures = " ".join(
            f"{cell.alone[name]:6.2f}->{cell.beside[name]:6.2f} {cell.ratio(name):5.2f}" for name in _FIGURES
        )
        share = cell.lines_per_s / cell.lines_per_s_alone if cell.lines_per_s_alone else 0.0
        print(f"{cell.engine:<7} {cell.live!s:<10} {figures}  {cell.lines_per_s:7.1f} {share:.0%}")
        used = (f"{role} {one:.2f}->{two:.2f}" for role, (one, two) in cell.cpu_cores.items() if max(one, two) >= 0.01)
        print(f"        CPU cores: {' '.join(used)}; median TTFT of each turn: {cell.runs_ms}")
        for error in cell.errors:
            print(f"        {error}")
    document = {"date": datetime.date.today().isoformat(), "cores": os.cpu_count(), "cells": list(map(asdict, cells))}
    print(json.dumps(document, separators=(",", ":")))
    for cell in cells:
        median, mean = cell.ratio("ttft_p50_ms"), cell.ratio("ttft_mean_ms")
        word = "ok" if max(median, mean) <= AIM and cell.lines_per_s > 0 else "BELOW"
        print(
            f"aim: TTFT beside a batch, {cell.engine}, {cell.live}: median {median:.2f} x, mean {mean:.2f} x of that"
            f" without, {AIM:g} at most, {cell.lines_per_s:.1f} lines/s: {word}"
        )


def parse() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=chosen(list(ENGINES)), default=list(ENGINES))
    parser.add_argument(
        "--live", type=lambda text: [Live.read(item) for item in text.split(",")], default="1,4/0.5",
        help="streams, with a stream's mean pause in seconds behind a slash",
    )  # fmt: skip
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=4, help="with the batch, and as many without")
    parser.add_argument("--seconds", type=float, default=2.5, help="measured time of a turn")
    parser.add_argument("--port", type=int, default=24700, help="first of four ports")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
