"""What weights are stored in: a tensor of the dtype that the model computes in, 8-bit floats, or integers of 4 bits.

E4M3 has four bits of exponent and three of mantissa, values up to 448 (Micikevicius et al., "FP8 Formats for Deep
Learning", 2022). Scales are of output channels, or of blocks of 128 x 128 as in DeepSeek-V3 (arXiv 2412.19437, 3.3).
Products of few rows take activations as they are; those of more rows round them to E4M3 as well, with a scale a row,
or with blocks one for each 128 values of a row. Those scales are found when they are rounded.

Integers of 4 bits have a scale and a zero point for each group of a row's inputs, as AWQ (arXiv 2306.00978) and GPTQ
(arXiv 2210.17323) make them. Activations are taken as they are.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

BLOCK = 128  # of 8-bit floats that share a scale, in each direction
PACKED = 128  # 4-bit integers of a row that lie together, in 64 bytes: `packed`
E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST = 1e-12  # of what scales are made from: zeros have one, too
MOST_EXACT_ROWS = 1  # activations of more are rounded
MXFP4_GROUP = 32
_OPERAND = (4, 2, 2, 4, 2)  # inputs of PACKED: planes, 16 in them, eight of these, threads of that, a thread's two
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E8M0_BIAS = 127


class WeightForm(enum.StrEnum):
    """Names in the log, and of the metric's label."""

    PLAIN = enum.auto()  # the dtype that the model computes in
    FP8_CHANNEL = enum.auto()
    FP8_BLOCKS = enum.auto()
    INT4_GROUPS = enum.auto()
    Q4_0 = enum.auto()  # ggml's blocks, on a CPU
    Q4_1 = enum.auto()
    Q8_0 = enum.auto()
    MXFP4 = enum.auto()  # experts alone: the other projections are plain


FORMS = {  # by TensorRT-LLM's names (QuantAlgo)
    "FP8": WeightForm.FP8_CHANNEL,  # one scale, repeated
    "FP8_PER_CHANNEL_PER_TOKEN": WeightForm.FP8_CHANNEL,
    "FP8_BLOCK_SCALES": WeightForm.FP8_BLOCKS,
    "W4A16_AWQ": WeightForm.INT4_GROUPS,
    "W4A16_GPTQ": WeightForm.INT4_GROUPS,
}


@dataclass(frozen=True, slots=True)
class StoredAs:
    """How the projections of a model's layers are stored."""

    algo: str  # of FORMS
    group: int = 0  # of 4-bit integers: inputs that share a scale; 0: all of a row
    scales: torch.dtype = torch.float32

    @property
    def form(self) -> WeightForm:
        return FORMS[self.algo]

    def __str__(self) -> str:
        return f"{self.algo} {self.group} {self.scales}"


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """(N, K), as `values` times `scales`."""

    values: Tensor  # (N, K) float8_e4m3fn
    scales: Tensor  # float32, (N,) of channels, or (ceil(N / 128), ceil(K / 128)) of blocks

    @property
    def form(self) -> WeightForm:
        return WeightForm.FP8_BLOCKS if self.scales.dim() == 2 else WeightForm.FP8_CHANNEL

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def __len__(self) -> int:
        return len(self.values)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"values": self.values, "scales": self.scales}

    def rows(self, begin: int, end: int) -> Fp8Weight:
        """Return a view of these rows, which with blocks begin with one."""
        if self.scales.dim() == 2:
            return Fp8Weight(self.values[begin:end], self.scales[begin // BLOCK : -(-end // BLOCK)])
        return Fp8Weight(self.values[begin:end], self.scales[begin:end])

    def dequantized(self) -> Tensor:
        """Return (N, K) float32."""
        rows, columns = self.values.shape
        if self.scales.dim() == 1:
            return self.values.float() * self.scales[:, None]
        scales = self.scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        return self.values.float() * scales


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """(N, K): (value - zero) * scale, of the input's group."""

    values: Tensor  # (N, K / 2) uint8, K rounded up to PACKED: `packed` says in which order
    scales: Tensor  # (N, K / group) float16, bfloat16 or float32
    zeros: Tensor  # (N, K / group) uint8
    size: int  # K

    form = WeightForm.INT4_GROUPS

    @property
    def group(self) -> int:
        """Return the inputs that share a scale."""
        return int(self.size // self.scales.shape[1])

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.values), self.size))

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def __len__(self) -> int:
        return len(self.values)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"values": self.values, "scales": self.scales, "zeros": self.zeros}

    def rows(self, begin: int, end: int) -> Int4Weight:
        """Return a view of these rows."""
        return Int4Weight(self.values[begin:end], self.scales[begin:end], self.zeros[begin:end], self.size)

    def dequantized(self) -> Tensor:
        """Return (N, K) float32."""
        values = unpacked(self.values)[:, : self.size].float()
        groups = values.reshape(len(self), -1, self.group)
        return ((groups - self.zeros[..., None].float()) * self.scales[..., None].float()).view(len(self), -1)


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """Experts (E, N, K) in MXFP4: values of 4 bits (e2m1), 32 of which share a power of two (e8m0).

    Source: OCP Microscaling Formats 1.0. Of a byte the low half comes first.
    """

    values: Tensor  # (E, N, K / 2) uint8
    scales: Tensor  # (E, N, K / 32) uint8: exponents, 127 more than they are

    @property
    def form(self) -> WeightForm:
        return WeightForm.MXFP4

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.values.shape[:2], 2 * self.values.shape[2]))

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def __len__(self) -> int:
        return len(self.values)

    def expert(self, index: int) -> Tensor:
        """Return the weights of one, (N, K) float32."""
        codes, exponents = self.values[index], self.scales[index]
        pairs = torch.stack((codes & 15, codes >> 4), -1).view(len(codes), -1, MXFP4_GROUP)
        values = torch.tensor(_E2M1, device=codes.device)[pairs.int()]
        return torch.ldexp(values, exponents.int()[..., None] - _E8M0_BIAS).view(len(codes), -1)


StoredWeight: TypeAlias = Fp8Weight | Int4Weight
Weight: TypeAlias = Tensor | StoredWeight | Mxfp4Weight
_Stored = TypeVar("_Stored", Fp8Weight, Int4Weight)


def packed(values: Tensor) -> Tensor:
    """Return integers of 4 bits (N, K) as bytes (N, K / 2), K rounded up to PACKED.

    The order is that of a tensor core's left operand (PTX ISA, mma.m16n8k16 and wgmma): four threads share a row, and
    of each 16 inputs a thread has two of the first eight and two of the others. So of 128 inputs each thread has 16
    bytes, eight words of 16 bits, whose lowest four bits are of the first 32 inputs, the next four of the next 32.
    """
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % PACKED))
    plane, half, eight, thread, pair = (2 + at for at in range(5))
    own = padded.view(len(values), -1, *_OPERAND).permute(0, 1, thread, half, eight, pair, plane)
    return (own[..., ::2] | (own[..., 1::2] << 4)).reshape(len(values), -1)


def unpacked(values: Tensor) -> Tensor:
    """Return the integers (N, K) of `packed`'s bytes, K rounded up."""
    planes, *inputs = _OPERAND
    own = torch.stack((values & 15, values >> 4), -1).view(len(values), -1, inputs[2], *inputs[:2], inputs[3], planes)
    return own.permute(0, 1, 6, 3, 4, 2, 5).reshape(len(values), -1)


def with_tensors(weight: _Stored, **tensors: Tensor) -> _Stored:
    return replace(weight, **tensors)


def form_of(weight: Weight) -> WeightForm:
    return WeightForm.PLAIN if isinstance(weight, Tensor) else weight.form


def plain(weight: Weight) -> Tensor:
    """Return a weight that is a tensor, where no other is read."""
    assert isinstance(weight, Tensor)
    return weight


def rounds_activations(form: WeightForm, rows: int) -> bool:
    """Whether the product of so many rows rounds them to E4M3."""
    return form in (WeightForm.FP8_CHANNEL, WeightForm.FP8_BLOCKS) and rows > MOST_EXACT_ROWS


def rounded(x: Tensor, form: WeightForm) -> tuple[Tensor, Tensor]:
    """x (R, K) -> values (R, K) float8_e4m3fn and scales float32, (R,) or with blocks (R, ceil(K / 128))."""
    if form is not WeightForm.FP8_BLOCKS:
        scales = _scale(x.float().abs().amax(1))
        return (x.float() / scales[:, None]).to(E4M3), scales
    rows, size = x.shape
    groups = torch.nn.functional.pad(x.float(), (0, -size % BLOCK)).view(rows, -1, BLOCK)
    scales = _scale(groups.abs().amax(2))
    return (groups / scales[..., None]).view(rows, -1)[:, :size].contiguous().to(E4M3), scales


def restored(values: Tensor, scales: Tensor) -> Tensor:
    """Return what `rounded` has made of x, float32."""
    each = scales[:, None] if scales.dim() == 1 else scales.repeat_interleave(BLOCK, 1)[:, : values.shape[1]]
    return values.float() * each


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """Return what E4M3 keeps of x as multiples of this scale; what is too large becomes the largest."""
    return (x.float() * (1 / scale)).clamp(-LARGEST, LARGEST).to(E4M3)


def _scale(largest: Tensor) -> Tensor:
    return largest.clamp(min=SMALLEST) / LARGEST
