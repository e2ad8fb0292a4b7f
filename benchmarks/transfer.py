"""KV transfer: its rate against a plain copy of the same rows, and what overlap saves a client.

First the transfer alone: an exporter in a process of its own, an importer here, rows of a GPT-like model of 125M (12
layers of 768, bfloat16) in blocks of 32 tokens that lie in random order. `plain` is one copy of as many bytes that lie
together, in this process; `blocks` one copy of the same rows, block by block, out of their places into others: that is
what a transfer is compared with. `shm` copies them out of memory that it has mapped, as between two engines on a CPU.
`files` is where they can't be mapped, and `nixl` another way: both copy twice, on two cores, decode writing one chunk
while prefill sends the next.

Then a prefill and a decode engine in this process, random weights: when a client has the first token (`first`), when it
would have if decode waited for the rows (`waiting`), and the second one.

    python benchmarks/transfer.py                    # 8,192 tokens; engines of the 1B shape, 2,048 tokens
    python benchmarks/transfer.py --engine none      # the transfer alone
    python benchmarks/transfer.py --quick

The table comes first, then one line of JSON, then the aims.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

from bireme.config import CacheTransceiverConfig
from bireme.disagg import DisaggregatedParams, seal
from bireme.discovery import run_folder
from bireme.discovery.records import WorkerRecord, host_id
from bireme.kv.transfer.backend import Backend
from bireme.kv.transfer.base import GroupLayout, KvLayout
from bireme.kv.transfer.chunks import CHUNK_BYTES
from bireme.kv.transfer.host_pool import HostPool
from bireme.kv.transfer.leased import LeasedTransfer
from bireme.kv.transfer.mapped import MappedBackend
from bireme.kv.transfer.memory import HostMemory, MemoryKind, TokenRows
from bireme.kv.transfer.nixl import MODULES, NixlBackend
from bireme.kv.transfer.shm import ShmBackend
from bireme.metrics import Registry

LAYERS, ROW_BYTES, SIZE, ALIGNMENT = 12, 1536, 32, 64
RATES = ("plain", "blocks", "shm", "files", "nixl")
AIM_SHM = 0.8  # of a copy of the same rows
AIM_NIXL = 0.7  # of shm
AIM_SHARE = 0.03  # transfer over prefill
KEY = b"k" * 32


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder:
        figures: dict[str, float] = {"plain": plain_rate(options), "blocks": block_rate(options)}
        for name in cases():
            figures[name] = transfer_rate(Path(folder), name, options)
        if options.engine != "none":
            figures |= engine_times(folder, options)
    for name, figure in figures.items():
        print(f"{name:12} {figure:10,.2f} {'GB/s' if name in RATES else 'ms'}")
    rounded = {name: round(figure, 3) for name, figure in figures.items()}
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    print(json.dumps({"benchmark": "transfer", "machine": machine, "options": vars(options), "figures": rounded}))
    aim("shm over a copy of the same rows", figures["shm"] / figures["blocks"], AIM_SHM)
    aim("files over a copy of the same rows", figures["files"] / figures["blocks"])
    if "nixl" in figures:
        aim("nixl over shm", figures["nixl"] / figures["shm"], AIM_NIXL)
        aim("nixl over files, which copies twice too", figures["nixl"] / figures["files"])
    if options.engine != "none":
        share = figures["transfer"] / figures["prefill"]
        word = "ok" if share <= AIM_SHARE else "MISSED"
        print(f"aim: transfer {share:.1%} of prefill's time, at most {AIM_SHARE:.0%}: {word}")
        print(f"aim: first token {figures['waiting'] - figures['first']:.1f} ms sooner than with the rows")


def aim(what: str, ratio: float, asked: float = 0.0) -> None:
    end = f", {asked:g} asked for: {'ok' if ratio >= asked else 'BELOW'}" if asked else ""
    print(f"aim: {what} {ratio:.2f}{end}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="of the transfer alone")
    parser.add_argument("--chunk", type=int, default=CHUNK_BYTES >> 10, help="KiB that go at a time")
    parser.add_argument("--rounds", type=int, default=5, help="the best counts")
    parser.add_argument("--engine", choices=("1b", "tiny", "none"), default="1b", help="shape of the engines' model")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens, of the engines")
    parser.add_argument("--quick", action="store_true", help="256 tokens, tiny engines, one round")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.rounds, options.engine, options.prompt = 256, 1, "tiny", 128
    return options


def cases() -> list[str]:
    has_nixl = any(importlib.util.find_spec(name) for name in MODULES)
    return ["shm", "files", "nixl"] if has_nixl else ["shm", "files"]


def plain_rate(options: argparse.Namespace) -> float:
    """Return GB/s of one copy of the rows."""
    source = np.ones((2 * LAYERS, options.tokens, ROW_BYTES), np.uint8)
    target = np.zeros_like(source)
    return source.nbytes / 1e9 / min(_seconds(lambda: np.copyto(target, source)) for _ in range(max(3, options.rounds)))


def block_rate(options: argparse.Namespace) -> float:
    """Return GB/s of one copy of the rows from their blocks to others."""
    tokens = options.tokens
    (source, source_rows), (target, target_rows) = _make_rows(tokens, 1, False), _make_rows(tokens, 2, False)
    for array in source.arrays[0]:
        array[:] = 1  # pages of its own
    places = list(zip(source_rows.rows[0][::SIZE], target_rows.rows[0][::SIZE], strict=True))

    def copy() -> None:
        for ours, theirs in zip(source.arrays[0], target.arrays[0], strict=True):
            for begin, end in places:
                theirs[end : end + SIZE] = ours[begin : begin + SIZE]

    num_bytes = 2 * LAYERS * tokens * ROW_BYTES
    return num_bytes / 1e9 / min(_seconds(copy) for _ in range(max(3, options.rounds)))


def transfer_rate(folder: Path, case: str, options: argparse.Namespace) -> float:
    """Return GB/s from the claim to the last row's arrival; every row is checked once."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_export, args=(theirs, folder, case, options), daemon=True)
    child.start()
    memory, rows = _make_rows(options.tokens, 1, case != "files")
    transfer = make_transfer(folder, "decode", case, options.chunk << 10)
    transfer.start(_layout(), memory)
    seconds = []
    for _ in range(options.rounds + 1):  # the first makes connections and touches pages
        params = DisaggregatedParams(**ours.recv())
        outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()
        began = time.perf_counter()
        transfer.fetch(params, (0,), rows, outcome.put)
        error = outcome.get(timeout=120)
        seconds.append(time.perf_counter() - began)
        assert error is None, error
        ours.send("next")
    wanted = _content(options.tokens)
    assert all((array[rows.rows[0]] == wanted).all() for array in memory.arrays[0]), "wrong rows"
    transfer.close()
    child.join(30)
    return 2 * LAYERS * options.tokens * ROW_BYTES / 1e9 / min(seconds[1:])


def _export(pipe: Any, folder: Path, case: str, options: argparse.Namespace) -> None:
    """Run in the exporter's process."""
    num_tokens = options.tokens
    memory, rows = _make_rows(num_tokens, 2, case != "files")
    for array in memory.arrays[0]:
        array[rows.rows[0]] = _content(num_tokens)
    transfer = make_transfer(folder, "prefill", case, options.chunk << 10)
    transfer.start(_layout(), memory)
    record = WorkerRecord(
        worker="prefill", life=1, pid=os.getpid(), host=host_id(), transfer_endpoint=transfer.endpoint
    )
    run_folder.publish(folder, record)
    for _ in range(options.rounds + 1):
        lease = transfer.reserve(lambda: None)
        lease.export(num_tokens, rows)
        ids = {"lease_id": lease.lease_id, "generation": lease.generation}
        pipe.send({"worker": "prefill", "life": 1, "num_tokens": num_tokens} | ids)
        pipe.recv()
    transfer.close()


def make_transfer(
    folder: Path, worker: str, backend: str, chunk_bytes: int = CHUNK_BYTES, life: int = 1
) -> LeasedTransfer:
    """`backend`: shm, files (shm's other way), nixl or cuda_ipc."""
    mover: Backend = NixlBackend(worker, between_hosts=False) if backend == "nixl" else ShmBackend(folder, worker, life)
    if isinstance(mover, ShmBackend) and backend != "files":
        mover = MappedBackend(MemoryKind.VRAM if backend == "cuda_ipc" else MemoryKind.DRAM, mover)
    return LeasedTransfer(
        mover, run_dir=folder, worker=worker, life=life, config=CacheTransceiverConfig(backend="DEFAULT"),
        metrics=Registry(worker), chunk_bytes=chunk_bytes,
    )  # fmt: skip


def _layout() -> KvLayout:
    return KvLayout("bench", "bfloat16", (GroupLayout(0, (2 * ROW_BYTES,) * LAYERS),))


def _make_rows(num_tokens: int, seed: int, is_shared: bool) -> tuple[HostMemory, TokenRows]:
    """Return memory for as many tokens, and where they lie: whole blocks in random order.

    `is_shared`: others can map it, as an engine's pool that has a transfer.
    """
    memory = (
        HostPool([[(num_tokens, ROW_BYTES)] * (2 * LAYERS)])
        if is_shared
        else HostMemory([[_aligned(num_tokens) for _ in range(2 * LAYERS)]])
    )
    blocks = np.random.default_rng(seed).permutation(num_tokens // SIZE)
    return memory, TokenRows(memory, ((blocks[:, None] * SIZE + np.arange(SIZE)).reshape(-1),))


def _aligned(num_tokens: int) -> Any:
    """Return zeros that lie as an engine's tensors do."""
    whole = np.zeros(num_tokens * ROW_BYTES + ALIGNMENT, np.uint8)
    begin = -whole.ctypes.data % ALIGNMENT
    return whole[begin : begin + num_tokens * ROW_BYTES].reshape(num_tokens, ROW_BYTES)


def _content(num_tokens: int) -> Any:
    return (np.arange(num_tokens)[:, None] * 31 + np.arange(ROW_BYTES)).astype(np.uint8)


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def engine_times(folder: str, options: argparse.Namespace) -> dict[str, float]:
    """Return milliseconds, the medians of the rounds."""
    from benchmarks.engine_gpu import write_config

    write_config(folder, options.engine)
    pair = EnginePair(Path(folder), options)
    rounds = [pair.round() for _ in range(options.rounds + 1)][1:]
    pair.close()
    return {name: float(np.median([one[name] for one in rounds])) for name in rounds[0]}


class EnginePair:
    """Prefill and decode, and the transfer between them."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._prompt, self._random = options.prompt, np.random.default_rng(7)
        self._transfers = {worker: make_transfer(folder, worker, "shm", CHUNK_BYTES) for worker in STAGES}
        self._ends = {worker: EngineEnd(folder, worker, self._transfers[worker], options) for worker in STAGES}
        for worker, transfer in self._transfers.items():
            record = WorkerRecord(
                worker=worker, life=1, pid=os.getpid(), host=host_id(), transfer_endpoint=transfer.endpoint
            )
            run_folder.publish(folder, record)

    def round(self) -> dict[str, float]:
        from bireme.messages import EngineRequest, SamplingParams

        prompt = self._random.integers(10, 500, self._prompt).astype("<i4").tobytes()
        sampling = SamplingParams(max_tokens=3, ignore_eos=True)
        asked = EngineRequest(prompt=prompt, sampling=sampling, request_type="context_only")
        began = time.perf_counter()
        exported = self._ends["prefill"].ask(asked).exported
        prefilled = time.perf_counter()
        asked = msgspec.structs.replace(asked, request_type="generation_only", disaggregated_params=seal(exported, KEY))
        decode = self._ends["decode"]
        usage = decode.ask(asked).usage
        first, second = (at - began for at in decode.token_times[:2])
        return {
            "prefill": 1e3 * (prefilled - began), "transfer": usage.transfer_ms, "first": 1e3 * first,
            "waiting": 1e3 * first + usage.transfer_ms, "second": 1e3 * second,
        }  # fmt: skip

    def close(self) -> None:
        for worker in STAGES:
            self._ends[worker].engine.stop()
            self._transfers[worker].close()


STAGES = ("prefill", "decode")


class EngineEnd:
    """An engine that is asked for one thing at a time."""

    def __init__(self, folder: Path, worker: str, transfer: LeasedTransfer, options: argparse.Namespace) -> None:
        from bireme.config import EngineConfig, KvCacheConfig, Limits
        from bireme.engines.base import EngineContext
        from bireme.engines.child.validate import Gate
        from bireme.engines.torch.engine import TorchEngine

        config = EngineConfig(
            max_batch_size=1, max_num_tokens=2048, max_seq_len=options.prompt + 64, load_format="dummy",
            kv_cache_config=KvCacheConfig(tokens_per_block=SIZE, max_tokens=2 * options.prompt + 128),
        )  # fmt: skip
        context = EngineContext(worker, worker, str(folder), config, Registry(), transfer, num_threads=2, life=1)
        self.engine = TorchEngine(context)
        self._gate = Gate(worker, self.engine.start(self._emit), Limits(), KEY, True, None)
        self._ended, self._num_requests = threading.Event(), 0
        self.token_times: list[float] = []

    def ask(self, request: Any) -> Any:
        """Return the end: `exported` and `usage`."""
        self._ended.clear()
        self.token_times, self._num_requests = [], self._num_requests + 1
        admitted = self._gate.admit(request)
        self.engine.submit((0, self._num_requests), admitted)
        assert self._ended.wait(600), "the request does not end"
        assert not self._last.finish.error, self._last.finish.error
        exported = self._last.exported
        return _End(
            exported and msgspec.structs.replace(exported, prompt_digest=admitted.digest), self._last.finish.usage
        )

    def _emit(self, step: int, deltas: list[Any], plain: Any = None) -> None:
        now = time.perf_counter()
        self.token_times += [now] * (sum(len(delta.tokens) for delta in deltas) + len(plain.keys if plain else ()))
        for delta in deltas:
            if delta.finish is not None:
                self._last = delta
                self._ended.set()


class _End(msgspec.Struct):
    exported: Any
    usage: Any


if __name__ == "__main__":
    main()
