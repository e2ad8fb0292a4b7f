"""Chat templates: messages to a prompt, in jinja2's sandbox with the helpers that transformers gives templates.

A template comes with a model and sees only plain JSON data; the prompt's size and the rendering time are limited.
Messages have the form of transformers and vLLM: arguments of tool calls as objects, content given in text parts as one
string (parts of other kinds stay a list), reasoning under each name in use. Templates of some vision-language models
would skip a string: they get parts. A template is asked once how it has to be given calls (CallForm).

**Control tokens in what callers send are text** (control_tokens.py), but for thought marks in an assistant's text by
which the template takes it apart. Roles that a recipe trusts are left as they are.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
_CALL_PROBES = ("bireme_function", "bireme_key", "bireme value")
_SECOND_PROBE = "bireme_second"  # the name in a second call
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
_RESERVED = ("chat_template", "messages", "tools", "tokenize", "return_dict", "continue_final_message")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_DICT_NAMES = frozenset(dir(dict))  # `message.items` is the method, as everywhere in Jinja
_PLAIN = {"role", "content"}
_SPLITS = ("split", "rsplit", "partition", "rpartition")


@dataclass(frozen=True, slots=True)
class CallForm:
    """How an assistant's calls have to be given to a template, which otherwise drops them without a word."""

    has_text_arguments: bool = False  # as JSON text instead of an object
    needs_no_content: bool = False  # none where there is no text; the empty text would hide the calls
    splits_content: bool = False  # text beside calls is a message of its own before them
    shows_one_call: bool = False  # or refuses several: each is a message of its own, before its result


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
        self._call_form = self._ask_call_form()
        self._takes_calls = self._call_form == CallForm()  # as they come
        self._has_results = self._call_form is not None or self._shows_results()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Render a conversation. Raises RequestError when the template refuses it, or the prompt gets too large."""
        shield, end = Shield(self._texts), ""
        try:
            shown, has_text = [], self._call_form is not None and self._call_form.has_text_arguments
            for message in self._formed(messages):
                shown.append(self._protected(_shown(message, self._wants_parts, has_text), shield))
            if messages and messages[-1].get(CONTINUED):
                end = shield.mark_of("")
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
        return _PROBE in (self._tried([{"role": "user", "content": content}]) or "")

    def _ask_call_form(self) -> CallForm | None:
        """Return the first form in which the template shows calls; None: it shows none."""
        refuses_all = True
        for form in (CallForm(has_text, needs_none) for needs_none in (False, True) for has_text in (False, True)):
            shown = self._shown_call(form, "")
            refuses_all &= shown is None
            if shown is not None and all(probe in shown for probe in _CALL_PROBES):
                form = _better(form, replace(form, splits_content=True), self._shows_both)
                return _better(form, replace(form, shows_one_call=True), self._shows_two)
        return CallForm() if refuses_all else None

    def _shows_two(self, form: CallForm) -> bool:
        return _SECOND_PROBE in (self._shown_call(form, "", _SECOND_PROBE) or "")

    def _shows_both(self, form: CallForm) -> bool:
        shown = self._shown_call(form, _PROBE) or ""
        return all(probe in shown for probe in (_PROBE, *_CALL_PROBES))

    def _shown_call(self, form: CallForm, content: str, second: str = "") -> str | None:
        """Return how a call is shown, and one of a function named `second`; None: the template refuses it."""
        name, key, value = _CALL_PROBES
        calls, results = [], []
        for number, function in enumerate(filter(None, (name, second))):
            call_id = f"probe123{number}"
            calls.append({"id": call_id, "type": "function", "function": {"name": function, "arguments": {key: value}}})
            results.append({"role": "tool", "tool_call_id": call_id, "name": function, "content": "1"})
        asked: list[Message] = [{"role": "user", "content": "hi"}]
        asked.append({"role": "assistant", "content": content, "tool_calls": calls})
        tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": _NO_PARAMETERS}}]
        for messages, offered in (([*asked, *results], tools), (asked, None)):
            shown = [_shown(one, self._wants_parts, form.has_text_arguments) for one in _all_in_form(messages, form)]
            if (text := self._tried(shown, offered)) is not None:
                return text
        return None

    def _tried(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str | None:
        """Return what the template makes of messages at load; None: it refuses them."""
        context = {"documents": None, "add_generation_prompt": True, "tools": tools, "messages": messages}
        try:
            return self._render({**self._special_tokens, **context})
        except RequestError:
            return None

    def _shows_results(self) -> bool:
        answer = {"role": "assistant", "content": "hm"}
        result = {"role": "tool", "tool_call_id": "probe1234", "name": "f", "content": _PROBE}
        shown = [_shown(message, self._wants_parts) for message in ({"role": "user", "content": "hi"}, answer, result)]
        return _PROBE in (self._tried(shown) or "")

    def _formed(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with calls, and their results, as the template shows them."""
        if self._takes_calls:
            return messages
        form = self._call_form
        if form is None:
            shown = list(map(_with_written_calls, messages))
            return shown if self._has_results else _results_as_user(shown)
        return _all_in_form(messages, form)

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


def _better(form: CallForm, changed: CallForm, shows_all: Callable[[CallForm], bool]) -> CallForm:
    return form if shows_all(form) or not shows_all(changed) else changed


def _all_in_form(messages: Sequence[Message], form: CallForm) -> Sequence[Message]:
    if form.shows_one_call:
        messages = _one_call_each(messages)
    return [one for message in messages for one in _in_form(message, form)]


def _one_call_each(messages: Sequence[Message]) -> Sequence[Message]:
    """Make of several calls a message each."""
    shown: list[Message] = []
    left = list(reversed(messages))
    while left:
        message = left.pop()
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or len(calls) < 2:
            shown.append(message)
            continue
        results = []
        while left and left[-1].get("role") == "tool":
            results.append(left.pop())
        shown += _apart(message, calls, results)
    return shown


def _apart(message: Message, calls: Sequence[Any], results: Sequence[Message]) -> Sequence[Message]:
    """Return one message a call, its results behind it; those of no call stand at the end."""
    shown: list[Message] = []
    by_call: dict[str, list[Message]] = {}
    for result in results:
        by_call.setdefault(str(result.get("tool_call_id")), []).append(result)
    for call in calls:
        call_id = call.get("id") if isinstance(call, dict) else None
        shown += [{**message, "tool_calls": [call]}, *([] if call_id is None else by_call.pop(str(call_id), []))]
        message = {"role": message.get("role"), "content": ""}  # text and thoughts stand before the first call
    return [*shown, *(result for result in results if str(result.get("tool_call_id")) in by_call)]


def _in_form(message: Message, form: CallForm) -> Sequence[Message]:
    """Return a message as a template shows its calls."""
    content = message.get("content")
    if not message.get("tool_calls"):
        return [message]
    if form.splits_content and content:
        text = {key: value for key, value in message.items() if key != "tool_calls"}
        calls = {key: value for key, value in message.items() if key not in _REASONING}
        return [text, *_in_form({**calls, "content": ""}, form)]
    if form.needs_no_content and not content:
        return [{**message, "content": None}]
    return [message]


def _with_written_calls(message: Message) -> Message:
    """Write calls into the assistant's text, as JSON, one a line."""
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    texts = [content] if isinstance(content, str) and content else []
    for call in calls:
        call = _with_arguments(call, False)
        texts.append(_to_json(call.get("function") if isinstance(call, dict) else call))
    return {**message, "content": "\n".join(texts), "tool_calls": None}


def _results_as_user(messages: Sequence[Message]) -> Sequence[Message]:
    """Results are what the user says, and so is what follows of theirs: many templates want turns in turn."""
    shown: list[Message] = []
    texts: list[str] = []  # of the turn at hand
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if isinstance(content, str) and (role == "tool" or (texts and role == "user")):
            if not texts:
                shown.append({"role": "user"})
            texts.append(content)
            continue
        if texts:
            shown[-1]["content"], texts = "\n".join(texts), []
        shown.append(message)
    if texts:
        shown[-1]["content"] = "\n".join(texts)
    return shown


def _shown(message: Message, wants_parts: bool, has_text_arguments: bool = False) -> Message:
    """Return the message in the form that templates expect, as a copy."""
    if not wants_parts and message.keys() == _PLAIN and isinstance(message["content"], str):  # nearly every message
        return message
    shown = dict(message)
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is not None:
        shown = {"thinking": reasoning, **shown, "reasoning_content": reasoning}
    if "content" in shown:
        shown["content"] = _shown_content(shown["content"], wants_parts)
    calls = shown.get("tool_calls")
    if isinstance(calls, list):
        shown["tool_calls"] = [_with_arguments(call, has_text_arguments) for call in calls]
    return shown


def _shown_content(content: Any, wants_parts: bool) -> Any:
    if wants_parts:
        return [{"type": "text", "text": content}] if isinstance(content, str) else content
    if isinstance(content, list) and content and all(map(_is_text, content)):
        return "\n".join(part["text"] for part in content)
    return content


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


def _with_arguments(call: Any, has_text: bool) -> Any:
    """OpenAI's arguments are a JSON string; most templates turn an object into JSON themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(arguments := function.get("arguments"), str) == has_text:
        return call
    if has_text:
        return {**call, "function": {**function, "arguments": _to_json(arguments)}}
    if not isinstance(arguments, str):
        return call
    try:
        arguments = json.loads(arguments or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _literals(tree: jinja2.nodes.Template) -> Iterator[str]:
    """Yield the strings in a template."""
    yield from (node.data for node in tree.find_all(jinja2.nodes.TemplateData))
    yield from _strings(tree.find_all(jinja2.nodes.Const))


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
    yield from _strings(names.get(node.name, node) if isinstance(node, jinja2.nodes.Name) else node for node in asked)


def _strings(nodes: Iterable[jinja2.nodes.Node]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, jinja2.nodes.Const) and isinstance(node.value, str):
            yield node.value


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
