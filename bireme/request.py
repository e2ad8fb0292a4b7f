"""What a client asked for, checked: tensors, JSON and parameters become one frozen GenerateRequest.

One rule: after this module nothing is in doubt. Every value has been checked against its range and the
recipe's limits, and an error names field, value, limit and remedy. Precedence: tensor >
`sampling_parameters` > request parameter > the recipe's `sampling`; unset stays unset, 0 and false are values.

vllm_backend's contract holds if and only if an input that only vllm_backend has is there (VLLM_ONLY):
the prompt is echoed when not streaming, finish_reason is "None" until the end. Otherwise
tensorrtllm_backend's: no echo. `stream` absent means false in both, as with the peers; the HTTP endpoint
`generate_stream` can't be told from `generate` by a model, so its clients send `"stream": true`.

Clamped, not refused: max_tokens beyond the context (the engine ends with `length`), top_k -1 (off), and
top_p 0 beside top_k (TensorRT-LLM's way to say off).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from bireme.config import Limits, Recipe
from bireme.errors import ConfigError, RequestError
from bireme.messages import ProcessorCall, SamplingParams
from bireme.specs import SAMPLING, ModelSpec, TensorSpec
from bireme.types import Array, Tensors, info_of

Ids = npt.NDArray[np.int32]
Contract = Literal["vllm", "trtllm"]
Encode = Callable[[str], list[int]]  # text -> token ids, without special tokens

VLLM_ONLY = frozenset({"sampling_parameters", "return_finish_reason", "return_cumulative_logprob", "return_logprobs"})
MAX_INT32 = 2**31 - 1
_SAMPLING_NAMES = frozenset(spec.name for spec in SAMPLING)
_ALIASES = {"random_seed": "seed", "num_return_sequences": "n", "stop_words": "stop"}
_JSON_NAMES = frozenset(
    {*_SAMPLING_NAMES, *_ALIASES.values(), "best_of", "logit_bias", "guided_decoding", "lora_name", "use_beam_search"}
    | {"detokenize", "spaces_between_special_tokens", "early_stopping"}
)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters with the words that only a tokenizer can turn into ids."""

    params: SamplingParams
    bad_words: tuple[str, ...] = ()
    bias_words: tuple[tuple[str, float], ...] = ()
    priority: float = 0.5
    lora_name: str = ""  # from sampling_parameters, where vllm_backend has it

    def resolve(self, encode: Encode) -> SamplingParams:
        """Return the parameters with words as ids; bias of a word goes to each of its tokens."""
        if not self.bad_words and not self.bias_words:
            return self.params
        bias = dict(self.params.logit_bias)
        for word, weight in self.bias_words:
            for token in encode(word):
                bias[token] = bias.get(token, 0.0) + weight
        bad = (*self.params.bad_token_ids, *(ids for word in self.bad_words for ids in _spellings(word, encode)))
        return msgspec.structs.replace(self.params, bad_token_ids=bad, logit_bias=bias)


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
    cache_salt: str = ""
    lora_name: str = ""
    timeout_ms: int = 0  # from arrival; 0: none


def parse_generate(inputs: Tensors, spec: ModelSpec, recipe: Recipe) -> GenerateRequest:
    """Read a request of `generate` or `completion`. Raises RequestError."""
    values = read_tensors(inputs, spec)
    sampling = parse_sampling(values, info_of(inputs).parameters, recipe)
    contract: Contract = "vllm" if VLLM_ONLY & values.keys() else "trtllm"
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
        cache_salt=values.get("cache_salt", ""),
        lora_name=values.get("lora_name", sampling.lora_name),
        timeout_ms=timeout_ms(inputs, recipe),
    )
    if contract == "vllm" and values.get("return_logprobs") and sampling.params.logprobs is None:
        return replace(request, sampling=_with_logprobs(sampling))
    return request


def parse_sampling(values: Mapping[str, Any], parameters: Mapping[str, Any], recipe: Recipe) -> Sampling:
    """Merge all sources of sampling values and check them. Raises RequestError."""
    layers = (
        ("", {name: value for name, value in values.items() if name in _SAMPLING_NAMES}),
        ("sampling_parameters.", _parse_json(values.get("sampling_parameters"))),
        ("parameter ", {name: value for name, value in parameters.items() if name in _JSON_NAMES}),
        ("recipe sampling.", recipe.sampling),
    )
    return _build(_merge(layers), recipe.limits)


def check_defaults(recipe: Recipe) -> None:
    """Raise ConfigError when the recipe's own sampling defaults could not be served."""
    try:
        _refuse_unknown(recipe.sampling, "sampling")
        parse_sampling({}, {}, recipe)
    except RequestError as error:
        raise ConfigError(f"recipe {recipe.name}: {error}") from error


def timeout_ms(inputs: Tensors, recipe: Recipe) -> int:
    """Return the request's own time limit, or the recipe's; 0: none."""
    return info_of(inputs).timeout_ms or int(recipe.pipeline.request_timeout_s * 1000)


def is_random(params: SamplingParams) -> bool:
    """Can two runs with different seeds differ?"""
    if params.temperature is not None:
        return params.temperature > 0
    return params.top_k is not None or params.top_p is not None or params.min_p is not None


def with_seed(params: SamplingParams) -> SamplingParams:
    """Draw a missing seed, so that a migrated stream goes on exactly."""
    if params.seed is not None or not is_random(params):
        return params
    return msgspec.structs.replace(params, seed=secrets.randbits(64))


def expand(params: SamplingParams) -> list[SamplingParams]:
    """Return the parameters of each of n sequences: the first keeps the seed, the others derive theirs."""
    params = with_seed(params)
    if params.n == 1:
        return [params]
    single = msgspec.structs.replace(params, n=1)
    if params.seed is None:
        return [single] * params.n
    return [msgspec.structs.replace(single, seed=_derive_seed(params.seed, index)) for index in range(params.n)]


def _derive_seed(seed: int, index: int) -> int:
    if index == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


# Tensors to plain values


def read_tensors(inputs: Tensors, spec: ModelSpec) -> dict[str, Any]:
    """Turn input tensors into plain values by their spec: scalars for dims (1,), else lists or an id array."""
    values: dict[str, Any] = {}
    for name, array in inputs.items():
        tensor = spec.input(name)
        if tensor is None:
            raise RequestError(f"{name}: {spec.name} has no such input{_near(name, [t.name for t in spec.inputs])}")
        values[name] = _read(tensor, array)
    return values


def _read(tensor: TensorSpec, array: Array) -> Any:
    kinds = {"BYTES": "OSU", "BOOL": "b", "FP32": "f"}.get(tensor.data_type, "iu")
    if array.dtype.kind not in kinds:
        raise RequestError(f"{tensor.name}: data type {array.dtype}; send {tensor.data_type}")
    if tensor.dims == (1,):
        if array.size != 1:
            raise RequestError(f"{tensor.name}: shape {list(array.shape)}; send exactly one value, shape [1]")
        return _scalar(tensor, array.reshape(-1)[0])
    if array.ndim > 2 or (array.ndim == 2 and array.shape[0] != 1):
        raise RequestError(f"{tensor.name}: shape {list(array.shape)}; send one row, shape [n]")
    flat = array.reshape(-1)
    if tensor.data_type == "BYTES":
        return [_text(tensor.name, item) for item in flat]
    return flat if tensor.name in _ID_TENSORS else flat.tolist()


_ID_TENSORS = frozenset({"input_ids", "resumed_output_ids", "commands", "engine_request"})
_RAW = frozenset({"disaggregated_params", "multimodal", "subscribe", "consumer"})  # bytes, not text


def _scalar(tensor: TensorSpec, item: Any) -> Any:
    if tensor.name in _RAW:
        return item if isinstance(item, bytes) else str(item).encode()
    return _text(tensor.name, item) if tensor.data_type == "BYTES" else item.item()


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
        num_bytes = len(text.encode())
        if num_bytes > limits.max_prompt_bytes:
            raise RequestError(
                f"text_input: {num_bytes} bytes; limits.max_prompt_bytes is {limits.max_prompt_bytes}, shorten it"
            )
        if not text:
            raise RequestError("text_input: empty; send at least one character")
        return text, None
    assert ids is not None
    checked = check_ids("input_ids", ids)
    check_prompt_tokens(len(checked), limits)
    return None, checked


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


def _with_logprobs(sampling: Sampling) -> Sampling:
    return replace(sampling, params=msgspec.structs.replace(sampling.params, logprobs=0))


# Layers of sampling values


@dataclass(frozen=True, slots=True)
class _Value:
    """A raw value and where it came from, for error messages."""

    where: str
    raw: Any


def _merge(layers: tuple[tuple[str, Mapping[str, Any]], ...]) -> dict[str, _Value]:
    """Return one value a name, from the strongest layer that has it; JSON null is unset."""
    merged: dict[str, _Value] = {}
    for prefix, layer in layers:
        found: dict[str, _Value] = {}
        for name, raw in layer.items():
            if raw is None:
                continue
            canonical, value = _ALIASES.get(name, name), _Value(prefix + name, raw)
            other = found.get(canonical)
            if other is not None and other.raw != raw:
                raise RequestError(f"{value.where}: {raw!r} contradicts {other.where}: {other.raw!r}; send one of them")
            found[canonical] = value
        merged = found | merged
    return merged


def _parse_json(text: str | None) -> Mapping[str, Any]:
    if not text:
        return {}
    try:
        tree = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise RequestError(f"sampling_parameters: not valid JSON ({_short(error)}); send a JSON object") from error
    if not isinstance(tree, dict):
        raise RequestError(f"sampling_parameters: a JSON {type(tree).__name__}; send a JSON object")
    _refuse_unknown(tree, "sampling_parameters")
    return tree


def _refuse_unknown(tree: Mapping[str, Any], where: str) -> None:
    for name in tree:
        if name not in _JSON_NAMES:
            raise RequestError(f"{where}.{name}: unknown key{_near(name, sorted(_JSON_NAMES))}")


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"


def _short(error: BaseException) -> str:
    return str(error)[:120]


# One checker a kind of value


def _integer(value: _Value, low: int, high: int, remedy: str) -> int:
    raw = value.raw
    try:
        number = int(raw) if isinstance(raw, str) else raw
    except ValueError:
        raise _wrong(value, f"send an integer from {low} to {high}") from None
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int):
        raise _wrong(value, f"send an integer from {low} to {high}")
    if not low <= number <= high:
        raise _wrong(value, f"the range is {low} to {high}, {remedy}")
    return number


def _number(value: _Value, low: float, high: float, remedy: str, *, open_low: bool = False) -> float:
    raw = value.raw
    try:
        number = float(raw) if isinstance(raw, (str, int, float)) and not isinstance(raw, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise _wrong(value, f"send a finite number{_range(low, high, open_low)}")
    if not low <= number <= high or (open_low and number == low):
        raise _wrong(value, f"the range is{_range(low, high, open_low)}, {remedy}")
    return number


def _range(low: float, high: float, open_low: bool) -> str:
    start = f" {'above' if open_low else 'from'} {low:g}"
    return start if math.isinf(high) else f"{start} to {high:g}"


def _flag(value: _Value) -> bool:
    if isinstance(value.raw, bool):
        return value.raw
    known = {"true": True, "1": True, "false": False, "0": False}
    if str(value.raw).lower() not in known:
        raise _wrong(value, "send true or false")
    return known[str(value.raw).lower()]


def _strings(value: _Value, limit: int, limit_name: str, max_bytes: int | None = None) -> tuple[str, ...]:
    raw = [value.raw] if isinstance(value.raw, str) else value.raw
    if not isinstance(raw, list) or not all(isinstance(item, str) for item in raw):
        raise _wrong(value, "send a string or a list of strings")
    items = tuple(item for item in raw if item)  # clients of tensorrtllm_backend send [""] for none
    if len(items) > limit:
        raise RequestError(f"{value.where}: {len(items)} strings; {limit_name} is {limit}, send fewer")
    for item in items:
        num_bytes = len(item.encode("utf-8", "surrogatepass"))
        if max_bytes is not None and num_bytes > max_bytes:
            raise RequestError(
                f"{value.where}: a string of {num_bytes} bytes; limits.max_stop_string_bytes is {max_bytes}, shorten it"
            )
        if not _is_utf8(item):
            raise RequestError(f"{value.where}: a lone surrogate; send valid Unicode text")
    return items


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _token_ids(value: _Value, limit: int) -> tuple[int, ...]:
    raw = value.raw if isinstance(value.raw, list) else [value.raw]
    if len(raw) > limit:
        raise RequestError(f"{value.where}: {len(raw)} ids; limits.max_stop_token_ids is {limit}, send fewer")
    return tuple(_integer(_Value(value.where, item), 0, MAX_INT32, "send token ids") for item in raw)


def _wrong(value: _Value, remedy: str) -> RequestError:
    return RequestError(f"{value.where}: {str(value.raw)[:80]}; {remedy}")


# Merged values to SamplingParams


def _build(values: dict[str, _Value], limits: Limits) -> Sampling:
    _check_harmless(values)
    fields = {**_counts(values, limits), **_distribution(values), **_ends(values, limits), **_hooks(values, limits)}
    params = SamplingParams(**fields)
    _check_together(params)
    bad = values.get("bad_words")
    priority, lora = values.get("priority"), values.get("lora_name")
    return Sampling(
        params=params,
        bad_words=_strings(bad, limits.max_bad_words, "limits.max_bad_words") if bad else (),
        bias_words=_bias_words(values, limits),
        priority=_number(priority, 0, 1, "higher is served first") if priority else 0.5,
        lora_name=str(lora.raw) if lora else "",
    )


def _counts(values: dict[str, _Value], limits: Limits) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if value := values.get("max_tokens"):
        fields["max_tokens"] = _integer(value, 1, limits.max_tokens or 2**63, "limits.max_tokens sets the upper end")
        fields["max_tokens"] = min(fields["max_tokens"], MAX_INT32)
    if value := values.get("min_tokens"):
        fields["min_tokens"] = _integer(value, 0, limits.max_tokens or MAX_INT32, "lower it")
    if value := values.get("n"):
        fields["n"] = _integer(value, 1, limits.max_n, "limits.max_n sets the upper end")
    if value := values.get("logprobs"):
        fields["logprobs"] = _integer(value, 0, limits.max_logprobs, "limits.max_logprobs sets the upper end")
    elif (flag := values.get("return_log_probs")) and _flag(flag):
        fields["logprobs"] = 0
    if value := values.get("prompt_logprobs"):
        fields["prompt_logprobs"] = _integer(value, 0, limits.max_logprobs, "limits.max_logprobs sets the upper end")
    return fields


def _distribution(values: dict[str, _Value]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if value := values.get("temperature"):
        fields["temperature"] = _number(value, 0, math.inf, "0 is greedy")
    if value := values.get("top_k"):
        fields["top_k"] = max(_integer(value, -1, MAX_INT32, "0 is off"), 0)
    if value := values.get("top_p"):
        fields["top_p"] = _number(value, 0, 1, "1 is off")
        if fields["top_p"] == 0 and fields.get("top_k"):
            del fields["top_p"]
    if value := values.get("min_p"):
        fields["min_p"] = _number(value, 0, 1, "0 is off")
    if value := values.get("seed"):
        fields["seed"] = _integer(value, -(2**63), 2**64 - 1, "send an unsigned 64-bit number") % 2**64
    if value := values.get("repetition_penalty"):
        fields["repetition_penalty"] = _number(value, 0, math.inf, "1 is off", open_low=True)
    for name in ("presence_penalty", "frequency_penalty"):
        if value := values.get(name):
            fields[name] = _number(value, -2, 2, "0 is off")
    return fields


def _ends(values: dict[str, _Value], limits: Limits) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if value := values.get("stop"):
        fields["stop"] = _strings(
            value, limits.max_stop_strings, "limits.max_stop_strings", limits.max_stop_string_bytes
        )
    if value := values.get("stop_token_ids"):
        fields["stop_token_ids"] = _token_ids(value, limits.max_stop_token_ids)
    if value := values.get("end_id"):
        end_id = _integer(value, -1, MAX_INT32, "-1 is none")
        fields |= {"ignore_eos": True} if end_id < 0 else {"end_id": end_id}
    for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
        if value := values.get(name):
            fields[name] = _flag(value)
    return fields


def _hooks(values: dict[str, _Value], limits: Limits) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if value := values.get("logit_bias"):
        fields["logit_bias"] = _logit_bias(value, limits)
    if value := values.get("logits_processors"):
        fields["logits_processors"] = _processors(value)
    if guided := _guided(values):
        fields["guided_decoding"] = guided
    return fields


def _logit_bias(value: _Value, limits: Limits) -> dict[int, float]:
    if not isinstance(value.raw, Mapping):
        raise _wrong(value, "send an object of token id to bias")
    if len(value.raw) > limits.max_logit_bias:
        raise RequestError(
            f"{value.where}: {len(value.raw)} entries; limits.max_logit_bias is {limits.max_logit_bias}, send fewer"
        )
    return {
        _integer(_Value(f"{value.where} key", key), 0, MAX_INT32, "send token ids"): _number(
            _Value(f"{value.where}.{str(key)[:20]}", bias), -100, 100, "0 is off"
        )
        for key, bias in value.raw.items()
    }


def _processors(value: _Value) -> tuple[ProcessorCall, ...]:
    try:
        raw = json.loads(value.raw) if isinstance(value.raw, str) else value.raw
        return tuple(msgspec.convert(raw, list[ProcessorCall]))
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise RequestError(
            f'{value.where}: {_short(error)}; send a JSON list of {{"name": ..., "args": {{...}}}}'
        ) from error


_GUIDE_TYPES = ("json", "json_schema", "regex", "ebnf_grammar")
_GUIDES = ("json", "regex", "grammar", "json_object", "choice", "structural_tag")


def _guided(values: dict[str, _Value]) -> dict[str, Any] | None:
    """Return exactly one guide, from tensorrtllm_backend's pair or vllm's object."""
    if value := values.get("guided_decoding"):
        raw = value.raw
        if not isinstance(raw, dict) or len(raw) != 1 or next(iter(raw)) not in _GUIDES:
            raise _wrong(value, f"send an object with exactly one of {', '.join(_GUIDES)}")
        return raw
    kind, guide = values.get("guided_decoding_guide_type"), values.get("guided_decoding_guide")
    if kind is None:
        if guide is not None:
            raise RequestError(f"{guide.where}: without guided_decoding_guide_type; send {' or '.join(_GUIDE_TYPES)}")
        return None
    if kind.raw not in _GUIDE_TYPES:
        raise _wrong(kind, f"send one of {', '.join(_GUIDE_TYPES)}")
    if kind.raw == "json":
        return {"json_object": True}
    if guide is None:
        raise RequestError(f"{kind.where}: {kind.raw} without guided_decoding_guide; send the guide's text")
    return {{"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}[kind.raw]: guide.raw}


def _bias_words(values: dict[str, _Value], limits: Limits) -> tuple[tuple[str, float], ...]:
    words, weights = values.get("embedding_bias_words"), values.get("embedding_bias_weights")
    if words is None and weights is None:
        return ()
    names = _strings(words, limits.max_logit_bias, "limits.max_logit_bias") if words else ()
    raw = weights.raw if weights else []
    numbers = raw if isinstance(raw, list) else [raw]
    if len(names) != len(numbers):
        raise RequestError(
            f"embedding_bias_words: {len(names)} words, {len(numbers)} embedding_bias_weights; send one weight a word"
        )
    return tuple(
        (name, _number(_Value("embedding_bias_weights", number), -100, 100, "0 is off"))
        for name, number in zip(names, numbers, strict=True)
    )


def _check_harmless(values: dict[str, _Value]) -> None:
    """Check what changes nothing here, so that a wrong value is not passed over in silence."""
    if value := values.get("beam_width"):
        _integer(value, 1, 1, "beam search is not served; use num_return_sequences for several answers")
    if value := values.get("length_penalty"):
        _number(value, -math.inf, math.inf, "it has no effect without beams")
    if (value := values.get("use_beam_search")) and _flag(value):
        raise _wrong(value, "beam search is not served; leave it out")
    if value := values.get("best_of"):
        n = values.get("n")
        count = _integer(n, 1, MAX_INT32, "") if n else 1
        _integer(value, count, count, "it must equal n: candidates are not ranked")


def _check_together(params: SamplingParams) -> None:
    if params.min_tokens and params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(f"min_tokens: {params.min_tokens}; at most max_tokens, {params.max_tokens}")


def _spellings(word: str, encode: Encode) -> set[tuple[int, ...]]:
    """Return a bad word's token sequences: at the start of a text, and after a space."""
    bare = word.lstrip()
    return {tuple(ids) for ids in (encode(word), encode(f" {bare}")) if ids}
