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
    FunctionDefinition,
    SamplingBody,
    ToolMode,
    Verbosity,
    check_functions,
    check_metadata,
    check_no_nvext_reply,
    last_turn,
    openai_sampling,
    schema_guide,
    template_variables,
)
from bireme.pipelines.extensions import (
    REFUSED_NAMES,
    REFUSED_TIERS,
    RequestOptions,
    ServiceTier,
    request_options,
    shown_tier,
)
from bireme.pipelines.json_body import convert_part
from bireme.request import check_session

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


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    """A function; the fields that are None are known and not served."""

    name: str
    type: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
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
        """Return the response object, but for what its answer adds."""
        shown = self.shown | {"service_tier": self.chat.service_tier}
        return ResponseForm(heading, shown, has_timing=self.chat.return_timing)

    def answer(
        self, form: ResponseForm, events: ResponseEvents | None = None, stream: EventStream | None = None
    ) -> ResponseAnswer:
        """Return what collects the answer, and tells a stream of it, if there is one."""
        return ResponseAnswer(
            form, events, stream, has_summary=self.has_summary, has_sealed=self.has_sealed, spaced=self.spaced
        )


def check_response(body: ResponseBody, recipe: Recipe, history: Sequence[Item] = ()) -> ResponseRequest:
    """Check what the types can't. `history`: items of the responses that this one goes on from. Raises RequestError."""
    options = request_options(body, body.service_tier)
    check_no_nvext_reply(options)
    include = _include(body)
    text, reasoning = body.text or TextOptions(), body.reasoning or ReasoningOptions()
    summary = _summary(reasoning)
    check_metadata(body.metadata)
    guide = _guide(text.format, options)
    tools = _Tools.of(body, recipe)
    functions, mode = _chosen(body, check_functions(tools.functions, recipe.limits))
    if functions and guide is not None:
        raise RequestError("text.format: not together with tools; send tool_choice none, or no tools")
    if body.conversation is not None and body.previous_response_id is not None:
        raise RequestError("conversation: not together with previous_response_id; send one of them")
    if body.background and body.store is False:
        raise RequestError("store: false beside background; a response that nobody waits for has to be kept")
    if options.routing.query_only:
        raise RequestError("bireme.routing.query_only: a response is an answer; ask /v1/chat/completions")
    items = input_items(body.input)
    conversation = Conversation(recipe.limits, recipe.media, body.instructions)
    conversation.add(history, "previous_response_id" if body.conversation is None else "conversation")
    conversation.add(items)
    turn = last_turn(conversation.messages, body.add_generation_prompt, bool(body.continue_final_message))
    fields: dict[str, Any] = {"max_tokens": body.max_output_tokens}
    if _LOGPROBS in include:
        fields["logprobs"] = body.top_logprobs or 0
    try:
        sampling = openai_sampling(body, fields, options, recipe)
    except RequestError as error:  # it calls them as chats do
        renamed = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
        name, _, rest = str(error).partition(":")
        raise RequestError(f"{renamed.get(name, name)}:{rest}") from None
    chat = ChatRequest(
        model=body.model,
        messages=conversation.messages,
        pictures=conversation.pictures,
        functions=functions,
        tool_mode=mode,
        is_parallel=body.parallel_tool_calls is not False,
        variables=template_variables(reasoning.effort, text.verbosity, options, recipe) | turn,
        sampling=sampling,
        logprobs=_LOGPROBS in include,
        guide=guide,
        stream=bool(body.stream),
        include_usage=True,
        cache_salt=options.cache_salt,
        return_timing=options.return_timing,
        session_id=options.session_id or check_session(body.prompt_cache_key or "", "prompt_cache_key"),
        routing=options.routing,
        kv_cache_retention_config=options.kv_cache_retention_config,
        service_tier=shown_tier(body.service_tier) or "default",
    )
    params = sampling.params
    shown = {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": chat.is_parallel,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": summary},
        "safety_identifier": body.safety_identifier,
        "temperature": params.temperature,
        "text": {"format": _format_json(text.format), "verbosity": text.verbosity or "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": tools.shown,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if params.top_p is None else params.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
    if body.conversation_id is not None:
        shown["conversation"] = {"id": body.conversation_id}
    return ResponseRequest(
        chat=chat,
        items=items,
        shown=shown,
        has_summary=summary is not None,
        has_sealed=_SEALED in include,
        is_truncated=body.truncation == "auto",
        is_kept=body.store is not False,
        conversation=body.conversation_id,
        spaced=tools.spaced,
    )


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


def _guide(form: TextFormat | None, options: RequestOptions) -> dict[str, Any] | None:
    if form is None or form.type == "text":
        return options.guide
    if options.guide is not None:
        raise RequestError(f"{options.guide_name}: not together with text.format; send one of them")
    if form.type == "json_object":
        return {"json_object": True}
    if form.schema is None:
        raise RequestError("text.format.schema: missing; send it, or type json_object")
    return schema_guide(form.name or "", form.schema, "text.format")


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
        """Raises RequestError."""
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
            name, description = (
                offered_name(space.name, name),
                "\n".join(filter(None, [space.description, description])),
            )
            self.spaced[name] = (space.name, tool.name)
        self.functions[where] = FunctionDefinition(name, description, tool.parameters, tool.strict)
        shown = {"type": "function", "name": tool.name, "parameters": tool.parameters, "strict": tool.strict}
        return shown if tool.description is None else {**shown, "description": tool.description}


def _chosen(body: ResponseBody, functions: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], ToolMode]:
    """Return the functions that are offered, and whether one must be called."""
    choice = body.tool_choice
    if not functions and choice not in (None, "none", "auto"):
        raise RequestError("tool_choice: without tools; send tools, or remove it")
    if choice == "none" or not functions:
        return [], "none"
    if not isinstance(choice, dict):
        return functions, choice or "auto"
    if choice.get("type") == "allowed_tools":
        allowed = convert_part(choice, AllowedTools, "tool_choice")
        if not allowed.tools:
            raise RequestError("tool_choice.tools: empty; name at least one, or send tool_choice none")
        names = dict.fromkeys(tool.name for tool in allowed.tools)
        return [_named(functions, name, "tool_choice.tools") for name in names], allowed.mode
    if choice.get("type") != "function":
        raise RequestError(f"tool_choice.type: {str(choice.get('type'))[:40]}; send function or allowed_tools")
    return [_named(functions, convert_part(choice, NamedTool, "tool_choice").name, "tool_choice.name")], "required"


def _named(functions: list[dict[str, Any]], name: str, where: str) -> dict[str, Any]:
    for function in functions:
        if function["name"] == name:
            return function
    raise RequestError(f"{where}: {name[:64]}; no such function in tools")
