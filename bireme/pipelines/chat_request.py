"""OpenAI's chat completion request, as JSON and in the pipeline's form.

Every field is served, or refused by name; none is silently ignored. `user`, `metadata`, `store` and
`safety_identifier` are accepted without effect: nothing is stored here. So is
`stream_options.continuous_usage_stats`: usage comes once, at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from bireme.config import Limits, Recipe
from bireme.errors import RequestError
from bireme.parameters import BY_NAME, PARAMETERS
from bireme.pipelines.chat_tools import ChatFormat, ChatTools, FunctionDefinition, ToolChoice, ToolMode, ToolRules
from bireme.pipelines.extensions import (
    REFUSED_NAMES,
    REFUSED_TIERS,
    Annotation,
    ExtraField,
    RequestOptions,
    ServiceTier,
    TopLevelNames,
    request_options,
    shown_tier,
)
from bireme.pipelines.json_body import decode_body
from bireme.pipelines.picture_parts import PICTURE_PARTS, PictureCollector, show_result_pictures
from bireme.pipelines.pictures import PictureSource
from bireme.sampling import Sampling, parse_sampling
from bireme.serving_options import ServingOptions
from bireme.text.chat_template import CONTINUED, Message

Verbosity = Literal["low", "medium", "high"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_ROLES = ("developer", "system", "user", "assistant", "tool")
_MAX_METADATA = 16
_TOOLS = ToolRules(format="response_format")

REFUSED = {
    "functions": "not served (deprecated by OpenAI); send tools",
    "function_call": "not served (deprecated by OpenAI); send tool_choice",
    "audio": "this server makes no audio; remove it",
    "web_search_options": "there is no web search here; remove it",
    "prompt_cache_options": "not served; prompts are cached as long as there is room",
    "prompt_cache_retention": "not served; prompts are cached as long as there is room",
    "moderation": "not served; remove it",
    **REFUSED_TIERS,
    **REFUSED_NAMES,
}


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    image_embeds: Any = None
    input_audio: Any = None
    file: Any = None


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None  # clients that join streamed calls send it back


class ReasoningDetail(msgspec.Struct):
    """One part; what is encrypted has no text."""

    text: str | None = None
    summary: str | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same under vLLM's and OpenRouter's name
    reasoning_details: list[ReasoningDetail] | None = None  # OpenRouter's; it says the same in parts
    refusal: str | None = None
    annotations: list[Any] | None = None  # of a response that returns as history
    audio: None = None
    function_call: None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    function: FunctionDefinition
    type: Literal["function"]


class ChosenFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class ChosenTool(msgspec.Struct, forbid_unknown_fields=True):
    function: ChosenFunction
    type: Literal["function"]


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False  # vLLM's; load generators send it and read the last chunk's usage


class PredictedOutput(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["content"]
    content: str | list[ContentPart]


class SamplingBody(TopLevelNames, kw_only=True, forbid_unknown_fields=True):
    """The common JSON of all that generate text."""

    model: str = ""  # required by the frontend; inside Triton there is only one
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    user: str | None = None


class OpenAIBody(SamplingBody, kw_only=True, forbid_unknown_fields=True):
    """The common JSON of chats and completions."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None  # not OpenAI's for chats; old clients send it, equal to n
    return_token_ids: bool | None = None  # vLLM's: the answer tells the ids of prompt and answer


class ChatBody(OpenAIBody, kw_only=True, forbid_unknown_fields=True):
    """The request's JSON."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None  # vLLM's: false leaves out what begins an answer
    continue_final_message: bool | None = None  # vLLM's: the answer goes on with the assistant's last message
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    prediction: PredictedOutput | None = None
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    modalities: list[Literal["text"]] | None = None
    service_tier: ServiceTier | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    model: str
    messages: list[Message]
    pictures: list[PictureSource]  # in the order of the messages
    functions: list[dict[str, Any]]  # offered; empty with tool_choice none
    tool_mode: ToolMode
    is_parallel: bool  # whether the answer may hold several calls
    variables: Mapping[str, Any]  # of the chat template
    sampling: Sampling
    logprobs: bool
    guide: dict[str, Any] | None  # of the content: response_format, or a guide beyond OpenAI's fields
    stream: bool
    include_usage: bool
    options: ServingOptions
    return_timing: bool
    service_tier: str | None = None  # as the answer shows it
    annotations: tuple[Annotation, ...] = ()  # of a stream
    extra_fields: tuple[ExtraField, ...] = ()  # of the answer's nvext
    return_token_ids: bool = False
    prediction: str = ""  # text that the answer may hold

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The functions as templates show them: without `strict`, which is for the guide."""
        shown = [{name: value for name, value in one.items() if name != "strict"} for one in self.functions]
        return [{"type": "function", "function": function} for function in shown]


def parse_chat(body: bytes | str, recipe: Recipe) -> ChatRequest:
    return check_chat(decode_body(body, ChatBody, REFUSED), recipe)


def check_chat(body: ChatBody, recipe: Recipe) -> ChatRequest:
    """Check what the types can't. Raises RequestError."""
    options = request_options(body, body.service_tier, body.prompt_cache_key)
    if body.nvext is not None and body.nvext.use_raw_prompt:
        raise RequestError("nvext.use_raw_prompt: a chat is told by its template; send the prompt to /v1/completions")
    check_annotations(options, body.stream)
    guide = _TOOLS.guide(_format(body.response_format), options)
    definitions = {f"tools[{at}].function": tool.function for at, tool in enumerate(body.tools or [])}
    tools = _TOOLS.offered(_TOOLS.functions(definitions, recipe.limits), _choice(body.tool_choice), guide)
    check_stream_options(body)
    check_metadata(body.metadata)
    messages, pictures = _messages(body.messages, recipe)
    return build_chat(
        options,
        recipe,
        tools,
        is_parallel=body.parallel_tool_calls is not False,
        model=body.model,
        messages=messages,
        pictures=pictures,
        has_prompt=body.add_generation_prompt,
        is_continued=bool(body.continue_final_message),
        variables=template_variables(body.reasoning_effort, body.verbosity),
        sampling=_sampling(body, recipe),
        logprobs=bool(body.logprobs),
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        service_tier=shown_tier(body.service_tier),
        return_token_ids=bool(body.return_token_ids),
        prediction=_predicted(body.prediction, recipe),
    )


def _predicted(prediction: PredictedOutput | None, recipe: Recipe) -> str:
    if prediction is None:
        return ""
    parts = prediction.content
    if not isinstance(parts, str):
        for at, part in enumerate(parts):
            if part.type != "text" or part.text is None:
                raise RequestError(f"prediction.content[{at}].type: {part.type}; send parts of type text")
        parts = "".join(part.text or "" for part in parts)
    size, limit = len(parts.encode()), recipe.limits.max_prompt_bytes
    if size > limit:
        raise RequestError(f"prediction: {size} bytes; limits.max_prompt_bytes is {limit}; shorten it")
    return parts


def _format(form: ResponseFormat | None) -> ChatFormat | None:
    if form is None:
        return None
    where, given = f"{_TOOLS.format}.json_schema", form.json_schema
    if given is None:
        return ChatFormat(_TOOLS.format, form.type, missing=where)
    return ChatFormat(_TOOLS.format, form.type, given.schema, where, given.name)


def _choice(choice: ToolMode | ChosenTool | None) -> ToolChoice:
    if isinstance(choice, ChosenTool):
        return ToolChoice("required", (choice.function.name,), "tool_choice.function.name")
    return ToolChoice(choice or "auto")


def build_chat(
    options: RequestOptions,
    recipe: Recipe,
    tools: ChatTools,
    *,
    messages: list[Message],
    has_prompt: bool | None,
    is_continued: bool,
    variables: Mapping[str, Any],
    sampling: Mapping[str, Any],
    renamed: Mapping[str, str] = MappingProxyType({}),
    **others: Any,
) -> ChatRequest:
    """Raises RequestError.

    `has_prompt`: whether what begins an answer follows the messages; None: as without the field. `is_continued`: the
    answer goes on with the last message. `variables`: of the chat template, from the API's fields. `sampling`: values
    under OpenAI's names; `renamed` says what the API calls some. `others`: fields of ChatRequest.
    """
    turn = _last_turn(messages, has_prompt, is_continued)
    checked = api_sampling(sampling, options, recipe, renamed)
    return ChatRequest(
        messages=messages,
        functions=tools.functions,
        tool_mode=tools.mode,
        variables={**recipe.chat.template_kwargs, **variables, **options.chat_template_kwargs, **turn},
        sampling=checked,
        options=checked.complete(options.serving),
        guide=tools.guide,
        return_timing=options.return_timing,
        annotations=options.annotations,
        extra_fields=options.extra_fields,
        **others,
    )


def check_annotations(options: RequestOptions, stream: bool | None) -> None:
    """Raise RequestError where annotations, which are events, have no stream to come in."""
    if options.annotations and not stream:
        raise RequestError("nvext.annotations: they are events of a stream; send stream true, or remove it")


def check_stream_options(body: OpenAIBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: only with stream true; remove it")


def check_no_nvext_reply(options: RequestOptions) -> None:
    """Raise RequestError where answers have no place for Dynamo's fields."""
    for name in ("annotations", "extra_fields"):
        if getattr(options, name):
            raise RequestError(f"nvext.{name}: a part of chats and completions; send bireme.return_timing")


_OPENAI = tuple(row.name for row in PARAMETERS if row.api == "openai")
_TEMPERATURE = BY_NAME["temperature"]


def _sampling(body: ChatBody, recipe: Recipe) -> dict[str, Any]:
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if (top := body.top_logprobs) is not None:
        if not body.logprobs:
            raise RequestError("top_logprobs: only with logprobs true; send logprobs true as well")
        if not 0 <= top <= (limit := recipe.limits.max_logprobs):
            raise RequestError(
                f"top_logprobs: {top}; the range is 0 to {limit}, limits.max_logprobs sets the upper end"
            )
    return openai_sampling(body) | {"max_tokens": max_tokens, "logprobs": (top or 0) if body.logprobs else None}


def openai_sampling(body: SamplingBody) -> dict[str, Any]:
    """Return the body's sampling values that are set."""
    return {name: value for name in _OPENAI if (value := getattr(body, name, None)) is not None}


def api_sampling(
    given: Mapping[str, Any], options: RequestOptions, recipe: Recipe, renamed: Mapping[str, str] = MappingProxyType({})
) -> Sampling:
    """Check a request's sampling values, in OpenAI's ranges; temperature is 1 unless request or recipe give another.

    `renamed`: the API's names of some, for errors. Raises RequestError.
    """
    fields = dict(given)
    low, high, temperature = _TEMPERATURE.low, _TEMPERATURE.openai_high, fields.get("temperature")
    if temperature is not None and not low <= temperature <= high:
        raise RequestError(f"temperature: {temperature}; the range is {low} to {high}, {_TEMPERATURE.advice}")
    if temperature is None and "temperature" not in recipe.sampling:
        fields["temperature"] = 1.0
    if options.is_greedy:
        fields["temperature"] = 0.0
    try:
        return parse_sampling({**fields, **options.sampling}, {}, recipe)
    except RequestError as error:
        name, colon, text = str(error).partition(":")
        raise RequestError(f"{renamed.get(name, name)}{colon}{text}") from None


def template_variables(effort: Effort | None, verbosity: Verbosity | None) -> dict[str, Any]:
    """Return what the chat template is told of how much to say."""
    variables: dict[str, Any] = {} if verbosity is None else {"verbosity": verbosity}
    if effort is not None:
        variables |= {"reasoning_effort": effort, "enable_thinking": effort not in ("none", "minimal")}
    return variables


def _last_turn(messages: list[Message], has_prompt: bool | None, is_continued: bool) -> dict[str, Any]:
    """Mark the last message if the answer goes on with it; return variables of the template. Raises RequestError."""
    if not is_continued:
        return {} if has_prompt is None else {"add_generation_prompt": has_prompt}
    if has_prompt:
        raise RequestError(f"add_generation_prompt: true beside {CONTINUED}; send one of them")
    last = messages[-1] if messages else {"role": "missing"}
    if last["role"] != "assistant":
        raise RequestError(f"{CONTINUED}: the last message's role is {last['role']}; end with the assistant's")
    if last.get("tool_calls"):
        raise RequestError(f"{CONTINUED}: the last message has tool calls, which have ended; send their results")
    messages[-1] = {**last, CONTINUED: True}
    return {"add_generation_prompt": False}


def _messages(messages: list[ChatMessage], recipe: Recipe) -> tuple[list[Message], list[PictureSource]]:
    limits, pictures = recipe.limits, PictureCollector(recipe.media)
    check_num_messages(len(messages), limits)
    shown = [_message(message, f"messages[{at}]", pictures) for at, message in enumerate(messages)]
    return (show_result_pictures(shown) if pictures.sources else shown), pictures.sources


def check_num_messages(num_messages: int, limits: Limits) -> None:
    if not num_messages:
        raise RequestError("messages: empty; send at least one message")
    if num_messages > limits.max_messages:
        raise RequestError(f"messages: {num_messages}; limits.max_messages is {limits.max_messages}, send fewer")


def _message(message: ChatMessage, where: str, pictures: PictureCollector) -> Message:
    """Return the message for a template; developer is the newer name of system."""
    role = message.role
    if role not in _ROLES:
        raise RequestError(f"{where}.role: {role[:40]}; send one of {', '.join(_ROLES)}")
    shown: Message = {"role": "system" if role == "developer" else role, "content": _content(message, where, pictures)}
    if message.name is not None:
        shown["name"] = message.name
    if role == "tool":
        if not message.tool_call_id:
            raise RequestError(f"{where}.tool_call_id: missing; send the id of the call that this answers")
        shown["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if role != "assistant":
            raise RequestError(f"{where}.tool_calls: only assistants call tools; remove it")
        shown["tool_calls"] = [_call(call) for call in message.tool_calls]
    if (thoughts := _thoughts(message, where)) is not None:
        shown["reasoning_content"] = thoughts
    return shown


def _thoughts(message: ChatMessage, where: str) -> str | None:
    """Return an earlier answer's reasoning, under whichever of its names it comes back."""
    first, second = message.reasoning_content, message.reasoning
    if first and second not in (None, "", first):
        raise RequestError(f"{where}.reasoning: not the same as reasoning_content; send one of them")
    in_parts = "".join(detail.text or detail.summary or "" for detail in message.reasoning_details or ())
    return first or second or in_parts or first


def _content(message: ChatMessage, where: str, pictures: PictureCollector) -> str | list[dict[str, Any]]:
    """Return a string where there is nothing but text, else parts as chat templates expect them."""
    content = message.content
    if content is None:
        if message.role == "assistant":
            return message.refusal or ""  # nothing but calls, or thoughts that used up its tokens
        raise RequestError(f"{where}.content: missing; send a string or a list of text parts")
    if isinstance(content, str):
        return content
    if all(part.type not in PICTURE_PARTS for part in content):
        return "\n".join(_part(part, f"{where}.content[{at}]") for at, part in enumerate(content))
    return [_shown_part(part, message.role, f"{where}.content[{at}]", pictures) for at, part in enumerate(content)]


def _shown_part(part: ContentPart, role: str, where: str, pictures: PictureCollector) -> dict[str, Any]:
    if part.type not in PICTURE_PARTS:
        return {"type": "text", "text": _part(part, where)}
    if role not in ("user", "tool"):
        raise RequestError(f"{where}.type: {part.type}; pictures go into user messages and tools' results")
    pictures.add(part.type, part.image_url if part.type == "image_url" else part.image_embeds, where)
    return {"type": "image"}


def _part(part: ContentPart, where: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in ("text", "refusal"):
        raise RequestError(f"{where}.type: {part.type[:40]}; send text, image_url or image_embeds")
    if text is None:
        raise RequestError(f"{where}.{part.type}: missing; send a string")
    return text


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}


def check_metadata(metadata: dict[str, str] | None) -> None:
    if metadata is None:
        return
    if len(metadata) > _MAX_METADATA:
        raise RequestError(f"metadata: {len(metadata)} entries; at most {_MAX_METADATA}, send fewer")
    for key, value in metadata.items():
        if len(key) > 64 or len(value) > 512:
            raise RequestError("metadata: keys have at most 64 characters, values 512; shorten them")
