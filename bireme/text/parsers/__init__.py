"""Reasoning and tool calls in generated text: formats by name, and the parser of one answer.

A recipe names its model's formats: `chat: {reasoning_parser: think, tool_parser: hermes}`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from bireme.errors import ConfigError
from bireme.text.parsers.base import Parser, ParserRequest, ReasoningFormat, ToolFormat
from bireme.text.parsers.envelope import EnvelopeFormat
from bireme.text.parsers.gemma import GemmaFormat
from bireme.text.parsers.harmony import HarmonyFormat
from bireme.text.parsers.kimi import KimiFormat
from bireme.text.parsers.named import MistralFormat, NamedFormat
from bireme.text.parsers.nested import NestedFormat
from bireme.text.parsers.plain import PlainParser
from bireme.text.parsers.pythonic import PythonicFormat
from bireme.text.parsers.tagged import TaggedFormat
from bireme.text.parsers.think import ThinkFormat

# docs/parsers.md says how to add to these, and which model speaks which.
REASONING: dict[str, ReasoningFormat] = {
    "think": ThinkFormat(),
    "qwen3": ThinkFormat(is_expected=True),
    "deepseek_r1": ThinkFormat(is_implied=True),
    "kimi_k2": ThinkFormat(is_expected=True),
    "kimi": ThinkFormat(("◁think▷",), ("◁/think▷",)),
    "mistral": ThinkFormat(("[THINK]",), ("[/THINK]",)),
    "granite": ThinkFormat(
        ("<think>", "Here is my thought process:", "Here's my thought process:"),
        ("</think>", "Here is my response:", "Here's my response:"),
        answer=("<response>", "</response>"),
    ),
    "seed_oss": ThinkFormat(("<seed:think>",), ("</seed:think>",)),
    "hunyuan3": ThinkFormat(("<think:opensource>",), ("</think:opensource>",)),
    "command_a": ThinkFormat(
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        has_answer_alone=True,
    ),
    "kimi_k3": ThinkFormat(
        ("<|open|>think<|sep|>",),
        ("<|close|>think<|sep|>",),
        answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        has_answer_alone=True,
        needs_answer=True,
        trailer="<|close|>message<|sep|>",
    ),
    "minimax_m3": ThinkFormat(("<mm:think>",), ("</mm:think>",), has_end_alone=True),
    "gemma4": ThinkFormat(("<|channel>thought\n", "<|channel>"), ("<channel|>",), is_expected=True),
    "harmony": HarmonyFormat(),
}
_MINIMAX = "]<]minimax[>["  # before each tag of MiniMax M3, one token
_DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_END = "<｜tool▁call▁end｜>"
_DEEPSEEK_V32 = TaggedFormat(
    ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    ('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>"),
    ('<｜DSML｜parameter name="', ">", "</｜DSML｜parameter>"),
    "deepseek_xml",
    other_section=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    type_marks=('string="true"', 'string="false"'),
)
TOOLS: dict[str, ToolFormat] = {
    "hermes": EnvelopeFormat(("<tool_call>",), "</tool_call>", layout="\n", needs_special_tokens=True),
    "llama3_json": EnvelopeFormat(
        ("<|python_tag|>",), separator="; ", argument_key="parameters", is_bare=True, needs_special_tokens=True
    ),
    "llama4_json": EnvelopeFormat(
        ("<|python_start|>",),
        "<|python_end|>",
        separator="",
        argument_key="parameters",
        is_bare=True,
        needs_special_tokens=True,
        is_taught=False,
    ),
    "mistral": MistralFormat(("[TOOL_CALLS]",), opener="[", separator=", ", layout=" ", needs_special_tokens=True),
    "nemotron": EnvelopeFormat(("<TOOLCALL>",), "</TOOLCALL>", opener="[", separator=", ", needs_special_tokens=True),
    "jamba": EnvelopeFormat(
        ("<tool_calls>",), "</tool_calls>", opener="[", separator=", ", needs_special_tokens=True, is_taught=False
    ),
    "phi4": EnvelopeFormat(
        ("<|tool_call|>", "functools"), "<|/tool_call|>", opener="[", separator=", ", needs_special_tokens=True
    ),
    "granite": EnvelopeFormat(("<|tool_call|>", "<tool_call>"), opener="[", separator=", ", needs_special_tokens=True),
    "command_a": EnvelopeFormat(
        ("<|START_ACTION|>",),
        "<|END_ACTION|>",
        opener="[",
        separator=", ",
        name_key="tool_name",
        argument_key="parameters",
        needs_special_tokens=True,
        is_taught=False,
    ),
    "pythonic": PythonicFormat(),
    "lfm2": PythonicFormat("<|tool_call_start|>", "<|tool_call_end|>", is_unescaped=True),
    "gemma3": PythonicFormat("```tool_code", "```"),
    "gemma4": GemmaFormat("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": GemmaFormat("<start_function_call>", "<end_function_call>", "<escape>"),
    "qwen3_coder": TaggedFormat(
        ("<tool_call>", "</tool_call>"),
        ("<function=", ">", "</function>"),
        ("<parameter=", ">", "</parameter>"),
        "qwen_xml",
        is_padded=True,
        is_shared=False,
    ),
    "seed_oss": TaggedFormat(
        ("<seed:tool_call>", "</seed:tool_call>"),
        ("<function=", ">", "</function>"),
        ("<parameter=", ">", "</parameter>"),
        "qwen_xml",
        is_shared=False,
    ),
    "minimax_m2": TaggedFormat(
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        ('<invoke name="', '">', "</invoke>"),
        ('<parameter name="', ">", "</parameter>"),
        "minimax_xml",
    ),
    "deepseek_v3.2": _DEEPSEEK_V32,
    "deepseek_v4": replace(_DEEPSEEK_V32, section=_DEEPSEEK_V32.other_section, other_section=_DEEPSEEK_V32.section),
    "glm45": TaggedFormat(
        ("<tool_call>", "</tool_call>"),
        ("", "", ""),
        ("<arg_key>", "</arg_key>", "</arg_value>"),
        "glm_xml",
        value="<arg_value>",
        is_shared=False,
    ),
    "hunyuan3": TaggedFormat(
        ("<tool_calls:opensource>", "</tool_calls:opensource>"),
        ("<tool_call:opensource>", "<tool_sep:opensource>", "</tool_call:opensource>"),
        ("<arg_key:opensource>", "</arg_key:opensource>", "</arg_value:opensource>"),
        "",
        value="<arg_value:opensource>",
    ),
    "minimax_m3": NestedFormat(
        (f"{_MINIMAX}<tool_call>", f"{_MINIMAX}</tool_call>"),
        (f'{_MINIMAX}<invoke name="', '">', f"{_MINIMAX}</invoke>"),
        (f"{_MINIMAX}<", ">", f"{_MINIMAX}</"),
        "minimax_m3_xml",
    ),
    "kimi_k3": KimiFormat(
        ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        ('<|open|>call tool="', "<|sep|>", "<|close|>call<|sep|>"),
        ('<|open|>argument key="', "<|sep|>", "<|close|>argument<|sep|>"),
        "kimi_k3_xml",
        type_marks=('type="string"', 'type="'),
    ),
    "deepseek_v3": NamedFormat(
        _DEEPSEEK_CALLS,
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", _DEEPSEEK_END),
        "\n",
        fence=("```json\n", "\n```"),
        between="\n",
    ),
    "deepseek_v3.1": NamedFormat(_DEEPSEEK_CALLS, ("<｜tool▁call▁begin｜>", _DEEPSEEK_END), "<｜tool▁sep｜>"),
    "kimi_k2": NamedFormat(
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ("<|tool_call_begin|>", "<|tool_call_end|>"),
        "<|tool_call_argument_begin|>",
        name_prefix="functions.",
        is_numbered=True,
    ),
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
    if reasoning is not None and request.functions:
        request = replace(request, thought_ends=reasoning.ends)

    def new_answer() -> Parser:
        return tools.parser(request) if tools is not None and request.functions else PlainParser()

    return reasoning.parser(request, new_answer) if reasoning is not None else new_answer()


def _find(table: Mapping[str, _F], name: str, key: str) -> _F | None:
    if not name:
        return None
    if name not in table:
        near = difflib.get_close_matches(name, table, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(table) or 'none'}"
        raise ConfigError(f"{key}: {name} is not a known format; {hint}")
    return table[name]
