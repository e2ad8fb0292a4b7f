"""KV transfer between GPU pools: its rate against a plain copy on the GPU, the ways through the host, and TTFT.

Two processes, each with pools of the shape's layers whose blocks lie in random order; every row is checked once.
`device copy` is one copy of as many bytes, `copy` the same rows copied out of the mapped pools, `transfer` all from the
claim until the exporter has said that the rows were kept. Then a prefill engine in one process and a decode engine in
the other: when a client has the first token (`first`) and the second, against one engine that does both (`alone`).

    python benchmarks/transfer_gpu.py                       # 8B shape, both processes on one GPU
    python benchmarks/transfer_gpu.py --gpus 2              # from GPU 0 to GPU 1, against a copy between them
    python benchmarks/transfer_gpu.py --engine none         # the transfer alone
    python benchmarks/transfer_gpu.py --quick               # also without a GPU, to see that it runs

The table comes first, then one line of JSON, then the aims.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import multiprocessing
import os
import queue
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

from benchmarks.engine_gpu import SHAPES, seconds_of, write_config
from benchmarks.transfer import KEY, EngineEnd, aim, make_transfer
from bireme.disagg import DisaggregatedParams, seal
from bireme.discovery import run_folder
from bireme.discovery.records import WorkerRecord, host_id
from bireme.engines.torch.geometry import LayerGeometry, group_layers
from bireme.engines.torch.pools.kv_store import KvStore
from bireme.kv.transfer.chunks import CHUNK_BYTES, GPU_FACTOR
from bireme.kv.transfer.leased import LeasedTransfer
from bireme.kv.transfer.memory import TokenRows
from bireme.kv.transfer.nixl import MODULES

SIZE = 32  # tokens a block
AIM_COPY = 0.8  # of a device copy
AIM_TTFT = 1.15  # of an engine that does both
_PERIOD = 251


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder:
        figures: dict[str, float] = {}
        if torch.cuda.is_available():
            figures |= host_rates(256 << 20)
        figures |= Transfers(Path(folder), options).figures()
        if options.engine != "none":
            write_config(folder, options.shape)
            figures |= Engines(Path(folder), options).figures()
    for name, figure in figures.items():
        print(f"{name:40} {figure:10,.2f}")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    machine = f"{name}, {os.cpu_count()} cores, torch {torch.__version__}"
    rounded = {name: round(figure, 3) for name, figure in figures.items()}
    print(json.dumps({"benchmark": "transfer_gpu", "machine": machine, "options": vars(options), "figures": rounded}))
    report(figures, options)


def report(figures: dict[str, float], options: argparse.Namespace) -> None:
    where = "one GPU" if options.gpus == 1 else "two GPUs"
    for count in options.tokens:
        if (plain := figures.get(f"device copy {count}, GB/s")) and f"cuda_ipc copy {count}, GB/s" in figures:
            copied, transferred = (figures[f"cuda_ipc {what} {count}, GB/s"] for what in ("copy", "transfer"))
            aim(f"cuda_ipc's copy of {count} tokens on {where} over a device copy", copied / plain, AIM_COPY)
            aim(
                f"cuda_ipc, claim to end, of {count} tokens on {where} over a device copy",
                transferred / plain,
                AIM_COPY,
            )
    if "first, ms" in figures:
        ratio = figures["first, ms"] / figures["alone, ms"]
        word = "ok" if ratio <= AIM_TTFT else "MISSED"
        print(f"aim: disaggregated TTFT {ratio:.2f} x of one engine's, {AIM_TTFT:g} asked for: {word}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 65536], help="of the transfer alone")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1)
    parser.add_argument("--rounds", type=int, default=5, help="the best counts; of the engines' the median")
    parser.add_argument("--engine", choices=("shape", "none"), default="shape")
    parser.add_argument("--backend", choices=("cuda_ipc", "shm", "nixl"), default="cuda_ipc", help="of the engines")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens, of the engines")
    parser.add_argument("--quick", action="store_true", help="64 tokens, tiny shape, one round")
    options = parser.parse_args()
    if options.quick:
        options.shape, options.tokens, options.rounds, options.prompt = "tiny", [64], 1, 64
    if not torch.cuda.is_available():
        options.backend = "shm"
    return options


def host_rates(num_bytes: int) -> dict[str, float]:
    """Return GB/s between the GPU and each kind of host memory, and at which a CPU fills it out of a file in memory."""
    device = torch.device("cuda", 0)
    here = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    descriptor = os.memfd_create("bireme-bench")
    os.truncate(descriptor, num_bytes)
    os.pwrite(descriptor, bytes(1 << 20), 0)
    found = {}
    for kind, there in (
        ("pageable", torch.zeros(num_bytes, dtype=torch.uint8)),
        ("pinned", torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)),
        ("write-combined", write_combined(num_bytes)),
    ):
        ways: dict[str, Callable[[], Any]] = {
            "from the GPU": lambda there=there: there.copy_(here, non_blocking=True),  # type: ignore[misc]
            "to the GPU": lambda there=there: here.copy_(there, non_blocking=True),  # type: ignore[misc]
            "filled": lambda there=there: os.preadv(descriptor, [memoryview(there.numpy())], 0),  # type: ignore[misc]
        }
        for way, action in ways.items():
            found[f"{kind} {way}, GB/s"] = num_bytes / 1e9 / min(seconds_of(action, device) for _ in range(5))
    os.close(descriptor)
    return found


def write_combined(num_bytes: int) -> torch.Tensor:
    """Return page-locked memory that the CPU writes past its caches; it stays until the process ends."""
    address = ctypes.c_void_p()
    flags = ctypes.c_uint(4)  # CU_MEMHOSTALLOC_WRITECOMBINED
    code = ctypes.CDLL("libcuda.so.1").cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(num_bytes), flags)
    assert code == 0 and address.value, f"cuMemHostAlloc: error {code}"
    return torch.frombuffer((ctypes.c_ubyte * num_bytes).from_address(address.value), dtype=torch.uint8)


class Transfers:
    """The importing end of transfers without engines; the exporting one is a child's."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder, self._options = folder, options
        self._store = make_store(options, importing_device(options))
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(target=serve_rows, args=(theirs, folder, options), daemon=True)
        self._child.start()

    def figures(self) -> dict[str, float]:
        found: dict[str, float] = {}
        on_gpu = self._store.device.type == "cuda"
        cases = [("shm", self._options.tokens[0])]
        if on_gpu:
            cases += [("cuda_ipc", count) for count in self._options.tokens]
            if any(importlib.util.find_spec(name) for name in MODULES):
                cases.append(("nixl", self._options.tokens[0]))
        for life, (backend, count) in enumerate(cases, 1):
            num_bytes = count * self._store.groups[0].bytes_per_token
            self._pipe.send((backend, count, life))
            transfer = make_transfer(self._folder, "decode", backend, life=life)
            transfer.start(self._store.layout("bench"), self._store)
            rows = rows_of(self._store, count, seed=life)
            seconds = min(
                [self._transfer(transfer, rows) for _ in range(self._options.rounds + 1)][-self._options.rounds :]
            )
            check(self._store, rows, count)
            found[f"{backend} transfer {count}, GB/s"] = num_bytes / 1e9 / seconds
            found[f"{backend} transfer {count}, ms"] = 1e3 * seconds
            if backend == "cuda_ipc":
                found[f"cuda_ipc copy {count}, GB/s"] = num_bytes / 1e9 / self._copy_seconds(transfer, rows, count)
                found[f"device copy {count}, GB/s"] = num_bytes / 1e9 / self._plain_seconds(num_bytes)
            self._pipe.send(None)
            self._pipe.recv()
            transfer.close()
        self._pipe.send(None)
        self._child.join(30)
        return found

    def _transfer(self, transfer: LeasedTransfer, rows: TokenRows) -> float:
        self._pipe.send("export")
        params = DisaggregatedParams(**self._pipe.recv())
        outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()
        began = time.perf_counter()
        transfer.fetch(params, (0,), rows, outcome.put)
        error = outcome.get(timeout=120)
        assert error is None, error
        return time.perf_counter() - began

    def _copy_seconds(self, transfer: LeasedTransfer, rows: TokenRows, count: int) -> float:
        """Return the seconds of the copies alone, as the transfer makes them."""
        backend: Any = transfer._backend
        ((_, mapped),) = backend._mapped.values()
        step = max(1, GPU_FACTOR * CHUNK_BYTES // self._store.groups[0].bytes_per_token)

        def copy() -> None:
            for first in range(0, count, step):
                part = rows.rows[0][first : first + step]
                mapped.copy(0, part[::-1].copy(), part, None)  # whatever rows: as far apart
            mapped.wait()

        return min(seconds_of(copy, self._store.device) for _ in range(5))

    def _plain_seconds(self, num_bytes: int) -> float:
        target = torch.empty(num_bytes, dtype=torch.uint8, device=self._store.device)
        source = torch.ones(num_bytes, dtype=torch.uint8, device="cuda:0")
        return min(seconds_of(lambda: target.copy_(source), self._store.device) for _ in range(5))


def importing_device(options: argparse.Namespace) -> torch.device:
    return torch.device("cuda", options.gpus - 1) if torch.cuda.is_available() else torch.device("cpu")


def make_store(options: argparse.Namespace, device: torch.device) -> KvStore:
    _, (hidden, _, layers, heads, kv_heads, _), others = SHAPES[options.shape]
    size = others.get("head_dim", hidden // heads)
    geometry = [LayerGeometry(kv_heads, size, size, 0, torch.bfloat16, ())] * layers
    return KvStore(geometry, group_layers(geometry), [-(-max(options.tokens) // SIZE)], SIZE, device, is_shared=True)


def rows_of(store: KvStore, count: int, seed: int) -> TokenRows:
    """Return where as many tokens lie: whole blocks in random order."""
    num_blocks = store.keys[0].shape[0] // SIZE - 1
    blocks = 1 + np.random.default_rng(seed).permutation(num_blocks)[: -(-count // SIZE)]
    return store.token_rows([blocks.tolist()], count)


def expected(store: KvStore, tensor: int, count: int) -> torch.Tensor:
    """Return a tensor's rows, (count, bytes)."""
    width = store.regions[0][tensor].row_bytes
    token, column = torch.arange(count, device=store.device), torch.arange(width, device=store.device)
    return ((token[:, None] * 31 + column[None, :] + 7 * tensor) % _PERIOD).to(torch.uint8)


def fill(store: KvStore, rows: TokenRows, count: int) -> None:
    index = torch.from_numpy(rows.rows[0]).to(store.device)
    for number, tensor in enumerate(store._tensors(0)):
        tensor.view(torch.uint8)[index] = expected(store, number, count)


def check(store: KvStore, rows: TokenRows, count: int) -> None:
    index = torch.from_numpy(rows.rows[0]).to(store.device)
    for number, tensor in enumerate(store._tensors(0)):
        assert torch.equal(tensor.view(torch.uint8)[index], expected(store, number, count)), f"tensor {number} is wrong"


def serve_rows(pipe: Any, folder: Path, options: argparse.Namespace) -> None:
    """Run in the exporter's process: a case is (backend, tokens, life), then `export`s, then None."""
    store = make_store(options, torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    while (case := pipe.recv()) is not None:
        backend, count, life = case
        fill(store, rows_of(store, count, seed=100 + life), count)
        rows = rows_of(store, count, seed=100 + life)  # named when they are filled
        transfer = make_transfer(folder, "prefill", backend, life=life)
        transfer.start(store.layout("bench"), store)
        publish(folder, transfer, life)
        while pipe.recv() is not None:
            lease = transfer.reserve(lambda: None)
            lease.export(count, rows)
            ids = {"lease_id": lease.lease_id, "generation": lease.generation}
            pipe.send({"worker": "prefill", "life": life, "num_tokens": count} | ids)
        transfer.close()
        pipe.send("closed")


def publish(folder: Path, transfer: LeasedTransfer, life: int) -> None:
    record = WorkerRecord(
        worker="prefill", life=life, pid=os.getpid(), host=host_id(), transfer_endpoint=transfer.endpoint
    )
    run_folder.publish(folder, record)


class Engines:
    """A decode engine here, a prefill engine in a child."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        from bireme.messages import EngineRequest, SamplingParams

        self._options, self._random = options, np.random.default_rng(7)
        self._sampling = SamplingParams(max_tokens=3, ignore_eos=True)
        self._request = EngineRequest
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(target=serve_prefill, args=(theirs, folder, options), daemon=True)
        if options.gpus == 2:
            os.environ["CUDA_VISIBLE_DEVICES"] = "1"  # the child's: an engine takes the first that it sees
        self._child.start()
        if options.gpus == 2:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        assert self._pipe.poll(300) and self._pipe.recv() == "ready", "the prefill engine does not start"
        self._transfer = make_transfer(folder, "decode", options.backend)
        self._decode = EngineEnd(str(folder), "decode", self._transfer, options)

    def figures(self) -> dict[str, float]:
        rounds = [self.round() for _ in range(self._options.rounds + 1)][1:]
        self.close()
        return {f"{name}, ms": float(np.median([one[name] for one in rounds])) for name in rounds[0]}

    def close(self) -> None:
        self._pipe.send(None)
        self._child.join(60)
        self._decode.engine.stop()
        self._transfer.close()

    def round(self) -> dict[str, float]:
        alone = self._asked()
        began = time.perf_counter()
        self._decode.ask(alone)
        alone_s = self._decode.token_times[0] - began
        asked = msgspec.structs.replace(self._asked(), request_type="context_only")
        began = time.perf_counter()
        self._pipe.send(msgspec.msgpack.encode(asked))
        exported = msgspec.msgpack.decode(self._pipe.recv(), type=DisaggregatedParams)
        prefill_s = time.perf_counter() - began
        asked = msgspec.structs.replace(asked, request_type="generation_only", disaggregated_params=seal(exported, KEY))
        usage = self._decode.ask(asked).usage
        first, second = (at - began for at in self._decode.token_times[:2])
        return {
            "alone": 1e3 * alone_s, "prefill": 1e3 * prefill_s, "first": 1e3 * first, "second": 1e3 * second,
            "transfer": usage.transfer_ms,
        }  # fmt: skip

    def _asked(self) -> Any:
        """Return a prompt that nobody has seen."""
        prompt = self._random.integers(10, 500, self._options.prompt).astype("<i4").tobytes()
        return self._request(prompt=prompt, sampling=self._sampling)


def serve_prefill(pipe: Any, folder: Path, options: argparse.Namespace) -> None:
    """Run in the prefill engine's process: requests come in, what was exported goes out, until None."""
    from bireme.messages import EngineRequest

    transfer = make_transfer(folder, "prefill", options.backend)
    end = EngineEnd(str(folder), "prefill", transfer, options)
    publish(folder, transfer, 1)
    pipe.send("ready")
    while (data := pipe.recv()) is not None:
        exported = end.ask(msgspec.msgpack.decode(data, type=EngineRequest)).exported
        pipe.send(msgspec.msgpack.encode(exported))
    end.engine.stop()
    transfer.close()


if __name__ == "__main__":
    main()
