"""Reasoning and tool calls in generated text: formats by name, and the parser of one answer.

A recipe names its model's formats: `chat: {reasoning_parser: think, tool_parser: hermes}`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from bireme.errors import ConfigError
from bireme.text.parsers.base import Parser, ParserRequest, ReasoningFormat, ToolFormat
from bireme.text.parsers.envelope import EnvelopeFormat
from bireme.text.parsers.harmony import HarmonyFormat
from bireme.text.parsers.named import DeepSeekFormat, MistralFormat
from bireme.text.parsers.plain import PlainParser
from bireme.text.parsers.pythonic import PythonicFormat
from bireme.text.parsers.qwen3_coder import Qwen3CoderFormat
from bireme.text.parsers.think import ThinkFormat

# docs/parsers.md says how to add to these.
REASONING: dict[str, ReasoningFormat] = {
    "think": ThinkFormat(),
    "qwen3": ThinkFormat(is_expected=True),
    "deepseek_r1": ThinkFormat(is_implied=True),
    "harmony": HarmonyFormat(),
}
TOOLS: dict[str, ToolFormat] = {
    "hermes": EnvelopeFormat(("<tool_call>",), "</tool_call>", layout="\n", needs_special_tokens=True),
    "llama3_json": EnvelopeFormat(
        ("<|python_tag|>",), separator="; ", argument_key="parameters", is_bare=True, needs_special_tokens=True
    ),
    "mistral": MistralFormat(("[TOOL_CALLS]",), opener="[", separator=", ", needs_special_tokens=True),
    "pythonic": PythonicFormat(),
    "qwen3_coder": Qwen3CoderFormat(),
    "deepseek_v3.1": DeepSeekFormat(),
    "harmony": HarmonyFormat(),
}
_F = TypeVar("_F")


def reasoning_format(name: str) -> ReasoningFormat | None:
    """Return a format by its name; None for "". Raises ConfigError for an unknown name."""
    return _find(REASONING, name, "chat.reasoning_parser")


def tool_format(name: str) -> ToolFormat | None:
    """Return a format by its name; None for "". Raises ConfigError for an unknown name."""
    return _find(TOOLS, name, "chat.tool_parser")


def create_parser(reasoning: ReasoningFormat | None, tools: ToolFormat | None, request: ParserRequest) -> Parser:
    """Return the parser of one answer: reasoning first, then tool calls where functions are offered."""
    parser = tools.parser(request) if tools is not None and request.functions else PlainParser()
    return reasoning.parser(request, parser) if reasoning is not None else parser


def _find(table: Mapping[str, _F], name: str, key: str) -> _F | None:
    if not name:
        return None
    if name not in table:
        near = difflib.get_close_matches(name, table, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(table) or 'none'}"
        raise ConfigError(f"{key}: {name} is not a known format; {hint}")
    return table[name]
