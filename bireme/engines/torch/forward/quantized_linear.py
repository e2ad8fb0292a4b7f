"""Products with weights that stay as their file has them, on a CPU: a GGUF file's Q4_0, Q4_1 and Q8_0 (ggml-common.h),
and integers of 4 bits with a scale and a zero point a group (AWQ, GPTQ).

They are put into the order in which `native/quantized.cpp` reads them, once, when a model is loaded. That file says
what the order is, and what becomes of the rows of x: they are rounded to 8 bits, as ggml rounds them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # inputs that share a scale; of x as well
_SIDE = 16  # outputs of a panel


@dataclass(frozen=True, slots=True)
class BlockForm:
    number: int  # in C++
    block_bytes: int  # of a group, in the file
    num_scales: int
    is_short: bool  # 4 bits


FORMS = {"Q4_0": BlockForm(0, 18, 1, True), "Q4_1": BlockForm(1, 20, 2, True), "Q8_0": BlockForm(2, 34, 1, False)}
_INT4 = "INT4_GROUPS"
_NUMBERS = {name: form.number for name, form in FORMS.items()} | {_INT4: 3}  # in C++


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows of a weight in a GGUF file's blocks."""

    form: str  # of FORMS
    blocks: Tensor  # (rows, groups * block_bytes) uint8

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return len(self.blocks), self.blocks.shape[1] // FORMS[self.form].block_bytes * GROUP


@dataclass(frozen=True, slots=True)
class GroupRows:
    """Rows of a weight in integers of 4 bits: (values - zeros) * scales, of each input's group."""

    values: Tensor  # (out, in) uint8, below 16
    scales: Tensor  # (out, groups) float16
    zeros: Tensor  # (out, groups), below 17

    @property
    def form(self) -> str:
        return _INT4

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return len(self.values), self.values.shape[1]


StoredRows: TypeAlias = BlockRows | GroupRows


@dataclass(frozen=True, slots=True)
class Panels:
    """Rows of one form in the order in which they are read."""

    form: str
    shape: tuple[int, int]  # (out, in)
    codes: Tensor  # (panels, groups, pieces, 16, 4) uint8
    scales: Tensor  # (panels, groups / span, scales, 16) float16
    span: int = 1  # groups that share a scale

    @property
    def num_bytes(self) -> int:
        return int(self.codes.nbytes + self.scales.nbytes)


def why_no_panels(shape: Sequence[int], num_groups: int) -> str:
    """Return why integers (out, in) with so many groups have no products here; empty: they do."""
    size = shape[1] // num_groups
    return "" if size % GROUP == 0 else f"groups of {size} inputs are no multiple of {GROUP}"


def arrange(rows: StoredRows) -> Panels:
    """Return a copy in panels. Raises ValueError for what doesn't divide into groups, or is no such form."""
    return _arrange_groups(rows) if isinstance(rows, GroupRows) else _arrange_blocks(rows)


def _arrange_groups(rows: GroupRows) -> Panels:
    (width, depth), num_groups = rows.shape, rows.scales.shape[1]
    if why := why_no_panels(rows.shape, num_groups):
        raise ValueError(f"{rows.form}: {why}")
    padded = F.pad(rows.values, (0, 0, 0, -width % _SIDE)).view(-1, _SIDE, depth // GROUP, 4, 2, 4)
    codes = padded[..., 0, :] | (padded[..., 1, :] << 4)
    scales = torch.stack([rows.scales.half(), rows.zeros.half()], -1)
    scales = F.pad(scales, (0, 0, 0, 0, 0, -width % _SIDE)).view(-1, _SIDE, num_groups, 2)
    ordered = codes.permute(0, 2, 3, 1, 4).contiguous(), scales.permute(0, 2, 3, 1).contiguous()
    return Panels(rows.form, rows.shape, *ordered, span=depth // GROUP // num_groups)


def _arrange_blocks(rows: BlockRows) -> Panels:
    form = FORMS.get(rows.form)
    if form is None:
        raise ValueError(f"form {rows.form!r}: it is none of {', '.join(FORMS)}")
    if rows.blocks.dim() != 2 or rows.blocks.dtype != torch.uint8 or rows.blocks.shape[1] % form.block_bytes:
        found = f"{rows.blocks.dtype} of {list(rows.blocks.shape)}"
        raise ValueError(f"{rows.form}: {found} is not rows of blocks of {form.block_bytes} bytes")
    groups = rows.blocks.shape[1] // form.block_bytes
    padded = F.pad(rows.blocks, (0, 0, 0, -len(rows.blocks) % _SIDE)).view(-1, _SIDE, groups, form.block_bytes)
    scales, codes = padded.split((2 * form.num_scales, form.block_bytes - 2 * form.num_scales), -1)
    if form.is_short:  # a byte has a value of the first half of the block and one of the second
        pieces = torch.cat([codes & 15, codes >> 4], -1).view(-1, _SIDE, groups, 4, 2, 4)
        ordered = pieces[..., 0, :] | (pieces[..., 1, :] << 4)
    else:
        ordered = (codes ^ 128).view(-1, _SIDE, groups, 8, 4)
    halves = scales.contiguous().view(torch.float16)
    return Panels(
        rows.form, rows.shape, ordered.permute(0, 2, 3, 1, 4).contiguous(), halves.permute(0, 2, 3, 1).contiguous()
    )


class _PartOfWeights(ctypes.Structure):
    """Of `native/parts.h`."""

    _fields_ = [
        ("form", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "bias")),
        *((name, ctypes.c_int64) for name in ("width", "begin", "span")),
    ]


class QuantizedLinear:
    """x (T, in) -> (T, out), of float32 or bfloat16; a row's result does not depend on the rows beside it."""

    def __init__(
        self, parts: Sequence[StoredRows], bias: Tensor | None, library: ctypes.CDLL, dtype: torch.dtype, threads: int
    ) -> None:
        """`parts`: rows that follow each other, of one form or several. Raises ValueError."""
        if len({part.shape[1] for part in parts}) != 1:
            raise ValueError(f"parts of {[part.shape for part in parts]} have not the same number of inputs")
        self._parts = [arrange(_joined(list(same))) for _, same in groupby(parts, key=_kind_of)]
        self.shape = sum(part.shape[0] for part in self._parts), self._parts[0].shape[1]
        self._bias, self._threads = bias, threads
        name = str(dtype).removeprefix("torch.")
        self._multiply, self._take_rows = library[f"multiply_quantized_{name}"], library[f"take_quantized_rows_{name}"]
        pointer, integer, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._multiply.argtypes = [number, *[pointer] * 6, *[integer] * 5, number]
        self._take_rows.argtypes = [number, *[pointer] * 4, integer, integer]
        size, begin = dtype.itemsize, 0
        self.dtype = dtype
        self.parts = (_PartOfWeights * len(self._parts))()  # for a whole step
        # form, codes, scales, bias, width, groups that share a scale, bytes before
        self._calls: list[tuple[int, int, int, int, int, int, int]] = []
        for to, part in zip(self.parts, self._parts, strict=True):
            own_bias = 0 if bias is None else bias.data_ptr() + begin
            pointers = part.codes.data_ptr(), part.scales.data_ptr()
            number_of_form = _NUMBERS[part.form]
            self._calls.append((number_of_form, *pointers, own_bias, part.shape[0], part.span, begin))
            to.form, (to.codes, to.scales), to.bias = number_of_form, pointers, own_bias
            to.width, to.begin, to.span = part.shape[0], begin // size, part.span
            begin += part.shape[0] * size

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self._parts)

    @property
    def forms(self) -> list[str]:
        return [part.form for part in self._parts]

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        rows, (stride, depth) = x.size(0), self.shape
        out = x.new_empty(rows, stride)
        other = 0 if add_to is None else add_to.data_ptr()
        for form, codes, scales, bias, width, span, begin in self._calls:
            to, more = out.data_ptr() + begin, other and other + begin
            sizes = rows, depth, width, stride, span
            self._multiply(form, x.data_ptr(), codes, scales, bias, more, to, *sizes, self._threads)
        return out

    def take_rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return weights' rows, (T,) int64 -> (T, in), in the dtype of the products. Of one part of blocks."""
        (part,) = self._parts
        ids = ids.contiguous()
        out = torch.empty(ids.size(0), self.shape[1], dtype=dtype)
        pointers = part.codes.data_ptr(), part.scales.data_ptr(), ids.data_ptr(), out.data_ptr()
        self._take_rows(_NUMBERS[part.form], *pointers, *out.size())
        return out


def _kind_of(rows: StoredRows) -> tuple[str, int]:
    """Rows of one kind can be one part."""
    return rows.form, rows.scales.shape[1] if isinstance(rows, GroupRows) else 1


def _joined(parts: Sequence[StoredRows]) -> StoredRows:
    """Of one kind."""
    groups = [part for part in parts if isinstance(part, GroupRows)]
    if groups:
        return GroupRows(*(torch.cat([getattr(part, name) for part in groups]) for name in GroupRows.__slots__))
    blocks = [part for part in parts if isinstance(part, BlockRows)]
    return BlockRows(blocks[0].form, torch.cat([part.blocks for part in blocks]))


def round_rows(x: Tensor) -> Tensor:
    """Return x (T, in) as the products see it: float32, in 8 bits for each group of 32 times its scale."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True) / 127
    return (torch.where(scales > 0, groups / scales, 0).round() * scales).flatten(-2)


def instructions(library: ctypes.CDLL) -> str:
    """Return what its products are computed with: avx512_vnni, avx2 or none."""
    tell = library["quantized_instructions"]
    tell.restype = ctypes.c_char_p
    return str(tell().decode())
