"""Rows copied between tensors whose addresses stand in a table: all layers of a group by one kernel.

One side may be memory that torch did not allocate, such as another process's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 5  # of a table: source, its stride, target, its stride, width
_PROGRAM_WORDS = 2048  # copied by one program, at most


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Rows of one tensor: the first one's address, and the bytes from one to the next."""

    address: int
    stride: int


def row_places(tensors: Sequence[Tensor]) -> list[RowPlace]:
    """Tensors (rows, size)."""
    return [RowPlace(tensor.data_ptr(), tensor.stride(0) * tensor.element_size()) for tensor in tensors]


@triton.jit(do_not_specialize=["num_tensors", "num_rows"])  # type: ignore[untyped-decorator]
def _copy_kernel(
    told,  # (num_tensors, 5), then the source rows, then the target rows
    num_tensors,
    num_rows,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    entry, rows = told + tl.program_id(1) * 5, told + num_tensors * 5
    index, word = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(2) * WORDS + tl.arange(0, WORDS)
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


def copy_rows(
    sources: Sequence[RowPlace],
    targets: Sequence[RowPlace],
    widths: Sequence[int],
    source_rows: npt.NDArray[np.int64],
    target_rows: npt.NDArray[np.int64],
    device: torch.device,
) -> None:
    """Copy rows of `widths` bytes, a tensor each; on the current stream, which must be the device's.

    The addresses are used as they are: the caller answers for them, and for the rows.
    """
    count, num_tensors = len(source_rows), len(widths)
    table = np.empty((num_tensors, _COLUMNS), np.int64)
    table[:, :2] = [(place.address, place.stride) for place in sources]
    table[:, 2:4] = [(place.address, place.stride) for place in targets]
    table[:, 4] = widths
    is_wide, is_aligned = not (table % 8).any(), not (table % 16).any()
    if is_wide:  # bytes are copied one by one as slowly as words
        table[:, (1, 3, 4)] //= 8
    # One small copy; made before the kernel is queued, so nothing waits for it.
    told = torch.from_numpy(np.concatenate([table.reshape(-1), source_rows, target_rows])).to(device, non_blocking=True)
    words = min(_PROGRAM_WORDS, triton.next_power_of_2(int(table[:, 4].max())))
    height = max(1, _PROGRAM_WORDS // words)
    grid = triton.cdiv(count, height), num_tensors, triton.cdiv(int(table[:, 4].max()), words)
    word = tl.int64 if is_wide else tl.uint8
    _copy_kernel[grid](
        told, num_tensors, count, WORD=word, ROWS=height, WORDS=words, IS_ALIGNED=is_aligned, num_warps=4
    )
