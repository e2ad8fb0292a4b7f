"""Anthropic's Messages request, as JSON and in the pipeline's form.

Every field is served, or refused by name; none is silently ignored. `metadata`, `service_tier`, `cache_control`, and a
tool's `eager_input_streaming` are accepted without effect: prompts are cached by themselves, and arguments always
stream. `thinking.budget_tokens` is no limit, as it is none there.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from bireme.config import Limits, Recipe
from bireme.errors import RequestError
from bireme.openai.text.hosted_tools import is_left_out
from bireme.pipelines.chat_request import ChatRequest, build_chat, check_no_nvext_reply, check_num_messages
from bireme.pipelines.chat_tools import ChatFormat, FunctionDefinition, ToolChoice, ToolMode, ToolRules, check_num_tools
from bireme.pipelines.extensions import REFUSED_NAMES, TopLevelNames, request_options
from bireme.pipelines.json_body import convert_part
from bireme.pipelines.picture_parts import PictureCollector, show_result_pictures
from bireme.text.chat_template import Message

# A line that Anthropic's coding agent puts first. It differs in each request, so no prompt would begin as another one.
_BILLING = "x-anthropic-billing-header:"

_NO_TOOLS_OF_OURS = "the server runs no tools of its own; send tools with name and input_schema"
_TOOLS = ToolRules("output_config.format", "tool", "input_schema", "none of the tools offered")
_MODES: dict[str, ToolMode] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
_NO_DOCUMENTS = "documents are not read here; send their text as a block of type text"
_NOT_OURS = "blocks of tools that a server runs are not served; remove it"
_NOT_SERVED = "not served; remove it"
_BLOCKS = {
    "document": _NO_DOCUMENTS,
    "search_result": "search results are not served; send their text as a block of type text",
    "container_upload": "there are no containers here; remove it",
    "browser_state": "not served; send its text as a block of type text",
    "server_tool_use": _NOT_OURS,
    "web_search_tool_result": _NOT_OURS,
    "web_fetch_tool_result": _NOT_OURS,
    "code_execution_tool_result": _NOT_OURS,
    "bash_code_execution_tool_result": _NOT_OURS,
    "text_editor_code_execution_tool_result": _NOT_OURS,
    "tool_search_tool_result": _NOT_OURS,
    "mcp_tool_use": _NOT_OURS,
    "mcp_tool_result": _NOT_OURS,
}
REFUSED = {
    "container": "there are no containers here; remove it",
    "mcp_servers": "the server calls no others; remove it",
    "diagnostics": _NOT_SERVED,
    "inference_geo": "the server is where it is; remove it",
    "user_profile_id": _NOT_SERVED,
    "workspace_id": _NOT_SERVED,
    "fallbacks": "there is one model a request; remove it",
    "fallback_credit_token": _NOT_SERVED,
    "billing_policy": _NOT_SERVED,
    "compaction": "conversations are not shortened here; remove it",
    "thread": "nothing is stored here; send the whole conversation as messages",
    "betas": "send it as the header anthropic-beta, or not at all",
    "speed=fast": "there is one speed; remove it",
    "thinking.type=between_tools": "send adaptive, enabled or disabled",
    "context_management.edits[].type=clear_tool_uses_20250919": "remove old results from the messages instead",
    "context_management.edits[].type=compact_20260112": "conversations are not shortened here; remove it",
    **{f"messages[].content[].type={name}": reason for name, reason in _BLOCKS.items()},
    **{f"messages[].content[].content[].type={name}": reason for name, reason in _BLOCKS.items()},
    "messages[].content[].type=tool_reference": "it goes into the content of a tool_result",
    "messages[].content[].source.type=file": "there are no files here; send the picture as base64 or url",
    "messages[].content[].source.file_id": "there are no files here; send the picture as base64 or url",
    **{
        f"tools[].{name}": _NO_TOOLS_OF_OURS
        for name in (
            "allowed_domains", "blocked_domains", "citations", "configs", "default_config", "display_height_px",
            "display_number", "display_width_px", "enable_zoom", "max_characters", "max_content_tokens", "max_uses",
            "mcp_server_name", "response_inclusion", "url_sources", "use_cache", "user_location",
        )
    },
    "tools[].input_examples": "not served; tell them in the description",
    **REFUSED_NAMES,
}  # fmt: skip


class CacheControl(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(msgspec.Struct, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """A content block; `type` says which."""


class TextBlock(_Block, tag="text"):
    text: str
    citations: list[Any] | None = None  # of an answer that returns as history
    cache_control: CacheControl | None = None


class Base64Source(msgspec.Struct, tag_field="type", tag="base64", forbid_unknown_fields=True):
    data: str
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]


class UrlSource(msgspec.Struct, tag_field="type", tag="url", forbid_unknown_fields=True):
    url: str


class ImageTransformations(msgspec.Struct, forbid_unknown_fields=True):
    oversized_image: Literal["downsize"] | None = None


class ImageBlock(_Block, tag="image"):
    source: Base64Source | UrlSource
    transformations: ImageTransformations | None = None
    cache_control: CacheControl | None = None


class ToolUseBlock(_Block, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None  # of an answer that returns as history
    toolset_name: str | None = None
    cache_control: CacheControl | None = None


class ToolReferenceBlock(_Block, tag="tool_reference"):
    """A tool that the client's own search has found."""

    tool_name: str
    cache_control: CacheControl | None = None


class ToolResultBlock(_Block, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | ToolReferenceBlock] | None = None
    is_error: bool | None = None
    toolset_name: str | None = None
    cache_control: CacheControl | None = None


class ThinkingBlock(_Block, tag="thinking"):
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(_Block, tag="redacted_thinking"):
    """Another server's thoughts, which nobody else can read: left out of the prompt."""

    data: str


ContentBlock = TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


class Turn(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class ToolSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None  # offered once a tool_reference has named it
    allowed_callers: list[str] | None = None
    cache_control: CacheControl | None = None


class ToolSelection(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice`; `name` goes with type tool alone."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputSchema(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputSchema | None = None


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    user_id: str | None = None


class ContextEdit(msgspec.Struct, forbid_unknown_fields=True):
    """Which of earlier thoughts are shown is the chat template's to say."""

    type: Literal["clear_thinking_20251015"]
    keep: Any = None


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True):
    edits: list[ContextEdit] = []


class CountBody(TopLevelNames, kw_only=True, forbid_unknown_fields=True):
    """The JSON of /v1/messages/count_tokens: what makes a prompt."""

    messages: list[Turn]
    model: str = ""
    system: str | list[TextBlock] | None = None
    tools: list[dict[str, Any]] | None = None  # ToolSpec, or what may be left out
    tool_choice: ToolSelection | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputSchema | None = None  # what output_config.format was called before
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    speed: Literal["standard"] | None = None
    add_generation_prompt: bool | None = None  # as in chats
    continue_final_message: bool | None = None  # as in chats, but true unless it is sent, as Anthropic's API is


class MessagesBody(CountBody, kw_only=True, forbid_unknown_fields=True):
    """The JSON of /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A checked request: what the pipeline runs, and what only the answer's form needs."""

    chat: ChatRequest
    stop_sequences: frozenset[str]
    shows_thinking: bool


def check_messages(body: MessagesBody, recipe: Recipe) -> MessagesRequest:
    """Check what the types can't. Raises RequestError."""
    sampling = {
        "max_tokens": body.max_tokens, "stop": body.stop_sequences, "temperature": body.temperature,
        "top_p": body.top_p,
    }  # fmt: skip
    chat = _chat(body, sampling, recipe, bool(body.stream))
    shows_thinking = body.thinking is None or body.thinking.display != "omitted"
    return MessagesRequest(chat, frozenset(body.stop_sequences or ()), shows_thinking)


def check_count(body: CountBody, recipe: Recipe) -> ChatRequest:
    """Check a request of which only the prompt counts. Raises RequestError."""
    return _chat(body, {}, recipe)


def _chat(body: CountBody, sampling: dict[str, Any], recipe: Recipe, stream: bool = False) -> ChatRequest:
    options = request_options(body)
    check_no_nvext_reply(options)
    functions = _functions(body, recipe)
    tools = _TOOLS.offered(functions, _choice(body.tool_choice), _TOOLS.guide(_format(body), options))
    pictures = PictureCollector(recipe.media)
    messages = _conversation(body, recipe.limits, pictures)
    is_continued = body.continue_final_message
    if is_continued is None:
        is_continued = body.messages[-1].role == "assistant" and not body.add_generation_prompt
    return build_chat(
        options,
        recipe,
        tools,
        is_parallel=body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use,
        model=body.model,
        messages=messages,
        pictures=pictures.sources,
        has_prompt=body.add_generation_prompt,
        is_continued=is_continued,
        variables=_thinking(body),
        sampling=sampling,
        renamed={"stop": "stop_sequences"},
        logprobs=False,
        stream=stream,
        include_usage=True,
    )


def _thinking(body: CountBody) -> dict[str, Any]:
    variables: dict[str, Any] = {}
    if body.output_config is not None and body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    if (thinking := body.thinking) is not None:
        if thinking.type != "enabled" and thinking.budget_tokens is not None:
            raise RequestError("thinking.budget_tokens: only with type enabled; remove it")
        variables["enable_thinking"] = thinking.type != "disabled"
    return variables


def _format(body: CountBody) -> ChatFormat | None:
    form, where = body.output_config.format if body.output_config else None, _TOOLS.format
    if body.output_format is not None:
        if form is not None:
            raise RequestError("output_format: not together with output_config.format; send the latter")
        form, where = body.output_format, "output_format"
    return None if form is None else ChatFormat(where, form.type, form.schema, where)


def _choice(choice: ToolSelection | None) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    if (choice.name is None) == (choice.type == "tool"):
        raise RequestError("tool_choice.name: goes with type tool, and only with it; send both or none")
    return ToolChoice(_MODES[choice.type], () if choice.name is None else (choice.name,), "tool_choice.name")


def _functions(body: CountBody, recipe: Recipe) -> list[dict[str, Any]]:
    tools = _tools(body.tools or [], recipe)
    definitions = {where: _definition(tool, where) for where, tool in tools.items()}
    known = {function["name"]: function for function in _TOOLS.functions(definitions, recipe.limits)}
    at_once = [tool.name for tool in tools.values() if not tool.defer_loading]
    if tools and not at_once:
        raise RequestError("tools: all have defer_loading; leave it out of at least one, which finds the others")
    # those that were found come last: the prompt goes on beginning as it did
    return [known[name] for name in dict.fromkeys([*at_once, *_found(body, known)])]


def _tools(given: list[dict[str, Any]], recipe: Recipe) -> dict[str, ToolSpec]:
    check_num_tools(len(given), recipe.limits)
    places = {f"tools[{at}]": tool for at, tool in enumerate(given) if not is_left_out(tool.get("type"), recipe)}
    return {where: convert_part(tool, ToolSpec, where, REFUSED) for where, tool in places.items()}


def _found(body: CountBody, known: Container[str]) -> list[str]:
    names = []
    for where, part in _result_parts(body.messages):
        if isinstance(part, ToolReferenceBlock):
            if part.tool_name not in known:
                raise RequestError(f"{where}.tool_name: {part.tool_name[:64]}; no such tool in tools")
            names.append(part.tool_name)
    return names


def _result_parts(turns: list[Turn]) -> Iterator[tuple[str, TextBlock | ImageBlock | ToolReferenceBlock]]:
    for at, turn in enumerate(turns):
        for number, block in enumerate([] if isinstance(turn.content, str) else turn.content):
            if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                where = f"messages[{at}].content[{number}].content"
                yield from ((f"{where}[{place}]", part) for place, part in enumerate(block.content))


def _definition(tool: ToolSpec, where: str) -> FunctionDefinition:
    if tool.type not in (None, "custom"):
        raise RequestError(f"{where}.type: {tool.type[:40]}; {_NO_TOOLS_OF_OURS}")
    if tool.input_schema is None:
        raise RequestError(f"{where}.input_schema: missing; send it")
    if tool.allowed_callers not in (None, ["direct"]):
        raise RequestError(f"{where}.allowed_callers: only direct is served; remove it")
    return FunctionDefinition(tool.name, tool.description, tool.input_schema, tool.strict)


def _conversation(body: CountBody, limits: Limits, pictures: PictureCollector) -> list[Message]:
    """Return the messages for a template: a tool's result is one of its own, turns of one role in a row are one."""
    turns = body.messages
    check_num_messages(len(turns), limits)
    shown: list[Message] = []
    texts = [body.system] if isinstance(body.system, str) else [block.text for block in body.system or ()]
    if system := _system(texts):
        shown.append({"role": "system", "content": system})
    for role, blocks in _turns(turns):
        if role == "user":
            shown += _user_messages(blocks, pictures)
        elif role == "assistant":
            shown.append(_assistant_message(blocks))
        else:
            shown.append({"role": "system", "content": _system(_texts(blocks, role))})
    return show_result_pictures(shown) if pictures.sources else shown


Placed = tuple[str, ContentBlock]  # where the request has it


def _turns(turns: list[Turn]) -> Iterator[tuple[str, list[Placed]]]:
    blocks: list[Placed] = []
    for at, turn in enumerate(turns):
        where = f"messages[{at}].content"
        if isinstance(turn.content, str):
            blocks.append((where, TextBlock(text=turn.content)))
        elif not turn.content:
            raise RequestError(f"{where}: empty; send at least one block")
        else:
            blocks += [(f"{where}[{number}]", block) for number, block in enumerate(turn.content)]
        if at + 1 == len(turns) or turns[at + 1].role != turn.role:
            yield turn.role, blocks
            blocks = []


def _system(texts: Iterable[str]) -> str:
    return "\n".join(text for text in map(_without_billing, texts) if text)


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


def _texts(blocks: list[Placed], role: str) -> Iterator[str]:
    for where, block in blocks:
        if not isinstance(block, TextBlock):
            raise _misplaced(where, block, role)
        yield block.text


def _user_messages(blocks: list[Placed], pictures: PictureCollector) -> Iterator[Message]:
    parts: list[dict[str, Any]] = []
    for where, block in blocks:
        if isinstance(block, TextBlock):
            parts.append({"type": "text", "text": block.text})
        elif isinstance(block, ImageBlock):
            parts.append(_picture(block, where, pictures))
        elif isinstance(block, ToolResultBlock):
            if parts:
                yield {"role": "user", "content": _joined(parts)}
                parts = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block, where, pictures)}
        else:
            raise _misplaced(where, block, "user")
    if parts:
        yield {"role": "user", "content": _joined(parts)}


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a string where there is nothing but text."""
    return parts if any(part["type"] == "image" for part in parts) else "\n".join(part["text"] for part in parts)


def _picture(block: ImageBlock, where: str, pictures: PictureCollector) -> dict[str, Any]:
    source = block.source
    url = source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
    pictures.add_image(url, f"{where}.image")
    return {"type": "image"}


def _result(block: ToolResultBlock, where: str, pictures: PictureCollector) -> str | list[dict[str, Any]]:
    parts = [{"type": "text", "text": block.content}] if isinstance(block.content, str) else []
    for number, part in enumerate([] if isinstance(block.content, str) else block.content or []):
        if isinstance(part, ImageBlock):
            parts.append(_picture(part, f"{where}.content[{number}]", pictures))
        elif isinstance(part, ToolReferenceBlock):
            parts.append({"type": "text", "text": f"{part.tool_name} is among the tools now."})
        else:
            parts.append({"type": "text", "text": part.text})
    if block.is_error:
        begin = parts.pop(0)["text"] if parts and parts[0]["type"] == "text" else ""
        parts.insert(0, {"type": "text", "text": f"Error: {begin}"})
    return _joined(parts)


def _assistant_message(blocks: list[Placed]) -> Message:
    texts, thoughts, calls = [], [], []
    for where, block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif not isinstance(block, RedactedThinkingBlock):
            raise _misplaced(where, block, "assistant")
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def _misplaced(where: str, block: ContentBlock, role: str) -> RequestError:
    kind = type(block).__struct_config__.tag
    return RequestError(f"{where}.type: {kind}; not in a message of role {role}, remove it")
