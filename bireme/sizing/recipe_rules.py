"""What an engine YAML should say, as decisions with their reasons: pure functions over a model, a GPU and a layout.

Published: NVIDIA Dynamo's examples/backends/trtllm at 976bb70a3b97 (engine_configs, performance_sweeps) and
TensorRT-LLM's examples/configs/curated. Numbers that these give stand as tables; tests hold the rules to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bireme.engine_kinds import EngineKind
from bireme.sizing.machines import Gpu
from bireme.sizing.model_shapes import FORMAT_BYTES, ModelShape
from bireme.sizing.timings import RankLayout, kv_parts

Stage = Literal["prefill", "decode", "aggregated"]

# A TEP engine's most tokens a step in the published sweeps (4 and 8 ranks); larger steps, and more ranks, are DEP.
MOST_TEP_TOKENS, MOST_TEP_RANKS = 128, 8
WIDE_RANKS = 16
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 2048)
# Sequences of a rank (TEP: of the engine) up to which so many tokens are drafted; more rows leave less room.
DRAFTS_BY_ROWS = ((32, 3), (64, 2), (math.inf, 1))
# Ranks -> (tokens of a step of one rank from which experts are balanced, copies of experts), largest first.
BALANCED_FROM: dict[int, tuple[tuple[int, int], ...]] = {32: ((64, 32),), 16: ((256, 32), (192, 0))}
_ALIGNED = 128  # lengths are rounded up to whole blocks of any size in use
# Beyond the prompt that is asked for: a chat template's tokens and the spread of lengths.
PROMPT_MARGIN = 203
_MOST_PREFILL_TOKENS, _LEAST_PREFILL_TOKENS = 16384, 8192
_LEAST_DECODE_TOKENS = 256
_LONG_STEP = 8192  # tokens a step from which aggregated DEP engines were published with a third of the memory
_RESERVED_BYTES = 4 << 30  # CUDA's context, NCCL, graphs, workspaces
_ACTIVATIONS = 16  # hidden vectors of BF16 that a token of a step has at once


@dataclass(frozen=True, slots=True)
class Chosen:
    """A setting with its reason. `value` None: the key stays unset."""

    value: Any
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Of the requests that a recipe is for."""

    prompt: int
    output: int
    most: int = 0  # tokens of the longest prompt that is served; 0: little more than `prompt`

    @property
    def longest_prompt(self) -> int:
        return self.most or self.prompt + PROMPT_MARGIN

    @property
    def longest(self) -> int:
        return self.longest_prompt + self.output

    @property
    def usual(self) -> int:
        """Return the tokens that a sequence of this load keeps at its end."""
        return min(self.longest, self.prompt + PROMPT_MARGIN + self.output)


def attention_dp(shape: ModelShape, stage: Stage, ranks: int, step_tokens: int) -> Chosen:
    """`step_tokens`: of the engine."""
    if not shape.has_experts or ranks == 1:
        return Chosen(False, "the model is dense" if ranks > 1 else "one rank")
    if stage == "prefill":
        if shape.is_latent:
            return Chosen(True, "latent attention has no heads to split KV by: each rank has a prompt of its own")
        return Chosen(False, "ranks share a prompt's heads: its first token comes sooner")
    if ranks > MOST_TEP_RANKS:
        return Chosen(True, f"wide expert parallelism: {ranks} ranks exchange tokens, not parts of attention")
    if step_tokens > MOST_TEP_TOKENS:
        return Chosen(True, f"throughput: published from {MOST_TEP_TOKENS} tokens a step on, here {step_tokens}")
    return Chosen(False, f"latency: published up to {MOST_TEP_TOKENS} tokens a step, here {step_tokens}")


def drafts(shape: ModelShape, rows: int, wanted: int | None) -> Chosen:
    """`wanted`: None: as many as the table has; 0: none. `rows`: of a rank."""
    if wanted == 0:
        return Chosen(0)
    if wanted is not None:
        return Chosen(wanted, "as asked")
    value = next(count for most, count in DRAFTS_BY_ROWS if rows <= most)
    return Chosen(value, f"published for {rows} sequences: the fewer, the more room a step has for drafts")


def moe_backend(shape: ModelShape, gpu: Gpu, layout: RankLayout, stage: Stage) -> Chosen:
    if not shape.has_experts:
        return Chosen(None)
    if not gpu.is_blackwell:
        if shape.weights == "mxfp4":
            return Chosen("TRITON", "MXFP4 on Hopper")
        return Chosen("CUTLASS", "Hopper: the others' kernels are for Blackwell")
    if shape.weights == "fp8_blocks":
        return Chosen("DEEPGEMM", "FP8 block scales on Blackwell")
    if stage == "aggregated" and shape.weights == "mxfp4":
        return Chosen("TRTLLM", "MXFP4 on Blackwell, as published for throughput")
    if stage != "prefill" and shape.weights in ("nvfp4", "mxfp4"):
        if not layout.attention_dp:
            return Chosen("TRTLLM", "few tokens a step: Blackwell's kernels for latency")
        if layout.ranks >= WIDE_RANKS and shape.weights == "nvfp4":
            return Chosen("CUTEDSL", "16 ranks or more with attention data parallelism; WIDEEP until 1.2")
    return Chosen("CUTLASS", "published for prefill" if stage == "prefill" else "attention data parallelism")


def expert_slots(shape: ModelShape, layout: RankLayout, backend: str | None, step_tokens: int) -> Chosen:
    """`step_tokens`: of one rank."""
    known = [ranks for ranks in BALANCED_FROM if layout.ranks >= ranks]
    if not known or not layout.attention_dp or backend in ("TRITON", None):
        return Chosen(0)
    for least, copies in BALANCED_FROM[max(known)]:
        if step_tokens >= least:
            slots = -(-(shape.num_experts + copies) // layout.ranks) * layout.ranks
            reason = f"{shape.num_experts} experts and {slots - shape.num_experts} copies of the busy ones"
            return Chosen(slots, f"{reason}, {slots // layout.ranks} slots a rank")
    return Chosen(0)


def graph_sizes(max_batch_size: int) -> Chosen:
    sizes = sorted({size for size in GRAPH_SIZES if size < max_batch_size} | {max_batch_size})
    return Chosen(sizes, "padded to the next size: every batch runs in a graph")


def allreduce_strategy(gpu: Gpu, layout: RankLayout, gpus_per_node: int) -> Chosen:
    if layout.attention_dp or not gpus_per_node < layout.ranks <= gpu.nvlink_domain:
        return Chosen(None)
    return Chosen("MNNVL", "ranks of several nodes add up by NVLink")


def memory_fraction(stage: Stage, layout: RankLayout, step_tokens: int) -> Chosen:
    if stage == "prefill":
        if layout.attention_dp:
            return Chosen(0.75, "room for attention over long inputs")
        return Chosen(0.85, "as published for prefill without attention data parallelism")
    if not layout.attention_dp:
        return Chosen(0.9 if stage == "decode" else 0.85, "all but what steps need")
    if stage == "aggregated" and step_tokens >= _LONG_STEP:
        return Chosen(0.3, "long prompts on every rank at once need the rest")
    if layout.ranks >= 32:
        return Chosen(0.7, "exchange buffers grow with the ranks")
    return Chosen(0.8, "exchange buffers need some")


def kv_dtype(shape: ModelShape, kind: EngineKind) -> Chosen:
    if kind.has_llm_args and shape.weights in ("fp8", "fp8_blocks", "nvfp4"):
        return Chosen("fp8", "half the bytes of BF16: twice the tokens")
    return Chosen(None)


def kv_value_bytes(shape: ModelShape, kind: EngineKind) -> int:
    return 1 if kv_dtype(shape, kind).value == "fp8" else 2


def prefill_tokens(lengths: Lengths) -> Chosen:
    whole = aligned(lengths.longest_prompt)
    if whole > _MOST_PREFILL_TOKENS:
        return Chosen(_MOST_PREFILL_TOKENS, f"the longest prompt, {whole} tokens, takes several steps")
    if whole < _LEAST_PREFILL_TOKENS:
        return Chosen(_LEAST_PREFILL_TOKENS, "several prompts fill a step")
    return Chosen(whole, "the longest prompt in one step")


def prefill_batch(lengths: Lengths, max_num_tokens: int) -> Chosen:
    value = min(256, max(1, max_num_tokens // lengths.prompt))
    return Chosen(value, "one prompt fills a step" if value == 1 else "whole prompts that fit a step")


def decode_tokens(rows: int, num_drafts: int) -> Chosen:
    """Return what a step of a worker takes that gets its prompts' KV from prefill."""
    needed = rows * (num_drafts + 1)
    if needed < _LEAST_DECODE_TOKENS:
        return Chosen(_LEAST_DECODE_TOKENS, "more than its sequences: short prompts are computed here")
    what = "one token" if not num_drafts else f"one sure and {num_drafts} drafted token(s)"
    return Chosen(1 << (needed - 1).bit_length() if num_drafts else needed, f"{what} for each sequence of a step")


def aggregated_tokens(rows: int, num_drafts: int, lengths: Lengths) -> Chosen:
    """As the published sweep has it: the decoding rows, a prompt, some room, in whole 64s."""
    whole = min(lengths.prompt, _MOST_PREFILL_TOKENS)
    value = ((num_drafts + 1) * rows + whole + 128 + 63) // 64 * 64
    return Chosen(value, "a prompt beside a full batch that generates")


def buffer_tokens(lengths: Lengths) -> Chosen:
    return Chosen(aligned(lengths.longest_prompt), "the longest prompt: one that does not fit never arrives")


def aligned(num_tokens: int) -> int:
    return -(-num_tokens // _ALIGNED) * _ALIGNED


def rank_weight_bytes(shape: ModelShape, layout: RankLayout, slots: int = 0) -> float:
    """Return what one rank holds; with attention data parallelism all of attention."""
    shared = (shape.attention_bytes + shape.mlp_bytes + shape.embedding_bytes) / layout.attention_ranks
    copies = slots / shape.num_experts if slots else 1.0
    return shared + copies * shape.expert_bytes / layout.ranks


def kv_tokens(shape: ModelShape, gpu: Gpu, layout: RankLayout, value_bytes: int, spent: Spent) -> int:
    """Return the tokens that an engine's pools hold, of sequences with `spent.longest`; 0 or less: it does not fit."""
    free = gpu.memory_bytes - rank_weight_bytes(shape, layout, spent.slots) - _RESERVED_BYTES
    free -= spent.step_tokens * shape.hidden * FORMAT_BYTES["bf16"] * _ACTIVATIONS
    row = shape.kv_values(spent.longest) * value_bytes / spent.longest
    parts = kv_parts(shape, layout)
    free = free * spent.fraction - spent.buffer_tokens * row / min(parts, layout.attention_ranks)
    return int(free * parts / row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What of a rank's memory is no KV."""

    step_tokens: int
    fraction: float
    buffer_tokens: int = 0
    slots: int = 0
    longest: int  # of a sequence: layers with windows keep less of a long one


def batch_sizes(most: int) -> Sequence[int]:
    """Return those that are tried: powers of two."""
    return [1 << power for power in range(most.bit_length())]
