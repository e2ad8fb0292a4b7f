"""Every operation of the frontend, with its fields from the structs that read them: /openapi.json and docs/api.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bireme import __version__
from bireme.observability.timeline import Timeline
from bireme.openai.batch.batches import BatchBody
from bireme.openai.live.state import LiveState
from bireme.openai.text import completion_request, embedding_request, messages_request, response_request
from bireme.openai.text.completion_request import CompletionBody
from bireme.openai.text.conversations import ConversationBody, ConversationUpdate, ItemsBody
from bireme.openai.text.embedding_request import EmbeddingsBody, RerankBody, ScoreBody
from bireme.openai.text.messages_request import CountBody, MessagesBody, ToolSpec
from bireme.openai.text.response_request import FunctionTool, NamespaceTool, ResponseBody
from bireme.openai.text.tokenization import DetokenizeBody, TokenizeBody
from bireme.pipelines import chat_request, video_request
from bireme.pipelines.chat_request import ChatBody
from bireme.pipelines.video_request import ImageBody, JobBody, VideoBody


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    text: str
    body: type[msgspec.Struct] | None = None  # of a JSON body
    refused: Mapping[str, str] = field(default_factory=dict)  # fields of other servers, with the reason
    answer: type[msgspec.Struct] | None = None  # of an API of our own: what it answers, or what each event holds


SCORE_PATHS = ("/v1/score", "/score")  # the second is vLLM's as well
RERANK_PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")  # vLLM's, and Cohere's

OPERATIONS = (
    Operation(
        "POST", "/v1/chat/completions", "Answer a conversation, whole or as server-sent events", ChatBody,
        chat_request.REFUSED,
    ),
    Operation(
        "POST", "/v1/completions", "Continue prompts, whole or as server-sent events", CompletionBody,
        completion_request.REFUSED,
    ),
    Operation(
        "POST", "/v1/responses", "Answer items, whole or as typed server-sent events", ResponseBody,
        response_request.REFUSED,
    ),
    Operation(
        "POST", "/v1/responses/input_tokens", "Count the tokens of a response's prompt", ResponseBody,
        response_request.REFUSED,
    ),
    Operation("GET", "/v1/responses/{id}", "Get a response that was kept"),
    Operation("DELETE", "/v1/responses/{id}", "Forget a response"),
    Operation("GET", "/v1/responses/{id}/input_items", "List what a response has answered"),
    Operation("POST", "/v1/responses/{id}/cancel", "End a response in the background"),
    Operation("POST", "/v1/conversations", "Keep a conversation", ConversationBody),
    Operation("GET", "/v1/conversations/{id}", "Get a conversation"),
    Operation("POST", "/v1/conversations/{id}", "Change its metadata", ConversationUpdate),
    Operation("DELETE", "/v1/conversations/{id}", "Forget it and its items"),
    Operation("POST", "/v1/conversations/{id}/items", "Add items", ItemsBody),
    Operation("GET", "/v1/conversations/{id}/items", "List its items, the newest first"),
    Operation("GET", "/v1/conversations/{id}/items/{item}", "Get an item"),
    Operation("DELETE", "/v1/conversations/{id}/items/{item}", "Forget an item"),
    Operation(
        "POST", "/v1/messages", "Answer a conversation in the form of Anthropic's Messages", MessagesBody,
        messages_request.REFUSED,
    ),
    Operation(
        "POST", "/v1/messages/count_tokens", "Count the tokens of a Messages prompt", CountBody,
        messages_request.REFUSED,
    ),
    Operation("POST", "/v1/embeddings", "Embed texts", EmbeddingsBody, embedding_request.REFUSED),
    *(
        Operation("POST", path, "Say how alike texts are, pair by pair", ScoreBody, embedding_request.REFUSED)
        for path in SCORE_PATHS
    ),
    *(
        Operation(
            "POST", path, "Put documents into the order of their likeness to a query", RerankBody,
            embedding_request.RANK_REFUSED,
        )
        for path in RERANK_PATHS
    ),
    Operation("POST", "/v1/files", "Keep a file; its body is a form"),
    Operation("GET", "/v1/files", "List files"),
    Operation("GET", "/v1/files/{id}", "Describe a file"),
    Operation("DELETE", "/v1/files/{id}", "Remove a file"),
    Operation("GET", "/v1/files/{id}/content", "Get a file"),
    Operation("POST", "/v1/batches", "Run the requests of a file", BatchBody),
    Operation("GET", "/v1/batches", "List batches, the newest first"),
    Operation("GET", "/v1/batches/{id}", "Tell how far a batch is"),
    Operation("POST", "/v1/batches/{id}/cancel", "End a batch with what is answered"),
    Operation("GET", "/v1/models", "List the models"),
    Operation("GET", "/v1/models/{model}", "Describe a model"),
    Operation("POST", "/tokenize", "Return the tokens of a prompt or conversation", TokenizeBody),
    Operation("POST", "/detokenize", "Return the text of tokens", DetokenizeBody),
    Operation("POST", "/v1/videos", "Start a job that makes a video", JobBody, video_request.REFUSED),
    Operation("GET", "/v1/videos", "List jobs"),
    Operation("GET", "/v1/videos/{id}", "Tell how far a job is"),
    Operation("DELETE", "/v1/videos/{id}", "End a job, and remove its video"),
    Operation("GET", "/v1/videos/{id}/content", "Get a job's video"),
    Operation(
        "POST", "/v1/videos/generations", "Make a video in one call, with progress as server-sent events", VideoBody,
        video_request.REFUSED,
    ),
    Operation("POST", "/v1/images/generations", "Make pictures", ImageBody, video_request.REFUSED),
    Operation("GET", "/files/{id}", "Get a result by its name"),
    Operation("GET", "/health/live", "Is the process alive"),
    Operation("GET", "/health/ready", "Can it answer"),
    Operation("GET", "/health", "The same, under vLLM's name"),
    Operation("GET", "/ping", "The same, under SageMaker's name"),
    Operation("POST", "/ping", "The same"),
    Operation("GET", "/version", "Tell the version of the server"),
    Operation("GET", "/metrics", "Prometheus metrics"),
    Operation(
        "GET", "/v1/requests/{id}/timeline", "Tell what took a request's time, by the request's or answer's id",
        answer=Timeline,
    ),
    Operation("GET", "/v1/live", "Watch workers, queues and faults as server-sent events", answer=LiveState),
    Operation("GET", "/openapi.json", "These operations as OpenAPI 3.1"),
)  # fmt: skip
_IN_PATH = re.compile(r"{(\w+)}")  # names of parameters
_PARTS = (ToolSpec, FunctionTool, NamespaceTool)  # of bodies, read once the type of each is known
_VIDEO_KINDS = (JobBody, VideoBody, ImageBody)
_EMBEDDING_KINDS = (EmbeddingsBody, ScoreBody, RerankBody)
UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600},
    },
}
REF = "#/components/schemas/"
_ANTHROPIC_KINDS = (MessagesBody, CountBody)
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi(models: list[str], videos: list[str], embedders: list[str]) -> dict[str, Any]:
    """Return the document (OpenAPI 3.1); given are the names that requests of each kind may give."""
    named = dict.fromkeys(_VIDEO_KINDS, videos) | dict.fromkeys(_EMBEDDING_KINDS, embedders)
    components = {**schemas(), **answer_schemas()}
    for one in OPERATIONS:
        if one.body is not None and "model" in (properties := components[one.body.__name__]["properties"]):
            if names := named.get(one.body, models):  # an enum of nothing would leave no request at all
                properties["model"] = {"type": "string", "enum": names}
    paths: dict[str, Any] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method.lower()] = _described(one)
    upload = {"required": True, "content": {"multipart/form-data": {"schema": UPLOAD}}}
    paths["/v1/files"]["post"] |= {"requestBody": upload}
    return {
        "openapi": "3.1.0",
        "info": {"title": "bireme", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"key": []}, {"header": []}],
    }


def schemas() -> dict[str, Any]:
    """Return the schema of each struct that a body is read into, by name."""
    kinds = dict.fromkeys([one.body for one in OPERATIONS if one.body is not None] + [*_PARTS])
    _, components = msgspec.json.schema_components(kinds, ref_template=f"{REF}{{name}}")
    return components


def answer_schemas() -> dict[str, Any]:
    """Return the schema of each struct that an answer of our own APIs is made of, by name."""
    kinds = [one.answer for one in OPERATIONS if one.answer is not None]
    _, components = msgspec.json.schema_components(kinds, ref_template=f"{REF}{{name}}")
    return components


def _described(one: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": one.text}
    refusals = ("400", "401", "404", "409", "413", "415", "429")
    if one.body in _ANTHROPIC_KINDS:
        described["responses"] = _responses(*refusals, "529", error="AnthropicError")
    else:
        described["responses"] = _responses(*refusals, "503")
    if one.answer is not None:
        kind = "text/event-stream" if one.path == "/v1/live" else "application/json"
        schema = {"$ref": f"{REF}{one.answer.__name__}"}
        described["responses"]["200"] = {"description": "answered", "content": {kind: {"schema": schema}}}
    if one.body is not None:
        schema = {"$ref": f"{REF}{one.body.__name__}"}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if names := _IN_PATH.findall(one.path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return described


def _responses(*statuses: str, error: str = "Error") -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    refused = {status: {"description": "refused", "content": content} for status in statuses}
    return {"200": {"description": "answered"}, **refused}
