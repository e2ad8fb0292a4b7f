"""Rules of an engine YAML about speculative decoding: what drafts need, and what they can't run with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bireme.engines.trtllm.engine_yaml import NO_DRAFTS, Tree, Yaml
from bireme.engines.trtllm.problems import Problem

_WITH_A_MODEL = ("Eagle", "Eagle3", "DraftTarget", "Draft_Target")


def drafts_have_a_model(yaml: Yaml) -> Iterator[Problem]:
    kind = yaml.get("speculative_config.decoding_type")
    model = yaml.get("speculative_config.speculative_model") or yaml.get("speculative_config.speculative_model_dir")
    if kind in _WITH_A_MODEL and not model:
        yield yaml.problem("speculative_config.speculative_model", f"{kind} drafts with a model of its own", "name it")


def drafts_have_a_length(yaml: Yaml) -> Iterator[Problem]:
    kind = yaml.get("speculative_config.decoding_type")
    if kind in (*_WITH_A_MODEL, "NGram") and not yaml.draft_len:
        yield yaml.problem("speculative_config.max_draft_len", f"{kind} drafts that many tokens", "set 1 or more")


def n_grams_have_a_size(yaml: Yaml) -> Iterator[Problem]:
    if yaml.get("speculative_config.decoding_type") != "NGram" or yaml.release >= "1.3":
        return
    if not yaml.number("speculative_config.max_matching_ngram_size", 0):
        reason = "TensorRT-LLM 1.2 has 0 by default and does not start with it"
        yield yaml.problem("speculative_config.max_matching_ngram_size", reason, "set 1 or more")


def schedules_of_drafts_begin_with_their_length(yaml: Yaml) -> Iterator[Problem]:
    schedule = yaml.block("speculative_config.draft_len_schedule")
    if schedule and _by_number(schedule).get(1) != yaml.draft_len:
        reason = f"it begins with a batch of 1, at max_draft_len {yaml.draft_len}"
        yield yaml.problem("speculative_config.draft_len_schedule", reason, f"set 1: {yaml.draft_len} in it")


def _by_number(tree: Tree) -> dict[int, Any]:
    """JSON has only strings for keys."""
    return {int(key): value for key, value in tree.items() if str(key).isdecimal()}


def drafting_runs_on_this_backend(yaml: Yaml) -> Iterator[Problem]:
    kind = yaml.get("speculative_config.decoding_type")
    if kind in ("Lookahead", "Medusa"):
        reason = "only the TensorRT backend has it, which bireme doesn't drive"
        yield yaml.problem("speculative_config.decoding_type", reason, "use Eagle, MTP, NGram or DraftTarget")
    elif kind and yaml.number("pipeline_parallel_size", 1) > 1:
        reason = "speculative decoding does not work with pipeline parallelism"
        yield yaml.problem("pipeline_parallel_size", reason, "set 1 and raise tensor_parallel_size")


def drafts_are_one_model(yaml: Yaml) -> Iterator[Problem]:
    for name in ("eagle3_one_model", "mtp_eagle_one_model"):
        if yaml.get(f"speculative_config.{name}") is False and yaml.release >= "1.3":
            reason = "TensorRT-LLM 1.3 drafts in the target model's own steps alone, and refuses false"
            yield yaml.problem(f"speculative_config.{name}", reason, "remove it")


def drafts_fit_a_step(yaml: Yaml) -> Iterator[Problem]:
    if yaml.draft_len == NO_DRAFTS or not yaml.largest_graph_batch:
        return
    needed = yaml.largest_graph_batch * (yaml.draft_len + 1)
    if yaml.number("max_num_tokens", 8192) < needed:
        reason = f"the largest CUDA graph, {yaml.largest_graph_batch} sequences, takes {yaml.draft_len + 1} tokens each"
        yield yaml.problem("max_num_tokens", reason, f"set {needed} or more, or capture smaller graphs")


def eagle_reuses_no_blocks(yaml: Yaml) -> Iterator[Problem]:
    if yaml.get("speculative_config.decoding_type") not in ("Eagle", "Eagle3"):
        return
    if yaml.get("kv_cache_config.enable_block_reuse", True):
        reason = "every published Eagle configuration turns it off"
        key = "kv_cache_config.enable_block_reuse"
        yield yaml.problem(key, reason, "set false, or measure the acceptance with it", is_warning=True)
