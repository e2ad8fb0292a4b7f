"""Plain data to settings classes, with errors for operators."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from bireme.errors import ConfigError

_S = TypeVar("_S", bound=msgspec.Struct)


def convert(tree: Any, kind: type[_S], where: str = "") -> _S:
    """Turn plain data into settings. Raises ConfigError naming file, key, value and, for a typo, the nearest key."""
    try:
        return msgspec.convert(tree, kind, strict=True, str_keys=True)  # overrides are JSON: keys are strings
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}{': ' if where else ''}{_explain(str(error), kind, tree)}") from error


@functools.cache
def keys_of(kind: type[msgspec.Struct]) -> Mapping[str, Any]:
    """Return a settings class's keys, a block's with its own keys."""
    blocks = {field.encode_name: _struct_in(field.type) for field in msgspec.structs.fields(kind)}
    return {name: keys_of(block) if block else None for name, block in blocks.items()}


def _explain(text: str, kind: type[msgspec.Struct], tree: Any) -> str:
    """Explain msgspec's message to an operator: key, value, what is allowed."""
    text, _, path = text.partition(" - at `$")
    path = path.strip("`").lstrip(".")
    unknown = re.match(r"Object contains unknown field `(.+?)`", text)
    if unknown:
        return _explain_unknown(unknown.group(1), path, kind)
    if not path:
        return text
    choices = ", ".join(_choices_at(kind, path))
    if "[" in path:  # the value stands in msgspec's text
        return f"{path}: {text}; one of {choices}" if choices else f"{path}: {_say_range(text)}"
    return f"{path}: {_value_at(tree, path)!r}; {f'one of {choices}' if choices else _say_range(text)}"


def _say_range(text: str) -> str:
    """Expected `int` >= 1 -> 1 or more."""
    match = re.fullmatch(r"Expected `.+` (>=|>|<=|<) (\S+)", text)
    if not match:
        return text
    bound = match.group(2).removesuffix(".0")
    words = {">=": "{} or more", ">": "more than {}", "<=": "{} or less", "<": "less than {}"}
    return words[match.group(1)].format(bound)


def _explain_unknown(key: str, path: str, kind: type[msgspec.Struct]) -> str:
    known = sorted(field.encode_name for field in msgspec.structs.fields(_struct_at(kind, path)))
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; known keys: {', '.join(known)}"
    return f"unknown key {path + '.' if path else ''}{key}{hint}"


def _choices_at(kind: type[msgspec.Struct], path: str) -> tuple[str, ...]:
    """Return the values that a Literal field allows; () for other fields."""
    block, _, name = re.sub(r"\[\d+\]$", "", path).rpartition(".")
    fields = msgspec.structs.fields(_struct_at(kind, block))
    annotation = next((field.type for field in fields if field.encode_name == name), None)
    return _literals_in(annotation)


def _literals_in(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next(filter(None, (_literals_in(part) for part in get_args(annotation))), ())


def _value_at(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else tree
    return tree


def _struct_at(kind: type[msgspec.Struct], where: str) -> type[msgspec.Struct]:
    for part in filter(None, where.replace("[...]", "").split(".")):
        name = part.split("[")[0]
        field = next((field for field in msgspec.structs.fields(kind) if field.encode_name == name), None)
        inner = _struct_in(field.type) if field else None
        if inner is None:
            break
        kind = inner
    return kind


def _struct_in(annotation: Any) -> type[msgspec.Struct] | None:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation
    return next(filter(None, (_struct_in(part) for part in get_args(annotation))), None)
