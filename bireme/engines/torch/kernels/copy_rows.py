"""Rows copied between tensors whose addresses stand in a table: all layers of a group by one kernel.

One side may be memory that torch did not allocate, such as another process's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 5  # of a table: source, its stride, target, its stride, width


@dataclass(frozen=True, slots=True)
class CopyShape:
    """How a copy spreads over the GPU."""

    words: int  # copied at a time by a program, at most
    num_warps: int  # of a program
    num_programs: int | None = None  # at once; None: as many as the GPU takes


# As quick as can be: 96% of a plain copy's rate on an H200, 94% with 2,048 words.
WHOLE_GPU = CopyShape(512, 4)
# As quick as a link between two H200 (92% of a plain copy; 8 programs 68%), and of little weight for what runs beside
# it: a GiB delays decode steps of 16 sequences by 0.4 ms, over the whole GPU by 3.0.
FEW_SMS = CopyShape(8192, 32, 16)


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Rows of one tensor: the first one's address, and the bytes from one to the next."""

    address: int
    stride: int


def row_places(tensors: Sequence[Tensor]) -> list[RowPlace]:
    """Tensors (rows, size)."""
    return [RowPlace(tensor.data_ptr(), tensor.stride(0) * tensor.element_size()) for tensor in tensors]


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])  # type: ignore[untyped-decorator]
def _copy_kernel(
    table,  # (num_tensors, 5)
    rows,  # the source rows, then the target rows
    num_rows,
    num_tiles,  # of ROWS rows and WORDS words
    num_tensors,
    num_columns,  # of tiles in a tensor
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        column, tensor = tile % num_columns, tile // num_columns % num_tensors
        index = tile // num_columns // num_tensors * ROWS + tl.arange(0, ROWS)
        entry, word = table + tensor * 5, column * WORDS + tl.arange(0, WORDS)
        source = tl.load(entry).to(tl.pointer_type(WORD))
        source_stride, width = tl.load(entry + 1), tl.load(entry + 4)
        target = tl.load(entry + 2).to(tl.pointer_type(WORD))
        target_stride = tl.load(entry + 3)
        if IS_ALIGNED:  # then two words are one load
            source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
            source_stride, target_stride = tl.multiple_of(source_stride, 2), tl.multiple_of(target_stride, 2)
            width = tl.multiple_of(width, 2)
        is_row = index < num_rows
        is_there = is_row[:, None] & (word < width)[None, :]
        read = tl.load(rows + index, is_row, 0) * source_stride
        written = tl.load(rows + num_rows + index, is_row, 0) * target_stride
        values = tl.load(source + read[:, None] + word[None, :], is_there)
        tl.store(target + written[:, None] + word[None, :], values, is_there)


class RowCopier:
    """Tensors whose rows are copied pair by pair. The table of their addresses is sent to the device once."""

    def __init__(
        self,
        sources: Sequence[RowPlace],
        targets: Sequence[RowPlace],
        widths: Sequence[int],
        device: torch.device,
        shape: CopyShape = WHOLE_GPU,
    ) -> None:
        """`widths`: bytes of a row, a tensor each. The addresses are used as they are: the caller answers for them."""
        table = np.empty((len(widths), _COLUMNS), np.int64)
        table[:, :2] = [(place.address, place.stride) for place in sources]
        table[:, 2:4] = [(place.address, place.stride) for place in targets]
        table[:, 4] = widths
        is_wide, is_aligned = not (table % 8).any(), not (table % 16).any()
        if is_wide:  # bytes are copied one by one as slowly as words
            table[:, (1, 3, 4)] //= 8
        width = int(table[:, 4].max())
        words = min(shape.words, triton.next_power_of_2(width))
        self._height = max(1, shape.words // words)
        self._num_tensors, self._num_columns = len(widths), triton.cdiv(width, words)
        self._num_programs = shape.num_programs
        self._settings = {
            "WORD": tl.int64 if is_wide else tl.uint8, "ROWS": self._height, "WORDS": words, "IS_ALIGNED": is_aligned,
            "num_warps": shape.num_warps,
        }  # fmt: skip
        self._device = device
        self._table = torch.from_numpy(table).to(device, non_blocking=True)

    def copy(self, source_rows: npt.NDArray[np.int64], target_rows: npt.NDArray[np.int64]) -> None:
        """Copy on the current stream, which must be the device's; the caller answers for the rows."""
        count = len(source_rows)
        told = _host_memory(2 * count, self._device)
        told.numpy()[:count], told.numpy()[count:] = source_rows, target_rows
        num_tiles = triton.cdiv(count, self._height) * self._num_tensors * self._num_columns
        rows = told.to(self._device, non_blocking=True)
        _copy_kernel[(min(num_tiles, self._num_programs or num_tiles),)](
            self._table, rows, count, num_tiles, self._num_tensors, self._num_columns, **self._settings
        )


def _host_memory(count: int, device: torch.device) -> Tensor:
    """Return (count,) in int32, page-locked where it can be had: then its copy to the device waits for nothing."""
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):
            return torch.empty(count, dtype=torch.int32, pin_memory=True)
    return torch.empty(count, dtype=torch.int32)
