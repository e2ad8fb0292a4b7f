"""Chat templates: messages to a prompt, in jinja2's sandbox with the helpers that transformers gives templates.

A template comes with a model and sees only plain JSON data. Attributes of Python's internals are out of its reach; the
prompt's size and the rendering time are limited (checked with every piece of output). Messages have the form of
transformers and vLLM: arguments of tool calls as objects, content given in text parts as one string (parts of other
kinds stay a list), reasoning under each name in use. Templates of some vision-language models read only parts and would
silently skip a string: they get parts.

**Control tokens in what callers send are text.** A template writes `<|im_end|>` to end a message; the same characters
in a message, a tool or a variable must not (control_tokens.py). The exception: thought marks in an assistant's text by
which the template takes it apart. Roles that a recipe trusts are left as they are.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from bireme.errors import ConfigError, RequestError
from bireme.text.control_tokens import ControlTokens, Prompt, Shield, TemplateTexts

Message = dict[str, Any]
CONTINUED = "continue_final_message"  # a key of the last message: the prompt ends where its content does
MAX_RENDER_S = 5.0  # no key: limits.max_messages and max_prompt_bytes bound a chat, this ends a template's own loops
_PROBE = "bireme probe"
_RESERVED = ("chat_template", "messages", "tools", "tokenize", "return_dict", "continue_final_message")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_DICT_NAMES = frozenset(dir(dict))  # `message.items` is the method, as everywhere in Jinja
_PLAIN = {"role", "content"}
_SPLITS = ("split", "rsplit", "partition", "rpartition")


class ChatTemplate:
    """A compiled template, and the special tokens that it may use."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        max_bytes: int = 8 << 20,
        controls: ControlTokens | None = None,
        trusted_roles: Sequence[str] = (),
    ) -> None:
        """`controls` in messages stay text, but in those of `trusted_roles`. Raises ConfigError: it is not valid."""
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._texts = TemplateTexts(controls or ControlTokens(), _literals(tree), _separators(tree))
            self._template = environment.from_string(tree)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template is not valid: {error}") from error
        self._template.globals = dict(self._template.globals)  # jinja2's chain of maps costs more than rendering
        self._special_tokens = dict(special_tokens)
        self._max_bytes = max_bytes
        self._trusted_roles = frozenset(trusted_roles)
        self._wants_parts = False
        if "image" in source:
            self._wants_parts = not self._shows(_PROBE) and self._shows([{"type": "text", "text": _PROBE}])

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Render a conversation. Raises RequestError when the template refuses it, or the prompt gets too large."""
        shield, end = Shield(self._texts), ""
        try:
            shown = [self._protected(_shown(message, self._wants_parts), shield) for message in messages]
            if messages and messages[-1].get(CONTINUED):
                end = shield.end_mark()
                shown[-1] = _ended(shown[-1], end)
            context = {
                "documents": None,
                "add_generation_prompt": True,
                **self._special_tokens,
                **shield.protect(_checked(variables or {})),
                "messages": shown,
                "tools": shield.protect_tools(list(tools)) if tools else None,
            }
        except RecursionError:
            raise RequestError("messages: they, or the arguments of their tool calls, are nested too deeply") from None
        text = self._render(context)
        return shield.restore(_until(text, end) if end else text)

    def _protected(self, message: Message, shield: Shield) -> Message:
        role, content = message.get("role"), message.get("content")
        if role in self._trusted_roles or (
            message.keys() == _PLAIN and shield.is_plain(role) and shield.is_plain(content)
        ):
            return message
        if role != "assistant" or "content" not in message:
            protected: Message = shield.protect(message)
            return protected
        return {**shield.protect({**message, "content": ""}), "content": shield.protect_answer(content)}

    def _shows(self, content: Any) -> bool:
        """Whether the template renders a user's text given in this form."""
        messages = [{"role": "user", "content": content}]
        context = {"documents": None, "add_generation_prompt": True, "tools": None, "messages": messages}
        try:
            return _PROBE in self._render({**self._special_tokens, **context})
        except RequestError:
            return False

    def _render(self, context: Mapping[str, Any]) -> str:
        deadline = time.monotonic() + MAX_RENDER_S
        parts, size = [], 0
        try:
            for part in self._template.generate(context):
                parts.append(part)
                size += len(part)
                if size > self._max_bytes:
                    raise RequestError(f"the rendered chat prompt exceeds limits.max_prompt_bytes {self._max_bytes}")
                if time.monotonic() > deadline:
                    raise RequestError(f"the chat template took more than {MAX_RENDER_S:g} s; send fewer messages")
        except RequestError:
            raise
        except jinja2.TemplateError as error:
            raise RequestError(f"messages: the model's chat template refuses them: {error}") from error
        except Exception as error:  # templates are code: a message without a needed field may raise anything
            raise RequestError(
                f"messages: the model's chat template can't show them: {type(error).__name__}: {error}"
            ) from error
        return "".join(parts)


def _checked(variables: Mapping[str, Any]) -> dict[str, Any]:
    for name in variables:
        if name in _RESERVED:
            raise RequestError(f"chat_template_kwargs.{name} can't be set by a request; remove it")
    return dict(variables)


def _shown(message: Message, wants_parts: bool) -> Message:
    """Return the message in the form that templates expect, as a copy."""
    if not wants_parts and message.keys() == _PLAIN and isinstance(message["content"], str):  # nearly every message
        return message
    shown = dict(message)
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is not None:
        shown = {"thinking": reasoning, **shown, "reasoning_content": reasoning}
    content = shown.get("content")
    if wants_parts and isinstance(content, str):
        shown["content"] = [{"type": "text", "text": content}]
    elif not wants_parts and isinstance(content, list) and content and all(_is_text(part) for part in content):
        shown["content"] = "\n".join(part["text"] for part in content)
    calls = shown.get("tool_calls")
    if isinstance(calls, list):
        shown["tool_calls"] = [_with_object_arguments(call) for call in calls]
    return shown


def _ended(message: Message, mark: str) -> Message:
    """Return a message to be gone on with, with a mark at its content's end."""
    content = message["content"]
    if isinstance(content, list):
        content = [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark}]
    else:
        content += mark
    return {**{key: value for key, value in message.items() if key != CONTINUED}, "content": content}


def _until(text: str, mark: str) -> str:
    if (at := text.rfind(mark)) < 0:
        raise RequestError(f"{CONTINUED}: the model's chat template leaves the last message's text out; remove it")
    return text[:at]


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _with_object_arguments(call: Any) -> Any:
    """OpenAI's arguments are a JSON string; templates turn an object into JSON themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _literals(tree: jinja2.nodes.Template) -> Iterator[str]:
    """Yield the strings in a template."""
    yield from (node.data for node in tree.find_all(jinja2.nodes.TemplateData))
    yield from (node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str))


def _separators(tree: jinja2.nodes.Template) -> Iterator[str]:
    """Yield the strings by which a template takes messages apart, or that it looks for in them."""
    names = {
        node.target.name: node.node
        for node in tree.find_all(jinja2.nodes.Assign)
        if isinstance(node.target, jinja2.nodes.Name)
    }
    asked: list[jinja2.nodes.Node] = [
        node.expr for node in tree.find_all(jinja2.nodes.Compare) if node.ops[0].op in ("in", "notin")
    ]
    for call in tree.find_all(jinja2.nodes.Call):
        if isinstance(call.node, jinja2.nodes.Getattr) and call.node.attr in _SPLITS:
            asked += call.args
    for node in asked:
        text = names.get(node.name, node) if isinstance(node, jinja2.nodes.Name) else node
        if isinstance(text, jinja2.nodes.Const) and isinstance(text.value, str):
            yield text.value


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is just rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Dict:
    """`dict(...)` in templates: makes one, exposes nothing else."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Knows that `message.role` means the item: a failing getattr each time would cost more than the rest."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and attribute not in _DICT_NAMES:
            return obj[attribute]
        return super().getattr(obj, attribute)


def _environment() -> jinja2.Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML characters, which prompts must keep."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
