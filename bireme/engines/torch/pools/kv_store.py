"""The KV tensors of all layers, as rows of one token each: in the dtype that the model computes in, or 8-bit floats.

Layers that share a window share block ids; each layer has its own two tensors (keys, values) of (blocks *
tokens_per_block, heads * size). Block 0 is padding: zero, and on a GPU, whose kernels never read it,
what rows that fill up a graph's batch write.

A drafting head's layer, whose shape may be another, lies beside the first group's layers, under the same block ids. To
transfers, where the other side may have no such head, it is a group of its own, the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bireme.engines.torch.geometry import UNSCALED, HeadLayer, KvScales, LayerGeometry, LayerGroup
from bireme.engines.torch.pools.mapped_pools import MappedPools, share_pools
from bireme.engines.torch.pools.row_copies import RowCopies
from bireme.kv.blocks.block_pool import NULL
from bireme.kv.transfer.base import GroupLayout, KvLayout
from bireme.kv.transfer.host_pool import HostPool, mapped_host_pool
from bireme.kv.transfer.memory import NOT_HELD, Bytes, MemoryKind, Region, RowCopy, Rows, TokenRows, zero_pages
from bireme.kv.transfer.wire import SharedMemory

if TYPE_CHECKING:
    from bireme.kv.transfer.mapped import MappedMemory


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Keys and values of a head's layer: what attends to a store's layers attends to it as layer 0 of these."""

    identity: str
    keys: list[Tensor]
    values: list[Tensor]
    scales: list[KvScales]
    windows: list[int]
    tokens_per_block: int
    device: torch.device

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))


class KvStore:
    """Allocated once; rows are written by forward passes and by imports."""

    def __init__(
        self,
        geometry: Sequence[LayerGeometry],
        groups: Sequence[LayerGroup],
        num_blocks: Sequence[int],
        tokens_per_block: int,
        device: torch.device,
        is_shared: bool = False,
        head: HeadLayer | None = None,
    ) -> None:
        """`is_shared`: other processes of the host copy rows out of it (a GPU's memory they can map in any case).

        `head`: the layer of a head, which sees as many tokens as the first group's.
        """
        self.groups = tuple(groups)
        self.windows = [group.window for group in groups]
        self.tokens_per_block = tokens_per_block
        self.dtype = geometry[0].dtype  # that the model computes in
        self.is_fp8 = geometry[0].scales is not None
        self.scales = [one.scales or UNSCALED for one in geometry]
        self.device = device
        group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
        self.group_of = [group_of[layer] for layer in range(len(geometry))]
        self._host_pool: HostPool | None = None
        keys, values = zip(*self._allocate(geometry, num_blocks, is_shared, head), strict=True)
        self.keys, self.values = list(keys[: len(geometry)]), list(values[: len(geometry)])
        self.head: HeadRows | None = None
        if head is not None:
            shape = self.windows[:1], tokens_per_block, device
            self.head = HeadRows(head.identity, [keys[-1]], [values[-1]], [UNSCALED], *shape)
        self.regions = tuple(tuple(map(self._region, group)) for group in self._moved_tensors)

    def _allocate(
        self, geometry: Sequence[LayerGeometry], num_blocks: Sequence[int], is_shared: bool, head: HeadLayer | None
    ) -> list[list[Tensor]]:
        """Return keys and values of each layer, a head's last.

        They are zero, because padding is attended to with weight zero, and zero times NaN is NaN.
        """
        layers, group_of = list(geometry), list(self.group_of)
        if head is not None:
            layers.append(head.geometry)
            group_of.append(0)
        rows = [(num_blocks[group] + 1) * self.tokens_per_block for group in group_of]
        shapes = [[(count, size) for size in one.row_sizes] for count, one in zip(rows, layers, strict=True)]
        if is_shared and self.device.type == "cpu":
            return self._in_host_pool(shapes, [_kept_dtype(one) for one in layers])
        return [
            [_zeros(shape, _kept_dtype(one), self.device) for shape in pair]
            for one, pair in zip(layers, shapes, strict=True)
        ]

    def _region(self, tensor: Tensor) -> Region:
        kind = MemoryKind.DRAM if self.device.type == "cpu" else MemoryKind.VRAM
        row_bytes = tensor.shape[1] * tensor.element_size()
        return Region(tensor.data_ptr(), row_bytes, tensor.shape[0], kind, self.device.index or 0)

    @property
    def form(self) -> str:
        """Return the name of what keys and values are kept in."""
        return str(self.keys[0].dtype).removeprefix("torch.")

    @property
    def num_bytes(self) -> int:
        own: int = sum(tensor.nbytes for tensor in (*self.keys, *self.values))
        return own + (self.head.num_bytes if self.head is not None else 0)

    @property
    def block_bytes(self) -> list[int]:
        """Return what a block of each group takes."""
        return [sum(view[0].nbytes for view in self.block_views(group)) for group in range(len(self.groups))]

    def layout(self, model: str) -> KvLayout:
        groups = tuple(GroupLayout(group.window, group.row_bytes) for group in self.groups)
        scales = tuple((one.keys, one.values) for one in self.scales) if self.is_fp8 else ()
        if self.head is None:
            return KvLayout(model, self.form, groups, scales)
        row_bytes = sum(region.row_bytes for region in self.regions[-1])
        of_head = GroupLayout(self.windows[0], (row_bytes,))
        return KvLayout(model, self.form, (*groups, of_head), scales, self.head.identity)

    def token_rows(self, blocks: Sequence[Sequence[int]], num_tokens: int) -> TokenRows:
        """Return the rows of a request's tokens, a head's as well; `blocks`: the ids that it holds, a group each.

        On a GPU they may be touched when the steps that have been started have ended: call it on the engine's thread.
        """
        size, positions = self.tokens_per_block, np.arange(num_tokens)
        found = []
        for held in blocks:
            index = np.asarray(held, dtype=np.int64)[positions // size]
            found.append(np.where(index == NULL, NOT_HELD, index * size + positions % size))
        if self.head is not None:
            found.append(found[0])
        return TokenRows(self, tuple(found), self._computed())

    @cached_property
    def copies(self) -> RowCopies:
        """What copies rows that the CPU can't address; takes its memory at the first use."""
        return RowCopies(self._moved_tensors, self.device)

    def read(self, group: int, rows: Rows, ready: Any = None) -> memoryview:
        return self.copies.read(group, rows, ready)

    def room(self, group: int, num_rows: int) -> memoryview:
        return self.copies.room(group, num_rows)

    def write(self, group: int, rows: Rows, data: memoryview, ready: Any = None) -> None:
        self.copies.write(group, rows, data, ready)

    def page_lock(self, memory: Bytes) -> None:
        self.copies.page_lock(memory)

    def page_unlock(self, memory: Bytes) -> None:
        self.copies.page_unlock(memory)

    def begin_read(self, group: int, rows: Rows, target: Bytes, ready: Any) -> RowCopy:
        return self.copies.begin_read(group, rows, target, ready)

    def begin_write(self, group: int, rows: Rows, source: Bytes, ready: Any) -> RowCopy:
        return self.copies.begin_write(group, rows, source, ready)

    def shared(self) -> SharedMemory | None:
        if self.device.type == "cpu":
            return None if self._host_pool is None else self._host_pool.shared()
        return share_pools(self._moved_tensors, self.device)

    def map(self, shared: SharedMemory) -> MappedMemory:
        if self.device.type == "cpu":
            return mapped_host_pool()(self.regions, shared)
        return MappedPools(self._moved_tensors, self.device, shared)

    def wait(self, ready: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.keys[0].device)  # it has a number, which this asks for
        if ready is not None:
            ready.synchronize()

    def block_views(self, group: int) -> list[Tensor]:
        """Return what blocks of a group have, layer by layer: (blocks, bytes of a block), in int64 if rows allow it.

        A GPU copies bytes one by one as slowly as words.
        """
        tensors = [*self._tensors(group), *(self._head_tensors if group == 0 else ())]
        is_wide = all(tensor.shape[1] * tensor.element_size() % 8 == 0 for tensor in tensors)
        words = [tensor.view(torch.int64 if is_wide else torch.uint8) for tensor in tensors]
        return [tensor.view(tensor.shape[0] // self.tokens_per_block, -1) for tensor in words]

    def clear(self, num_rows: int) -> None:
        """Zero the first rows, which warm-up wrote; not all, which would take memory for unused rows."""
        for tensor in (*self.keys, *self.values, *self._head_tensors):
            tensor[:num_rows].zero_()

    def _computed(self) -> Any:
        """Return an event of all that the engine's stream has been given so far."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    @property
    def _moved_tensors(self) -> list[list[Tensor]]:
        own = [self._tensors(group) for group in range(len(self.groups))]
        return [*own, self._head_tensors] if self.head is not None else own

    @property
    def _head_tensors(self) -> list[Tensor]:
        return [*self.head.keys, *self.head.values] if self.head is not None else []

    def _tensors(self, group: int) -> list[Tensor]:
        return [tensor for layer in self.groups[group].layers for tensor in (self.keys[layer], self.values[layer])]

    def _in_host_pool(
        self, shapes: Sequence[Sequence[tuple[int, int]]], dtypes: Sequence[torch.dtype]
    ) -> list[list[Tensor]]:
        """Return each layer's keys and values in memory that other processes can map; zeros, as everywhere."""
        moved = [group.layers for group in self.groups]
        if len(shapes) > len(self.group_of):  # a head's is a group of its own
            moved.append((len(self.group_of),))
        self._host_pool = HostPool(
            [
                [(rows, size * dtypes[layer].itemsize) for layer in layers for rows, size in shapes[layer]]
                for layers in moved
            ]
        )
        found: dict[int, list[Tensor]] = {}
        for layers, arrays in zip(moved, self._host_pool.arrays, strict=True):
            for layer, pair in zip(layers, zip(arrays[::2], arrays[1::2], strict=True), strict=True):
                found[layer] = [torch.from_numpy(array).view(dtypes[layer]) for array in pair]
        return [found[layer] for layer in range(len(shapes))]


def _kept_dtype(layer: LayerGeometry) -> torch.dtype:
    return layer.dtype if layer.scales is None else torch.float8_e4m3fn


def _zeros(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch would write every zero, and so take a pool's whole memory at the start, in small pages.
    return torch.frombuffer(zero_pages(shape[0] * shape[1] * dtype.itemsize), dtype=dtype).view(shape)
