"""JSON requests into structs: types checked by msgspec, errors in a caller's words.

Messages begin with the field (`tools[0].function.name: ...`), from which OpenAI's `param` is read.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from bireme.errors import RequestError

_S = TypeVar("_S", bound=msgspec.Struct)
MAX_DEPTH, MAX_ITEMS = 64, 100_000  # of values that travel to engines as they are
# Of a whole body, the first and the last also counted inside its strings. A parser holds the GIL from a body's first
# byte to its last, on whatever thread: 31 MiB of text take 0.1 s of a core, as ten million empty lists or as four
# million keys 2 s.
MAX_CONTAINERS, MAX_KEYS, MAX_COMMAS = 500_000, 200_000, 4_000_000
_NEVER_TOO_MANY = MAX_CONTAINERS  # bytes
_BLANKS = b" \t\r\n"
_INT64_LOW, _UINT64_HIGH = -(2**63), 2**64 - 1
_PATH = re.compile(r"(?P<text>.*) - at `\$(?P<path>.*)`", re.DOTALL)
_INDEX = re.compile(r"\[\d+\]")
_INVALID = re.compile(r"Invalid (?:enum )?value '(.*)'", re.DOTALL)
_FIELD = re.compile(r"[A-Za-z_][\w.\[\]-]*(?=: )")


def decode_body(body: bytes | str, kind: type[_S], refused: Mapping[str, str]) -> _S:
    """Return the request. `refused` names fields that are known but not served, with the reason: `a.b`, `a[].b` of any
    element, and `a.b=value` of a single value.

    Raises RequestError for anything but valid JSON of this kind.
    """
    if len(body) > _NEVER_TOO_MANY:
        _check_counts(body.encode() if isinstance(body, str) else body)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(_explain(str(error), kind, refused)) from None
    except RecursionError:
        raise RequestError("the body's JSON is nested too deeply; flatten it") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise RequestError(f"the body is not valid JSON ({str(error)[:200]}); send a JSON object in UTF-8") from None


def convert_part(value: Any, kind: type[_S], where: str, refused: Mapping[str, str] | None = None) -> _S:
    """Return a part of a body, which `where` names, as a struct; `refused` as of the body. Raises RequestError."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RequestError(_explain(str(error), kind, refused or {}, where)) from None


def _check_counts(body: bytes) -> None:
    containers, commas = body.count(b"{") + body.count(b"["), body.count(b",")
    if containers > MAX_CONTAINERS:
        raise RequestError(f"the body has {containers} objects and lists; the limit is {MAX_CONTAINERS}, send fewer")
    if body.count(b":") > MAX_KEYS and (keys := _num_keys(body)) > MAX_KEYS:
        raise RequestError(f"the body's objects have {keys} keys; the limit is {MAX_KEYS}, send fewer")
    if commas > MAX_COMMAS:
        raise RequestError(f"the body has {commas} commas; the limit is {MAX_COMMAS}, send fewer values")


def _num_keys(body: bytes) -> int:
    """Return how often a string is followed by a colon; also counts strings that begin with one."""
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    return unescaped.translate(None, _BLANKS).count(b'":')


def param_of(message: str) -> str | None:
    match = _FIELD.match(message)
    return match.group() if match else None


def check_plain(value: Any, where: str) -> None:
    """Raise RequestError for a value that can't be sent on: too deep, too many items, numbers too large."""
    level, num_items = [value], 0
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            below += _inner(item, where)
        num_items += len(below)
        if num_items > MAX_ITEMS:
            raise RequestError(f"{where}: more than {MAX_ITEMS} values; shorten it")
        if not below:
            return
        level = below
    raise RequestError(f"{where}: nested more than {MAX_DEPTH} levels; flatten it")


def _inner(item: Any, where: str) -> Iterable[Any]:
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, list):
        return item
    if isinstance(item, int) and not _INT64_LOW <= item <= _UINT64_HIGH:
        raise RequestError(f"{where}: an integer of more than 64 bits; send a smaller one")
    return ()


def _explain(text: str, kind: type[msgspec.Struct], refused: Mapping[str, str], where: str = "") -> str:
    """Return msgspec's message as `field: what is wrong; remedy`; `where` is the field that was read."""
    match = _PATH.fullmatch(text)
    text, path = (match["text"], (where + match["path"]).lstrip(".")) if match else (text, where)
    text = text.replace("`", "")
    if field := _after(text, "Object contains unknown field "):
        name = f"{path}.{field}" if path else field
        return f"{name[:200]}: {refused.get(_INDEX.sub('[]', name)) or _unknown(field, path, kind)}"
    if field := _after(text, "Object missing required field "):
        return f"{path}.{field}: missing; send it" if path else f"{field}: missing; send it"
    if not path:
        return f"the body is wrong: {_lower(text)}; send a JSON object"
    if reason := refused.get(_INDEX.sub("[]", path)):  # of a field that takes null alone
        return f"{path}: {reason}"
    if value := _INVALID.fullmatch(text):
        reason = refused.get(f"{_INDEX.sub('[]', path)}={value[1]}", "no such value here; send another")
        return f"{path}: {value[1][:40]}; {reason}"
    return f"{path}: {_lower(text)}; change its type"


def _unknown(field: str, path: str, kind: type[msgspec.Struct]) -> str:
    if path:
        return "unknown field; remove it"
    known = [known.encode_name for known in msgspec.structs.fields(kind)]
    near = difflib.get_close_matches(field, known, n=1)
    return f"unknown field; did you mean {near[0]}?" if near else "unknown field; remove it"


def _after(text: str, beginning: str) -> str:
    return text[len(beginning) :] if text.startswith(beginning) else ""


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
