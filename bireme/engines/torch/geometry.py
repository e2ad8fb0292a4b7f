"""What never changes after the start: the shape of layers, their groups, what one engine takes, what its GPU must be.

Needs no torch: a program that starts engines says with it what they will take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from bireme.settings import NO_QUANT

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Capability: TypeAlias = tuple[int, int]

NEWEST: Capability = (99, 0)  # taken for a GPU whose driver does not tell
# Compute capabilities by the PTX ISA's target notes, for the instructions that our kernels are made of.
_FIRST_WITH_FP8 = (8, 9)  # cvt.rn.f16x2.e4m3x2
_FIRST_WITH_BFLOAT16 = (8, 0)  # fma.rn.bf16x2, which 4-bit weights are unpacked with, too
NO_FEW_BITS = "a CPU, or a GPU without triton, has no products of weights in few bits"
NEWER_GPU = "remove it, or take a newer GPU"  # where quant_config asks a plain checkpoint to be rounded
DEQUANTIZE = f"remove it, or set {NO_QUANT}, to have it dequantized"
OTHER_DTYPE = "set auto or float32, or take a newer GPU"
MOST_GATHERED_BYTES = 4 << 20  # of keys and values that decode rows copy at once, on a CPU: at least one row's
MOST_SCORES = 1 << 20  # that attention writes out at once where it has to, on a CPU: a prompt's rows take turns


def why_no_fp8(capability: Capability) -> str:
    """Return why a GPU takes no 8-bit floats, as weights or KV; empty: it does."""
    return _before(_FIRST_WITH_FP8, "8-bit floats", capability)


def why_no_bfloat16(capability: Capability) -> str:
    """Return why a GPU does not compute in bfloat16; empty: it does."""
    return _before(_FIRST_WITH_BFLOAT16, "bfloat16", capability)


def why_no_few_bits(algo: str, capability: Capability) -> str:
    """Return why a GPU does not multiply with weights of this `quant_config.quant_algo`; empty: it does."""
    return why_no_fp8(capability) if algo.startswith("FP8") else why_no_bfloat16(capability)


def _before(first: Capability, what: str, capability: Capability) -> str:
    if capability >= first:
        return ""
    least, own = (".".join(map(str, numbers)) for numbers in (first, capability))
    return f"GPUs before compute capability {least} have no {what}, and this one has {own}"


@dataclass(frozen=True, slots=True)
class KvScales:
    """What a layer's keys and values are multiples of where pools keep them as 8-bit floats."""

    keys: float = 1.0
    values: float = 1.0


UNSCALED = KvScales()


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """A layer's attention call, as the probe saw it, and what its keys and values are kept in."""

    num_kv_heads: int
    key_size: int
    value_size: int
    window: int  # 0: all
    dtype: torch.dtype  # that they are computed in
    unknown: tuple[str, ...]
    scales: KvScales | None = None  # of 8-bit floats; None: they are kept as they are computed

    @property
    def row_sizes(self) -> tuple[int, int]:
        """Return the values of a token's keys, and of its values."""
        return self.num_kv_heads * self.key_size, self.num_kv_heads * self.value_size

    @property
    def row_bytes(self) -> int:
        """Return what a pool has of a token."""
        return sum(self.row_sizes) if self.scales else self.computed_row_bytes

    @property
    def computed_row_bytes(self) -> int:
        return sum(self.row_sizes) * int(self.dtype.itemsize)

    @property
    def gathered_row_bytes(self) -> int:
        """Return what a token takes that is copied out of a pool to be attended to: 8-bit floats are converted."""
        return self.computed_row_bytes + (self.row_bytes if self.scales else 0)


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """The layer of a head, whose keys and values lie beside the model's."""

    geometry: LayerGeometry
    identity: str  # rows of equal tokens are equal where this and the model's are


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
        LayerGroup(window, layers, tuple(geometry[layer].row_bytes for layer in layers))
        for window in windows
        for layers in [tuple(index for index, layer in enumerate(geometry) if layer.window == window)]
    )


@dataclass(frozen=True, slots=True)
class Rotary:
    """How a layer's queries and keys are normed and turned."""

    cos_sin: Tensor  # (positions, K) float32: the cosines of the K / 2 angles, then their sines
    eps: float = 0.0
    q_norm: Tensor | None = None  # (K,)
    k_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TopKRouter:
    """How a mixture's layer chooses a token's experts: those with the highest probabilities, which weigh them."""

    weight: Tensor  # (E, hidden)
    top_k: int
    is_normed: bool  # the weights of those chosen add up to one
    bias: Tensor | None = None  # (E,)


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """gpt-oss' gate: g * sigmoid(alpha * g) * (u + 1), of g = min(gate, limit) and u = up within the limit, both ways.

    Rows of gate and of up take turns in the weights, where others have all of gate above all of up.
    """

    limit: float
    alpha: float

    def of(self, gate_up: Tensor) -> Tensor:
        """gate_up (T, 2 I) -> (T, I), computed in float32."""
        gate, up = gate_up.float().unflatten(-1, (-1, 2)).unbind(-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (gate * (self.alpha * gate).sigmoid() * (up + 1)).to(gate_up.dtype)


@dataclass(frozen=True, slots=True)
class Mixture:
    """What an MLP of E experts, I wide, has beside their weights."""

    router: TopKRouter
    clamp: ClampedGate | None = None
    gate_up_bias: Tensor | None = None  # (E, 2 I)
    down_bias: Tensor | None = None  # (E, hidden)


_MOST_VERIFIED = 512  # rows of a step: logits and scratch of each take about a megabyte of an 8B model


@dataclass(frozen=True, slots=True)
class EngineLimits:
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int  # of the model and the settings; the pool may hold less
    max_input_len: int
    tokens_per_block: int
    enable_chunked_prefill: bool
    may_preempt: bool  # MAX_UTILIZATION
    max_logprob_rows: int
    max_queue_size: int
    max_queue_time_s: float
    best_effort_share: float
    max_stream_gap_s: float = 0.0  # of steps that have decodes; 0: none
    max_draft_len: int = 0  # tokens of a draft; 0: there are none
    overlaps: bool = False  # a decode step is started before the tokens of the one before are read

    @property
    def most_verified_rows(self) -> int:
        """Return the most rows of a step with drafts that is one launch on a GPU; 0: there are no drafts."""
        if not self.max_draft_len:
            return 0
        rows = min(self.max_batch_size * (1 + self.max_draft_len), self.max_num_tokens)
        return min(rows, max(self.max_batch_size + self.max_draft_len, _MOST_VERIFIED))

    @property
    def most_sampled_rows(self) -> int:
        """Return the most rows of a step that have logits to draw from, those of drafts among them."""
        return min(self.max_batch_size * (1 + self.max_draft_len), self.max_num_tokens)

    @property
    def most_blocks(self) -> int:
        """Return the blocks of the longest row, its next token included."""
        return -(-self.max_seq_len // self.tokens_per_block) + 1
