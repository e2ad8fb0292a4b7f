"""The first forward passes, before any request: allocators, kernels and lazy imports meet their shapes here.

Runs on empty pools with unowned blocks, and zeroes them afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from bireme.engines.torch.forward.batch import BatchBuilder
from bireme.engines.torch.forward.forward import Forward
from bireme.engines.torch.geometry import EngineLimits
from bireme.engines.torch.pools.kv_store import KvStore
from bireme.engines.torch.step import Batch, SchedulerOutput, Sequence
from bireme.engines.torch.storage import MOST_EXACT_ROWS, WeightForm, rounds_activations
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
# What two roundings of a number to E4M3 differ by, as the root of the mean square, if nothing ties them to each other:
# half a step is 2 ** -4 of it at most. What is right differs at few places, and is off by a quarter of this.
_MOST_ERROR_OF_ROUNDED = 2**-4 * (2 / 3) ** 0.5
_MOST_ERROR_OF_FP8_KV = 0.6  # of logits: what differs in bf16 takes another step at many places, layer after layer
_MOST_ERROR_OF_EXACT = {torch.bfloat16: 2**-7, torch.float32: 1e-3}  # of one product; four roundings of bf16
# In bf16, where a rounding decides between two experts that are about as likely. Of gpt-oss' rows with random weights
# one in six differs by more between transformers' own bf16 and float32: one of several prompts must agree.
_MOST_ERROR_OF_EXPERTS = 0.3
_PROMPTS_OF_EXPERTS = 4
# Enough to choose kernels and grow the allocator; more than steps that are graphs have. A full budget may take seconds,
# as would these on a CPU.
_MOST_TOKENS = {"cuda": 1024, "cpu": 64}


class DifferentLogitsError(RuntimeError):
    """A decoder computes something else than the model's modules."""


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
    for plan in first_plans(manager, store, limits, forward.modules.uses_kernels):
        forward.run(plan)


def first_plans(
    manager: BlockManager, store: KvStore, limits: EngineLimits, uses_kernels: bool
) -> Iterator[SchedulerOutput]:
    """Yield these steps. Each is to be computed before the next is asked for; then the store is zero again."""
    size, num_blocks = manager.tokens_per_block, min(spec.num_blocks for spec in manager.groups)
    most = _MOST_TOKENS[store.device.type]
    num_tokens = max(1, min(most, limits.max_num_tokens, limits.max_seq_len - 1, num_blocks * size))
    prefill = _sequence(manager, 0, num_tokens)
    manager.grow(prefill.table, num_tokens, 0)
    yield SchedulerOutput(chunks=[(prefill, num_tokens)])
    for computed in sorted({num_tokens // 2, num_tokens * 7 // 8} - {0}):
        prefill.computed = computed
        yield SchedulerOutput(chunks=[(prefill, num_tokens - prefill.computed)])
    manager.release(prefill.table)
    count = min(limits.max_batch_size, num_blocks)
    decodes = [_sequence(manager, slot, 1) for slot in range(count)]
    for sequence in decodes:
        manager.grow(sequence.table, 1, 0)
    for rows in sorted({min(rows, count) for rows in (1, 8, 32, count)} if uses_kernels else {count}):
        yield SchedulerOutput(decodes=decodes[:rows])
    for sequence in decodes:
        manager.release(sequence.table)
    store.clear(min(num_blocks, max(count, -(-num_tokens // size))) * size + size)


def check_resident(resident: ResidentDecode, on: FirstPasses) -> None:
    """Compare a prompt and a decode step with what the model's own modules make of them. Raises RuntimeError."""
    weights = resident.decoder.weights
    if weights.form is not WeightForm.PLAIN:
        check_layers(weights, on.forward.modules)
    check_prompts(weights.embeddings.dtype, weights.has_experts, partial(_check_resident, resident, on))


def _check_resident(resident: ResidentDecode, on: FirstPasses, number: int) -> None:
    modules, builder, weights = on.forward.modules, on.forward.builder, resident.decoder.weights
    with _checked(on, number, _tokens_to_check(weights)) as (sequence, count):
        prompt = builder.build(SchedulerOutput(chunks=[(sequence, count)]))
        expected = on.findings.logits(_named(f"prompt of {count}", number), lambda: modules.compute(prompt))
        _compare("logits of a prompt are", expected, resident.decoder.compute(prompt), _most_error(weights, on.store))
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
        expected = on.findings.logits(_named(f"decode step after {count}", number), lambda: modules.compute(step))
        _compare("logits of a decode step are", expected, found, _most_error(weights, on.store))


def check_verifying(verifying: ResidentDecode, on: FirstPasses) -> None:
    """The same of a step with a draft, whose rows are of one sequence. Raises RuntimeError."""
    weights = verifying.decoder.weights
    check_prompts(weights.embeddings.dtype, weights.has_experts, partial(_check_verifying, verifying, on))


def _check_verifying(verifying: ResidentDecode, on: FirstPasses, number: int) -> None:
    modules, builder, weights = on.forward.modules, on.forward.builder, verifying.decoder.weights
    row = Row(SamplingParams(), [], (), (), verifying.vocab_size)
    with _checked(on, number, _tokens_to_check(weights)) as (sequence, count):
        modules.compute(builder.build(SchedulerOutput(chunks=[(sequence, count)])))
        _go_on(sequence, count)
        length = min(on.limits.max_draft_len, on.limits.max_seq_len - count - 1)
        on.manager.grow(sequence.table, count + 1 + length, count)
        drafts = [at % modules.vocab_size for at in range(5, 5 + length)]
        plan = SchedulerOutput(decodes=[sequence], drafts={sequence: drafts})
        if not plan.drafts[sequence]:
            return
        what = _named(f"step with a draft of {length} after {count}", number)
        expected = on.findings.logits(what, partial(_compute, modules.compute, builder, sequence, plan))
        flight = verifying.start(plan, lambda _: row)
        flight.read()
        _compare("logits of a step with a draft are", expected, flight.logits, _most_error(weights, on.store))


def check_mixed(mixed: MixedSteps, resident: ResidentDecode, on: FirstPasses) -> None:
    """The same of a prompt's rows, and of the row that decodes behind them. Raises RuntimeError."""
    weights = resident.decoder.weights
    check_prompts(weights.embeddings.dtype, weights.has_experts, partial(_check_mixed, mixed, resident, on))


def _check_mixed(mixed: MixedSteps, resident: ResidentDecode, on: FirstPasses, number: int) -> None:
    modules, builder, weights = on.forward.modules, on.forward.builder, resident.decoder.weights
    row = Row(SamplingParams(), [], (), (), resident.vocab_size)
    with _checked(on, number, _tokens_to_check(weights)) as (sequence, count):
        plans = {
            _named(f"prompt of {count}", number): SchedulerOutput(chunks=[(sequence, count)]),
            _named(f"decode step after {count}", number): SchedulerOutput(decodes=[sequence]),
        }
        for what, plan in plans.items():
            if plan.decodes:
                _go_on(sequence, count)
            by_modules = partial(_compute, modules.compute, builder, sequence, plan)
            expected = on.findings.logits(what, by_modules)
            flight = mixed.start(plan, lambda _: row)
            flight.read()
            _compare(f"logits of a mixed {what} are", expected, flight.logits, _most_error(weights, on.store))


def check_packed(decoder: PackedDecoder, builder: BatchBuilder, on: FirstPasses) -> None:
    """The same of a decoder on a CPU, and of a prompt's rest. `builder`: the decoder's."""
    check_prompts(on.store.dtype, decoder.has_experts, partial(_check_packed, decoder, builder, on))


def _check_packed(decoder: PackedDecoder, builder: BatchBuilder, on: FirstPasses, number: int) -> None:
    with _checked(on, number) as (sequence, count):
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
            expected = on.findings.logits(_named(f"{what} of {count}", number), by_modules)
            found, most_error = _compute(decoder.compute, builder, sequence, plan), _MOST_ERROR[expected.dtype]
            if decoder.has_experts and expected.dtype is torch.bfloat16:
                most_error = _MOST_ERROR_OF_EXPERTS
            _compare(f"logits of a {what} are", expected, found, most_error)


def check_prompts(dtype: torch.dtype, has_experts: bool, check: Callable[[int], None]) -> None:
    """Call it for a prompt; of a mixture in bf16 for further ones, until one agrees. Raises RuntimeError."""
    most = _PROMPTS_OF_EXPERTS if has_experts and dtype is torch.bfloat16 else 1
    for number in range(most):
        try:
            check(number)
        except DifferentLogitsError:
            if number + 1 == most:
                raise
        else:
            break


def _named(what: str, number: int) -> str:
    return f"{what}, prompt {number}" if number else what


@contextlib.contextmanager
def _checked(on: FirstPasses, number: int, most: int = _CHECKED_TOKENS) -> Iterator[tuple[Sequence, int]]:
    """Give a prompt with blocks for one token more, and its length; free the blocks, also after a failed check.

    `number`: of the prompt, of several.
    """
    manager, limits = on.manager, on.limits
    room = min(spec.num_blocks for spec in manager.groups) * manager.tokens_per_block
    count = max(1, min(most, limits.max_num_tokens, limits.max_seq_len - 2, room - 1))
    sequence = _sequence(manager, 0, count)
    # On a GPU an id beyond the vocabulary does not raise: it is the end of the device's context.
    sequence.tokens = [(7 + number) * at % min(97, on.forward.modules.vocab_size) for at in range(count)]
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


def check_layers(weights: DecoderWeights, modules: Modules) -> None:
    """Compare products of each layer with its modules' at many rows, those of the first at one and at few, too.

    Raises RuntimeError, which names the layer and the product.
    """
    size, noise = weights.embeddings.shape[1], torch.Generator().manual_seed(7)
    drawn = (0.02 * torch.randn(_CHECKED_TOKENS, size, generator=noise)).to(
        weights.embeddings
    )  # embeddings may be zero
    with torch.inference_mode():
        for index, own in enumerate(modules.layers):
            for rows in (1, 4, _CHECKED_TOKENS) if index == 0 else (_CHECKED_TOKENS,):
                x = drawn[:rows]  # small beside what is added
                for part, expected, found in _products_of(weights, index, own, x):
                    most = _most_error_of_layer(weights, part, rows)
                    _compare(f"{part} of layer {index}, {rows} rows, is", expected, found, most)


def _products_of(
    weights: DecoderWeights, index: int, own: Any, x: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the name of each product of a layer, what its modules `own` make of rows x, and what the decoder does."""
    from bireme.engines.torch.forward.products import products_for

    layer, attention = weights.layers[index], own.self_attn
    before_mlp = getattr(own, "pre_feedforward_layernorm", own.post_attention_layernorm)
    normed = own.input_layernorm(x)
    found = products_for(weights, x).qkv(layer)
    yield "QKV", torch.cat([part(normed) for part in (attention.q_proj, attention.k_proj, attention.v_proj)], 1), found
    attended = found[:, : layer.output.shape[1]].contiguous()
    expected, products = attention.o_proj(attended), products_for(weights, x.clone())
    products.add_output(layer, attended)
    yield "output", _normed(own, "post_attention_layernorm", layer.attention_post_norm, expected), products.rows() - x
    expected, products = own.mlp(before_mlp(x)), products_for(weights, x.clone())
    products.add_mlp(layer)
    yield "MLP", _normed(own, "post_feedforward_layernorm", layer.mlp_post_norm, expected), products.rows() - x


def _normed(own: Any, name: str, norm: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else getattr(own, name)(x)


def _most_error_of_layer(weights: DecoderWeights, part: str, rows: int) -> float:
    """Return how far a product of one layer may be off, relative; an MLP rounds twice, and multiplies in between."""
    dtype, is_mlp = weights.embeddings.dtype, part == "MLP"
    if not rounds_activations(weights.form, rows):
        return _MOST_ERROR_OF_EXACT[dtype] * (2 if is_mlp else 1)
    if dtype is torch.float32:
        return _MOST_ERROR_OF_FP8
    return float(_MOST_ERROR_OF_ROUNDED * (3**0.5 if is_mlp else 1))


def _most_error(weights: DecoderWeights, store: KvStore) -> float:
    """Return how far logits may be off, relative."""
    dtype = weights.embeddings.dtype
    if dtype is torch.bfloat16 and store.is_fp8:
        return _MOST_ERROR_OF_FP8_KV
    if dtype is torch.bfloat16:
        return _MOST_ERROR_OF_EXPERTS if weights.has_experts else _MOST_ERROR[dtype]
    return _MOST_ERROR[dtype] if weights.form is WeightForm.PLAIN and not store.is_fp8 else _MOST_ERROR_OF_FP8


def _tokens_to_check(weights: DecoderWeights) -> int:
    """Return the tokens of a prompt that is compared as a whole.

    In bf16 these are so few that activations are not rounded to 8 bits: a rounding that takes the next step in one
    layer is found again in all that follow, so that nothing is told by the last. Rounded ones are a layer's check.
    """
    is_told = weights.embeddings.dtype is torch.float32 or not rounds_activations(weights.form, _CHECKED_TOKENS)
    return _CHECKED_TOKENS if is_told else MOST_EXACT_ROWS


def _compare(what: str, expected: torch.Tensor, found: torch.Tensor, most_error: float) -> None:
    right = expected.to(found.device).float()
    error = float((found.float() - right).norm() / right.norm())
    if not error <= most_error:
        raise DifferentLogitsError(
            f"its {what} {error:.3g} off what the model's modules make, {most_error:.3g} at most"
        )


def _sequence(manager: BlockManager, slot: int, num_tokens: int) -> Sequence:
    request = EngineRequest(prompt=b"", sampling=SamplingParams())
    sequence = Sequence((0, 0), request, [0] * num_tokens, num_tokens, 1, frozenset(), 0.0, manager.open())
    sequence.slot, sequence.mirrored = slot, [0] * len(manager.groups)
    return sequence
