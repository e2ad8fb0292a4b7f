"""What an engine's steps take on a GPU that need not be at hand: the seam, and an estimate from peaks.

The estimate is arithmetic: what a step reads and computes, at shares of the vendor's peaks. Sources with measured times
are step_times.py, for one size of engine, and aiconfigurator.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from bireme.sizing.machines import Gpu
from bireme.sizing.model_shapes import FORMAT_BYTES, ModelShape
from bireme.sizing.step_times import StepTimes

# Shares of the peaks. An H100 with Llama 3.1 8B in BF16 was measured at 0.89 of its memory's and 0.62 of its products'
# (docs/measurements.md): engines of several ranks, and those of experts, stay further below.
_MEMORY_SHARE, _FLOPS_SHARE, _EXPERT_FLOPS_SHARE, _LINK_SHARE = 0.8, 0.55, 0.25, 0.7
_STEP_MS, _EXPERT_LAYER_MS = 0.5, 0.045  # of a step, and of a layer with experts, whatever they compute
_EXCHANGE_MS = 0.012  # of one exchange between ranks, whatever it moves
_LOADS = 1.25  # the busiest rank's share of experts' work over the mean


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """How one engine lies on its ranks."""

    ranks: int
    attention_dp: bool  # each rank has requests of its own; else all compute a part of each
    has_experts: bool

    @property
    def name(self) -> str:
        """As papers call it: TP, TEP (experts too) or DEP (attention data-parallel), with the ranks."""
        kind = "DEP" if self.attention_dp else "TEP" if self.has_experts and self.ranks > 1 else "TP"
        return f"{kind}{self.ranks}"

    @property
    def attention_ranks(self) -> int:
        """Return the ranks that share a request's attention."""
        return 1 if self.attention_dp else self.ranks


class Timings(Protocol):
    """Milliseconds; infinity: there is no time for this layout. `source` says where they come from, for readers."""

    @property
    def source(self) -> str: ...

    @property
    def missing(self) -> Mapping[str, str]:
        """Return the layouts that were asked for and have no times, each with the reason."""

    def prefill_ms(self, layout: RankLayout, num_tokens: int) -> float:
        """Return the time of one prompt alone; with attention data parallelism every rank has one."""

    def decode_ms(self, layout: RankLayout, num_rows: int, context: int, num_drafts: int) -> float:
        """Return the time of a step of `num_rows` sequences of the whole engine, each with its drafts."""


class PeakTimings:
    """Estimates."""

    missing: Mapping[str, str] = {}

    def __init__(self, shape: ModelShape, gpu: Gpu, kv_value_bytes: float) -> None:
        self.source = f"estimated from the {gpu.name.upper()}'s peaks, to a factor of two"
        self._shape, self._gpu, self._kv_value_bytes = shape, gpu, kv_value_bytes

    def prefill_ms(self, layout: RankLayout, num_tokens: int) -> float:
        shape, rows = self._shape, layout.ranks if layout.attention_dp else 1
        products = 2 * shape.active_params * num_tokens * rows
        products += 2 * shape.num_layers * shape.hidden * num_tokens**2 * rows  # scores and values of half the pairs
        compute = products / (self._flops() * layout.ranks)
        return 1e3 * compute + self._exchanges_ms(layout, num_tokens * rows) + self._step_ms()

    def decode_ms(self, layout: RankLayout, num_rows: int, context: int, num_drafts: int) -> float:
        shape, tokens = self._shape, num_rows * (num_drafts + 1)
        read = self._read_weights(layout, tokens) + self._read_kv(layout, num_rows, context)
        memory = read / (self._gpu.memory_bytes_per_s * _MEMORY_SHARE)
        compute = 2 * shape.active_params * tokens / (self._flops() * layout.ranks)
        return 1e3 * max(memory, compute) + self._exchanges_ms(layout, tokens) + self._step_ms()

    def _flops(self) -> float:
        share = _EXPERT_FLOPS_SHARE if self._shape.has_experts else _FLOPS_SHARE
        return self._gpu.flops_of(self._shape.weights) * share

    def _step_ms(self) -> float:
        return _STEP_MS + (_EXPERT_LAYER_MS * self._shape.num_layers if self._shape.has_experts else 0)

    def _read_weights(self, layout: RankLayout, tokens: int) -> float:
        """Return what one rank reads: of experts those that a token of the step goes to."""
        shape = self._shape
        read = (shape.attention_bytes + shape.embedding_bytes / 2) / layout.attention_ranks
        read += shape.mlp_bytes / layout.attention_ranks
        if not shape.has_experts:
            return read
        untouched = (1 - shape.experts_per_token / shape.num_experts) ** tokens
        return read + shape.expert_bytes * (1 - untouched) / layout.ranks * (_LOADS if layout.ranks > 1 else 1)

    def _read_kv(self, layout: RankLayout, num_rows: int, context: int) -> float:
        row = self._shape.kv_values(context) * self._kv_value_bytes
        return num_rows * row / kv_parts(self._shape, layout)

    def _exchanges_ms(self, layout: RankLayout, tokens: int) -> float:
        """Return the time of exchanges: two a layer, around attention and around the products behind it."""
        if layout.ranks == 1:
            return 0.0
        gpu, shape = self._gpu, self._shape
        link = gpu.nvlink_bytes_per_s if layout.ranks <= gpu.nvlink_domain else gpu.network_bytes_per_s
        copies = min(shape.experts_per_token, layout.ranks) if layout.attention_dp else 2
        moved = copies * tokens * shape.hidden * FORMAT_BYTES["bf16"] / (layout.ranks if layout.attention_dp else 1)
        return 2 * shape.num_layers * (_EXCHANGE_MS + 1e3 * moved / (link * _LINK_SHARE))


class MeasuredTimings:
    """A table of step times, which is of one model and of engines of one GPU."""

    def __init__(self, times: StepTimes) -> None:
        self.missing: dict[str, str] = {}
        self.source = f"measured: {times.table.machine}"
        self._times = times
        self._chunk = max((point.prefill_tokens for point in times.table.points), default=0) or 1

    def prefill_ms(self, layout: RankLayout, num_tokens: int) -> float:
        """As the table's engine computes it, in steps of the most tokens that it was measured with."""
        if self._lacks(layout, 0):
            return math.inf
        begins = range(0, num_tokens, self._chunk)
        sizes = [min(self._chunk, num_tokens - begin) for begin in begins]
        return sum(
            self._times.step_ms(0, size, prompts=int(not begin), tokens_times_context=size * begin)
            for begin, size in zip(begins, sizes, strict=True)
        )

    def decode_ms(self, layout: RankLayout, num_rows: int, context: int, num_drafts: int) -> float:
        if self._lacks(layout, num_drafts):
            return math.inf
        return self._times.step_ms(num_rows, context=num_rows * context)

    def _lacks(self, layout: RankLayout, num_drafts: int) -> bool:
        if layout.ranks > 1 or num_drafts:
            self.missing[layout.name] = "the table is of engines of one GPU, without drafts"
        return layout.name in self.missing


def kv_parts(shape: ModelShape, layout: RankLayout) -> int:
    """Return over how many ranks the engine's KV is spread: requests apart, or heads as far as there are."""
    if layout.attention_dp:
        return layout.ranks
    return 1 if shape.is_latent else min(layout.ranks, shape.num_kv_heads)
