"""The first forward passes, before any request: allocators, kernels and lazy imports meet their shapes here.

Runs on empty pools with unowned blocks, and zeroes them afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from bireme.engines.torch.forward.batch import BatchBuilder
from bireme.engines.torch.forward.forward import Forward
from bireme.engines.torch.geometry import EngineLimits
from bireme.engines.torch.pools.kv_store import KvStore
from bireme.engines.torch.step import Batch, SchedulerOutput, Sequence
from bireme.engines.torch.storage import WeightForm, rounds_activations
from bireme.engines.torch.weights.findings import Findings
from bireme.kv.blocks.block_manager import BlockManager
from bireme.logits.rows import Row
from bireme.messages import EngineRequest, SamplingParams

if TYPE_CHECKING:
    from bireme.engines.torch.forward.decoder_weights import DecoderWeights
    from bireme.engines.torch.forward.mixed_steps import MixedSteps
    from bireme.engines.torch.forward.modules import Modules
    from bireme.engines.torch.forward.packed_decoder import PackedDecoder
    from bireme.engines.torch.forward.resident_decode import ResidentDecode

_CHECKED_TOKENS = 40
_MOST_ERROR = {torch.bfloat16: 0.1, torch.float32: 1e-3}  # relative; bf16's own is 0.04
_MOST_ERROR_OF_FP8 = 0.02  # in float32, where rounding may take the next step of 8-bit floats
# In bf16 what differs takes another step at many places, layer after layer: of random weights 0.38 on an H100, whose
# own were 0.07 off without it. What is wrong is off by 1 and more; layers by themselves are held to less.
_MOST_ERROR_OF_ROUNDED = 0.6
_MOST_ERROR_OF_LAYER = 0.1
_MOST_ERROR_OF_EXPERTS = 0.3  # in bf16, where a rounding decides between two experts that are about as likely
# Enough to choose kernels and grow the allocator; more than steps that are graphs have. A full budget may take seconds,
# as would these on a CPU.
_MOST_TOKENS = {"cuda": 1024, "cpu": 64}


@dataclass(frozen=True, slots=True)
class FirstPasses:
    """What a decoder is compared on with the modules."""

    forward: Forward
    manager: BlockManager
    store: KvStore
    limits: EngineLimits
    findings: Findings


def warm_up(forward: Forward, manager: BlockManager, store: KvStore, limits: EngineLimits) -> None:
    """Run a prefill, many and few tokens behind a prefix, and a decode step of the largest batch that fits.

    Of kernels all variants.
    """
    run, size = forward.run, manager.tokens_per_block
    room = min(spec.num_blocks for spec in manager.groups) * size
    num_tokens = max(1, min(_MOST_TOKENS[store.device.type], limits.max_num_tokens, limits.max_seq_len - 1, room))
    prefill = _sequence(manager, 0, num_tokens)
    manager.grow(prefill.table, num_tokens, 0)
    run(SchedulerOutput(chunks=[(prefill, num_tokens)]))
    for computed in sorted({num_tokens // 2, num_tokens * 7 // 8} - {0}):
        prefill.computed = computed
        run(SchedulerOutput(chunks=[(prefill, num_tokens - prefill.computed)]))
    manager.release(prefill.table)
    count = min(limits.max_batch_size, min(spec.num_blocks for spec in manager.groups))
    decodes = [_sequence(manager, slot, 1) for slot in range(count)]
    for sequence in decodes:
        manager.grow(sequence.table, 1, 0)
    for rows in sorted({min(rows, count) for rows in (1, 8, 32, count)} if forward.modules.uses_kernels else {count}):
        run(SchedulerOutput(decodes=decodes[:rows]))
    for sequence in decodes:
        manager.release(sequence.table)
    store.clear(min(min(spec.num_blocks for spec in manager.groups), max(count, -(-num_tokens // size))) * size + size)


def check_resident(resident: ResidentDecode, on: FirstPasses) -> None:
    """Compare a prompt and a decode step with what the model's own modules make of them. Raises RuntimeError."""
    modules, builder, weights = on.forward.modules, on.forward.builder, resident.decoder.weights
    if weights.form is not WeightForm.PLAIN:
        check_layer(weights, modules)
    with _checked(on.manager, on.limits) as (sequence, count):
        prompt = builder.build(SchedulerOutput(chunks=[(sequence, count)]))
        expected = on.findings.logits(f"prompt of {count}", lambda: modules.compute(prompt))
        _compare("prompt", expected, resident.decoder.compute(prompt), _most_error(weights, count, on.store))
        _go_on(sequence, count)
        step = builder.build(SchedulerOutput(decodes=[sequence]))
        row = Row(SamplingParams(), [], (), (), resident.vocab_size)
        resident.graphs.make(1)
        flight = resident.start(SchedulerOutput(decodes=[sequence]), lambda _: row)
        flight.read()
        if resident.graphs.error:
            raise RuntimeError(f"its first graph: {resident.graphs.error}")
        found = flight.logits.clone()
        again = [(sequence.slot, 0, row)]  # now, and not when a request would wait for its kernel
        flight.choose_again(found[:, : resident.vocab_size].clone(), again)
        expected = on.findings.logits(f"decode step after {count}", lambda: modules.compute(step))
        _compare("decode step", expected, found, _most_error(weights, 1, on.store))


def check_mixed(mixed: MixedSteps, resident: ResidentDecode, on: FirstPasses) -> None:
    """The same of a prompt's rows, and of the row that decodes behind them. Raises RuntimeError."""
    modules, builder, weights = on.forward.modules, on.forward.builder, resident.decoder.weights
    row = Row(SamplingParams(), [], (), (), resident.vocab_size)
    with _checked(on.manager, on.limits) as (sequence, count):
        plans = {
            f"prompt of {count}": SchedulerOutput(chunks=[(sequence, count)]),
            f"decode step after {count}": SchedulerOutput(decodes=[sequence]),
        }
        for what, plan in plans.items():
            if plan.decodes:
                _go_on(sequence, count)
            by_modules = partial(_compute, modules.compute, builder, sequence, plan)
            expected = on.findings.logits(what, by_modules)
            flight = mixed.start(plan, lambda _: row)
            flight.read()
            _compare(f"mixed {what}", expected, flight.logits, _most_error(weights, plan.num_tokens, on.store))


def check_packed(decoder: PackedDecoder, builder: BatchBuilder, on: FirstPasses) -> None:
    """The same of a decoder on a CPU, and of a prompt's rest. `builder`: the decoder's."""
    with _checked(on.manager, on.limits) as (sequence, count):
        plans = {
            "prompt": SchedulerOutput(chunks=[(sequence, count)]),
            "prompt's rest": SchedulerOutput(chunks=[(sequence, count - count // 2)]),
            "decode step": SchedulerOutput(decodes=[sequence]),
        }
        for (what, plan), computed in zip(plans.items(), (0, count // 2, count), strict=True):
            if computed == count:
                _go_on(sequence, count)
            sequence.computed = computed
            by_modules = partial(_compute, on.forward.modules.compute, on.forward.builder, sequence, plan)
            expected = on.findings.logits(f"{what} of {count}", by_modules)
            found, most_error = _compute(decoder.compute, builder, sequence, plan), _MOST_ERROR[expected.dtype]
            if decoder.has_experts and expected.dtype is torch.bfloat16:
                most_error = _MOST_ERROR_OF_EXPERTS
            _compare(what, expected, found, most_error)


@contextlib.contextmanager
def _checked(manager: BlockManager, limits: EngineLimits) -> Iterator[tuple[Sequence, int]]:
    """Give a prompt with blocks for one token more, and its length; free the blocks, also after a failed check."""
    room = min(spec.num_blocks for spec in manager.groups) * manager.tokens_per_block
    count = max(1, min(_CHECKED_TOKENS, limits.max_num_tokens, limits.max_seq_len - 2, room - 1))
    sequence = _sequence(manager, 0, count)
    sequence.tokens = [7 * at % 97 for at in range(count)]
    manager.grow(sequence.table, count + 1, 0)
    try:
        yield sequence, count
    finally:
        manager.release(sequence.table)


def _compute(
    compute: Callable[[Batch], torch.Tensor], builder: BatchBuilder, sequence: Sequence, plan: SchedulerOutput
) -> torch.Tensor:
    sequence.mirrored = [0] * len(sequence.mirrored)  # nothing: another builder has built its last step
    return compute(builder.build(plan))


def _go_on(sequence: Sequence, computed: int) -> None:
    sequence.computed = computed
    sequence.tokens.append(11)


def check_layer(weights: DecoderWeights, modules: Modules) -> None:
    """Compare products of the first layer with its modules' at one row, at few, and at more. Raises RuntimeError."""
    from bireme.engines.torch.forward.products import products_for

    layer, own = weights.layers[0], modules.first_layer
    attention, norm = own.self_attn, getattr(own, "pre_feedforward_layernorm", own.post_attention_layernorm)
    with torch.inference_mode():
        for rows in (1, 4, _CHECKED_TOKENS):
            x = weights.embeddings[:rows] * (0.02 / weights.embeddings[:rows].std())  # small beside what is added
            normed = own.input_layernorm(x)
            expected = torch.cat([part(normed) for part in (attention.q_proj, attention.k_proj, attention.v_proj)], 1)
            _compare(f"layer's QKV of {rows}", expected, products_for(weights, x).qkv(layer), _MOST_ERROR_OF_LAYER)
            expected = own.mlp(norm(x))
            if layer.mlp_post_norm is not None:
                expected = own.post_feedforward_layernorm(expected)
            products = products_for(weights, x.clone())
            products.add_mlp(layer)
            _compare(f"layer's MLP of {rows}", expected, products.rows() - x, _MOST_ERROR_OF_LAYER)


def _most_error(weights: DecoderWeights, rows: int, store: KvStore) -> float:
    """Return how far logits of a step with so many rows may be off, relative."""
    dtype = weights.embeddings.dtype
    if dtype is torch.bfloat16 and (store.is_fp8 or rounds_activations(weights.form, rows)):
        return _MOST_ERROR_OF_ROUNDED
    if dtype is torch.bfloat16:
        return _MOST_ERROR_OF_EXPERTS if weights.has_experts else _MOST_ERROR[dtype]
    return _MOST_ERROR[dtype] if weights.form is WeightForm.PLAIN and not store.is_fp8 else _MOST_ERROR_OF_FP8


def _compare(what: str, expected: torch.Tensor, found: torch.Tensor, most_error: float) -> None:
    right = expected.to(found.device).float()
    error = float((found.float() - right).norm() / right.norm())
    if not error <= most_error:
        raise RuntimeError(f"its logits of a {what} are {error:.3g} off those of the model's modules")


def _sequence(manager: BlockManager, slot: int, num_tokens: int) -> Sequence:
    request = EngineRequest(prompt=b"", sampling=SamplingParams())
    sequence = Sequence((0, 0), request, [0] * num_tokens, num_tokens, 1, frozenset(), 0.0, manager.open())
    sequence.slot, sequence.mirrored = slot, [0] * len(manager.groups)
    return sequence
