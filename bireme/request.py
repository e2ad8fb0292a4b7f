"""A client's request, checked: tensors, JSON and parameters become one frozen GenerateRequest.

Every value is checked here against its range and the recipe's limits (sampling values in sampling.py); an error names
field, value, limit and remedy.

vllm_backend's contract holds if and only if an input is given that only vllm_backend has (VLLM_ONLY): the prompt is
echoed when not streaming, and a response holds text_output and what a `return_*` input or the request's list of outputs
asks for; finish_reason is "None" until the end, `logprobs` is null unless the sampling parameters ask for some, and
there are 16 tokens unless they say how many. Otherwise tensorrtllm_backend's names and this project's own answer: no
echo, and finish_reason, usage and the rest unasked. `stream` absent means false in both, as with the peers; a model
can't tell the HTTP endpoint `generate_stream` from `generate`, so its clients send `"stream": true`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from bireme.config import Limits, Recipe, RoutingMode
from bireme.errors import RequestError
from bireme.messages import KvCacheRetentionConfig, SamplingParams
from bireme.parameters import MAX_INT32
from bireme.sampling import Sampling, nearest, parse_sampling
from bireme.specs import ModelSpec, TensorSpec
from bireme.types import Array, Tensors, info_of

Ids = npt.NDArray[np.int32]
Contract = Literal["vllm", "trtllm"]

VLLM_ONLY = frozenset({"sampling_parameters", "return_finish_reason", "return_cumulative_logprob", "return_logprobs"})
_VLLM_MAX_TOKENS = 16  # vLLM's default
_RETURNED = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")


MAX_SESSION_CHARACTERS = 256
_MAX_UTF8_BYTES = 4  # of a character
MAX_RETENTION_RANGES = 64


class RoutingChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a request says about its own placement; unset: the router decides."""

    mode: RoutingMode | None = None
    prefill_worker: str = ""
    decode_worker: str = ""
    prefill_dp_rank: int | None = None
    decode_dp_rank: int | None = None
    query_only: bool = False  # answer with the placement, and compute nothing


NO_CHOICE = RoutingChoice()


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
    cache_salt: str = ""
    lora_name: str = ""
    timeout_ms: int = 0  # from arrival; 0: none
    session_id: str = ""
    routing: RoutingChoice = NO_CHOICE
    kv_cache_retention_config: KvCacheRetentionConfig | None = None


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
        cache_salt=values.get("cache_salt", ""),
        lora_name=sampling.lora_name,
        timeout_ms=timeout_ms(inputs, recipe),
        session_id=check_session(values.get("session_id", "")),
        routing=parse_routing(values.get("routing", "")),
        kv_cache_retention_config=parse_retention(values.get("kv_cache_retention_config", "")),
    )
    if "cumulative_logprob" in request.extras and sampling.params.logprobs is None:
        return replace(request, sampling=_with_logprobs(sampling), hides_logprobs=True)
    return request


def _defaults(contract: Contract, limits: Limits) -> dict[str, Any]:
    """Return the API's own sampling values."""
    return {"max_tokens": min(_VLLM_MAX_TOKENS, limits.max_tokens or _VLLM_MAX_TOKENS)} if contract == "vllm" else {}


def check_session(session_id: str, where: str = "session_id") -> str:
    if len(session_id) > MAX_SESSION_CHARACTERS:
        raise RequestError(f"{where}: {len(session_id)} characters; the limit is {MAX_SESSION_CHARACTERS}, shorten it")
    return session_id


def parse_routing(text: str) -> RoutingChoice:
    """Read the tensor `routing`. Raises RequestError."""
    if not text:
        return NO_CHOICE
    try:
        choice = msgspec.json.decode(text, type=RoutingChoice)
    except msgspec.MsgspecError as error:
        raise RequestError(f"routing: {str(error)[:200]}; send a JSON object with {_ROUTING_FIELDS}") from None
    if choice.query_only:
        raise RequestError("routing.query_only: the model `router` (router.has_model) answers that, remove it")
    return choice


_ROUTING_FIELDS = ", ".join(field.name for field in msgspec.structs.fields(RoutingChoice))


def parse_retention(text: str) -> KvCacheRetentionConfig | None:
    """Read the tensor `kv_cache_retention_config`. Raises RequestError."""
    if not text:
        return None
    try:
        config = msgspec.json.decode(text, type=KvCacheRetentionConfig)
    except msgspec.MsgspecError as error:
        raise RequestError(
            f"kv_cache_retention_config: {str(error)[:200]}; send a JSON object with {_RETENTION_FIELDS}"
        ) from None
    return check_retention(config)


_RETENTION_FIELDS = ", ".join(field.name for field in msgspec.structs.fields(KvCacheRetentionConfig))


def check_retention(
    config: KvCacheRetentionConfig | None, where: str = "kv_cache_retention_config"
) -> KvCacheRetentionConfig | None:
    """Return what is given. Raises RequestError for what no cache can do."""
    if config is None:
        return None
    ranges = config.token_range_retention_configs
    if len(ranges) > MAX_RETENTION_RANGES:
        raise RequestError(
            f"{where}.token_range_retention_configs: {len(ranges)} ranges; the limit is {MAX_RETENTION_RANGES}"
        )
    levels = [("decode_retention_priority", config.decode_retention_priority)]
    durations = [("decode_duration_ms", config.decode_duration_ms)]
    for at, one in enumerate(ranges):
        name = f"token_range_retention_configs[{at}]"
        levels.append((f"{name}.priority", one.priority))
        durations.append((f"{name}.duration_ms", one.duration_ms))
        if one.token_start < 0 or (one.token_end is not None and one.token_end <= one.token_start):
            raise RequestError(
                f"{where}.{name}: tokens {one.token_start} to {one.token_end}; token_start is 0 or more, token_end is"
                " behind it, or null for the prompt's end"
            )
    for name, priority in levels:
        if not 0 <= priority <= 100:
            raise RequestError(f"{where}.{name}: {priority}; 0 to 100, higher is kept longer")
    for name, duration_ms in durations:
        if duration_ms is not None and not 1 <= duration_ms <= MAX_INT32:
            raise RequestError(f"{where}.{name}: {duration_ms}; 1 to {MAX_INT32} milliseconds, or null for good")
    for before, after in pairwise(sorted(ranges, key=lambda one: one.token_start)):
        if before.token_end is None or before.token_end > after.token_start:
            raise RequestError(
                f"{where}.token_range_retention_configs: the ranges from tokens {before.token_start} and"
                f" {after.token_start} overlap; end the first before the second begins"
            )
    return config


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
    if is_single and array.size != 1:
        raise RequestError(f"{tensor.name}: shape {list(array.shape)}; send exactly one value, shape [1]")
    if not is_single and (array.ndim > 2 or (array.ndim == 2 and array.shape[0] != 1)):
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
    }
    return frozenset(name for name, is_wanted in wanted.items() if is_wanted)


def _vllm_outputs(values: Mapping[str, Any]) -> frozenset[str]:
    return frozenset({"text_output", *(name for name in _RETURNED if values.get(f"return_{name}"))})


def _with_logprobs(sampling: Sampling) -> Sampling:
    return replace(sampling, params=msgspec.structs.replace(sampling.params, logprobs=0))
