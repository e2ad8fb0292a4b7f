"""The two ends of transfers that tools/check_fabric.py measures: rows in a GPU's memory, without one in the host's."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import queue
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bireme.config import CacheTransceiverConfig
from bireme.disagg import DisaggregatedParams
from bireme.discovery.records import WorkerRecord, host_id
from bireme.errors import ConfigError
from bireme.kv.transfer import create_transfer
from bireme.kv.transfer.base import KvLayout, KvTransfer
from bireme.kv.transfer.gpu_direct import why_not_direct
from bireme.kv.transfer.memory import NOT_HELD, RowMemory, TokenRows
from bireme.kv.transfer.nixl import MODULES
from bireme.kv.transfer.wire import VERSION
from bireme.metrics import Registry

SIZE = 32  # tokens a block
COPY_BYTES = 16 << 20
_COPIES = 32
_COUNTERS = Path("/sys/class/infiniband")


class HostFacts(msgspec.Struct, frozen=True):
    """What a host says of itself."""

    bireme: str
    wire: int  # version of the protocol of transfers
    host: str  # on which it is
    gpu: str  # name; "": none that torch sees
    nixl: str  # package and version; "": none
    why_not_direct: str  # of GPUDirect; "": adapters read the GPU


def own_facts(bireme: str) -> HostFacts:
    gpu, module = gpu_name(), next((name for name in MODULES if importlib.util.find_spec(name)), "")
    version = f"{module} {importlib.metadata.version(module.replace('_', '-'))}" if module else ""
    return HostFacts(bireme, VERSION, host_id(), gpu, version, why_not_direct(0) if gpu else "there is no GPU")


def gpu_name() -> str:
    if importlib.util.find_spec("torch") is None:
        return ""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def copy_rates() -> tuple[float, float]:
    """Return GB/s of page-locked pieces from the GPU, and to it."""
    import torch

    there = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    here = torch.zeros(COPY_BYTES, dtype=torch.uint8, pin_memory=True)

    def rate(copy: Callable[[], Any]) -> float:
        copy()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(_COPIES):
            copy()
        torch.cuda.synchronize()
        return _COPIES * COPY_BYTES / 1e9 / (time.perf_counter() - began)

    return rate(lambda: here.copy_(there, non_blocking=True)), rate(lambda: there.copy_(here, non_blocking=True))


def make_memory(layout: KvLayout, num_tokens: int, *, on_gpu: bool) -> RowMemory:
    """Return room for a prompt's rows, a tensor for keys and one for values a layer."""
    num_blocks = [-(-min(num_tokens, group.window or num_tokens) // SIZE) + 2 for group in layout.groups]
    if not on_gpu:
        from bireme.kv.transfer.host_pool import HostPool

        halves = [[(row // 2, row - row // 2) for row in group.row_bytes] for group in layout.groups]
        return HostPool(
            [
                [(count * SIZE, half) for pair in group for half in pair if half]
                for count, group in zip(num_blocks, halves, strict=True)
            ]
        )
    import torch

    from bireme.engines.torch.geometry import LayerGeometry, group_layers
    from bireme.engines.torch.pools.kv_store import KvStore

    geometry = [
        LayerGeometry(1, row // 2, row - row // 2, group.window, torch.uint8, ())
        for group in layout.groups
        for row in group.row_bytes
    ]
    return KvStore(geometry, group_layers(geometry), num_blocks, SIZE, torch.device("cuda", 0), is_shared=True)


def rows_of(memory: RowMemory, layout: KvLayout, num_tokens: int) -> tuple[TokenRows, tuple[int, ...]]:
    """Return where a prompt's tokens lie, in blocks in random order, and the first that is moved of each group."""
    found, firsts = [], []
    for group, regions in zip(layout.groups, memory.regions, strict=True):
        first = max(0, num_tokens - group.window) if group.window else 0
        begin = first // SIZE * SIZE  # a block is held whole
        blocks = 1 + np.random.default_rng(0).permutation(regions[0].num_rows // SIZE - 1)
        held = (blocks[:, None] * SIZE + np.arange(SIZE)).reshape(-1)[: num_tokens - begin]
        found.append(np.concatenate([np.full(begin, NOT_HELD), held]).astype(np.int64))
        firsts.append(first)
    return TokenRows(memory, tuple(found)), tuple(firsts)


@dataclass(frozen=True, slots=True)
class Way:
    """How rows go."""

    backend: str
    staging: str = "auto"

    @property
    def name(self) -> str:
        return f"{self.backend} {self.staging}"


class End:
    """One end of a transfer; close it."""

    def __init__(self, worker: str, way: Way, layout: KvLayout, num_tokens: int, **options: Any) -> None:
        """`options`: of create_transfer. Raises ConfigError."""
        self._layout = layout
        self._folder = tempfile.TemporaryDirectory(prefix="bireme-fabric-")
        config = CacheTransceiverConfig(
            backend="CUDA_IPC" if way.backend == "CUDA_IPC" else "NIXL",
            staging="never" if way.staging == "never" else "always" if way.staging == "always" else "auto",
            max_tokens_in_buffer=num_tokens,
        )
        self.memory = make_memory(layout, num_tokens, on_gpu=bool(gpu_name()))
        self.transfer: KvTransfer = create_transfer(
            way.backend, run_dir=Path(self._folder.name), worker=worker, life=1, config=config,
            metrics=Registry(worker), **options,
        )  # fmt: skip
        try:
            self.transfer.start(layout, self.memory)
        except BaseException:
            self._folder.cleanup()
            raise

    def close(self) -> None:
        self.transfer.close()
        self._folder.cleanup()


class ExportEnd(End):
    """What has the rows."""

    @property
    def record(self) -> WorkerRecord:
        return WorkerRecord(
            worker="prefill", life=1, pid=os.getpid(), host=host_id(), transfer_endpoint=self.transfer.endpoint
        )

    def export(self, num_tokens: int) -> DisaggregatedParams:
        lease = self.transfer.reserve(lambda: None)
        lease.export(num_tokens, rows_of(self.memory, self._layout, num_tokens)[0])
        return DisaggregatedParams(
            worker="prefill", life=1, num_tokens=num_tokens, lease_id=lease.lease_id, generation=lease.generation
        )


class ImportEnd(End):
    """What fetches them."""

    def fetch_seconds(self, params: DisaggregatedParams) -> float:
        """Return the seconds from the claim until the last row is there. Raises BiremeError."""
        rows, firsts = rows_of(self.memory, self._layout, params.num_tokens)
        outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()
        began = time.perf_counter()
        self.transfer.fetch(params, firsts, rows, outcome.put)
        error = outcome.get()
        if error is not None:
            raise error
        return time.perf_counter() - began


@dataclass
class Traffic:
    """What passed through this host's adapters since it was made."""

    _before: tuple[int, int] = field(default_factory=lambda: (_network_bytes(), _rdma_bytes()))

    def way(self, num_bytes: int) -> str:
        """Return by what so many bytes came."""
        network, rdma = _network_bytes() - self._before[0], _rdma_bytes() - self._before[1]
        if rdma > 0.8 * num_bytes:
            return "RDMA"
        return "TCP" if network > 0.8 * num_bytes else "memory of one host"


def _network_bytes() -> int:
    """Return what all interfaces have received, loopback among them."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[0]) for line in lines)


def _rdma_bytes() -> int:
    """Return what RDMA adapters have received; they count words of four bytes."""
    counters = _COUNTERS.glob("*/ports/*/counters/port_rcv_data")
    return 4 * sum(int(path.read_text()) for path in counters)


def check_versions(ours: HostFacts, theirs: HostFacts) -> None:
    """Raise ConfigError where the two hosts' transfers would refuse each other."""
    if ours.wire != theirs.wire:
        raise ConfigError(
            f"the other host has version {theirs.wire} of KV transfers (bireme {theirs.bireme}), this one {ours.wire}"
            f" (bireme {ours.bireme}); run the same bireme on both"
        )
