"""The contract's settings classes as pydantic models, which refuse any other field, word or type."""

from __future__ import annotations

import functools
import operator
from typing import Any

import pydantic

from tensorrt_llm import _contract


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", protected_namespaces=())


def model(name: str, fields: dict[str, tuple[Any, Any]], base: type[Any] = Strict) -> type[Any]:
    """`fields`: name -> (annotation, default)."""
    definitions: dict[str, Any] = {
        key: (kind, ... if default is _contract.REQUIRED else pydantic.Field(default))
        for key, (kind, default) in fields.items()
    }
    return pydantic.create_model(name, __base__=base, **definitions)


def fields(class_name: str) -> dict[str, tuple[Any, Any]]:
    return {
        key: (_contract.annotation(kind, more, block), default)
        for key, (kind, default, more) in _contract.class_fields(class_name).items()
    }


@functools.cache
def block(name: str) -> Any:
    """Return a class, or the classes that a union chooses from; those that _unions makes are mappings until then."""
    table = _contract.contract()["config_classes"][name]
    if name in ("SpeculativeConfig", "SparseAttentionConfig"):
        return dict
    if "discriminator" in table:
        return functools.reduce(operator.or_, map(block, table["classes"].values()))
    return model(name, fields(name))
