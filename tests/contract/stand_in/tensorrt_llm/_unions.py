"""The classes of speculative_config and sparse_attention_config, as each release tells them apart.

At 1.2.1 decoding_type and algorithm are class variables: a mapping that has them is refused where a typed field
expects one of the classes, and `from_dict` of the base is the way in. 1.3 has them as fields.
"""

from __future__ import annotations

from typing import Any

import pydantic

from tensorrt_llm import _classes, _contract

_CLASSES = _contract.contract()["config_classes"]


def _class(name: str, base: type[Any], choosing: str) -> type[Any]:
    definitions: dict[str, Any] = {}
    for key, (kind, default, more) in _contract.class_fields(name).items():
        if key == choosing and not _contract.FROM_1_3:
            continue
        default = default if default is not _contract.REQUIRED else None if key == choosing else ...
        kind = str if key == choosing else _contract.annotation(kind, more, _classes.block)
        aliases = [key, *([more["alias"]] if "alias" in more else [])]
        field = pydantic.Field(default, validation_alias=pydantic.AliasChoices(*aliases))
        definitions[key] = (kind, field)
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
        since, until = table.get("since", {}).get(choice, ""), table.get("until", {}).get(choice, "9")
        if since <= _contract.RELEASE < until:
            found[choice] = _class(name, Base, key)
    return Base, found


DecodingBaseConfig, DECODING = _union(_CLASSES["SpeculativeConfig"])
BaseSparseAttentionConfig, SPARSE = _union(_CLASSES["SparseAttentionConfig"])
FIELDS = {
    "speculative_config": ("decoding_type", DecodingBaseConfig, DECODING),
    "sparse_attention_config": ("algorithm", BaseSparseAttentionConfig, SPARSE),
}


def take(values: dict[str, Any]) -> None:
    """Check these two of LLM's arguments as pydantic does; in 1.3 mappings become their class."""
    for name, (key, base, classes) in FIELDS.items():
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
