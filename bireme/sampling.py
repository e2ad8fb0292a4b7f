"""Sampling values from all their sources, merged and checked.

Precedence: tensor > `sampling_parameters` > request parameter > the recipe's `sampling`; unset stays unset,
0 and false are values. Names are tensorrtllm_backend's and vllm's, numbers may come as strings. Request
parameters with other names are somebody else's (tracing, proxies) and left alone; unknown keys of
`sampling_parameters` are refused with the nearest name.

Clamped, not refused: max_tokens beyond the context (the engine ends with `length`; OpenAI and vLLM refuse that, and
so is here what no context holds: 2**31 and more), top_k -1 (off), and top_p 0 beside top_k (TensorRT-LLM's way to
say off).
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
from bireme.specs import SAMPLING

Encode = Callable[[str], list[int]]  # text -> token ids, without special tokens

MAX_INT32 = 2**31 - 1
_SAMPLING_NAMES = frozenset(spec.name for spec in SAMPLING)
_ALIASES = {"random_seed": "seed", "num_return_sequences": "n", "stop_words": "stop"}
_ID = re.compile("0|[1-9][0-9]*")
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


def parse_sampling(values: Mapping[str, Any], parameters: Mapping[str, Any], recipe: Recipe) -> Sampling:
    """Merge all sources of sampling values and check them. Raises RequestError."""
    layers = (
        ("", {name: value for name, value in values.items() if name in _SAMPLING_NAMES}),
        ("sampling_parameters.", _parse_json(values.get("sampling_parameters"))),
        ("parameter ", {name: value for name, value in parameters.items() if name in _JSON_NAMES}),
        ("recipe sampling.", recipe.sampling),
    )
    return _build(_merge(layers), recipe.limits)


def json_sampling(fields: Mapping[str, Any], recipe: Recipe) -> Sampling:
    """Check the sampling fields of a JSON request, over the recipe's defaults. Raises RequestError."""
    return _build(_merge((("", fields), ("recipe sampling.", recipe.sampling))), recipe.limits)


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


# Layers


class _Value(NamedTuple):
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
            raise RequestError(f"{where}.{name}: unknown key{nearest(name, sorted(_JSON_NAMES))}")


def nearest(name: str, known: list[str]) -> str:
    """Return the end of an error message about an unknown name."""
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
    fields: dict[str, Any] = {}
    for names, read in _READERS:
        if not names.isdisjoint(values):  # most requests bring three or four of all the values that there are
            fields |= read(values, limits)
    params = SamplingParams(**fields)
    _check_together(params)
    _check_travels(params)
    bad = values.get("bad_words")
    priority, lora = values.get("priority"), values.get("lora_name")
    return Sampling(
        params=params,
        bad_words=_strings(bad, limits.max_bad_words, "limits.max_bad_words") if bad else (),
        bias_words=() if _BIAS_WORDS.isdisjoint(values) else _bias_words(values, limits),
        priority=_number(priority, 0, 1, "higher is served first") if priority else 0.5,
        lora_name=str(lora.raw) if lora else "",
    )


def _check_travels(params: SamplingParams) -> None:
    """What clients nest freely must fit the wire: one value that does not would end everybody's bus session."""
    if not params.logits_processors and params.guided_decoding is None:
        return
    try:
        encode((params.logits_processors, params.guided_decoding))
    except (OverflowError, RecursionError, ValueError, TypeError) as error:
        where = "logits_processors" if params.logits_processors else "guided_decoding"
        raise RequestError(f"{where}: {str(error)[:80]}; send numbers of at most 64 bits, not nested deeply") from error


def _counts(values: dict[str, _Value], limits: Limits) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if value := values.get("max_tokens"):
        fields["max_tokens"] = _max_tokens(value, limits)
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


def _max_tokens(value: _Value, limits: Limits) -> int:
    if limits.max_tokens is not None:
        return _integer(value, 1, limits.max_tokens, "limits.max_tokens sets the upper end")
    return _integer(value, 1, MAX_INT32, "leave it out for what is left of the context")


def _distribution(values: dict[str, _Value], limits: Limits) -> dict[str, Any]:
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
    if guided := _guided(values, limits):
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
        _bias_id(key, value.where): _number(_Value(f"{value.where}.{str(key)[:20]}", bias), -100, 100, "0 is off")
        for key, bias in value.raw.items()
    }


def _bias_id(key: Any, where: str) -> int:
    """JSON's keys are texts: only an id's own digits, because int() would also read " 5", "+5", "1_0" and "٥"."""
    if isinstance(key, str) and not _ID.fullmatch(key):
        raise RequestError(f"{where} key: {key[:80]!r}; send token ids in decimal digits")
    return _integer(_Value(f"{where} key", key), 0, MAX_INT32, "send token ids")


def _processors(value: _Value) -> tuple[ProcessorCall, ...]:
    try:
        raw = json.loads(value.raw) if isinstance(value.raw, str) else value.raw
        return tuple(msgspec.convert(raw, list[ProcessorCall]))
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise RequestError(
            f'{value.where}: {_short(error)}; send a JSON list of {{"name": ..., "args": {{...}}}}'
        ) from error


_GUIDE_TYPES = ("json", "json_schema", "regex", "ebnf_grammar")


def _guided(values: dict[str, _Value], limits: Limits) -> dict[str, Any] | None:
    """Return exactly one guide, from tensorrtllm_backend's pair or vllm's object."""
    if value := values.get("guided_decoding"):
        parse_guide(value.raw, limits, value.where)
        return dict(value.raw)
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
    guided = {{"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}[kind.raw]: guide.raw}
    parse_guide(guided, limits, guide.where)
    return guided


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


def _check_harmless(values: dict[str, _Value], limits: Limits) -> dict[str, Any]:
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
    return {}


_BIAS_WORDS = frozenset({"embedding_bias_words", "embedding_bias_weights"})
_READERS: tuple[tuple[frozenset[str], Callable[[dict[str, _Value], Limits], dict[str, Any]]], ...] = (
    (frozenset({"beam_width", "length_penalty", "use_beam_search", "best_of"}), _check_harmless),
    (frozenset({"max_tokens", "min_tokens", "n", "logprobs", "return_log_probs", "prompt_logprobs"}), _counts),
    (
        frozenset({"temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty"})
        | {"presence_penalty", "frequency_penalty"},
        _distribution,
    ),
    (
        frozenset({"stop", "stop_token_ids", "end_id", "ignore_eos", "skip_special_tokens"})
        | {"include_stop_str_in_output"},
        _ends,
    ),
    (
        frozenset({"logit_bias", "logits_processors", "guided_decoding", "guided_decoding_guide_type"})
        | {"guided_decoding_guide"},
        _hooks,
    ),
)


def _check_together(params: SamplingParams) -> None:
    if params.min_tokens and params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(f"min_tokens: {params.min_tokens}; at most max_tokens, {params.max_tokens}")


def _spellings(word: str, encode: Encode) -> set[tuple[int, ...]]:
    """Return a bad word's token sequences: at the start of a text, and after a space."""
    bare = word.lstrip()
    return {tuple(ids) for ids in (encode(word), encode(f" {bare}")) if ids}
