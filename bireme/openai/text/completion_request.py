"""OpenAI's (older) completion request, as JSON and checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from bireme.config import Limits, Recipe
from bireme.errors import RequestError
from bireme.openai.text.listed_texts import ListedTexts
from bireme.parameters import BY_NAME
from bireme.pipelines.chat_request import (
    OpenAIBody,
    api_sampling,
    check_annotations,
    check_stream_options,
    openai_sampling,
)
from bireme.pipelines.extensions import REFUSED_NAMES, Annotation, ExtraField, RequestOptions, request_options
from bireme.sampling import Sampling
from bireme.serving_options import ServingOptions

REFUSED = {
    "suffix": "not served: no fill in the middle; remove it",
    "messages": "belongs to /v1/chat/completions; send prompt",
    "max_completion_tokens": "belongs to /v1/chat/completions; send max_tokens",
    **REFUSED_NAMES,
}
_PROMPTS = ListedTexts("prompt", "a string", "prompts", "limits.max_prompts")
_DEFAULT_MAX_TOKENS = 16  # OpenAI's
_MAX_LOGPROBS = BY_NAME["logprobs"].openai_high


class CompletionBody(OpenAIBody, kw_only=True, forbid_unknown_fields=True):
    """The request's JSON."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: None = None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    prompts: list[str | list[int]]
    sampling: Sampling
    logprobs: int | None
    echo: bool
    wants_tokens: bool  # False: max_tokens 0, the prompt alone
    stream: bool
    include_usage: bool
    options: ServingOptions
    return_timing: bool
    annotations: tuple[Annotation, ...]  # of a stream
    extra_fields: tuple[ExtraField, ...]  # of the answer's nvext
    return_token_ids: bool


def check_completion(body: CompletionBody, recipe: Recipe) -> CompletionRequest:
    """Check what the types can't. Raises RequestError."""
    check_stream_options(body)
    options = request_options(body)
    check_annotations(options, body.stream)
    if options.chat_template_kwargs:
        raise RequestError("chat_template_kwargs: belongs to /v1/chat/completions; remove it")
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens: 0; without echo there is nothing to answer, send 1 or more, or echo true")
    if body.echo and body.logprobs is not None:
        _check_scores_prompts(recipe)
    prompts, sampling = _prompts(body.prompt, recipe.limits), _sampling(body, options, recipe)
    return CompletionRequest(
        prompts=prompts,
        sampling=sampling,
        options=sampling.complete(options.serving),
        logprobs=body.logprobs,
        echo=bool(body.echo),
        wants_tokens=body.max_tokens != 0,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        return_timing=options.return_timing,
        annotations=options.annotations,
        extra_fields=options.extra_fields,
        return_token_ids=bool(body.return_token_ids),
    )


def _sampling(body: CompletionBody, options: RequestOptions, recipe: Recipe) -> Sampling:
    if body.logprobs is not None and not 0 <= body.logprobs <= _MAX_LOGPROBS:
        raise RequestError(f"logprobs: {body.logprobs}; the range is 0 to {_MAX_LOGPROBS}")
    max_tokens = min(_DEFAULT_MAX_TOKENS, recipe.limits.max_tokens or _DEFAULT_MAX_TOKENS)
    if body.max_tokens is not None:
        max_tokens = body.max_tokens or 1  # engines make one: without_tokens leaves it out
    fields: dict[str, Any] = openai_sampling(body) | {
        "guided_decoding": options.guide,
        "logprobs": body.logprobs,
        "prompt_logprobs": body.logprobs if body.echo else None,
        "max_tokens": max_tokens,
    }
    sampling = api_sampling(fields, options, recipe)
    if body.echo and body.logprobs is not None and sampling.params.max_tokens == 1:
        # Scorers of prompts count on one token after it, and a token that ends an answer is not delivered as one.
        return replace(sampling, params=msgspec.structs.replace(sampling.params, ignore_eos=True))
    return sampling


def _check_scores_prompts(recipe: Recipe) -> None:
    """TensorRT-LLM's prompt log probabilities are of the likeliest tokens; the prompt's own may be missing."""
    for stage in ("prefill", "decode"):
        worker = recipe.workers.get(stage)
        if worker is not None and not worker.kind.scores_prompts:
            raise RequestError(
                "echo: not together with logprobs here: TensorRT-LLM gives log probabilities of the likeliest prompt"
                " tokens alone, not of the prompt's own; leave out one of them, or serve with engine torch"
            )


def _prompts(prompt: str | list[str | int | list[int]], limits: Limits) -> list[str | list[int]]:
    given = _PROMPTS.split(prompt, limits.max_prompts)
    return [_text(one, where) if isinstance(one, str) else one for where, one in given]


def _text(text: str, where: str) -> str:
    if not text:
        raise RequestError(f"{where}: empty; send at least one character")
    return text
