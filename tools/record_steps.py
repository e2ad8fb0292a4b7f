"""Write the step records of a running launch's workers as JSON, a line a step: what a fit of step times reads.

    python tools/record_steps.py > steps.jsonl                    # until Ctrl-C
    python tools/record_steps.py --seconds 60 --output steps.jsonl
    python tools/record_steps.py --run-folder /run/user/1000/bireme-1000/4711-a1b2c3
    python tools/record_steps.py --fit steps.jsonl --engine torch --machine "2 cores, EPYC" --output step_times.json

Of recipes with `kv_events.step_records: true` and plane zmq; docs/observability.md has the fields. For a user's only
launch on this host, else --run-folder names one. Engines that are started again are found within a second. Signs of
life are left out. At the end stderr has how many records were written, and how many are missing by their numbers.
--fit makes of them a table of step times, for simulations (docs/sizing.md), and says how far its rule is from it.

Exit codes: 0; 2 there is no such launch, none of its workers sends records, or they can't be read or written.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.options import not_negative
from bireme.discovery import run_folder
from bireme.errors import BiremeError, ConfigError, NotFoundError
from bireme.kv.wire.curve import curve_keys, is_ipv6, needs_curve
from bireme.kv.wire.step_records import STEP_TOPIC, StepRecord
from bireme.launch.run_folder import only_launch
from bireme.sizing.step_times import StepTimes

DONE, WRONG = 0, 2
_LOOK_S = 1.0
_TELL_S = 10.0  # between two lines of progress
_HWM = 100_000  # records that wait to be written; more are missed


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    steps = None
    try:
        if options.fit:
            fit(options)
            return DONE
        folder = Path(options.run_folder) if options.run_folder else only_launch()
        steps = Steps(folder)
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(open(options.output, "wb")) if options.output else sys.stdout.buffer
            steps.write(output, options.seconds)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # its reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (BiremeError, OSError) as error:
        print(f"record_steps: {error}", file=sys.stderr)
        return WRONG
    if steps is not None:
        print(f"{steps.num_written} records, {steps.num_missed} missed", file=sys.stderr)
    return DONE


def fit(options: argparse.Namespace) -> None:
    """Raises ConfigError and OSError."""
    with open(options.fit, "rb") as file:
        try:
            times = StepTimes.of_records(file, options.engine, options.machine)
        except ConfigError as error:
            raise ConfigError(f"--fit {options.fit}: {error}; record for longer, under a load") from error
    times.write(Path(options.output or "/dev/stdout"))
    print(f"{len(times.table.points)} points; the rule is {100 * times.error:.1f}% off at the median", file=sys.stderr)


class Steps:
    """The records of all workers of a launch. Raises ConfigError where none sends any."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = zmq.Context()
        self._sockets: dict[str, Any] = {}  # by endpoint
        self._next: dict[tuple[str, int, int], int] = {}  # by worker, life and rank
        self.num_written = self.num_missed = 0
        self._look()
        if not self._sockets:
            raise ConfigError(
                f"no worker of the launch in {folder} sends step records over ZeroMQ;"
                " set kv_events.step_records: true in its recipe.yaml (over NATS, subscribe to the subject .steps)"
            )

    def write(self, output: IO[bytes], seconds: float | None) -> None:
        began = looked_at = told_at = time.monotonic()
        ends_at = began + seconds if seconds is not None else float("inf")
        whole = f" of {seconds:g}" if seconds is not None else ""
        while (now := time.monotonic()) < ends_at:
            if now - looked_at >= _LOOK_S:
                self._look()
                looked_at = now
            if now - told_at >= _TELL_S:
                print(f"{self.num_written} records in {now - began:.0f}{whole} s", file=sys.stderr, flush=True)
                told_at = now
            for record in self._take(min(_LOOK_S, ends_at - now)):
                self._count(record)
                if record.wall_time:
                    output.write(msgspec.json.encode(record) + b"\n")
                    self.num_written += 1
            output.flush()

    def _look(self) -> None:
        """Connect to workers that are new, and leave those that have gone."""
        endpoints = set()
        for path in self._folder.glob("*.json"):
            with contextlib.suppress(NotFoundError):  # it goes just now, or is no record of a worker
                endpoints.add(run_folder.find(self._folder, path.stem).step_endpoint)
        endpoints = {one for one in endpoints if one.startswith(("ipc:", "tcp:"))}
        for gone in self._sockets.keys() - endpoints:
            self._sockets.pop(gone).close(0)
        for new in endpoints - self._sockets.keys():
            self._sockets[new] = self._open(new)

    def _open(self, endpoint: str) -> Any:
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.IPV6, is_ipv6(endpoint))
        socket.setsockopt(zmq.RCVHWM, _HWM)
        if needs_curve(endpoint):
            key = run_folder.deployment_key(self._folder)
            socket.curve_publickey, socket.curve_secretkey = curve_keys(key, "reader")
            socket.curve_serverkey = curve_keys(key, "engine")[0]
        socket.subscribe(STEP_TOPIC)
        socket.connect(endpoint)
        return socket

    def _take(self, timeout_s: float) -> Iterator[StepRecord]:
        poller = zmq.Poller()
        for socket in self._sockets.values():
            poller.register(socket, zmq.POLLIN)
        for socket, _ in poller.poll(int(1000 * timeout_s)):
            with contextlib.suppress(zmq.Again):
                while True:
                    _, _, payload = socket.recv_multipart(zmq.NOBLOCK)
                    yield _decode(payload)

    def _count(self, record: StepRecord) -> None:
        key = (record.worker_id, record.life, record.dp_rank)
        self.num_missed += record.counter_id - self._next.get(key, record.counter_id)
        self._next[key] = record.counter_id + 1


_decode = msgspec.msgpack.Decoder(StepRecord).decode


def _end(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", metavar="FILE", help="instead of stdout; what it held is replaced")
    parser.add_argument("--seconds", type=not_negative, metavar="S", help="end after so long")
    parser.add_argument("--run-folder", metavar="FOLDER", help="of the launch; its log names it")
    parser.add_argument("--fit", metavar="FILE", help="of records, that were written before: make step times of them")
    parser.add_argument("--engine", default="", help="what made them, for --fit's table")
    parser.add_argument("--machine", default="", help="and where")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main())
