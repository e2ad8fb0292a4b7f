"""The request of /v1/responses, as JSON and as a chat request.

Every field is served, or refused by name. The chat pipeline runs it: what this API alone knows (items, echoed fields)
stays here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from bireme.config import Recipe
from bireme.errors import RequestError
from bireme.openai.http.event_stream import EventStream
from bireme.openai.text.hosted_tools import is_left_out
from bireme.openai.text.response_answer import ResponseAnswer, ResponseEvents, ResponseForm
from bireme.openai.text.response_items import Conversation, Item, input_items, offered_name
from bireme.pipelines.chat_answer import ResponseMeta
from bireme.pipelines.chat_request import (
    ChatRequest,
    Effort,
    SamplingBody,
    Verbosity,
    build_chat,
    check_metadata,
    check_no_nvext_reply,
    openai_sampling,
    template_variables,
)
from bireme.pipelines.chat_tools import ChatFormat, FunctionDefinition, ToolChoice, ToolMode, ToolRules
from bireme.pipelines.extensions import REFUSED_NAMES, REFUSED_TIERS, ServiceTier, request_options, shown_tier
from bireme.pipelines.json_body import convert_part

_LOGPROBS, _SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"
_INCLUDED = {
    _LOGPROBS,
    _SEALED,
    # of tools that are not here, so nothing is left out; pictures of the input are always shown
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
}
_TOOLS = ToolRules(format="text.format")
_IN_CHATS = "a field of /v1/chat/completions; "
REFUSED = {
    "messages": _IN_CHATS + "send input",
    "max_tokens": "send max_output_tokens",
    "max_completion_tokens": "send max_output_tokens",
    "n": "a response is one answer; ask several times",
    "logprobs": f"send include with {_LOGPROBS}",
    "response_format": "send text.format",
    "reasoning_effort": "send reasoning.effort",
    "verbosity": "send text.verbosity",
    "prompt": "there are no stored prompts here; send instructions and input",
    "context_management": "not served; truncation auto drops what is oldest",
    "moderation": "not served; remove it",
    "access_programs": "not served; remove it",
    "background_options": "not served; remove it",
    "image": "not served; remove it",
    "prompt_cache_options": "not served; prompts are cached as long as there is room",
    "prompt_cache_retention": "not served; prompts are cached as long as there is room",
    **REFUSED_TIERS,
    **REFUSED_NAMES,
}


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # the older name
    context: Literal["auto"] | None = None  # the chat template decides what of it the model sees again
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool = False  # taken without effect, as in chats
    include_usage: bool = False  # of chats; load generators send it, and responses always tell their usage


class FunctionTool(FunctionDefinition, forbid_unknown_fields=True):
    """A function; the fields that are None are known and not served."""

    type: str = ""
    output_schema: None = None
    allowed_callers: None = None
    defer_loading: Literal[False] | None = None


class NamespaceTool(msgspec.Struct, forbid_unknown_fields=True):
    """Functions under a common name."""

    name: str
    description: str
    tools: list[dict[str, Any]]
    type: str = ""


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    type: Literal["function"]


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]
    type: str = ""


class ConversationReference(msgspec.Struct, forbid_unknown_fields=True):
    id: str


class ResponseBody(SamplingBody, kw_only=True, forbid_unknown_fields=True):
    """The request's JSON."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    add_generation_prompt: bool | None = None  # these two as in chats
    continue_final_message: bool | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None  # counts calls of tools that the server runs, of which there are none
    include: list[str] | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream_options: ResponseStreamOptions | None = None
    service_tier: ServiceTier | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    client_metadata: dict[str, Any] | None = None  # codex's, about itself: taken without effect
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationReference | None = None

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationReference) else self.conversation


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A request, checked."""

    chat: ChatRequest
    items: list[Item]  # of the input
    shown: dict[str, Any]  # fields of the request that its response repeats
    has_summary: bool  # reasoning is told as its own summary
    has_sealed: bool  # reasoning items carry encrypted_content
    is_truncated: bool  # the oldest messages go when the prompt is too long
    is_kept: bool  # for later
    conversation: str | None  # that gets its input and output
    spaced: dict[str, tuple[str, str]]  # the model's name of a function -> its namespace, and its name there

    def form(self, heading: ResponseMeta) -> ResponseForm:
        shown = self.shown | {"service_tier": self.chat.service_tier}
        return ResponseForm(heading, shown, has_timing=self.chat.return_timing)

    def answer(
        self, form: ResponseForm, events: ResponseEvents | None = None, stream: EventStream | None = None
    ) -> ResponseAnswer:
        return ResponseAnswer(
            form, events, stream, has_summary=self.has_summary, has_sealed=self.has_sealed, spaced=self.spaced
        )


def check_response(body: ResponseBody, recipe: Recipe, history: Sequence[Item] = ()) -> ResponseRequest:
    """Check what the types can't. `history`: items of the responses that this one goes on from. Raises RequestError."""
    options = request_options(body, body.service_tier, body.prompt_cache_key)
    check_no_nvext_reply(options)
    include = _include(body)
    text, reasoning = body.text or TextOptions(), body.reasoning or ReasoningOptions()
    summary = _summary(reasoning)
    check_metadata(body.metadata)
    guide = _TOOLS.guide(_format(text.format), options)
    given = _Tools.of(body, recipe)
    functions = _TOOLS.functions(given.functions, recipe.limits)
    tools = _TOOLS.offered(functions, _choice(body.tool_choice, bool(functions)), guide)
    _check_keeping(body)
    if options.serving.routing.query_only:
        raise RequestError("bireme.routing.query_only: a response is an answer; ask /v1/chat/completions")
    items = input_items(body.input)
    conversation = Conversation(recipe.limits, recipe.media, body.instructions)
    conversation.add(history, "previous_response_id" if body.conversation is None else "conversation")
    conversation.add(items)
    has_logprobs = _LOGPROBS in include
    own = {"max_tokens": body.max_output_tokens, "logprobs": (body.top_logprobs or 0) if has_logprobs else None}
    chat = build_chat(
        options,
        recipe,
        tools,
        is_parallel=body.parallel_tool_calls is not False,
        model=body.model,
        messages=conversation.messages,
        pictures=conversation.pictures,
        has_prompt=body.add_generation_prompt,
        is_continued=bool(body.continue_final_message),
        variables=template_variables(reasoning.effort, text.verbosity),
        sampling=openai_sampling(body) | own,
        logprobs=has_logprobs,
        stream=bool(body.stream),
        include_usage=True,
        service_tier=shown_tier(body.service_tier) or "default",
        renamed={"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"},
    )
    return ResponseRequest(
        chat=chat,
        items=items,
        shown=_shown(body, chat, given.shown, summary),
        has_summary=summary is not None,
        has_sealed=_SEALED in include,
        is_truncated=body.truncation == "auto",
        is_kept=body.store is not False,
        conversation=body.conversation_id,
        spaced=given.spaced,
    )


def _check_keeping(body: ResponseBody) -> None:
    if body.conversation is not None and body.previous_response_id is not None:
        raise RequestError("conversation: not together with previous_response_id; send one of them")
    if body.background and body.store is False:
        raise RequestError("store: false beside background; a response that nobody waits for has to be kept")


def _shown(body: ResponseBody, chat: ChatRequest, tools: list[dict[str, Any]], summary: str | None) -> dict[str, Any]:
    """Return the fields of the request that its response repeats."""
    params, text = chat.sampling.params, body.text or TextOptions()
    shown = {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": chat.is_parallel,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": summary},
        "safety_identifier": body.safety_identifier,
        "temperature": params.temperature,
        "text": {"format": _format_json(text.format), "verbosity": text.verbosity or "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if params.top_p is None else params.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
    return shown if body.conversation_id is None else {**shown, "conversation": {"id": body.conversation_id}}


def _include(body: ResponseBody) -> list[str]:
    include = body.include or []
    for at, name in enumerate(include):
        if name not in _INCLUDED:
            raise RequestError(f"include[{at}]: {name[:60]}; send {', '.join(sorted(_INCLUDED))}")
    if body.top_logprobs and _LOGPROBS not in include:
        raise RequestError(f"top_logprobs: only with include {_LOGPROBS}; add it, or remove top_logprobs")
    return include


def _summary(reasoning: ReasoningOptions) -> str | None:
    summary = reasoning.summary or reasoning.generate_summary
    if summary == "concise":
        raise RequestError("reasoning.summary: concise; reasoning is shown as it is, send auto or detailed")
    return summary


def _format(form: TextFormat | None) -> ChatFormat | None:
    if form is None:
        return None
    missing = f"{_TOOLS.format}.schema" if form.schema is None else ""
    return ChatFormat(_TOOLS.format, form.type, form.schema, _TOOLS.format, form.name or "", missing)


def _format_json(form: TextFormat | None) -> dict[str, Any]:
    if form is None or form.type != "json_schema":
        return {"type": form.type if form else "text"}
    shown = {"type": form.type, "name": form.name, "schema": form.schema, "strict": form.strict}
    return shown if form.description is None else {**shown, "description": form.description}


@dataclass(frozen=True, slots=True)
class _Tools:
    """The request's tools. The model sees a namespace's functions beside all others, each with both descriptions."""

    functions: dict[str, FunctionDefinition]  # by their places in the request
    spaced: dict[str, tuple[str, str]]
    shown: list[dict[str, Any]]

    @classmethod
    def of(cls, body: ResponseBody, recipe: Recipe) -> _Tools:
        tools = cls({}, {}, [])
        for at, given in enumerate(body.tools or []):
            where = f"tools[{at}]"
            if given.get("type") == "namespace":
                space = convert_part(given, NamespaceTool, where)
                inner = [tools._add(tool, f"{where}.tools[{place}]", space) for place, tool in enumerate(space.tools)]
                fields = {"type": "namespace", "name": space.name, "description": space.description}
                tools.shown.append({**fields, "tools": inner})
            elif not is_left_out(given.get("type"), recipe):
                tools.shown.append(tools._add(given, where))
        return tools

    def _add(self, given: dict[str, Any], where: str, space: NamespaceTool | None = None) -> dict[str, Any]:
        """Take a function; return how responses show it."""
        if given.get("type") != "function":
            kind = str(given.get("type"))[:40]
            raise RequestError(f"{where}.type: {kind}; functions and namespaces of them are served here, remove it")
        tool = convert_part(given, FunctionTool, where)
        name, description = tool.name, tool.description
        if space is not None:
            name = offered_name(space.name, name)
            description = "\n".join(filter(None, [space.description, description]))
            self.spaced[name] = (space.name, tool.name)
        self.functions[where] = FunctionDefinition(name, description, tool.parameters, tool.strict)
        shown = {"type": "function", "name": tool.name, "parameters": tool.parameters, "strict": tool.strict}
        return shown if tool.description is None else {**shown, "description": tool.description}


def _choice(choice: ToolMode | dict[str, Any] | None, has_functions: bool) -> ToolChoice:
    if not isinstance(choice, dict):
        return ToolChoice(choice or "auto")
    if not has_functions:
        return ToolChoice("required")  # refused, whatever it names
    if choice.get("type") == "allowed_tools":
        allowed = convert_part(choice, AllowedTools, "tool_choice")
        if not allowed.tools:
            raise RequestError("tool_choice.tools: empty; name at least one, or send tool_choice none")
        return ToolChoice(allowed.mode, [tool.name for tool in allowed.tools], "tool_choice.tools")
    if choice.get("type") != "function":
        raise RequestError(f"tool_choice.type: {str(choice.get('type'))[:40]}; send function or allowed_tools")
    return ToolChoice("required", [convert_part(choice, NamedTool, "tool_choice").name], "tool_choice.name")
