"""What weights are stored in: a tensor of the dtype that the model computes in, or 8-bit floats with scales.

E4M3 has four bits of exponent and three of mantissa, values up to 448 (Micikevicius et al., "FP8 Formats for Deep
Learning", 2022). Scales are of output channels, or of blocks of 128 x 128 as in DeepSeek-V3 (arXiv 2412.19437, 3.3).
Products of few rows take activations as they are; those of more rows round them to E4M3 as well, with a scale a row,
or with blocks one for each 128 values of a row. Those scales are found when they are rounded.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

BLOCK = 128
E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST = 1e-12  # of what scales are made from: zeros have one, too
MOST_EXACT_ROWS = 16  # activations of more are rounded
MXFP4_GROUP = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E8M0_BIAS = 127


class WeightForm(enum.StrEnum):
    """Names in the log, and of the metric's label."""

    PLAIN = enum.auto()  # the dtype that the model computes in
    FP8_CHANNEL = enum.auto()
    FP8_BLOCKS = enum.auto()
    Q4_0 = enum.auto()  # ggml's blocks, on a CPU
    Q4_1 = enum.auto()
    Q8_0 = enum.auto()
    MXFP4 = enum.auto()  # experts alone: the other projections are plain


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

    def dequantized(self) -> Tensor:
        """Return (N, K) float32."""
        rows, columns = self.values.shape
        if self.scales.dim() == 1:
            return self.values.float() * self.scales[:, None]
        scales = self.scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        return self.values.float() * scales


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


Weight: TypeAlias = Tensor | Fp8Weight | Mxfp4Weight


def form_of(weight: Weight) -> WeightForm:
    return WeightForm.PLAIN if isinstance(weight, Tensor) else weight.form


def plain(weight: Weight) -> Tensor:
    """Return a weight that is a tensor, where no other is read."""
    assert isinstance(weight, Tensor)
    return weight


def parts_of(weight: Weight) -> tuple[Tensor, Tensor | None, int]:
    """Return what kernels take: values, scales, and the size of blocks (0: none)."""
    if not isinstance(weight, Fp8Weight):
        return plain(weight), None, 0
    return weight.values, weight.scales, BLOCK if weight.form is WeightForm.FP8_BLOCKS else 0


def rounds_activations(form: WeightForm, rows: int) -> bool:
    """Whether the product of so many rows rounds them to E4M3."""
    return form is not WeightForm.PLAIN and rows > MOST_EXACT_ROWS


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
