"""Which engines, how many of each and how large: every layout that fits is tried, the one that serves most is taken.

A steady state is computed: engines that are never idle, requests of one length, prefill no busier than a share. Where a
target or the GPUs leave nothing, ConfigError names what is short and what to change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from bireme.engine_kinds import ENGINE_KINDS, EngineKind, EngineName
from bireme.errors import ConfigError
from bireme.sizing import recipe_rules as rules
from bireme.sizing.machines import Gpu
from bireme.sizing.model_shapes import ModelShape
from bireme.sizing.recipe_rules import Chosen, Lengths, Spent, Stage
from bireme.sizing.timings import RankLayout, Timings

Mode = Literal["auto", "aggregated", "disaggregated"]

_MOST_ROWS, _MOST_OWN_ROWS = 1024, 256  # of a rank: more were not published; of our engine, not measured
_MOST_REPLICAS = 64  # of a recipe
BUSY = 0.8  # of prefill's time: above it prompts queue
ACCEPTED = 0.6  # of each drafted token, as long as all before it were; assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a recipe is to do, and with what. Pins: 0 or None leaves it open."""

    shape: ModelShape
    gpu: Gpu
    nodes: int
    gpus_per_node: int
    lengths: Lengths
    ttft_ms: float = math.inf
    itl_ms: float = math.inf
    concurrency: int = 0  # requests under way at once; 0: as many as the targets allow
    engine: EngineName = "trtllm"
    mode: Mode = "auto"
    drafts: int | None = 0  # tokens drafted by the model's own layers; None: as the table has it
    prefill_ranks: int = 0
    decode_ranks: int = 0
    prefill_workers: int = 0
    decode_workers: int = 0
    attention_dp: bool | None = None  # of the workers that decode

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def kind(self) -> EngineKind:
        return ENGINE_KINDS[self.engine]

    @property
    def value_bytes(self) -> int:
        return rules.kv_value_bytes(self.shape, self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedEngine:
    """One engine of a stage, sized."""

    stage: Stage
    layout: RankLayout
    attention_dp: Chosen
    rows: int  # max_batch_size: of a rank with attention data parallelism, else of the engine
    drafts: Chosen
    max_num_tokens: Chosen
    slots: Chosen
    backend: Chosen
    fraction: Chosen
    kv_tokens: int  # that its pools hold
    step_ms: float  # prefill: a prompt's time
    prompt_ms: float  # a prompt's time in this engine

    @property
    def all_rows(self) -> int:
        return self.rows * (self.layout.ranks if self.layout.attention_dp else 1)

    @property
    def tokens_a_step(self) -> float:
        """Of one sequence, as far as its drafts are accepted."""
        return sum(ACCEPTED**number for number in range(self.drafts.value + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipePlan:
    """`servers`: nodes that each have the whole recipe; 1: the counts are all there is."""

    prefill: SizedEngine | None
    num_prefill: int
    decode: SizedEngine
    num_decode: int
    servers: int
    is_apart: bool  # stages, or engines that span nodes, have nodes of their own
    requests_per_s: float  # of all servers
    ttft_ms: float
    itl_ms: float
    rows: float  # under way on each worker that decodes

    @property
    def num_gpus(self) -> int:
        prefill = self.num_prefill * self.prefill.layout.ranks if self.prefill else 0
        return self.servers * (prefill + self.num_decode * self.decode.layout.ranks)


def plan(wish: Wish, timings: Timings) -> RecipePlan:
    """Raises ConfigError."""
    check_wish(wish)
    found = list(_plans(wish, timings))
    if not found:
        raise ConfigError(_why_none(wish, timings))
    return max(found, key=_merit)


def other_way(wish: Wish, timings: Timings, found: RecipePlan) -> RecipePlan | None:
    """Return the best plan with prefill apart where `found` has it not, and the other way round."""
    mode: Mode = "aggregated" if found.prefill else "disaggregated"
    return max(_plans(replace(wish, mode=mode), timings), key=_merit, default=None)


def _merit(one: RecipePlan) -> tuple[float, ...]:
    """Most requests, to the percent; then few GPUs, short gaps, one recipe for all nodes, first tokens."""
    rate = round(math.log(max(one.requests_per_s, 1e-9)), 2)
    return rate, -one.num_gpus, -round(one.itl_ms, 1), one.servers, -one.ttft_ms


def check_wish(wish: Wish) -> None:
    """Raises ConfigError for what no plan could heal."""
    shape, gpu = wish.shape, wish.gpu
    if wish.gpus_per_node > gpu.gpus_per_node:
        raise ConfigError(
            f"--gpus: {wish.gpus_per_node} on each of {wish.nodes} node(s); a node with {gpu.name.upper()} has"
            f" {gpu.gpus_per_node}, give --nodes {-(-wish.num_gpus // gpu.gpus_per_node)}"
        )
    if shape.weights == "nvfp4" and not gpu.is_blackwell:
        raise ConfigError(
            f"--gpu {gpu.name}: {shape.name} has NVFP4 weights, which Hopper can't multiply; name its FP8 checkpoint,"
            " or --gpu b200 or gb200"
        )
    if wish.lengths.longest > shape.max_seq_len:
        raise ConfigError(
            f"--isl {wish.lengths.prompt} --osl {wish.lengths.output}: {wish.lengths.longest} tokens with room for a"
            f" chat template ({rules.PROMPT_MARGIN}); {shape.name} takes {shape.max_seq_len}"
        )
    if wish.drafts != 0 and not shape.num_draft_layers:
        raise ConfigError(
            f"--mtp: {shape.name} brings no layers for multi-token prediction (num_nextn_predict_layers); leave it out"
        )
    if not wish.concurrency and math.isinf(wish.itl_ms):
        raise ConfigError("--concurrency: missing; say how many requests are under way at once, or give --itl-ms")
    if not wish.kind.has_llm_args:
        _check_own_engine(wish)


def _check_own_engine(wish: Wish) -> None:
    if wish.shape.weights != "bf16":
        raise ConfigError(
            f"--engine torch: {wish.shape.name} has {wish.shape.weights} weights, which it does not read; use --engine"
            " trtllm, or a checkpoint in BF16"
        )
    if wish.shape.is_latent:
        raise ConfigError("--engine torch: it has no multi-head latent attention (kv_lora_rank); use --engine trtllm")
    if wish.drafts != 0:
        raise ConfigError("--engine torch: it drafts nothing; leave --mtp out, or use --engine trtllm")
    if max(wish.prefill_ranks, wish.decode_ranks) > 1:
        raise ConfigError("--engine torch: an engine has one GPU; use more workers, or --engine trtllm")


def _plans(wish: Wish, timings: Timings) -> Iterator[RecipePlan]:
    if wish.mode != "disaggregated":
        for engine in _decoders(wish, timings, "aggregated"):
            yield from _aggregated(wish, engine)
    if wish.mode != "aggregated":
        prefills = list(_prefills(wish, timings))
        decodes = list(_decoders(wish, timings, "decode")) if prefills else []
        for prefill in prefills:
            for decode in decodes:
                yield from _disaggregated(wish, prefill, decode)


def _aggregated(wish: Wish, engine: SizedEngine) -> Iterator[RecipePlan]:
    ranks, per_node = engine.layout.ranks, wish.gpus_per_node
    is_apart = ranks > per_node
    servers = 1 if is_apart else wish.nodes
    budget = wish.num_gpus // ranks if is_apart else per_node // ranks
    if is_apart and ranks % per_node:
        return
    for count in _counts(wish.decode_workers, budget):
        rows = _rows_of(wish, engine, count * servers)
        if rows is None:
            continue
        steps = wish.lengths.output / engine.tokens_a_step
        busy_ms = steps * engine.step_ms + rows * engine.prompt_ms / _together(engine)
        itl_ms, ttft_ms = busy_ms / wish.lengths.output, engine.prompt_ms + engine.step_ms
        if ttft_ms <= wish.ttft_ms and itl_ms <= wish.itl_ms:
            rate = count * servers * rows * 1e3 / (busy_ms + ttft_ms)
            yield RecipePlan(
                prefill=None, num_prefill=0, decode=engine, num_decode=count, servers=servers, is_apart=is_apart,
                requests_per_s=rate, ttft_ms=ttft_ms, itl_ms=itl_ms, rows=rows,
            )  # fmt: skip


def _disaggregated(wish: Wish, prefill: SizedEngine, decode: SizedEngine) -> Iterator[RecipePlan]:
    itl_ms = decode.step_ms / decode.tokens_a_step
    ttft_ms = prefill.step_ms + decode.step_ms
    if ttft_ms > wish.ttft_ms or itl_ms > wish.itl_ms:
        return
    own_ms = itl_ms * wish.lengths.output
    per_prefill = _together(prefill) / prefill.step_ms * BUSY  # prompts a millisecond
    for servers, count in _decode_counts(wish, prefill, decode):
        rows = _rows_of(wish, decode, count * servers)
        if rows is None:
            continue
        wanted = count * rows / (own_ms + (ttft_ms if wish.concurrency else 0))
        room = _prefill_room(wish, prefill, decode, servers, count)
        needed = wish.prefill_workers or max(1, math.ceil(wanted / per_prefill))
        number = min(needed, room)
        if number < 1 or (wish.prefill_workers and number < needed):
            continue
        rate = min(wanted, number * per_prefill) * servers * 1e3
        yield RecipePlan(
            prefill=prefill, num_prefill=number, decode=decode, num_decode=count, servers=servers,
            is_apart=servers == 1 and wish.nodes > 1, requests_per_s=rate, ttft_ms=ttft_ms, itl_ms=itl_ms, rows=rows,
        )  # fmt: skip


def _decode_counts(wish: Wish, prefill: SizedEngine, decode: SizedEngine) -> Iterator[tuple[int, int]]:
    """Yield (servers, decode workers of each): every node alike, or stages on nodes of their own."""
    smaller = wish.gpus_per_node - prefill.layout.ranks
    for count in _counts(wish.decode_workers, smaller // decode.layout.ranks):
        yield wish.nodes, count
    if wish.nodes > 1 and wish.kind.moves_own_kv:
        most = (wish.nodes - _nodes(wish, prefill.layout.ranks, 1)) * wish.gpus_per_node // decode.layout.ranks
        for count in _counts(wish.decode_workers, most):
            yield 1, count


def _prefill_room(wish: Wish, prefill: SizedEngine, decode: SizedEngine, servers: int, count: int) -> int:
    """Return how many prefill workers fit beside `count` of decode."""
    if servers == wish.nodes:
        left = wish.gpus_per_node - count * decode.layout.ranks
        return min(_MOST_REPLICAS, left // prefill.layout.ranks)
    nodes = wish.nodes - _nodes(wish, decode.layout.ranks, count)
    ranks, per_node = prefill.layout.ranks, wish.gpus_per_node
    return min(_MOST_REPLICAS, nodes * (per_node // ranks) if ranks <= per_node else nodes * per_node // ranks)


def _nodes(wish: Wish, ranks: int, count: int) -> int:
    """Return the nodes that `count` engines take where no other stage shares them."""
    if ranks > wish.gpus_per_node:
        return -(-ranks // wish.gpus_per_node) * count
    return -(-count // (wish.gpus_per_node // ranks))


def _counts(pinned: int, most: int) -> range:
    most = min(most, _MOST_REPLICAS)
    if pinned:
        return range(pinned, pinned + 1) if pinned <= most else range(0)
    return range(1, most + 1)


def _rows_of(wish: Wish, engine: SizedEngine, workers: int) -> float | None:
    """Return the rows under way on each; None: this engine is too small for them, or larger than they need."""
    if not wish.concurrency:
        return engine.all_rows
    rows = wish.concurrency / workers
    least = engine.all_rows / 2 if engine.rows > 1 else 0
    most = min(engine.all_rows, engine.kv_tokens // wish.lengths.usual)
    return rows if least < rows <= most else None


def _together(engine: SizedEngine) -> int:
    """Return the prompts that are computed at once, in the time of one."""
    return engine.layout.ranks if engine.layout.attention_dp else 1


def _prefills(wish: Wish, timings: Timings) -> Iterator[SizedEngine]:
    shape, lengths = wish.shape, wish.lengths
    tokens = rules.prefill_tokens(lengths)
    batch = rules.prefill_batch(lengths, tokens.value)
    for ranks in _rank_counts(wish, wish.prefill_ranks):
        choice = rules.attention_dp(shape, "prefill", ranks, tokens.value)
        layout = RankLayout(ranks=ranks, attention_dp=choice.value, has_experts=shape.has_experts)
        fraction, buffer = rules.memory_fraction("prefill", layout, tokens.value), rules.buffer_tokens(lengths)
        spent = Spent(
            step_tokens=tokens.value,
            fraction=fraction.value,
            buffer_tokens=buffer.value,
            longest=lengths.longest_prompt,
        )
        kv = rules.kv_tokens(shape, wish.gpu, layout, wish.value_bytes, spent)
        if kv < 2 * lengths.longest_prompt * _of_each_rank(layout):  # one that is computed, one on its way
            continue
        prompt_ms = timings.prefill_ms(layout, lengths.prompt)
        if math.isinf(prompt_ms):
            continue
        yield SizedEngine(
            stage="prefill", layout=layout, attention_dp=choice, rows=batch.value,
            drafts=rules.drafts(shape, 1, wish.drafts), max_num_tokens=tokens, slots=Chosen(0),
            backend=rules.moe_backend(shape, wish.gpu, layout, "prefill"), fraction=fraction, kv_tokens=kv,
            step_ms=prompt_ms, prompt_ms=prompt_ms,
        )  # fmt: skip


def _decoders(wish: Wish, timings: Timings, stage: Stage) -> Iterator[SizedEngine]:
    for ranks in _rank_counts(wish, wish.decode_ranks):
        kinds = (False, True) if wish.shape.has_experts and ranks > 1 else (False,)
        for is_dp in kinds:
            for rows in rules.batch_sizes(_MOST_ROWS if wish.kind.has_llm_args else _MOST_OWN_ROWS):
                engine = _decoder(wish, timings, stage, ranks, is_dp, rows)
                if engine is not None:
                    yield engine


def _decoder(wish: Wish, timings: Timings, stage: Stage, ranks: int, is_dp: bool, rows: int) -> SizedEngine | None:
    """Return it where the rules want this kind for so many rows, and memory holds it."""
    shape, lengths = wish.shape, wish.lengths
    drafts = rules.drafts(shape, rows, wish.drafts)
    all_rows = rows * (ranks if is_dp else 1)
    choice = rules.attention_dp(shape, stage, ranks, all_rows * (drafts.value + 1))
    if wish.attention_dp is not None and shape.has_experts and ranks > 1:
        choice = Chosen(wish.attention_dp, "as asked")
    if choice.value != is_dp:
        return None
    layout = RankLayout(ranks=ranks, attention_dp=is_dp, has_experts=shape.has_experts)
    is_alone = stage == "aggregated"
    tokens = (
        rules.aggregated_tokens(rows, drafts.value, lengths) if is_alone else rules.decode_tokens(rows, drafts.value)
    )
    backend, fraction = (
        rules.moe_backend(shape, wish.gpu, layout, stage),
        rules.memory_fraction(stage, layout, tokens.value),
    )
    step_tokens = tokens.value if is_alone else rows * (drafts.value + 1)
    slots = rules.expert_slots(shape, layout, backend.value, step_tokens)
    buffer = 0 if is_alone else rules.buffer_tokens(lengths).value
    spent = Spent(
        step_tokens=tokens.value,
        fraction=fraction.value,
        buffer_tokens=buffer,
        slots=slots.value,
        longest=lengths.usual,
    )
    kv = rules.kv_tokens(shape, wish.gpu, layout, wish.value_bytes, spent)
    least = (all_rows // 2 + 1 if wish.concurrency else all_rows) * lengths.usual
    if kv < max(least, lengths.longest * _of_each_rank(layout)):
        return None
    step_ms = timings.decode_ms(layout, all_rows, lengths.prompt + lengths.output // 2, drafts.value)
    prompt_ms = timings.prefill_ms(layout, lengths.prompt)
    if math.isinf(step_ms + prompt_ms):
        return None
    return SizedEngine(
        stage=stage, layout=layout, attention_dp=choice, rows=rows, drafts=drafts, max_num_tokens=tokens, slots=slots,
        backend=backend, fraction=fraction, kv_tokens=kv,
        step_ms=step_ms, prompt_ms=prompt_ms,
    )  # fmt: skip


def _of_each_rank(layout: RankLayout) -> int:
    return layout.ranks if layout.attention_dp else 1


def _rank_counts(wish: Wish, pinned: int) -> list[int]:
    """Return the sizes that an engine may have: within NVLink's reach, unless only more GPUs hold the weights."""
    if not wish.kind.has_llm_args:
        return [1]
    if pinned:
        return [pinned] if _divides(wish, pinned) else []
    possible = [ranks for ranks in (1 << power for power in range(8)) if _divides(wish, ranks)]
    near = [ranks for ranks in possible if ranks <= max(wish.gpu.nvlink_domain, wish.gpus_per_node)]
    return near if any(_holds_weights(wish, ranks) for ranks in near) else possible


def _divides(wish: Wish, ranks: int) -> bool:
    shape = wish.shape
    if ranks > wish.num_gpus or (ranks > wish.gpus_per_node and ranks % wish.gpus_per_node):
        return False
    return shape.num_heads % ranks == 0 and (not shape.has_experts or shape.num_experts % ranks == 0)


def _holds_weights(wish: Wish, ranks: int) -> bool:
    layout = RankLayout(ranks=ranks, attention_dp=False, has_experts=wish.shape.has_experts)
    spent = Spent(step_tokens=1024, fraction=0.9, longest=wish.lengths.longest)
    return rules.kv_tokens(wish.shape, wish.gpu, layout, wish.value_bytes, spent) > wish.lengths.longest


def _why_none(wish: Wish, timings: Timings) -> str:
    """Say which limit leaves nothing: the GPUs, a pin, a target, or all requests at once."""
    stages: list[Stage] = ["decode"] if wish.mode != "aggregated" else []
    stages += ["aggregated"] if wish.mode != "disaggregated" else []
    engines = [engine for stage in stages for engine in _decoders(wish, timings, stage)]
    if not engines:
        return _why_no_engine(wish, timings)
    best = min(engine.step_ms / engine.tokens_a_step for engine in engines)
    if best > wish.itl_ms:
        return _slow("--itl-ms", wish.itl_ms, best, "a step of the fastest engine takes", timings)
    prompts = [engine.prompt_ms for engine in engines if engine.stage == "aggregated"]
    prompts += [engine.prompt_ms for engine in _prefills(wish, timings)] if "decode" in stages else []
    if prompts and min(prompts) + best > wish.ttft_ms:
        first = min(prompts) + best
        return _slow("--ttft-ms", wish.ttft_ms, first, "the fastest prompt and a step take", timings)
    if wish.mode == "disaggregated" and wish.num_gpus < 2:
        return "--mode disaggregated: one GPU; prefill and decode take one each at least, give --gpus 2 or more"
    return _too_many(wish, timings)


def _why_no_engine(wish: Wish, timings: Timings) -> str:
    shape, possible = wish.shape, _rank_counts(wish, wish.decode_ranks)
    name, gpus = wish.gpu.name.upper(), wish.num_gpus
    if not possible:
        parts = f"{shape.num_heads} heads" + (f" and {shape.num_experts} experts" if shape.has_experts else "")
        return (
            f"--decode-ranks {wish.decode_ranks}: {shape.name} has {parts}, and there are {wish.nodes} node(s) of"
            f" {wish.gpus_per_node} GPUs; give a power of two that divides them and fits a node or fills several"
        )
    if not any(_holds_weights(wish, ranks) for ranks in possible):
        needed = shape.weight_bytes / (wish.gpu.memory_bytes * 0.8)
        option = f"--decode-ranks {wish.decode_ranks}" if wish.decode_ranks else f"--gpus {gpus}"
        return (
            f"{option}: {shape.name} has {shape.weight_bytes / 1e9:.0f} GB of weights, and an engine on {max(possible)}"
            f" {name} with {wish.gpu.memory_bytes / 1e9:.0f} GB each has no room for them and a request; give about"
            f" {1 << max(0, math.ceil(needed) - 1).bit_length()} GPUs or more, or a checkpoint with smaller weights"
        )
    if timings.missing:
        names = ", ".join(timings.missing)
        layout, why = next(iter(timings.missing.items()))
        return f"--timings: no times for {names} ({layout}: {why}); take --timings peaks, or other ranks"
    return (
        f"--isl {wish.lengths.prompt} --osl {wish.lengths.output}: no engine on {gpus} {name} holds the KV of one"
        " request beside the weights; give more GPUs, or shorter lengths"
    )


def _too_many(wish: Wish, timings: Timings) -> str:
    """Say how many requests there may be, with everything else as it is."""
    most = max(
        (round(one.rows * one.num_decode * one.servers) for one in _plans(replace(wish, concurrency=0), timings)),
        default=0,
    )
    where = f"{wish.nodes} node(s) of {wish.gpus_per_node} {wish.gpu.name.upper()}"
    pins = {
        "--prefill-ranks": wish.prefill_ranks, "--decode-ranks": wish.decode_ranks,
        "--prefill-workers": wish.prefill_workers, "--decode-workers": wish.decode_workers,
    }  # fmt: skip
    given = [f"{name} {value}" for name, value in pins.items() if value]
    given += [f"--mode {wish.mode}"] if wish.mode != "auto" else []
    if most and wish.concurrency > most:
        text = f"--concurrency {wish.concurrency}: {where} hold the KV of {most} within the targets"
        return (
            f"{text}{' with ' + ', '.join(given) if given else ''}; give at most so many, more GPUs, or shorter lengths"
        )
    if given:
        return f"{', '.join(given)}: no such workers fit {where} within the targets; give more GPUs, or leave one out"
    return f"--gpus {wish.num_gpus}: no workers fit {where} within the targets; give more GPUs, or looser targets"


def _slow(option: str, wanted: float, best: float, what: str, timings: Timings) -> str:
    return (
        f"{option} {wanted:g}: {what} {best:.1f} ms ({timings.source}); give {math.ceil(best)} or more, more GPUs"
        " for larger engines, or a checkpoint with smaller weights"
    )
