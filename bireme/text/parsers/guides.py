"""Guides for tool calls, as xgrammar's structural tags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bireme.guides import LOOSE
from bireme.text.parsers.base import Function, Guide

Format = dict[str, Any]


def structural_tag(*parts: Format | str) -> Guide:
    """Return the guide that is these formats and texts one after the other."""
    formats = [{"type": "const_string", "value": part} if isinstance(part, str) else part for part in parts]
    whole = formats[0] if len(formats) == 1 else {"type": "sequence", "elements": formats}
    return {"structural_tag": {"type": "structural_tag", "format": whole}}


def call_tags(
    functions: Sequence[Function], begin: Callable[[str], str], end: str | list[str], style: str = "json"
) -> list[Format]:
    """Return one tag a function: `begin(name)`, arguments by its schema, `end`, or one of them.

    Schemas of tools are often not the caller's own (an MCP server writes them), so a keyword that can't be enforced
    refuses the request only where the function says `strict`.
    """
    return [
        {
            "type": "tag",
            "begin": begin(str(function["name"])),
            "content": {
                "type": "json_schema",
                "json_schema": parameters_of(function),
                "style": style,
                **({} if function.get("strict") else {LOOSE: True}),
            },
            "end": end,
        }
        for function in functions
    ]


def separated(tags: list[Format], separator: str, is_parallel: bool) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not is_parallel,
    }


def parameters_of(function: Function) -> dict[str, Any]:
    """Return a function's schema; one without parameters takes an empty object."""
    schema = function.get("parameters")
    if isinstance(schema, dict) and schema:
        return schema
    return {"type": "object", "properties": {}, "additionalProperties": False}
