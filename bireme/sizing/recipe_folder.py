"""A plan as a recipe folder: YAML whose comments say why, and a README with what to expect."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bireme import yaml_text
from bireme.config import CHECKOUT
from bireme.sizing import recipe_rules as rules
from bireme.sizing.recipe_plan import ACCEPTED, BUSY, RecipePlan, SizedEngine, Wish, other_way
from bireme.sizing.recipe_rules import PROMPT_MARGIN, Chosen
from bireme.sizing.timings import Timings

Block = Mapping[str, "Chosen | Mapping[str, Chosen]"]

_WIDTH = 120
_LINKS = 0.7  # of a link's peak, that a transfer reaches
_BALANCER = "eplb.yaml"
_PLAIN = re.compile(r"[A-Za-z][\w.-]*(/[\w.-]+)*")
NULL = object()  # YAML's null: an unset key means another value
MADE = ("recipe.yaml", "prefill.yaml", "decode.yaml", _BALANCER, "README.md")


def recipe_files(wish: Wish, plan: RecipePlan, timings: Timings, command: str) -> dict[str, str]:
    """Return the files' texts by name. `command`: by which the recipe was asked for."""
    files = {"recipe.yaml": _recipe(wish, plan, timings, command)}
    if plan.prefill is not None:
        files["prefill.yaml"] = as_yaml(engine_tree(wish, plan, plan.prefill))
    files["decode.yaml"] = as_yaml(engine_tree(wish, plan, plan.decode))
    if plan.decode.slots.value:
        updates = Chosen(1, "placement follows the traffic, a layer each iteration")
        files[_BALANCER] = as_yaml({"num_slots": plan.decode.slots, "layer_updates_per_iter": updates})
    files["README.md"] = _readme(wish, plan, timings, command)
    return files


def engine_tree(wish: Wish, plan: RecipePlan, engine: SizedEngine) -> Block:
    """Return the engine YAML's keys in their order."""
    tree = _trtllm_tree(wish, plan, engine) if wish.kind.has_llm_args else _torch_tree(wish, plan, engine)
    return {key: found for key, item in tree.items() if (found := _without_unset(item)) is not None}


def as_yaml(tree: Block) -> str:
    lines: list[str] = []
    for key, item in tree.items():
        if isinstance(item, Chosen):
            lines += _lines(key, item, "")
        else:
            lines.append(f"{key}:")
            lines += [line for name, inner in item.items() for line in _lines(name, inner, "  ")]
    return "\n".join(lines) + "\n"


def _lines(key: str, decision: Chosen, indent: str) -> list[str]:
    text = f"{indent}{key}: {_scalar(decision.value)}"
    if not decision.reason:
        return [text]
    whole = f"{text}  # {decision.reason}"
    return [whole] if len(whole) <= _WIDTH else [f"{indent}# {decision.reason}", text]


def _scalar(value: Any) -> str:
    """Return it as YAML 1.1 reads it again: JSON less quotes, and less exponents, which it takes for text."""
    if value is NULL:
        return "null"
    if isinstance(value, float):
        return f"{value:.7f}".rstrip("0").removesuffix(".") if value < 1e-4 else repr(value)
    is_plain = isinstance(value, str) and _PLAIN.fullmatch(value) and yaml_text.read(value) == value
    return str(value) if is_plain else json.dumps(value)


def _without_unset(item: Chosen | Mapping[str, Chosen]) -> Chosen | Mapping[str, Chosen] | None:
    if isinstance(item, Chosen):
        return None if item.value is None else item
    return {key: inner for key, inner in item.items() if inner.value is not None} or None


def _trtllm_tree(wish: Wish, plan: RecipePlan, engine: SizedEngine) -> Block:
    shape, layout, stage = wish.shape, engine.layout, engine.stage
    spans = layout.ranks > wish.gpus_per_node
    own_code = Chosen(True if shape.has_own_code else None, "the checkpoint brings its configuration class")
    whole = Chosen(layout.ranks if shape.has_experts else None, "whole experts on each rank")
    per_node = Chosen(wish.gpus_per_node if spans or plan.is_apart else None, "ranks a node")
    return {
        "trust_remote_code": own_code,
        "tensor_parallel_size": Chosen(layout.ranks, f"{layout.name}: {_why_ranks(wish, engine)}"),
        "moe_expert_parallel_size": whole,
        "gpus_per_node": per_node,
        "enable_attention_dp": engine.attention_dp if shape.has_experts else Chosen(None),
        "enable_chunked_prefill": _chunks(wish, engine),
        "max_batch_size": _batch(wish, engine),
        "max_num_tokens": engine.max_num_tokens,
        **_lengths(wish, engine, plan),
        "disable_overlap_scheduler": Chosen(
            True if stage == "prefill" else None, "a prefill has no next step to overlap with (TensorRT-LLM 1.2)"
        ),
        "speculative_config": _drafts(plan),
        "moe_config": {
            "backend": engine.backend,
            "load_balancer": Chosen(_BALANCER if engine.slots.value else None, engine.slots.reason),
        },
        "attention_dp_config": _balance(engine),
        "allreduce_strategy": rules.allreduce_strategy(wish.gpu, layout, wish.gpus_per_node)
        if stage != "prefill"
        else Chosen(None),
        "kv_cache_config": {
            "free_gpu_memory_fraction": engine.fraction,
            "dtype": rules.kv_dtype(shape, wish.kind),
        },
        "cuda_graph_config": Chosen(NULL, "graphs are for decode steps")
        if stage == "prefill"
        else {"enable_padding": Chosen(True), "batch_sizes": rules.graph_sizes(engine.rows)},
        **_transceiver(wish, plan, "DEFAULT", "NIXL: every release takes it for every model"),
    }


def _torch_tree(wish: Wish, plan: RecipePlan, engine: SizedEngine) -> Block:
    return {
        "dtype": Chosen("bfloat16"),
        "max_batch_size": _batch(wish, engine),
        "max_num_tokens": engine.max_num_tokens,
        **_lengths(wish, engine, plan),
        "kv_cache_config": {"free_gpu_memory_fraction": engine.fraction},
        **_transceiver(wish, plan, "CUDA_IPC", "from GPU to GPU of one host"),
    }


def _why_ranks(wish: Wish, engine: SizedEngine) -> str:
    each = rules.rank_weight_bytes(wish.shape, engine.layout, engine.slots.value) / 1e9
    return f"{each:.1f} GB of weights a rank, and KV of {engine.kv_tokens:,} tokens an engine"


def _batch(wish: Wish, engine: SizedEngine) -> Chosen:
    if engine.stage == "prefill":
        return rules.prefill_batch(wish.lengths, engine.max_num_tokens.value)
    whose = "of each rank" if engine.layout.attention_dp else "of the engine"
    room = engine.kv_tokens // max(1, engine.all_rows)
    return Chosen(engine.rows, f"sequences {whose}; there is KV for {room:,} tokens of each")


def _chunks(wish: Wish, engine: SizedEngine) -> Chosen:
    if engine.stage == "aggregated":
        return Chosen(True, "a prompt need not wait for a step of its own")
    if engine.stage == "decode":
        return Chosen(True, "prompts that are not worth a transfer are computed here")
    is_needed = wish.lengths.longest_prompt > engine.max_num_tokens.value
    return Chosen(True if is_needed else None, "the longest prompt takes several steps")


def _lengths(wish: Wish, engine: SizedEngine, plan: RecipePlan) -> dict[str, Chosen]:
    lengths = wish.lengths
    if engine.stage == "prefill":
        reason = f"{lengths.prompt} of prompt, {PROMPT_MARGIN} for a chat template and longer ones"
        reason = "the longest prompt that is served, as asked" if lengths.most else reason
        return {"max_seq_len": Chosen(lengths.longest_prompt, reason)}
    most = Chosen(lengths.longest_prompt if plan.prefill else None, "prefill takes no longer prompt")
    reason = f"{lengths.longest_prompt} of prompt with its template, {lengths.output} of output"
    return {"max_input_len": most, "max_seq_len": Chosen(lengths.longest, reason)}


def _drafts(plan: RecipePlan) -> Mapping[str, Chosen] | Chosen:
    if not plan.decode.drafts.value:
        return Chosen(None)
    return {"decoding_type": Chosen("MTP"), "num_nextn_predict_layers": plan.decode.drafts}


def _balance(engine: SizedEngine) -> Mapping[str, Chosen] | Chosen:
    """As TensorRT-LLM's curated throughput configurations have it, where prompts and decoding share ranks."""
    if engine.stage != "aggregated" or not engine.layout.attention_dp:
        return Chosen(None)
    return {
        "enable_balance": Chosen(True, "a rank alone with a prompt makes all others wait"),
        "batching_wait_iters": Chosen(50),
        "timeout_iters": Chosen(1),
    }


def _transceiver(wish: Wish, plan: RecipePlan, backend: str, reason: str) -> dict[str, Mapping[str, Chosen]]:
    if plan.prefill is None:
        return {}
    buffer = rules.buffer_tokens(wish.lengths)
    return {"cache_transceiver_config": {"backend": Chosen(backend, reason), "max_tokens_in_buffer": buffer}}


def _recipe(wish: Wish, plan: RecipePlan, timings: Timings, command: str) -> str:
    model = Path(wish.shape.name)
    name = wish.shape.name
    if model.is_dir():
        path = model.resolve()
        name = str(path.relative_to(CHECKOUT)) if path.is_relative_to(CHECKOUT) else str(path)
    lines = [f"# {_summary(wish, plan)}", f"# Made by: {' '.join(command.split())}", f"model: {_scalar(name)}"]
    if plan.prefill is not None:
        own, hop = _router(wish, plan)
        lines += ["router:", *_lines("prefill_ms_per_token", own, "  "), *_lines("transfer_ms_per_token", hop, "  ")]
    lines.append("workers:")
    first = 0
    for stage, engine, count in _stages(plan):
        gpus = count * engine.layout.ranks
        words = [f"engine: {wish.engine}", f"engine_config: {stage}.yaml"]
        words += [f"replicas: {count}"] if count > 1 else []
        if not plan.is_apart:
            words.append(f"devices: {list(range(first, first + gpus))}")
            first += gpus
        lines.append(f"  {stage}: {{{', '.join(words)}}}")
    return "\n".join(lines) + "\n"


def _stages(plan: RecipePlan) -> list[tuple[str, SizedEngine, int]]:
    prefill = [("prefill", plan.prefill, plan.num_prefill)] if plan.prefill else []
    return [*prefill, ("decode", plan.decode, plan.num_decode)]


def _router(wish: Wish, plan: RecipePlan) -> tuple[Chosen, Chosen]:
    """Return decode's price of a prompt token, and the transfer's of one that prefill has computed."""
    own = plan.decode.prompt_ms / wish.lengths.prompt
    gpu = wish.gpu
    total = sum(count * engine.layout.ranks for _, engine, count in _stages(plan))
    is_near = total <= gpu.nvlink_domain and not (plan.is_apart and gpu.nvlink_domain <= wish.gpus_per_node)
    rate = (gpu.nvlink_bytes_per_s if is_near else gpu.network_bytes_per_s) * _LINKS
    row = wish.shape.kv_values(wish.lengths.prompt) * wish.value_bytes / wish.lengths.prompt
    link = "NVLink" if is_near else "the network"
    return (
        Chosen(round(own, 5), "estimated for decode's GPUs; measure it"),
        Chosen(round(1e3 * row / rate, 6), f"{row / 1024:.0f} KiB of KV a token by {link}; tools/check_fabric.py"),
    )


def _summary(wish: Wish, plan: RecipePlan) -> str:
    parts = [f"{count} {stage} ({engine.layout.name})" for stage, engine, count in _stages(plan)]
    what = " and ".join(parts) if plan.prefill else f"{plan.num_decode} aggregated ({plan.decode.layout.name})"
    where = f" on each of {plan.servers} nodes" if plan.servers > 1 else ""
    model = " ".join(Path(wish.shape.name).name.split())
    return f"{model} on {plan.num_gpus} {wish.gpu.name.upper()}: {what}{where}."


def _readme(wish: Wish, plan: RecipePlan, timings: Timings, command: str) -> str:
    lengths = wish.lengths
    rate = plan.requests_per_s
    per_gpu = rate * lengths.output / plan.num_gpus
    rows = [
        ("requests a second", f"{rate:.2f}"),
        ("output tokens a second and GPU", f"{per_gpu:.0f}"),
        ("TTFT without a queue, ms", f"{plan.ttft_ms:.0f}"),
        ("mean time between tokens, ms", f"{plan.itl_ms:.1f}"),
        ("requests under way on each worker that decodes", f"{plan.rows:.0f}"),
        ("GPUs used of those given", f"{plan.num_gpus} of {wish.num_gpus}"),
    ]
    if wish.mode == "auto":
        rows.append(_other_way(wish, plan, timings))
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    drafts = (
        f" Of drafted tokens a share of {ACCEPTED} is taken to be accepted, one after the other."
        if plan.decode.drafts.value
        else ""
    )
    times = (
        f"Times are {timings.source}: a steady state with engines that never idle, requests of one length, and prefill"
        f" busy for at most {BUSY:.0%} of its time.{drafts} Measure before you rely on it: tools/sweep.py. The YAML's"
        " comments say why each value is what it is, and docs/tuning.md what to watch. Set `chat` for the model's own"
        " formats (docs/parsers.md)."
    )
    return f"""\
# {{name}}

{_summary(wish, plan)} Prompts of {lengths.prompt} tokens, answers of {lengths.output}. Made by:

    {command}

{_how_to_serve(wish, plan)}

| to expect | |
|---|---|
{table}

{textwrap.fill(times, _WIDTH)}
"""


def _other_way(wish: Wish, plan: RecipePlan, timings: Timings) -> tuple[str, str]:
    name = "the same, aggregated" if plan.prefill else "the same, prefill apart"
    other = other_way(wish, timings, plan)
    if other is None:
        return name, "does not fit within the targets"
    figures = f"{other.requests_per_s:.2f} requests/s, TTFT {other.ttft_ms:.0f} ms, {other.itl_ms:.1f} ms a token"
    return name, f"{figures}, on {other.num_gpus} GPUs"


def _how_to_serve(wish: Wish, plan: RecipePlan) -> str:
    check = "    python tools/check_recipe.py {folder}\n"
    if plan.servers > 1:
        job = f"--servers {plan.servers} --network NETWORK --gpus-per-node {wish.gpus_per_node} --out job.sbatch"
        return f"{check}    python tools/make_sbatch.py {{folder}} {job}"
    if not plan.is_apart:
        return f"{check}    python tools/serve.py {{folder}}"
    job = f"--apart --network NETWORK --gpus-per-node {wish.gpus_per_node} --out job.sbatch"
    note = (
        "\n\nEach stage has nodes of its own, so no `devices` are named: tools/check_recipe.py warns of both on one"
        " machine."
        if plan.prefill
        else ""
    )
    return f"{check}    python tools/make_sbatch.py {{folder}} {job}{note}"
