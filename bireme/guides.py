"""The contents of `guided_decoding`: one guide, checked and in one canonical form. Knows no grammar library.

    {"json": SCHEMA}             a JSON schema, as an object or as its text
    {"json_object": true}        any JSON object
    {"regex": TEXT}              the whole answer matches
    {"grammar": TEXT}            EBNF (GBNF's dialect), start rule `root`
    {"choice": [TEXT, ...]}      exactly one of these
    {"structural_tag": TAG}      xgrammar's structural tags, as an object or as its text

Beside it, `"reasoning_end": TEXT` leaves everything up to and including this text free, and white space after it. Then
the guide holds. `"trigger": {"token": ID}` leaves the answer free but for what this token begins: from it on the guide
holds, the token's own text included, until it is complete; then the answer is free again.

The entry and the engine both check with `parse_guide`: sizes and depth here, the meaning where it is compiled.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec

from bireme.config import Limits
from bireme.errors import RequestError

KINDS = ("json", "json_object", "regex", "grammar", "choice", "structural_tag")
REASONING_END = "reasoning_end"
TRIGGER = "trigger"
LOOSE = "is_loose"  # in a tag beside `json_schema`: what of it can't be enforced is left out, as the log says
MAX_REASONING_END_CHARACTERS = 256
_BESIDE = (REASONING_END, TRIGGER)
_TEXTS = ("regex", "grammar")
_JSON = ("json", "structural_tag")


class Trigger(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a guide holds that most of the answer is free of."""

    token: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]  # its text is the guide's first
    stop_after_first: bool = False  # the answer ends where the guide is complete
    is_loose: bool = False  # a guide that can't be had leaves the answer free, as the log says
    # with reasoning_end: only an answer that begins with this text has reasoning; "": every one begins with it
    reasoning_begin: Annotated[str, msgspec.Meta(max_length=MAX_REASONING_END_CHARACTERS)] = ""


@dataclass(frozen=True, slots=True)
class Guide:
    """One guide. Equal guides have equal keys."""

    kind: str
    text: str  # JSON for json, choice and structural_tag; "" for json_object
    reasoning_end: str = ""  # "": the guide holds from the first token
    trigger: Trigger | None = None

    @property
    def grammar_key(self) -> bytes:
        return hashlib.blake2b(f"{self.kind}\0{self.text}".encode("utf-8", "surrogatepass"), digest_size=20).digest()


def parse_guide(raw: object, limits: Limits, where: str = "guided_decoding") -> Guide:
    """Check a request's guide. Raises RequestError with field, value, limit and remedy."""
    if not isinstance(raw, Mapping):
        raise RequestError(f"{where}: a {type(raw).__name__}; send an object with exactly one of {', '.join(KINDS)}")
    kinds = [name for name in raw if name not in _BESIDE]
    if len(kinds) != 1 or kinds[0] not in KINDS:
        found = ", ".join(str(name)[:40] for name in kinds[:8]) or "none"
        raise RequestError(f"{where}: {found}; send an object with exactly one of {', '.join(KINDS)}")
    kind = kinds[0]
    text = _text_of(kind, raw[kind], limits, f"{where}.{kind}")
    _check_unicode(text, f"{where}.{kind}")
    end = _reasoning_end(raw.get(REASONING_END, ""), f"{where}.{REASONING_END}")
    return Guide(kind, text, end, _trigger(raw[TRIGGER], f"{where}.{TRIGGER}") if TRIGGER in raw else None)


def _text_of(kind: str, value: object, limits: Limits, where: str) -> str:
    if kind == "json_object":
        if value is not True:
            raise RequestError(
                f"{where}: {str(value)[:40]}; only true makes sense, leave guided_decoding out otherwise"
            )
        return ""
    if kind == "choice":
        return _choice(value, limits, where)
    if kind in _TEXTS:
        if not isinstance(value, str) or not value:
            raise RequestError(f"{where}: a {type(value).__name__}; send a text that is not empty")
        _check_bytes(value, limits, where)
        return value
    return _json_text(value, limits, where)


def _json_text(value: object, limits: Limits, where: str) -> str:
    """Return a schema or tag as JSON text; its keys keep their order, which is the order of properties."""
    return _reread(value, limits, where) if isinstance(value, str) else _written(value, limits, where)


@functools.lru_cache(32)  # agents send the tools of their last request again, and a request is checked in three places
def _reread(text: str, limits: Limits, where: str) -> str:
    _check_bytes(text, limits, where)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}: not valid JSON ({str(error)[:120]}); send an object or its text") from error
    return _written(value, limits, where)


def _written(value: object, limits: Limits, where: str) -> str:
    if not isinstance(value, Mapping) and not (isinstance(value, bool) and where.endswith(".json")):
        raise RequestError(f"{where}: a JSON {type(value).__name__}; send an object")
    _check_depth(value, limits, where)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{where}: {str(error)[:120]}; send plain JSON") from error
    _check_bytes(text, limits, where)
    return text


def _choice(value: object, limits: Limits, where: str) -> str:
    if not isinstance(value, (list, tuple)) or not value:
        raise RequestError(f"{where}: send a list of texts, at least one")
    if len(value) > limits.max_guide_choices:
        raise RequestError(
            f"{where}: {len(value)} texts; limits.max_guide_choices is {limits.max_guide_choices}; send fewer"
        )
    for text in value:
        if not isinstance(text, str) or not text:
            raise RequestError(f"{where}: {str(text)[:40]!r}; every entry must be a text that is not empty")
    joined = json.dumps(list(value), ensure_ascii=False)
    _check_bytes(joined, limits, where)
    return joined


def _reasoning_end(value: object, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_REASONING_END_CHARACTERS:
        raise RequestError(
            f"{where}: send a text of at most {MAX_REASONING_END_CHARACTERS} characters, for example </think>"
        )
    _check_unicode(value, where)
    return value


def _trigger(value: object, where: str) -> Trigger:
    try:
        trigger = msgspec.convert(value, Trigger)
    except msgspec.ValidationError as error:
        raise RequestError(f'{where}: {error}; send an object like {{"token": 5}}') from error
    _check_unicode(trigger.reasoning_begin, f"{where}.reasoning_begin")
    return trigger


def _check_bytes(text: str, limits: Limits, where: str) -> None:
    num_bytes = len(text.encode("utf-8", "surrogatepass"))
    if num_bytes > limits.max_guide_bytes:
        raise RequestError(
            f"{where}: {num_bytes} bytes; limits.max_guide_bytes is {limits.max_guide_bytes}; shorten it"
        )


def _check_unicode(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{where}: it holds a lone surrogate; send valid Unicode") from None


def _check_depth(tree: object, limits: Limits, where: str) -> None:
    """Walk without recursion: a client's JSON may be deeper than our stack."""
    level, depth = [tree], 0
    while level:
        depth += 1
        if depth > limits.max_guide_depth:
            raise RequestError(
                f"{where}: nested more than {limits.max_guide_depth} deep (limits.max_guide_depth); flatten it, or use"
                " $defs and $ref"
            )
        inner: list[object] = []
        for node in level:
            if isinstance(node, Mapping):
                inner += node.values()
            elif isinstance(node, (list, tuple)):
                inner += node
        level = [node for node in inner if isinstance(node, (Mapping, list, tuple))]
