"""Sampling parameters as TensorRT-LLM takes them. Pure: a request in, keyword arguments out.

What a request does not set stays unset, with these exceptions, each because TensorRT-LLM means something else:

    end_id, stop_token_ids   always given: without a tokenizer it has no end-of-sequence ids
    top_p 1.0                 with a temperature alone it would still be greedy
    greedy                    (temperature_of) temperature, top_k, top_p, min_p and seed are left out
    top_k 0, min_p 0          off: left out
    logprobs, prompt_logprobs 0   is none to it: becomes 1, and the answer is cut down again
    max_tokens, min_tokens    less the tokens that were generated before a migration
    min_tokens                only where one id ends the request: substitutes.py serves it elsewhere
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bireme.messages import EngineRequest, SamplingParams, temperature_of
from bireme.parameters import PARAMETERS

NO_END_ID = -1
_LOGPROBS = ("logprobs", "prompt_logprobs")
_RANDOM = tuple(row for row in PARAMETERS if row.is_random)
PENALTIES = {row.name: row.off for row in PARAMETERS if row.is_field and row.data_type == "FP32" and not row.is_random}


def stop_ids(sampling: SamplingParams, eos_ids: Sequence[int]) -> tuple[int, ...]:
    """The first one is its `end_id`."""
    if sampling.ignore_eos:
        return sampling.stop_token_ids
    own = tuple(eos_ids) if sampling.end_id is None else (sampling.end_id,)
    return (*own, *(token for token in sampling.stop_token_ids if token not in own))


def sampling_fields(request: EngineRequest, eos_ids: Sequence[int]) -> dict[str, Any]:
    """All but guide, bias and processors."""
    params = request.sampling
    assert params.n == 1 and params.max_tokens is not None, "the gate resolves max_tokens, the entry expands n"
    max_tokens = 1 if request.request_type == "context_only" else params.max_tokens - request.num_resumed
    fields: dict[str, Any] = {
        "max_tokens": max_tokens,
        "detokenize": False,
        **_given(params, PENALTIES),
        **_distribution(params),
        **_ends(request, eos_ids, max_tokens),
        **{name: max(1, count) for name, count in _given(params, _LOGPROBS).items()},
    }
    if bad := [sequence[0] for sequence in params.bad_token_ids if len(sequence) == 1]:
        fields["bad_token_ids"] = bad
    return fields


def needs_own_min_tokens(params: SamplingParams, eos_ids: Sequence[int]) -> bool:
    """TensorRT-LLM's min_tokens holds back `end_id` alone, and with ignore_eos (1.2.1) a token of the vocabulary."""
    ends = stop_ids(params, eos_ids)
    return bool(params.min_tokens) and bool(ends) and (len(ends) > 1 or params.ignore_eos)


def _given(params: SamplingParams, names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(params, name)) is not None}


def _distribution(params: SamplingParams) -> dict[str, Any]:
    if not temperature_of(params):
        return {}
    fields = _given(params, (row.name for row in _RANDOM))
    for row in _RANDOM:
        if fields.get(row.name) == row.off == 0:
            del fields[row.name]
    if "top_k" not in fields and "top_p" not in fields:
        fields["top_p"] = 1.0
    return fields


def _ends(request: EngineRequest, eos_ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
    params = request.sampling
    ids = stop_ids(params, eos_ids)
    if params.ignore_eos:
        end_id, others = (eos_ids[0] if eos_ids else NO_END_ID), ids
    else:
        end_id, others = (ids[0], ids[1:]) if ids else (NO_END_ID, ())
    fields: dict[str, Any] = {"end_id": end_id}
    if params.ignore_eos:
        fields["ignore_eos"] = True
    elif params.min_tokens is not None and len(ids) == 1:
        fields["min_tokens"] = min(max(0, params.min_tokens - request.num_resumed), max_tokens)
    if others:
        fields["stop_token_ids"] = list(others)
    return fields
