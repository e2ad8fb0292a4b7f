"""The contract file, cut down to what one release has."""

from __future__ import annotations

import inspect
import os
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).resolve().parents[4] / "bireme" / "engines" / "trtllm" / "contract.yaml"
VERSIONS = {"1.2.1": "1.2.1", "1.3": "1.3.0rc29", "1.4": "1.4.0rc1"}
PROFILE = os.environ.get("TRTLLM_STAND_IN", "1.2.1")
FROM_1_3 = PROFILE != "1.2.1"
FROM_1_4 = PROFILE == "1.4"
# Parameters of generate_async that the contract's comments date after 1.2.1.
SINCE_1_3 = ("conversation_params", "priority")
REQUIRED = inspect.Parameter.empty


@cache
def contract() -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
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


def llm_arg_fields() -> dict[str, Any]:
    """Return TorchLlmArgs' fields beyond the constructor's explicit ones, with their defaults."""
    table = contract()["torch_llm_args"]
    fields = {name: default_of(entry) for name, entry in table["v1_2_1"].items()}
    if FROM_1_3:
        for name in [key for key in fields if any(key in text for text in table["removed_by_1_3"])]:
            del fields[name]
        fields |= dict.fromkeys([*table["added_by_1_3_0rc7"], *table["added_late_1_3"]])
    return fields
