"""Request fields beyond OpenAI's: in the `bireme` object, or where other servers take them.

vLLM's and its clients' names are accepted at the top level, Dynamo's in `nvext`. All mean the same as the `bireme`
object's fields; a value that is given twice must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from bireme.errors import RequestError
from bireme.parameters import PARAMETERS
from bireme.pipelines.json_body import check_plain
from bireme.serving_options import (
    NO_CHOICE,
    NO_OPTIONS,
    KvCacheRetentionConfig,
    RoutingChoice,
    ServingOptions,
    check_retention,
    check_session,
)

if TYPE_CHECKING:
    from msgspec import Struct as ForAll
    from msgspec import Struct as ForNvExt
else:

    def _parameters(name: str, api: str, *bases: type[msgspec.Struct]) -> type[msgspec.Struct]:
        """Make a struct of the parameters that are taken there. Unset: the recipe's default, else the engine's."""
        fields = [(row.name, row.json_type | None, None) for row in PARAMETERS if row.api == api]
        return msgspec.defstruct(name, fields, bases=bases, kw_only=True, forbid_unknown_fields=True)

    ForNvExt = _parameters("ForNvExt", "nvext")
    ForAll = _parameters("ForAll", "shared", ForNvExt)


class SharedNames(ForAll, kw_only=True, forbid_unknown_fields=True):
    """Accepted at the top level and in `bireme`, with the same meaning."""

    cache_salt: str | None = None  # prompts with different salts share no KV blocks
    chat_template_kwargs: dict[str, Any] | None = None


class Extensions(SharedNames, frozen=True, kw_only=True, forbid_unknown_fields=True):  # type: ignore[misc]
    """The `bireme` object."""

    priority: float | None = None  # 0 to 1, higher is served first
    logits_processors: list[dict[str, Any]] | None = None  # [{"name": ..., "args": {...}}]
    guided_decoding: dict[str, Any] | None = None  # exactly one of json, regex, grammar, choice, structural_tag, ...
    return_timing: bool = False  # times and workers in the answer's own `bireme` object
    session_id: str = ""  # requests of one session stay with their worker
    routing: RoutingChoice = NO_CHOICE
    kv_cache_retention_config: KvCacheRetentionConfig | None = None  # how long its KV blocks are kept


_T = TypeVar("_T")
_NO_EXTENSIONS = Extensions()
Annotation = Literal["request_id", "formatted_prompt", "token_ids"]
ExtraField = Literal["worker_id", "timing"]
ServiceTier = Literal["auto", "default", "flex", "priority", "fast"]


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's object: one guide; its other options are not served."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class NvExt(ForNvExt, kw_only=True, forbid_unknown_fields=True):
    """Dynamo's object, as far as it has a meaning here; REFUSED_NAMES has the rest."""

    cache_salt: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    greed_sampling: bool | None = None
    use_raw_prompt: bool | None = None
    annotations: list[Annotation] | None = None  # events of a stream that tell what was made of the request
    extra_fields: list[ExtraField] | None = None  # of the answer's own nvext


class TopLevelNames(SharedNames, kw_only=True, forbid_unknown_fields=True):
    """A request's own fields beside OpenAI's."""

    priority: int | None = None  # vLLM's: lower is served earlier, 0 is the default
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    nvext: NvExt | None = None
    bireme: Extensions = _NO_EXTENSIONS


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A request's options beyond OpenAI's fields, under whichever names."""

    sampling: Mapping[str, Any]  # fields of bireme/sampling.py that are set, but for the guide
    guide: dict[str, Any] | None
    guide_name: str  # how the request calls it
    is_greedy: bool  # whatever the other fields say
    chat_template_kwargs: dict[str, Any]
    serving: ServingOptions  # without the priority, which is read with the sampling values
    return_timing: bool
    annotations: tuple[Annotation, ...]  # Dynamo's
    extra_fields: tuple[ExtraField, ...]  # Dynamo's


def _names_in(names: Iterable[str]) -> Callable[[str, msgspec.Struct], Iterator[tuple[str, str, Any]]]:
    """Return what yields name, place and value of those names that are set."""
    names = tuple(names)
    values_of = attrgetter(*names)

    def set_in(at: str, place: msgspec.Struct) -> Iterator[tuple[str, str, Any]]:
        for name, value in zip(names, values_of(place), strict=True):
            if value is not None:
                yield name, at + name, value

    return set_in


_GUIDES = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
}  # fmt: skip
_shared_in = _names_in(SharedNames.__struct_fields__)
_nvext_shared_in = _names_in(name for name in SharedNames.__struct_fields__ if name in NvExt.__struct_fields__)
_guides_in = _names_in(_GUIDES)
_structured_in = _names_in(("json", "regex", "choice", "grammar", "structural_tag", "json_object"))
_not_structured_in = _names_in(
    ("disable_fallback", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
)
_NO_NVEXT = NvExt()
_PLACED_HERE = "workers have names here; send bireme.routing"
_SHOWN_TIERS = {"auto": "default", "fast": "priority"}  # others are shown as they are
_TIERS = {"flex": 0.25, "priority": 0.75}  # priority of a tier that has one; all others have everybody's
_EVERYBODYS = 0.5
REFUSED_NAMES = {
    **{
        f"nvext.{name}": _PLACED_HERE
        for name in ("backend_instance_id", "prefill_worker_id", "decode_worker_id", "dp_rank", "prefill_dp_rank")
    },
    "nvext.annotations[]=llm_metrics": "not served; nvext.extra_fields timing has times, usage the counts",
    "nvext.token_data": "send token ids as the prompt of /v1/completions",
    "nvext.max_thinking_tokens": "not served; remove it, or send max_tokens",
    "nvext.agent_hints": "not served; priority is a field of its own",
    "nvext.session_control": "send bireme.session_id, or the header x-session-id",
    "nvext.agent_context": "not served; remove it",
    "nvext.request_timestamp_ms": "time is the server's own; remove it",
    "nvext.routing_constraints": "workers have no taints; send bireme.routing",
    "nvext.router": "not served; send bireme.routing",
    "nvext.guided_decoding_backend": "guides have one backend; remove it",
    "nvext.guided_whitespace_pattern": "not served; remove it",
    **{
        name: f"not a field of OpenAI's; send it as bireme.{name}"
        for name in (field.encode_name for field in msgspec.structs.fields(Extensions))
        if name not in {field.encode_name for field in msgspec.structs.fields(TopLevelNames)}
    },
}


REFUSED_TIERS = {
    f"service_tier={tier}": "no capacity is set aside here; send priority, flex, default or auto"
    for tier in ("scale", "ultrafast")
}


def shown_tier(tier: ServiceTier | None) -> str | None:
    """Return a request's service tier as answers repeat it."""
    return None if tier is None else _SHOWN_TIERS.get(tier, tier)


def lower_tier(tier: str, priority: float) -> str:
    """Return the tier that a request gets in place of `tier`, now that its priority was lowered to this."""
    levels = {"default": _EVERYBODYS, **_TIERS}
    within = [name for name, level in levels.items() if level <= min(priority, levels[tier])]
    return max(within, key=levels.__getitem__, default="flex")


def request_options(
    body: TopLevelNames, tier: ServiceTier | None = None, session_key: str | None = None
) -> RequestOptions:
    """Return one value a name, from any place. Raises RequestError, also for values that can't be sent on.

    `tier`: the request's service_tier, where it has one: a priority by another name. `session_key`: its
    prompt_cache_key, which is its session where it names none.
    """
    own, nvext = body.bireme, body.nvext or _NO_NVEXT
    values = {name: value for name, (_, value) in _agreed(_shared(body)).items()}
    if (priority := _priority(body, tier)) is not None:
        values["priority"] = priority
    if own.logits_processors is not None:
        check_plain(own.logits_processors, "bireme.logits_processors")
        values["logits_processors"] = own.logits_processors
    guide_name, guide = _agreed(_guides(body)).get("guide", ("", None))
    if guide is not None:
        check_plain(guide, guide_name)
    if chat_template_kwargs := values.pop("chat_template_kwargs", {}):
        check_plain(chat_template_kwargs, "chat_template_kwargs")
    return RequestOptions(
        guide=guide,
        guide_name=guide_name,
        is_greedy=bool(nvext.greed_sampling),
        chat_template_kwargs=chat_template_kwargs,
        serving=_serving(own, values.pop("cache_salt", ""), session_key or ""),
        return_timing=own.return_timing,
        annotations=_distinct(nvext.annotations),
        extra_fields=_distinct(nvext.extra_fields),
        sampling=values,
    )


def _serving(own: Extensions, cache_salt: str, session_key: str) -> ServingOptions:
    if own is _NO_EXTENSIONS and not cache_salt and not session_key:
        return NO_OPTIONS  # which messages leave out
    session_id = check_session(own.session_id, "bireme.session_id")
    return ServingOptions(
        cache_salt=cache_salt,
        session_id=session_id or check_session(session_key, "prompt_cache_key"),
        routing=own.routing,
        kv_cache_retention_config=check_retention(own.kv_cache_retention_config, "bireme.kv_cache_retention_config"),
    )


def _priority(body: TopLevelNames, tier: ServiceTier | None) -> float | None:
    rank, own, of_tier = body.priority, body.bireme.priority, _TIERS.get(shown_tier(tier) or "")
    if rank is not None and own is not None:
        raise RequestError(f"priority: {rank} beside bireme.priority: {own:g}; send one of them")
    asked = own if rank is None else _from_rank(rank)
    if asked is not None and of_tier is not None:
        raise RequestError(f"service_tier: {tier} beside a priority; send one of them")
    return of_tier if asked is None else asked


def _distinct(names: Iterable[_T] | None) -> tuple[_T, ...]:
    return tuple(dict.fromkeys(names)) if names else ()


def _agreed(given: Iterable[tuple[str, str, Any]]) -> dict[str, tuple[str, Any]]:
    """Return the first place and value of each name. Raises RequestError where another place has another value."""
    agreed: dict[str, tuple[str, Any]] = {}
    for name, where, value in given:
        first, known = agreed.setdefault(name, (where, value))
        if known != value:
            raise RequestError(f"{first}: {str(known)[:80]} contradicts {where}: {str(value)[:80]}; send one of them")
    return agreed


def _shared(body: TopLevelNames) -> Iterator[tuple[str, str, Any]]:
    """Yield name, place and value of what several places have."""
    yield from _shared_in("", body)
    if body.bireme is not _NO_EXTENSIONS:
        yield from _shared_in("bireme.", body.bireme)
    if body.nvext is not None:
        yield from _nvext_shared_in("nvext.", body.nvext)


def _guides(body: TopLevelNames) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the guides of all places, as _shared does, in the form of bireme/guides.py."""
    for name, where, guide in _guides_in("", body):
        yield "guide", where, {_GUIDES[name]: guide}
    if body.nvext is not None:
        for name, where, guide in _guides_in("nvext.", body.nvext):
            yield "guide", where, {_GUIDES[name]: guide}
    if (outputs := body.structured_outputs) is not None:
        for _, where, value in _not_structured_in("structured_outputs.", outputs):
            if value:
                raise RequestError(f"{where}: {value}; not served, remove it")
        for kind, where, guide in _structured_in("structured_outputs.", outputs):
            if guide is not False:  # json_object is a switch
                yield "guide", where, {kind: guide}
    if body.bireme.guided_decoding is not None:
        yield "guide", "bireme.guided_decoding", body.bireme.guided_decoding


def _from_rank(rank: int) -> float:
    """Return a priority from 0 to 1 for vLLM's: 0 is the usual 0.5, a lower number comes earlier, so is higher."""
    return 0.5 - 0.5 * rank / (1 + abs(rank))
