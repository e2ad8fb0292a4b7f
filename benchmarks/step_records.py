"""What a record of each step costs the torch engine and the mocker: decode steps with records and without, in turns.

One torch engine in this process, on random weights of one of engine_gpu.py's shapes. With records the publisher sends
them over its socket to a reader in another process, and is woken after each step, as in an engine process; without,
neither happens. `cost` compares the medians of the turns, which tells something where steps take equal times, as on a
GPU. The other columns are CPU time in microseconds, in a loop that does nothing else: `same` is what the engine's
thread does for the record of a step whose rows are those of the step before, `changed` where they are not, `mocker` the
same two of the mocker; `sent` is what the publisher's thread does for a record.

    python benchmarks/step_records.py --shape 8b          # a GPU's steps
    python benchmarks/step_records.py                     # the tiny shape, also on a CPU
    python benchmarks/step_records.py --quick             # to see that it runs

The table comes first, then the aims, and the very last line is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

from benchmarks.engine_gpu import SHAPES, write_config
from bireme.config import EngineConfig, KvCacheConfig, Limits
from bireme.engines.base import AdmittedRequest, EngineContext, EngineProgress
from bireme.engines.child.validate import Gate
from bireme.engines.mocker.sequence import MockSequence
from bireme.engines.mocker.step_records import MockRecorder
from bireme.engines.mocker.tokens import plain_ids
from bireme.engines.torch.loading import LoadedEngine
from bireme.engines.torch.scheduling.step_records import StepRecorder
from bireme.engines.torch.scheduling.waiting import WaitingQueue
from bireme.engines.torch.step import SchedulerOutput
from bireme.kv.publishing.publisher import KvPublisher
from bireme.kv.publishing.step_stream import StepStream
from bireme.kv.publishing.zmq_plane import ZmqPlane
from bireme.kv.wire.step_records import NOTHING_QUEUED, STEP_TOPIC, ScheduledRequests, StepRecord, StepRing
from bireme.messages import EngineRequest, SamplingParams
from bireme.metrics import Registry

AIM_SHARE = 0.005  # of a step on a GPU
AIM_US = 25.0  # of CPU time: as much of a step of 5 ms
_WARM_STEPS = 20
_READER = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.subscribe(b"")
socket.connect(sys.argv[1])
socket.recv_multipart()
print("reads", flush=True)
while True:
    socket.recv_multipart()
"""


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder, Published(Path(folder)) as published:
        write_config(folder, options.shape)
        bench = TorchBench(folder, published, options)
        rows = [measure(bench, batch, options) for batch in options.batch]
        sent_us = published.sent_us()
    mocker = {batch: mocker_us(batch) for batch in options.batch}
    report(rows, mocker, sent_us, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--turns", type=int, default=10, help="with records, and as many without")
    parser.add_argument("--steps", type=int, default=100, help="of a turn")
    parser.add_argument("--quick", action="store_true", help="two rows, two turns of 10 steps")
    options = parser.parse_args()
    if options.quick:
        options.batch, options.turns, options.steps = [2], 2, 10
    return options


class Idle:
    """What the publisher asks for beside records."""

    def kv_events(self) -> list[Any]:
        return []

    def progress(self) -> EngineProgress:
        return EngineProgress(0, 0.0, 0, 0)


class Published:
    """A ring whose records go to a reader in another process."""

    def __init__(self, folder: Path) -> None:
        self.ring = StepRing()
        self._plane = ZmqPlane(f"ipc://{folder}/bench", "", b"k" * 32, has_events=False, has_steps=True)
        metrics = Registry("bench")
        self.publisher = KvPublisher(
            Idle(), self._plane, worker="bench", life=1, tokens_per_block=32, num_ranks=1, deployment_key=b"k" * 32,
            metrics=metrics, has_events=False, replay_batches=1, steps=StepStream(self.ring, "bench", 1, 1, metrics),
        )  # fmt: skip
        self._reader: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Published:
        self.publisher.start()
        command = [sys.executable, "-c", _READER, self._plane.step_endpoint]
        self._reader = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._reader.stdout is not None and self._reader.stdout.readline(), "the reader has ended"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._reader is not None
        self._reader.kill()
        self._reader.communicate()
        self.publisher.close()

    def sent_us(self) -> float:
        """Return what a record costs on its way from another ring to the socket."""
        ring = StepRing()
        stream = StepStream(ring, "bench", 1, 1, Registry("bench"))
        scheduled = ScheduledRequests(0, 0, 0.0, 0, 1, 1000, 0.0)
        one = StepRecord(wall_time=0.005, scheduled_requests=scheduled, queued_requests=NOTHING_QUEUED, ts=0.0)

        def send() -> None:
            ring.add(one)
            for number, payload in stream.take():
                self._plane.publish(STEP_TOPIC, number, payload)

        return cpu_us(send)


class TorchBench:
    """One engine, stepped by this program."""

    def __init__(self, folder: str, published: Published, options: argparse.Namespace) -> None:
        self._published, self._num_steps = published, options.steps
        self._most_steps = _WARM_STEPS + 2 * options.turns * options.steps
        length = self._most_steps + 200
        config = EngineConfig(
            max_batch_size=max(options.batch),
            max_seq_len=length,
            kv_cache_config=KvCacheConfig(tokens_per_block=32, max_tokens=max(options.batch) * (length + 32)),
            load_format="dummy",
        )
        context = EngineContext("bench", "decode", folder, config, Registry("bench"), num_threads=1)
        self._loaded = LoadedEngine(context, lambda act: act())
        self._core = self._loaded.core
        while self._core.prepare():
            pass
        self._gate = Gate("decode", self._loaded.capacity, Limits(), b"")
        self._random, self._count = np.random.default_rng(1), 0

    def start(self, batch: int) -> None:
        """Have so many decode rows, and no others."""
        for key in list(self._core.requests.running):
            self._core.requests.abort(key)
        for _ in range(batch):
            self._count += 1
            prompt = self._random.integers(10, 500, 100).astype("<i4").tobytes()
            sampling = SamplingParams(max_tokens=self._most_steps + 50, ignore_eos=True)
            admitted = self._gate.admit(EngineRequest(prompt=prompt, sampling=sampling))
            self._core.requests.add(self._loaded.admission.admit((0, self._count), admitted))
        while any(not sequence.first_token_at for sequence in self._core.requests.running.values()):
            self._core.step()
        for _ in range(_WARM_STEPS):
            self._core.step()

    def turn(self, is_recorded: bool) -> None:
        core, waiting, publisher = self._core, self._core.scheduler.waiting, self._published.publisher
        if is_recorded:
            core._recorder = StepRecorder(self._published.ring, waiting)
        for _ in range(self._num_steps):
            core.step()
            core.take_outputs()
            if is_recorded:
                publisher.wake()
        core._recorder = waiting.sums = None

    def record_us(self) -> tuple[float, float]:
        """Return what the record of a step costs whose rows are those before, and of one with others."""
        rows = list(self._core.requests.running.values())
        recorder = StepRecorder(StepRing(), WaitingQueue())
        plans = itertools.cycle([SchedulerOutput(decodes=rows), SchedulerOutput(decodes=[*rows[1:], rows[0], rows[0]])])
        same = SchedulerOutput(decodes=rows)
        return (
            cpu_us(lambda: recorder.stepped(recorder.scheduled(same), "resident", 1.0)),
            cpu_us(lambda: recorder.stepped(recorder.scheduled(next(plans)), "resident", 1.0)),
        )


def mocker_us(batch: int) -> tuple[float, float]:
    """Return what the record of a step of the mocker costs, with the rows before and with others."""
    request = EngineRequest(prompt=np.arange(100, dtype="<i4").tobytes(), sampling=SamplingParams(max_tokens=50))
    admitted, ids = AdmittedRequest(request, np.arange(100, dtype=np.int32)), plain_ids(1000)
    rows = [MockSequence((0, number), admitted, ids, number) for number in range(batch)]
    recorder, others = MockRecorder(StepRing()), itertools.cycle([rows, [*rows[1:], rows[0], rows[0]]])

    def record(decoding: list[MockSequence]) -> None:
        recorder.begin(decoding, [])
        recorder.stepped(0.005)

    return cpu_us(lambda: record(rows)), cpu_us(lambda: record(next(others)))


def cpu_us(action: Callable[[], None]) -> float:
    """Return microseconds of this thread, the least of many rounds."""
    found = []
    for _ in range(30):
        began = time.thread_time()
        for _ in range(100):
            action()
        found.append(1e4 * (time.thread_time() - began))
    return round(min(found), 2)


def measure(bench: TorchBench, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return microseconds of a step without records and with them, and of a record."""
    bench.start(batch)
    steps: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * options.turns):
        is_recorded = bool(number % 2) != bool(number // 2 % 2)  # off on, on off, ...: what drifts meets both
        began = time.perf_counter()
        bench.turn(is_recorded)
        steps[is_recorded].append(1e6 * (time.perf_counter() - began) / options.steps)
    without, recorded = (statistics.median(steps[one]) for one in (False, True))
    same, changed = bench.record_us()
    return {
        "batch": batch,
        "step_us": round(without, 1),
        "spread_us": round(max(steps[False]) - min(steps[False]), 1),
        "recorded_us": round(recorded, 1),
        "share": round(recorded / without - 1, 5),
        "same_us": same,
        "changed_us": changed,
    }


def report(
    rows: list[dict[str, Any]],
    mocker: dict[int, tuple[float, float]],
    sent_us: float,
    options: argparse.Namespace,
) -> None:
    is_gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if is_gpu else "CPU"
    print(f"{options.shape} shape, {name}; microseconds of a step, and of CPU time for a record")
    print(f"{'rows':>6} {'without':>9} {'spread':>8} {'with':>9} {'cost':>8} {'same':>7} {'changed':>8} {'mocker':>14}")
    for row in rows:
        steps = f"{row['step_us']:9.1f} {row['spread_us']:8.1f} {row['recorded_us']:9.1f} {row['share']:8.2%}"
        same, changed = mocker[row["batch"]]
        print(f"{row['batch']:6} {steps} {row['same_us']:7.2f} {row['changed_us']:8.2f} {same:7.2f}{changed:7.2f}")
    print(f"sent: {sent_us} us of the publisher's thread")
    for row in rows:
        if is_gpu:
            word = "ok" if row["share"] < AIM_SHARE else "BELOW"
            asked = f"{100 * AIM_SHARE:g} asked for: {word}"
            print(f"aim: {row['batch']} rows: step records cost {100 * row['share']:.2f}% of a step, {asked}")
        cost_us = max(row["changed_us"], mocker[row["batch"]][1]) + sent_us
        word = "ok" if cost_us < AIM_US else "BELOW"
        print(f"aim: {row['batch']} rows: a record costs {cost_us:.1f} us at most, {AIM_US:g} asked for: {word}")
    found = {"rows": rows, "mocker_us": mocker, "sent_us": sent_us}
    print(json.dumps({"benchmark": "step_records", "device": name, "options": vars(options), **found}))


if __name__ == "__main__":
    main()
