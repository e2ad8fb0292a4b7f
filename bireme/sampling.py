"""Sampling values from all their sources, merged and checked.

Precedence: tensor > `sampling_parameters` > request parameter > the recipe's `sampling` > the API's default; unset
stays unset, 0 and false are values. Names are tensorrtllm_backend's and vllm's, numbers may come as strings. Request
parameters with other names belong to others (tracing, proxies) and are ignored; unknown keys of `sampling_parameters`
are refused with the nearest name.

Clamped, not refused, are top_k -1 (off), top_p 0 beside top_k (TensorRT-LLM's form of off) and max_tokens beyond the
context. (The engine ends with `length`; OpenAI and vLLM refuse that, and here 2**31 and more is refused, which no
context holds.)
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from bireme.config import Limits, Recipe
from bireme.errors import ConfigError, RequestError
from bireme.guides import parse_guide
from bireme.messages import ProcessorCall, SamplingParams, encode, temperature_of
from bireme.parameters import ALIASES, BY_NAME, MAX_INT32, NAMES, PARAMETERS, Parameter
from bireme.serving_options import ServingOptions

EncodeText = Callable[[str], list[int]]  # text -> token ids, without special tokens
_ID = re.compile("0|[1-9][0-9]*")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters with the words that only a tokenizer can turn into ids."""

    params: SamplingParams
    bad_words: tuple[str, ...] = ()
    bias_words: tuple[tuple[str, float], ...] = ()
    priority: float = 0.5  # as it was read: what holds is in the request's options
    lora_name: str = ""  # from sampling_parameters, where vllm_backend has it

    def complete(self, options: ServingOptions) -> ServingOptions:
        """Return the options with the priority, which is read among the sampling values."""
        if self.priority == options.priority:
            return options
        return msgspec.structs.replace(options, priority=self.priority)

    def resolve(self, encode: EncodeText) -> SamplingParams:
        """Return the parameters with words as ids; bias of a word goes to each of its tokens."""
        if not self.bad_words and not self.bias_words:
            return self.params
        bias = dict(self.params.logit_bias)
        for word, weight in self.bias_words:
            for token in encode(word):
                bias[token] = bias.get(token, 0.0) + weight
        bad = (*self.params.bad_token_ids, *(ids for word in self.bad_words for ids in _spellings(word, encode)))
        return msgspec.structs.replace(self.params, bad_token_ids=bad, logit_bias=bias)


def parse_sampling(
    values: Mapping[str, Any], parameters: Mapping[str, Any], recipe: Recipe, defaults: Mapping[str, Any] | None = None
) -> Sampling:
    """Merge all sources of sampling values, tensors' or JSON's first, and check them. Raises RequestError.

    `defaults`: of the API, where the recipe has none.
    """
    layers = (
        ("", {name: value for name, value in values.items() if name in NAMES}),
        ("sampling_parameters.", _parse_json(values.get("sampling_parameters"))),
        ("parameter ", {name: value for name, value in parameters.items() if name in NAMES}),
        ("recipe sampling.", recipe.sampling),
        ("default ", defaults or {}),
    )
    return _build(_merge(layers), recipe.limits)


def check_defaults(recipe: Recipe) -> None:
    """Raise ConfigError when the recipe's own sampling defaults could not be served."""
    try:
        _refuse_unknown(recipe.sampling, "sampling")
        parse_sampling({}, {}, recipe)
    except RequestError as error:
        raise ConfigError(f"recipe {recipe.name}: {error}") from error


def with_seed(params: SamplingParams) -> SamplingParams:
    """Draw a missing seed, so that a migrated stream goes on exactly."""
    if params.seed is not None or not temperature_of(params):
        return params
    return msgspec.structs.replace(params, seed=secrets.randbits(64), is_seed_drawn=True)


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


class _Value(NamedTuple):
    """A raw value and where it came from, for error messages."""

    where: str
    raw: Any


_Reader = Callable[[_Value, Limits], Any]


def _merge(layers: tuple[tuple[str, Mapping[str, Any]], ...]) -> dict[str, _Value]:
    """Return one value a name, from the strongest layer that has it; JSON null is unset."""
    merged: dict[str, _Value] = {}
    for prefix, layer in layers:
        if not layer:
            continue
        found: dict[str, _Value] = {}
        for name, raw in layer.items():
            if raw is None:
                continue
            canonical, value = ALIASES.get(name, name), _Value(prefix + name, raw)
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
        if name not in NAMES:
            raise RequestError(f"{where}.{name}: unknown key{nearest(name, sorted(NAMES))}")


def nearest(name: str, known: list[str]) -> str:
    """Return the end of an error message about an unknown name."""
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"


def _short(error: BaseException) -> str:
    return str(error)[:120]


def _integer(value: _Value, low: float, high: float, remedy: str) -> int:
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


def _number(value: _Value, parameter: Parameter) -> float:
    raw, low, high = value.raw, parameter.low, parameter.high
    try:
        number = float(raw) if isinstance(raw, (str, int, float)) and not isinstance(raw, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if math.isfinite(number) and low <= number <= high and not (parameter.is_low_open and number == low):
        return number
    if math.isfinite(number):
        raise _wrong(value, f"the range is {parameter.range_text}, {parameter.advice}")
    raise _wrong(value, f"send a finite number {parameter.range_text}")


def _flag(value: _Value) -> bool:
    if isinstance(value.raw, bool):
        return value.raw
    known = {"true": True, "1": True, "false": False, "0": False}
    if str(value.raw).lower() not in known:
        raise _wrong(value, "send true or false")
    return known[str(value.raw).lower()]


def _strings(value: _Value, limit: int, limit_name: str, max_bytes: float = math.inf) -> tuple[str, ...]:
    raw = [value.raw] if isinstance(value.raw, str) else value.raw
    is_list = isinstance(raw, list)
    if is_list and (count := len(raw) - raw.count("")) > limit:  # clients of tensorrtllm_backend send [""] for none
        raise RequestError(f"{value.where}: {count} strings; {limit_name} is {limit}, send fewer")
    if not is_list or not all(isinstance(item, str) for item in raw):
        raise _wrong(value, "send a string or a list of strings")
    items = tuple(filter(None, raw))
    for item in items:
        num_bytes = len(item.encode("utf-8", "surrogatepass"))
        if num_bytes > max_bytes:
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


def _wrong(value: _Value, remedy: str) -> RequestError:
    return RequestError(f"{value.where}: {str(value.raw)[:80]}; {remedy}")


def _build(values: dict[str, _Value], limits: Limits) -> Sampling:
    fields = {name: _READERS[name](value, limits) for name, value in values.items()}
    beside = {} if _FIELDS.issuperset(fields) else _combine(fields, values, limits)
    if fields.get("top_p") == 0 and fields.get("top_k"):
        del fields["top_p"]
    params = SamplingParams(**fields)
    if params.min_tokens and params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(f"min_tokens: {params.min_tokens}; at most max_tokens, {params.max_tokens}")
    if params.logits_processors or params.guided_decoding is not None:
        _check_travels(params)
    return Sampling(params, **beside)


def _combine(fields: dict[str, Any], values: dict[str, _Value], limits: Limits) -> dict[str, Any]:
    """Convert what is not as it was sent: SamplingParams' fields in place; Sampling's are returned."""
    others = {name: fields.pop(name) for name in fields.keys() - _FIELDS}
    words, weights = others.get("embedding_bias_words", ()), others.get("embedding_bias_weights", ())
    if len(words) != len(weights):
        raise RequestError(
            f"embedding_bias_words: {len(words)} words, {len(weights)} embedding_bias_weights; send one weight a word"
        )
    if others.get("return_log_probs"):
        fields.setdefault("logprobs", 0)
    if (best_of := values.get("best_of")) is not None:
        n = fields.get("n", 1)
        _integer(best_of, n, n, "it must equal n: candidates are not ranked")
    if "guided_decoding" not in fields and (guide := _guide_of_pair(values, limits)) is not None:
        fields["guided_decoding"] = guide
    end_id = others.get("end_id")
    if end_id == -1:
        fields.setdefault("ignore_eos", True)
    elif end_id is not None:
        fields["end_id"] = end_id
    beside = {name: others[name] for name in others.keys() & _BESIDE}
    return {"bias_words": tuple(zip(words, weights, strict=True)), **beside}


def _check_travels(params: SamplingParams) -> None:
    """Nested values of clients must fit the wire: one that does not would end the bus session of all requests."""
    try:
        encode((params.logits_processors, params.guided_decoding))
    except (OverflowError, RecursionError, ValueError, TypeError) as error:
        where = "logits_processors" if params.logits_processors else "guided_decoding"
        raise RequestError(f"{where}: {str(error)[:80]}; send numbers of at most 64 bits, not nested deeply") from error


_GUIDE_TYPES = {"json": "json_object", "json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}


def _guide_of_pair(values: dict[str, _Value], limits: Limits) -> dict[str, Any] | None:
    kind, guide = values.get("guided_decoding_guide_type"), values.get("guided_decoding_guide")
    if kind is None:
        if guide is not None:
            raise RequestError(f"{guide.where}: without guided_decoding_guide_type; send {' or '.join(_GUIDE_TYPES)}")
        return None
    if not isinstance(kind.raw, str) or kind.raw not in _GUIDE_TYPES:
        raise _wrong(kind, f"send one of {', '.join(_GUIDE_TYPES)}")
    if kind.raw == "json":
        return {"json_object": True}
    if guide is None:
        raise RequestError(f"{kind.where}: {kind.raw} without guided_decoding_guide; send the guide's text")
    return _guide(_Value(guide.where, {_GUIDE_TYPES[kind.raw]: guide.raw}), limits)


def _ranged(parameter: Parameter) -> _Reader:
    """Return a reader that checks a value by its row of the table alone."""
    low = parameter.low if parameter.lowest is None else parameter.lowest
    high = parameter.high if parameter.data_type == "UINT64" else min(parameter.high, MAX_INT32)
    if parameter.is_ignored:
        return lambda value, limits: None
    if parameter.data_type == "BOOL":
        return lambda value, limits: _flag(value)
    if parameter.data_type == "FP32":
        return lambda value, limits: _number(value, parameter)
    if not parameter.has_range:
        raise TypeError(f"{parameter.name}: neither a range nor a reader of its own")

    def read(value: _Value, limits: Limits) -> int:
        most = getattr(limits, parameter.limit) if parameter.limit else None
        if most is None:
            return _integer(value, low, high, parameter.advice)
        return _integer(value, low, most, f"limits.{parameter.limit} sets the upper end")

    return read


def _stop(value: _Value, limits: Limits) -> tuple[str, ...]:
    return _strings(value, limits.max_stop_strings, "limits.max_stop_strings", limits.max_stop_string_bytes)


def _token_ids(value: _Value, limits: Limits) -> tuple[int, ...]:
    raw, limit = value.raw if isinstance(value.raw, list) else [value.raw], limits.max_stop_token_ids
    if len(raw) > limit:
        raise RequestError(f"{value.where}: {len(raw)} ids; limits.max_stop_token_ids is {limit}, send fewer")
    return tuple(_integer(_Value(value.where, item), 0, MAX_INT32, "send token ids") for item in raw)


def _weights(value: _Value, limits: Limits) -> tuple[float, ...]:
    raw = value.raw if isinstance(value.raw, list) else [value.raw]
    return tuple(_number(_Value(value.where, item), BY_NAME["embedding_bias_weights"]) for item in raw)


def _logit_bias(value: _Value, limits: Limits) -> dict[int, float]:
    if not isinstance(value.raw, Mapping):
        raise _wrong(value, "send an object of token id to bias")
    if len(value.raw) > limits.max_logit_bias:
        raise RequestError(
            f"{value.where}: {len(value.raw)} entries; limits.max_logit_bias is {limits.max_logit_bias}, send fewer"
        )
    return {
        _bias_id(key, value.where): _number(_Value(f"{value.where}.{str(key)[:20]}", bias), BY_NAME["logit_bias"])
        for key, bias in value.raw.items()
    }


def _bias_id(key: Any, where: str) -> int:
    """JSON's keys are texts: only an id's own digits count, because int() would also read " 5", "+5", "1_0" and "٥"."""
    if isinstance(key, str) and not _ID.fullmatch(key):
        raise RequestError(f"{where}: the key {key[:80]!r}; send token ids in decimal digits")
    return _integer(_Value(f"{where}: the key", key), 0, MAX_INT32, "send token ids")


def _processors(value: _Value, limits: Limits) -> tuple[ProcessorCall, ...]:
    try:
        raw = json.loads(value.raw) if isinstance(value.raw, str) else value.raw
        if isinstance(raw, list) and len(raw) > limits.max_logits_processors:  # before each of them is looked at
            limit = limits.max_logits_processors
            raise RequestError(
                f"{value.where}: {len(raw)} of them; limits.max_logits_processors is {limit}; send fewer or raise it"
            )
        return tuple(msgspec.convert(raw, list[ProcessorCall]))
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise RequestError(
            f'{value.where}: {_short(error)}; send a JSON list of {{"name": ..., "args": {{...}}}}'
        ) from error


def _guide(value: _Value, limits: Limits) -> dict[str, Any]:
    parse_guide(value.raw, limits, value.where)
    return dict(value.raw)


def _no_beams(value: _Value, limits: Limits) -> None:
    if _flag(value):
        raise _wrong(value, "beam search is not served; leave it out")


def _raw(value: _Value, limits: Limits) -> Any:
    """A value that `_combine` reads together with others."""
    return value.raw


_top_k, _seed = _ranged(BY_NAME["top_k"]), _ranged(BY_NAME["seed"])
_OWN: dict[str, _Reader] = {
    "top_k": lambda value, limits: max(_top_k(value, limits), 0),
    "seed": lambda value, limits: _seed(value, limits) % 2**64,
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "bad_words": lambda value, limits: _strings(value, limits.max_bad_words, "limits.max_bad_words"),
    "embedding_bias_words": lambda value, limits: _strings(value, limits.max_logit_bias, "limits.max_logit_bias"),
    "embedding_bias_weights": _weights,
    "logit_bias": _logit_bias,
    "logits_processors": _processors,
    "guided_decoding": _guide,
    "guided_decoding_guide_type": _raw,
    "guided_decoding_guide": _raw,
    "best_of": _raw,
    "use_beam_search": _no_beams,
    "lora_name": lambda value, limits: str(value.raw),
}
_READERS = {row.name: _OWN.get(row.name) or _ranged(row) for row in PARAMETERS}
_FIELDS = frozenset(row.name for row in PARAMETERS if row.is_field)
_BESIDE = frozenset({"bad_words", "priority", "lora_name"})  # Sampling's, as they were sent


def _spellings(word: str, encode: EncodeText) -> set[tuple[int, ...]]:
    """Return a bad word's token sequences: at the start of a text, and after a space."""
    bare = word.lstrip()
    return {tuple(ids) for ids in (encode(word), encode(f" {bare}")) if ids}
