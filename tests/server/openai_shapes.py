"""Are responses what OpenAI's own package says they are? Strict types, and no field that it does not know."""

from __future__ import annotations

import types
import typing
from typing import Any

import pydantic

OURS = {"bireme", "reasoning_content"}  # extensions, documented in docs/openai.md
# Not optional in OpenAI's published schema although the package lets them be left out.
_NEEDED = {
    "ChatCompletion": {"id", "choices", "created", "model", "object"},
    "ChatCompletionChunk": {"id", "choices", "created", "model", "object"},
    "Completion": {"id", "choices", "created", "model", "object"},
    "ChatCompletionMessage": {"role", "content", "refusal"},
    "Choice": {"index", "finish_reason", "logprobs"},
    "CompletionUsage": {"prompt_tokens", "completion_tokens", "total_tokens"},
}


def check(kind: type[pydantic.BaseModel], body: dict[str, Any]) -> None:
    """Raise AssertionError or pydantic.ValidationError when `body` is not a `kind`, field by field."""
    _walk(kind.model_validate(body, strict=True), kind.__name__)


def _walk(value: Any, where: str) -> None:
    if isinstance(value, (list, tuple)):
        for at, item in enumerate(value):
            _walk(item, f"{where}[{at}]")
    if not isinstance(value, pydantic.BaseModel):
        return
    unknown = set(value.model_extra or {}) - OURS
    assert not unknown, f"{where}: unknown fields {unknown}"
    missing = _NEEDED.get(type(value).__name__, set()) - value.model_fields_set
    assert not missing, f"{where}: missing {missing}"
    for name, field in type(value).model_fields.items():
        child = getattr(value, name)
        if name in value.model_fields_set and child is None:
            assert _may_be_none(field.annotation), f"{where}.{name}: null"
        _walk(child, f"{where}.{name}")


def _may_be_none(annotation: Any) -> bool:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return annotation is Any or (is_union and type(None) in typing.get_args(annotation))
