"""Memory through which embeddings go between engine processes of one host without a copy through files: a row a token.

Others map it: a GPU's by CUDA IPC, so that embeddings never leave the GPUs, a CPU's as memory without a name. What
finds no room in it goes through files, as without a pool.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bireme.engines.base import EngineContext
from bireme.engines.torch.images.tensor_rows import TensorRows
from bireme.engines.torch.pools.mapped_pools import MappedPools, share_pools
from bireme.engines.torch.pools.row_copies import RowCopies
from bireme.errors import ConfigError
from bireme.kv.transfer.base import KvLayout
from bireme.kv.transfer.host_pool import HostPool, mapped_host_pool
from bireme.kv.transfer.mapped import MappableMemory, MappedMemory
from bireme.kv.transfer.memory import MemoryKind, Region, Rows, TokenRows
from bireme.kv.transfer.wire import SharedMemory
from bireme.multimodal.embedding_share import EmbeddingRows


class GpuRows:
    """A GPU's tensor as rows that others map. Its methods are the transfer's copier's."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._copies: RowCopies | None = None
        device = tensor.device.index or 0
        row_bytes, num_rows = tensor.shape[1], tensor.shape[0]
        self.regions = ((Region(tensor.data_ptr(), row_bytes, num_rows, MemoryKind.VRAM, device),),)

    def wait(self, ready: Any) -> None:
        torch.cuda.set_device(self._tensor.device)
        if ready is not None:
            ready.synchronize()

    def read(self, group: int, rows: Rows, ready: Any = None) -> memoryview:
        return self._staged().read(group, rows, ready)

    def room(self, group: int, num_rows: int) -> memoryview:
        return self._staged().room(group, num_rows)

    def write(self, group: int, rows: Rows, data: memoryview, ready: Any = None) -> None:
        self._staged().write(group, rows, data, ready)

    def shared(self) -> SharedMemory:
        try:
            return share_pools([[self._tensor]], self._tensor.device)
        except ConfigError as error:  # it names the key of KV
            raise ConfigError(
                f"multimodal_config.embedding_pool_bytes: the pool can't be shared ({error}); leave it out"
            ) from error

    def map(self, shared: SharedMemory) -> MappedMemory:
        return MappedPools([[self._tensor]], self._tensor.device, shared)

    def _staged(self) -> RowCopies:
        if self._copies is None:
            self._copies = RowCopies([[self._tensor]], self._tensor.device)
        return self._copies


class EmbeddingPool:
    """The rows of one engine's memory, handed out and taken back. From any thread."""

    def __init__(self, num_bytes: int, dtype: torch.dtype, hidden_size: int, device: torch.device) -> None:
        """Raises ConfigError when it holds no row."""
        row_bytes = hidden_size * torch.empty((), dtype=dtype).element_size()
        num_rows = num_bytes // row_bytes
        if not num_rows:
            raise ConfigError(
                f"multimodal_config.embedding_pool_bytes: {num_bytes}; one row of embeddings has {row_bytes} bytes"
            )
        self.device = device
        self._dtype = dtype
        self.memory: MappableMemory
        if device.type == "cuda":
            self._tensor = torch.zeros((num_rows, row_bytes), dtype=torch.uint8, device=device)
            self.memory = GpuRows(self._tensor)
        else:
            pool = HostPool([[(num_rows, row_bytes)]])
            mapped_host_pool()  # what it loads, the first picture does not wait for
            self._tensor, self.memory = torch.from_numpy(pool.arrays[0][0]), pool
        self._free = np.arange(num_rows)[::-1].copy()
        self._num_free = num_rows
        self._last_use: Any = None  # a sign on a GPU: rows that were given back have been read
        self._lock = threading.Lock()

    def take(self, num_tokens: int) -> TokenRows | None:
        """Return rows for as many tokens; None: no room."""
        with self._lock:
            if num_tokens > self._num_free:
                return None
            self._num_free -= num_tokens
            rows = self._free[self._num_free : self._num_free + num_tokens].copy()
            return TokenRows(self.memory, (rows,), self._last_use)

    def put(self, embeddings: EmbeddingRows) -> TokenRows | None:
        """Return rows that hold a copy; None: no room."""
        assert isinstance(embeddings, TensorRows)
        place = self.take(embeddings.num_tokens)
        if place is None:
            return None
        try:
            self._tensor[self._index(place)] = embeddings.tensor.to(self.device).view(torch.uint8)
        except BaseException:
            self.give_back(place)
            raise
        return TokenRows(place.memory, place.rows, self._sign())

    def get(self, place: TokenRows) -> TensorRows:
        """Return a copy of what has been written to rows; it is there, on whichever stream it is read."""
        rows = TensorRows(self._tensor[self._index(place)].view(self._dtype))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return rows

    def give_back(self, place: TokenRows) -> None:
        sign = self._sign()
        with self._lock:
            (rows,) = place.rows
            self._free[self._num_free : self._num_free + len(rows)] = rows
            self._num_free += len(rows)
            self._last_use = sign

    @property
    def num_free(self) -> int:
        return int(self._num_free)

    def _index(self, place: TokenRows) -> Tensor:
        return torch.from_numpy(place.rows[0]).to(self.device)

    def _sign(self) -> Any:
        """Return a sign that what this thread has started on the GPU has ended; None on a CPU, where it has."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event


def start_share(
    context: EngineContext, layout: KvLayout, dtype: torch.dtype, hidden_size: int, device: torch.device
) -> torch.device:
    """Start the context's share, with a pool where the engine YAML has one; return where embeddings are to lie.

    An engine that computes with what it has encoded itself needs none.
    """
    assert context.share is not None, "a model with a vision tower has a share"
    size = context.config.multimodal_config.embedding_pool_bytes
    if not size or (context.hosts_encoder and context.stage != "multimodal_encoder"):
        context.share.start(layout)
        return torch.device("cpu")
    context.share.start(layout, EmbeddingPool(size, dtype, hidden_size, device))
    return device
