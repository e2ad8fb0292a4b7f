"""The contract file, cut down to what one release has."""

from __future__ import annotations

import functools
import inspect
import operator
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml

FILE = Path(__file__).resolve().parents[4] / "bireme" / "engines" / "trtllm" / "contract.yaml"
VERSIONS = {"1.2.1": "1.2.1", "1.3": "1.3.0rc29", "1.4": "1.4.0rc1"}
PROFILE = os.environ.get("TRTLLM_STAND_IN", "1.2.1")
RELEASE = PROFILE[:3]
FROM_1_3 = PROFILE != "1.2.1"
FROM_1_4 = PROFILE == "1.4"
# Parameters of generate_async that the contract's comments date after 1.2.1.
SINCE_1_3 = ("conversation_params", "priority")
REQUIRED = inspect.Parameter.empty


@cache
def contract() -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    tree: dict[str, Any] = yaml.load(FILE.read_text(encoding="utf-8"), loader)  # noqa: S506
    return tree


def default_of(text: Any) -> Any:
    """Return the default that a table's entry says: a value, or the first word of a sentence about it."""
    if isinstance(text, list):
        return default_of(text[1]) if len(text) > 1 else None
    if not isinstance(text, str):
        return text
    word = text.replace("(", " ").split()[0] if text.strip() else ""
    if word == "required":
        return REQUIRED
    known = {"null": None, "None": None, "true": True, "false": False, "True": True, "False": False, "{}": {}}
    if word in known:
        return known[word]
    try:
        return int(word)
    except ValueError:
        pass
    try:
        return float(word)
    except ValueError:
        return None if "|" in text or word == "factory" else word


def generate_async_signature() -> inspect.Signature:
    """Return LLM.generate_async's signature in this profile."""
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name, text in contract()["llm"]["methods"]["generate_async"]["params"].items():
        if name in SINCE_1_3 and not FROM_1_3:
            continue
        default: Any = REQUIRED
        if "=" in text:
            default = 0.5 if name == "priority" else default_of(text.split("=")[1])
        parameters.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default))
    return inspect.Signature(parameters)


def constructor_signature() -> inspect.Signature:
    """Return LLM.__init__'s signature."""
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name, entry in contract()["llm"]["explicit_ctor_args"].items():
        if name != "**kwargs":
            default = REQUIRED if entry.get("required") else entry["default"]
            parameters.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default))
    return inspect.Signature([*parameters, inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)])


def disaggregated_fields() -> list[str]:
    table = contract()["disaggregated_params"]
    return [*table["v1_2_1"], *(table["added_1_3"] if FROM_1_3 else ())]


def class_fields(name: str) -> dict[str, tuple[str, Any, dict[str, Any]]]:
    """Return a settings class' fields in this profile, its base's included: name -> (type, default, more)."""
    table = contract()["config_classes"][name]
    found = class_fields(table["base"]) if "base" in table else {}
    for key, entry in table.items():
        if not isinstance(entry, list):
            continue
        kind, default, *rest = entry
        more = rest[0] if rest else {}
        if RELEASE < more.get("since", "") or (more.get("until") and more["until"] <= RELEASE):
            continue
        for since, later in more.get("defaults", {}).items():
            default = later if since <= RELEASE else default
        if more.get("required") or RELEASE < more.get("required_until", ""):
            default = REQUIRED
        found[key] = "null" if kind is None else str(kind), None if default == "factory" else default, more
    return found


def annotation(kind: str, more: dict[str, Any], block: Callable[[str], Any]) -> Any:
    """Return what the real classes say of a type of config_classes; `block` finds another class by its name."""
    newer = [word for word, since in more.get("values_since", {}).items() if RELEASE < since]
    gone = [word for word, until in more.get("values_until", {}).items() if until <= RELEASE]
    parts = [part.strip() for part in re.split(r"\|(?![^\[]*\])", kind)]
    kinds = [_alternative(part, more, block) for part in parts if part not in (*newer, *gone)]
    words = tuple(kind for kind in kinds if isinstance(kind, str))
    others = [kind for kind in kinds if not isinstance(kind, str)]
    return functools.reduce(operator.or_, [*others, Literal[words]] if words else others)


def _alternative(part: str, more: dict[str, Any], block: Callable[[str], Any]) -> Any:
    plain = {"null": type(None), "bool": bool, "int": int, "float": float, "str": str, "dict": dict}
    if part in ("any", "object"):
        return Any
    if part in plain:
        return plain[part]
    if inner := re.fullmatch(r"(list|dict)\[(?:str, )?(.+)\]", part):
        item = annotation(inner.group(2), more, block)
        return list[item] if inner.group(1) == "list" else dict[str, item]
    if number := re.fullmatch(r"(int|float) (?:>= (\S+)|(\S+)\.\.(\S+))", part):
        least, most = number.group(2) or number.group(3), number.group(4)
        bounds = pydantic.Field(ge=float(least), le=float(most) if most else None)
        return Annotated[plain[number.group(1)], bounds]
    return block(part) if re.fullmatch(r"[A-Z]\w+Config", part) else part
