"""Answers as models are taught to write them: templates of our own that render what each model's own template does."""

from __future__ import annotations

import functools
import json

import jinja2

_JSON_LIST = (
    '[{% for c in calls %}{{ ", " if loop.index0 }}{"name": "{{ c[0] }}", "arguments": {{ c[1]|json }}}{% endfor %}]'
)
_INVOKES = (
    '{% for c in calls %}<D%invoke name="{{ c[0] }}">\n{% for k, v in c[1].items() %}<D%parameter name="{{ k }}"ATTR>'
    "{{ v if v is string else v|json }}</D%parameter>\n{% endfor %}</D%invoke>\n{% endfor %}"
)
_GEMMA = (
    "{% macro g(v) %}{% if v is string %}Q{{ v }}Q{% elif v is mapping %}{% raw %}{{% endraw %}"
    "{% for k in v|sort %}{{ ',' if loop.index0 }}{{ k }}:{{ g(v[k]) }}{% endfor %}}{% elif v is sequence %}["
    "{% for x in v %}{{ ',' if loop.index0 }}{{ g(x) }}{% endfor %}]{% else %}{{ v|json }}{% endif %}{% endmacro %}"
    "{% for c in calls %}BEGINcall:{{ c[0] }}{{ g(c[1]) }}END{% endfor %}"
)
_DSML = (
    "{% if calls %}\n\n<｜DSML｜function_calls>\n"
    + _INVOKES.replace("D%", "｜DSML｜")
    .replace("ATTR", ' string="{{ (v is string)|json }}"')
    .removesuffix("{% endfor %}")
    + "{% endfor %}</｜DSML｜function_calls>{% endif %}"
)
_PYTHONIC = (
    "{% for c in calls %}{{ SEP if loop.index0 }}{{ c[0] }}({% for k, v in c[1].items() %}{{ ', ' if loop.index0 }}"
    "{{ k }}={{ v|python }}{% endfor %}){% endfor %}"
)
_NESTED = (
    "{% macro x(v) %}{% if v is mapping %}{% for k, w in v.items() if w is not none %}N@<{{ k }}>{{ x(w) }}N@</{{ k }}>"
    "{% endfor %}{% elif v is sequence and v is not string %}{% for w in v %}N@<item>{{ x(w) }}N@</item>{% endfor %}"
    "{% else %}{{ v if v is string else v|json }}{% endif %}{% endmacro %}N@<tool_call>\n{% for c in calls %}"
    'N@<invoke name="{{ c[0] }}">{{ x(c[1]) }}N@</invoke>\n{% endfor %}N@</tool_call>'
)
CALLS = {
    "hermes": (
        '{% for c in calls %}\n<tool_call>\n{"name": "{{ c[0] }}", "arguments": {{ c[1]|json }}}\n</tool_call>'
        "{% endfor %}"
    ),
    "llama3_json": (
        '{% for c in calls %}{{ "; " if loop.index0 }}{"name": "{{ c[0] }}", "parameters": {{ c[1]|json }}}{% endfor %}'
    ),
    "llama4_json": (
        '<|python_start|>{"type": "function", "name": "{{ calls[0][0] }}", "parameters": {{ calls[0][1]|json }}}'
        "<|python_end|>"
    ),
    "mistral": "[TOOL_CALLS] " + _JSON_LIST,
    "nemotron": "<TOOLCALL>" + _JSON_LIST + "</TOOLCALL>",
    "jamba": (
        "<tool_calls>[\n{% for c in calls %}    "
        '{"name": "{{ c[0] }}", "arguments": {{ c[1]|json }}}{{ "," if not loop.last }}\n{% endfor %}]</tool_calls>'
    ),
    "command_a": (
        "<|START_ACTION|>[\n{% for c in calls %}    "
        '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c[0] }}", "parameters": {{ c[1]|json }}}'
        '{{ "," if not loop.last }}\n{% endfor %}]<|END_ACTION|>'
    ),
    "lfm2": "<|tool_call_start|>[" + _PYTHONIC.replace("SEP", "', '") + "]<|tool_call_end|>",
    "seed_oss": (
        "{% for c in calls %}\n<seed:tool_call>\n<function={{ c[0] }}>\n{% for k, v in c[1].items() %}"
        "<parameter={{ k }}>{{ v if v is string else v|json }}</parameter>\n{% endfor %}</function>\n"
        "</seed:tool_call>{% endfor %}"
    ),
    "hunyuan3": (
        "<tool_calls:opensource>\n{% for c in calls %}<tool_call:opensource>{{ c[0] }}<tool_sep:opensource>\n"
        "{% for k, v in c[1].items() %}<arg_key:opensource>{{ k }}</arg_key:opensource>\n<arg_value:opensource>"
        "{{ v if v is string else v|json }}</arg_value:opensource>\n{% endfor %}</tool_call:opensource>\n"
        "{% endfor %}</tool_calls:opensource>"
    ),
    "phi4": "functools" + _JSON_LIST,
    "granite": "<|tool_call|>" + _JSON_LIST,
    "pythonic": "[" + _PYTHONIC.replace("SEP", "', '") + "]",
    "gemma3": "```tool_code\n" + _PYTHONIC.replace("SEP", "'\\n'") + "\n```",
    "gemma4": _GEMMA.replace("Q", '<|"|>').replace("BEGIN", "<|tool_call>").replace("END", "<tool_call|>"),
    "functiongemma": _GEMMA.replace("Q", "<escape>")
    .replace("BEGIN", "<start_function_call>")
    .replace("END", "<end_function_call>"),
    "qwen3_coder": (
        "{% for c in calls %}\n<tool_call>\n<function={{ c[0] }}>\n{% for k, v in c[1].items() %}<parameter={{ k }}>\n"
        "{{ v if v is string else v|json }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
    ),
    "minimax_m2": "\n<minimax:tool_call>\n" + _INVOKES.replace("D%", "").replace("ATTR", "") + "</minimax:tool_call>",
    "deepseek_v3.2": _DSML,
    "deepseek_v4": _DSML.replace("function_calls", "tool_calls"),
    "glm45": (
        "{% for c in calls %}\n<tool_call>{{ c[0] }}\n{% for k, v in c[1].items() %}<arg_key>{{ k }}</arg_key>\n"
        "<arg_value>{{ v if v is string else v|json }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    ),
    "minimax_m3": _NESTED.replace("N@", "]<]minimax[>["),
    "kimi_k3": (
        '<|open|>tools<|sep|>{% for c in calls %}<|open|>call tool="{{ c[0] }}" index="{{ loop.index }}"<|sep|>'
        '{% for k, v in c[1].items() %}<|open|>argument key="{{ k }}" type="{{ v|kind }}"<|sep|>'
        "{{ v if v is string else v|json }}<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>{% endfor %}"
        "<|close|>tools<|sep|><|close|>message<|sep|>"
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>{% for c in calls %}{{ '\n' if loop.index0 }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        "{{ c[0] }}\n```json\n{{ c[1]|json }}\n```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
    ),
    "deepseek_v3.1": (
        "<｜tool▁calls▁begin｜>{% for c in calls %}<｜tool▁call▁begin｜>{{ c[0] }}<｜tool▁sep｜>{{ c[1]|json }}"
        "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>{% for c in calls %}<|tool_call_begin|>functions.{{ c[0] }}:{{ loop.index0 }}"
        "<|tool_call_argument_begin|>{{ c[1]|json }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>"
    ),
    "harmony": (" to=functions.{{ calls[0][0] }}<|channel|>commentary json<|message|>{{ calls[0][1]|json }}<|call|>"),
}
# reasoning parser: end of the prompt, answer
REASONING = {
    "think": ("<think>\n", "{{ thought }}\n</think>\n\n{{ content }}"),  # MiniMax M2, DeepSeek V3.2, Nemotron Nano
    "qwen3": ("<|assistant|>", "\n<think>{{ thought }}</think>\n{{ content }}"),  # GLM 4.5
    "deepseek_r1": ("", "{{ thought }}</think>{{ content }}"),
    "kimi_k2": ("<|im_middle|>", "<think>{{ thought }}</think>{{ content }}"),
    "kimi": ("<|im_middle|>", "◁think▷{{ thought }}◁/think▷{{ content }}"),
    "mistral": ("[/INST]", "[THINK]{{ thought }}[/THINK]{{ content }}"),
    "granite": ("<|end_of_role|>", "<think>{{ thought }}</think>\n<response>{{ content }}</response>"),
    "seed_oss": ("assistant\n", "<seed:think>{{ thought }}</seed:think>{{ content }}"),
    "hunyuan3": ("<｜hy_Assistant:opensource｜><think:opensource>", "{{ thought }}</think:opensource>{{ content }}"),
    "command_a": (
        "<|CHATBOT_TOKEN|><|START_THINKING|>",
        "{{ thought }}<|END_THINKING|><|START_RESPONSE|>{{ content }}<|END_RESPONSE|>",
    ),
    "kimi_k3": (
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
        "{{ thought }}<|close|>think<|sep|><|open|>response<|sep|>{{ content }}<|close|>response<|sep|>"
        "<|close|>message<|sep|>",
    ),
    "minimax_m3": ("]~b]ai\n", "<mm:think>{{ thought }}</mm:think>{{ content }}"),
    "gemma4": ("<|turn>model\n", "<|channel>thought\n{{ thought }}<channel|>{{ content }}"),
    "harmony": (
        "<|start|>assistant",
        "<|channel|>analysis<|message|>{{ thought }}<|end|><|start|>assistant<|channel|>final<|message|>{{ content }}",
    ),
}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _kind(value: object) -> str:
    kinds = {bool: "boolean", type(None): "null", str: "string", dict: "object", list: "array"}
    return kinds.get(type(value), "number")


_TEMPLATES = jinja2.Environment(autoescape=False, keep_trailing_newline=True, cache_size=64)
_TEMPLATES.filters |= {"json": _json, "python": repr, "kind": _kind}
_compiled = functools.cache(_TEMPLATES.from_string)


def render_calls(name: str, calls: list[tuple[str, dict[str, object]]]) -> str:
    return _compiled(CALLS[name]).render(calls=calls)


def render_thought(name: str, thought: str, content: str) -> str:
    return _compiled(REASONING[name][1]).render(thought=thought, content=content)


def read_back(name: str, calls: list[tuple[str, dict[str, object]]]) -> list[tuple[str, dict[str, object]]]:
    """Return what of calls an answer shows: MiniMax M3 writes no null."""
    if name != "minimax_m3":
        return calls
    return [(called, {key: value for key, value in of.items() if value is not None}) for called, of in calls]
