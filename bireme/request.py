"""A client's request, checked: tensors, JSON and parameters become one frozen GenerateRequest.

Every value is checked here against its range and the recipe's limits (sampling values in sampling.py); an error names
field, value, limit and remedy.

vllm_backend's contract holds if and only if an input is given that only vllm_backend has (VLLM_ONLY). The prompt is
echoed when not streaming, and a response holds text_output and what a `return_*` input or the request's list of outputs
asks for. Then finish_reason is "None" until the end, `logprobs` is null unless the sampling parameters ask for some,
and there are 16 tokens unless they say how many. Otherwise tensorrtllm_backend's names and this project's own answer:
no echo, and finish_reason, usage and the rest unasked. `stream` absent means false in both, as with the peers; a model
can't tell the HTTP endpoint `generate_stream` from `generate`, so its clients send `"stream": true`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from bireme.config import Limits, Recipe
from bireme.errors import RequestError
from bireme.messages import SamplingParams
from bireme.parameters import MAX_INT32
from bireme.sampling import Sampling, nearest, parse_sampling
from bireme.serving_options import NO_OPTIONS, ServingOptions, read_options
from bireme.specs import ModelSpec, TensorSpec
from bireme.types import Array, Tensors, info_of

Ids = npt.NDArray[np.int32]
Contract = Literal["vllm", "trtllm"]

VLLM_ONLY = frozenset({"sampling_parameters", "return_finish_reason", "return_cumulative_logprob", "return_logprobs"})
_VLLM_MAX_TOKENS = 16  # vLLM's default
_RETURNED = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
DRAFT_COUNTS = ("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")  # outputs of a sequence's end
_MAX_UTF8_BYTES = 4  # of a character


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request of a text pipeline."""

    sampling: Sampling
    text: str | None = None  # exactly one of text and input_ids
    input_ids: Ids | None = None  # CPU 1D
    stream: bool = False
    contract: Contract = "trtllm"
    echo: bool = False  # the prompt's text comes before the answer's
    extras: frozenset[str] = frozenset()  # the peers' output names that were asked for
    outputs: frozenset[str] | None = None  # what a response may hold; None: everything
    hides_logprobs: bool = False  # they are computed for their sum alone
    options: ServingOptions = NO_OPTIONS
    timeout_ms: int = 0  # from arrival; 0: none


def parse_generate(inputs: Tensors, spec: ModelSpec, recipe: Recipe) -> GenerateRequest:
    """Read a request of `generate` or `completion`. Raises RequestError."""
    values = read_tensors(inputs, spec)
    contract: Contract = "vllm" if VLLM_ONLY & values.keys() else "trtllm"
    sampling = parse_sampling(values, info_of(inputs).parameters, recipe, _defaults(contract, recipe.limits))
    stream = bool(values.get("stream", False))
    text, ids = _prompt(values, recipe.limits)
    request = GenerateRequest(
        sampling=sampling,
        text=text,
        input_ids=ids,
        stream=stream,
        contract=contract,
        echo=_echo(values.get("exclude_input_in_output"), contract, stream),
        extras=_extras(values, contract, sampling.params),
        outputs=_vllm_outputs(values) if contract == "vllm" and not info_of(inputs).outputs else None,
        options=read_options(values, sampling.priority, sampling.lora_name),
        timeout_ms=timeout_ms(inputs, recipe),
    )
    if "cumulative_logprob" in request.extras and sampling.params.logprobs is None:
        return replace(request, sampling=_with_logprobs(sampling), hides_logprobs=True)
    return request


def _defaults(contract: Contract, limits: Limits) -> dict[str, Any]:
    """Return the API's own sampling values."""
    return {"max_tokens": min(_VLLM_MAX_TOKENS, limits.max_tokens or _VLLM_MAX_TOKENS)} if contract == "vllm" else {}


def timeout_ms(inputs: Tensors, recipe: Recipe) -> int:
    """Return the request's own time limit, or the recipe's; 0: none."""
    return info_of(inputs).timeout_ms or int(recipe.pipeline.request_timeout_s * 1000)


def read_tensors(inputs: Tensors, spec: ModelSpec) -> dict[str, Any]:
    """Turn input tensors into plain values by their spec: scalars for dims (1,), else lists or an id array."""
    values: dict[str, Any] = {}
    for name, array in inputs.items():
        tensor = spec.input(name)
        if tensor is None:
            raise RequestError(f"{name}: {spec.name} has no such input{nearest(name, [t.name for t in spec.inputs])}")
        values[name] = _read(tensor, array)
    return values


def _read(tensor: TensorSpec, array: Array) -> Any:
    kinds = {"BYTES": "OSU", "BOOL": "b", "FP32": "f"}.get(tensor.data_type, "iu")
    if array.dtype.kind not in kinds:
        raise RequestError(f"{tensor.name}: data type {array.dtype}; send {tensor.data_type}")
    is_single = tensor.dims == (1,)
    if is_single:
        if array.size != 1:
            raise RequestError(f"{tensor.name}: shape {list(array.shape)}; send exactly one value, shape [1]")
    elif array.shape[:-1] not in ((), (1,)):
        raise RequestError(f"{tensor.name}: shape {list(array.shape)}; send one row, shape [n]")
    flat = array.reshape(-1)
    if tensor.kind == "array":
        return flat
    items = flat.tolist()
    if tensor.data_type == "BYTES":
        items = [_bytes(item) if tensor.kind == "bytes" else _text(tensor.name, item) for item in items]
    return items[0] if is_single else items


def _bytes(item: str | bytes) -> bytes:
    return item.encode() if isinstance(item, str) else bytes(item)


def _text(name: str, item: Any) -> str:
    if isinstance(item, str):
        return item
    try:
        return bytes(item).decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: not UTF-8 (byte {error.start}: {error.reason}); send UTF-8 text") from error


def check_ids(name: str, ids: Array, vocab_size: int | None = None) -> Ids:
    """Return token ids as int32. Raises RequestError for ids outside the vocabulary."""
    if ids.size == 0:
        return np.zeros(0, np.int32)
    lowest, highest = int(ids.min()), int(ids.max())
    limit = vocab_size or MAX_INT32 + 1
    if lowest < 0 or highest >= limit:
        wrong = lowest if lowest < 0 else highest
        raise RequestError(f"{name}: token id {wrong}; valid ids are 0 to {limit - 1}")
    return np.ascontiguousarray(ids, np.int32)


def _prompt(values: Mapping[str, Any], limits: Limits) -> tuple[str | None, Ids | None]:
    text, ids = values.get("text_input"), values.get("input_ids")
    if (text is None) == (ids is None):
        given = "neither" if text is None else "both"
        raise RequestError(f"{given} of text_input and input_ids were sent; send exactly one of them")
    if text is not None:
        check_prompt_text("text_input", text, limits)
        if not text:
            raise RequestError("text_input: empty; send at least one character")
        return text, None
    assert ids is not None
    checked = check_ids("input_ids", ids)
    check_prompt_tokens(len(checked), limits)
    return None, checked


def check_prompt_text(
    name: str, text: str, limits: Limits, longest_token_bytes: int | None = None, max_seq_len: int | None = None
) -> None:
    """Raise RequestError for a text that is too large, or whose tokens can't fit, before it is encoded."""
    limit = limits.max_prompt_bytes
    bounds = {"limits.max_prompt_tokens": limits.max_prompt_tokens, "the context": max_seq_len and max_seq_len - 1}
    held = {bound: num * longest_token_bytes for bound, num in bounds.items() if num and longest_token_bytes}
    if len(text) * _MAX_UTF8_BYTES <= min([limit, *held.values()]):
        return  # whatever its characters are; counting bytes takes as long as reading the JSON
    num_bytes = len(text) if len(text) > limit else len(text.encode("utf-8", "surrogatepass"))
    if num_bytes > limit:
        raise RequestError(f"{name}: {num_bytes} bytes; limits.max_prompt_bytes is {limit}, shorten it")
    for bound, num_held in held.items():
        if num_bytes > num_held:
            raise RequestError(
                f"{name}: {num_bytes} bytes; {bounds[bound]} tokens ({bound}) hold {num_held} at most, shorten it"
            )


def check_prompt_tokens(num_tokens: int, limits: Limits, max_seq_len: int | None = None) -> None:
    """Raise RequestError for an empty prompt, or one that is over the recipe's limit or fills the context."""
    if num_tokens == 0:
        raise RequestError("prompt: 0 tokens; send at least one")
    if limits.max_prompt_tokens is not None and num_tokens > limits.max_prompt_tokens:
        raise RequestError(
            f"prompt: {num_tokens} tokens; limits.max_prompt_tokens is {limits.max_prompt_tokens}, shorten the prompt"
        )
    if max_seq_len is not None and num_tokens >= max_seq_len:
        raise RequestError(
            f"prompt: {num_tokens} tokens; the context of {max_seq_len} must hold it and at least one more,"
            " shorten the prompt"
        )


def check_text_tokens(name: str, num_tokens: int, limits: Limits, max_seq_len: int | None) -> None:
    """Raise RequestError for a text without tokens, or with more than an embedding model takes. None: not known yet."""
    if num_tokens == 0:
        raise RequestError(f"{name}: no tokens; send at least one")
    bounds = {"the model's limit": max_seq_len, "limits.max_prompt_tokens": limits.max_prompt_tokens}
    for bound, limit in bounds.items():
        if limit is not None and num_tokens > limit:
            raise RequestError(f"{name}: {num_tokens} tokens; {bound} is {limit}, shorten or split it")


def _echo(exclude: bool | None, contract: Contract, stream: bool) -> bool:
    if stream:
        if contract == "vllm" and exclude is False:
            raise RequestError("When streaming, `exclude_input_in_output` = False is not allowed.")
        return False
    return exclude is False if contract == "trtllm" else not exclude


def _extras(values: Mapping[str, Any], contract: Contract, params: SamplingParams) -> frozenset[str]:
    wanted = {
        "output_log_probs": values.get("return_log_probs"),
        "cum_log_probs": values.get("return_log_probs"),
        "cumulative_logprob": values.get("return_cumulative_logprob"),
        "logprobs": values.get("return_logprobs"),
        "num_input_tokens": values.get("return_num_input_tokens"),
        "num_output_tokens": values.get("return_num_output_tokens"),
        "sequence_index": contract == "trtllm" and params.n > 1,
        **dict.fromkeys(DRAFT_COUNTS, values.get("return_perf_metrics")),
    }
    return frozenset(name for name, is_wanted in wanted.items() if is_wanted)


def _vllm_outputs(values: Mapping[str, Any]) -> frozenset[str]:
    drafts = DRAFT_COUNTS if values.get("return_perf_metrics") else ()
    return frozenset({"text_output", *drafts, *(name for name in _RETURNED if values.get(f"return_{name}"))})


def _with_logprobs(sampling: Sampling) -> Sampling:
    return replace(sampling, params=msgspec.structs.replace(sampling.params, logprobs=0))
