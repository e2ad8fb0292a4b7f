"""The classes of speculative_config and sparse_attention_config, as each release tells them apart.

At 1.2.1 decoding_type and algorithm are class variables: a mapping that has them is refused where a typed field
expects one of the classes, and `from_dict` of the base is the way in. 1.3 has them as fields.
"""

from __future__ import annotations

from typing import Any

import pydantic

from tensorrt_llm import _contract

_CLASSES = _contract.contract()["config_classes"]
_RELEASE = _contract.PROFILE[:3]


def _exists(entry: dict[str, Any]) -> bool:
    return not (_RELEASE < entry.get("since", "")) and not (entry.get("until") and entry["until"] <= _RELEASE)


def _fields(name: str) -> dict[str, Any]:
    table = _CLASSES[name]
    result = _fields(table["base"]) if "base" in table else {}
    for key, entry in table.items():
        if isinstance(entry, list) and _exists(entry[2] if len(entry) > 2 else {}):
            result[key] = entry
    return result


def _class(name: str, base: type[Any], choosing: str) -> type[Any]:
    definitions: dict[str, Any] = {}
    for key, entry in _fields(name).items():
        more = entry[2] if len(entry) > 2 else {}
        if key == choosing and not _contract.FROM_1_3:
            continue
        default = ... if more.get("required") and key != choosing else entry[1]
        aliases = [key, *([more["alias"]] if "alias" in more else [])]
        field = pydantic.Field(default, validation_alias=pydantic.AliasChoices(*aliases))
        definitions[key] = (Any, field)
    return pydantic.create_model(name, __base__=base, **definitions)


def _union(table: dict[str, Any]) -> tuple[type[Any], dict[str, type[Any]]]:
    """Return the base class and key -> class."""
    key, found = table["discriminator"], {}

    class Base(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid", protected_namespaces=())

        if not _contract.FROM_1_3:

            @classmethod
            def from_dict(cls, data: dict[str, Any]) -> Any:
                chosen = data.pop(key, None)
                if chosen not in found:
                    raise ValueError(f"Invalid {key}: {chosen}")
                return found[chosen](**data)

    for choice, name in table["classes"].items():
        if not (_RELEASE < table.get("since", {}).get(choice, "")):
            found[choice] = _class(name, Base, key)
    return Base, found


DecodingBaseConfig, DECODING = _union(_CLASSES["SpeculativeConfig"])
BaseSparseAttentionConfig, SPARSE = _union(_CLASSES["SparseAttentionConfig"])
_FIELDS = {
    "speculative_config": ("decoding_type", DecodingBaseConfig, DECODING),
    "sparse_attention_config": ("algorithm", BaseSparseAttentionConfig, SPARSE),
}


def take(values: dict[str, Any]) -> None:
    """Check these two of LLM's arguments as pydantic does; in 1.3 mappings become their class."""
    for name, (key, base, classes) in _FIELDS.items():
        value = values.get(name)
        if value is None or isinstance(value, base):
            continue
        if not isinstance(value, dict) or key not in value:
            raise ValueError(f"{name}: a mapping with {key}, or one of its classes, is expected")
        if not _contract.FROM_1_3:
            raise ValueError(f"{name}.{key}: Extra inputs are not permitted")
        if value[key] not in classes:
            raise ValueError(f"{name}: {key} {value[key]!r} does not match any of the expected tags")
        values[name] = classes[value[key]](**value)
