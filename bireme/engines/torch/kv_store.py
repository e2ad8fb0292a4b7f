"""The KV tensors of all layers, as rows of one token each, and their copies to and from transfers.

Layers that share a window share block ids; each layer has its own two tensors (keys, values) of (blocks *
tokens_per_block, heads * size). Block 0 is padding: zero, and on a GPU, whose kernels never read it,
what rows that fill up a graph's batch write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bireme.engines.torch.attention import LayerGeometry
from bireme.kv.block_pool import NULL
from bireme.kv.transfer.base import GroupLayout, KvLayout
from bireme.kv.transfer.memory import NOT_HELD, MemoryKind, Region, Rows, TokenRows


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a window, in the model's order."""

    window: int
    layers: tuple[int, ...]
    row_bytes: tuple[int, ...]  # one layer each, keys and values together

    @property
    def bytes_per_token(self) -> int:
        return sum(self.row_bytes)


def group_layers(geometry: Sequence[LayerGeometry]) -> tuple[LayerGroup, ...]:
    """Sort layers by window: all-seeing first, then from the widest to the narrowest."""
    windows = sorted({layer.window for layer in geometry}, key=lambda window: -window if window else -float("inf"))
    return tuple(
        LayerGroup(window, layers, tuple(_row_bytes(geometry[layer]) for layer in layers))
        for window in windows
        for layers in [tuple(index for index, layer in enumerate(geometry) if layer.window == window)]
    )


class KvStore:
    """Allocated once; rows are written by forward passes and by imports."""

    def __init__(
        self,
        geometry: Sequence[LayerGeometry],
        groups: Sequence[LayerGroup],
        num_blocks: Sequence[int],
        tokens_per_block: int,
        device: torch.device,
    ) -> None:
        self.groups = tuple(groups)
        self.tokens_per_block = tokens_per_block
        self.dtype = geometry[0].dtype
        self.device = device
        self.group_of = [0] * len(geometry)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for index, group in enumerate(groups):
            for layer in group.layers:
                self.group_of[layer] = index
        for layer, shape in enumerate(geometry):
            rows = (num_blocks[self.group_of[layer]] + 1) * tokens_per_block
            self.keys.append(self._empty(rows, shape.num_kv_heads * shape.key_size, shape.dtype))
            self.values.append(self._empty(rows, shape.num_kv_heads * shape.value_size, shape.dtype))
        kind = MemoryKind.DRAM if device.type == "cpu" else MemoryKind.VRAM
        self.regions = tuple(
            tuple(
                Region(one.data_ptr(), one.shape[1] * one.element_size(), one.shape[0], kind, device.index or 0)
                for one in self._tensors(index)
            )
            for index in range(len(groups))
        )

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def layout(self, model: str) -> KvLayout:
        groups = tuple(GroupLayout(group.window, group.row_bytes) for group in self.groups)
        return KvLayout(model, str(self.dtype).removeprefix("torch."), groups)

    def token_rows(self, blocks: Sequence[Sequence[int]], num_tokens: int) -> TokenRows:
        """Return the rows of a request's tokens; `blocks`: the ids that it holds, a group each."""
        size, positions = self.tokens_per_block, np.arange(num_tokens)
        found = []
        for held in blocks:
            index = np.asarray(held, dtype=np.int64)[positions // size]
            found.append(np.where(index == NULL, NOT_HELD, index * size + positions % size))
        return TokenRows(self, tuple(found))

    def read(self, group: int, rows: Rows, data: memoryview) -> None:
        """Copy rows of all layers of a group into `data`: layer by layer, keys then values."""
        index = torch.from_numpy(rows).to(self.device)
        target, at = torch.frombuffer(data, dtype=torch.uint8), 0
        for tensor in self._tensors(group):
            source = tensor.view(torch.uint8)
            end = at + len(rows) * source.shape[1]
            target[at:end].view(len(rows), -1).copy_(source.index_select(0, index))
            at = end

    def write(self, group: int, rows: Rows, data: memoryview) -> None:
        """Copy `data`, in the order of `read`, into rows of all layers of a group."""
        index = torch.from_numpy(rows).to(self.device)
        array = np.frombuffer(data, dtype=np.uint8)
        source, at = torch.from_numpy(array if array.flags.writeable else array.copy()), 0
        for tensor in self._tensors(group):
            target = tensor.view(torch.uint8)
            end = at + len(rows) * target.shape[1]
            target.index_copy_(0, index, source[at:end].view(len(rows), -1).to(self.device))
            at = end

    def block_views(self, group: int) -> list[Tensor]:
        """Return keys and values of a group's layers: (blocks, bytes of a block), in int64 where its rows allow it.

        A GPU copies bytes one by one as slowly as words.
        """
        tensors = self._tensors(group)
        is_wide = all(tensor.shape[1] * tensor.element_size() % 8 == 0 for tensor in tensors)
        words = [tensor.view(torch.int64 if is_wide else torch.uint8) for tensor in tensors]
        return [tensor.view(tensor.shape[0] // self.tokens_per_block, -1) for tensor in words]

    def clear(self, num_rows: int) -> None:
        """Zero the first rows, which warm-up wrote; not all, which would take memory for unused rows."""
        for tensor in (*self.keys, *self.values):
            tensor[:num_rows].zero_()

    def _tensors(self, group: int) -> list[Tensor]:
        return [tensor for layer in self.groups[group].layers for tensor in (self.keys[layer], self.values[layer])]

    def _empty(self, rows: int, size: int, dtype: torch.dtype) -> Tensor:
        # Zeroed, because padding is attended to with weight zero, and zero times NaN is NaN. On CPU the system hands
        # out zero pages on first use, so this costs nothing before.
        return torch.zeros(rows, size, dtype=dtype, device=self.device)


def _row_bytes(layer: LayerGeometry) -> int:
    return layer.num_kv_heads * (layer.key_size + layer.value_size) * int(layer.dtype.itemsize)
