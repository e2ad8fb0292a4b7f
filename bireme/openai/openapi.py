"""/openapi.json: schemas of requests from the structs that read them."""

from __future__ import annotations

from typing import Any

import msgspec

from bireme import __version__
from bireme.openai.batch.batches import BatchBody
from bireme.openai.text.completion_request import CompletionBody
from bireme.openai.text.messages_request import CountBody, MessagesBody
from bireme.openai.text.response_request import ResponseBody
from bireme.openai.text.tokenization import DetokenizeBody, TokenizeBody
from bireme.pipelines.chat_request import ChatBody
from bireme.pipelines.video_request import ImageBody, JobBody, VideoBody

_POSTS: dict[str, tuple[type[msgspec.Struct], str]] = {
    "/v1/chat/completions": (ChatBody, "Answer a conversation, whole or as server-sent events"),
    "/v1/completions": (CompletionBody, "Continue prompts, whole or as server-sent events"),
    "/v1/responses": (ResponseBody, "Answer items, whole or as typed server-sent events"),
    "/v1/messages": (MessagesBody, "Answer a conversation in the form of Anthropic's Messages"),
    "/v1/messages/count_tokens": (CountBody, "Count the tokens of a Messages prompt"),
    "/v1/batches": (BatchBody, "Run the requests of a file"),
    "/tokenize": (TokenizeBody, "Return the tokens of a prompt or conversation"),
    "/v1/videos": (JobBody, "Start a job that makes a video"),
    "/v1/videos/generations": (VideoBody, "Make a video in one call, with progress as server-sent events"),
    "/v1/images/generations": (ImageBody, "Make pictures"),
    "/detokenize": (DetokenizeBody, "Return the text of tokens"),
}
_VIDEO_KINDS = (JobBody, VideoBody, ImageBody)
_GETS = {
    "/v1/models": "List the models",
    "/v1/models/{model}": "Describe a model",
    "/v1/responses/{id}": "Get a response that was kept",
    "/v1/responses/{id}/input_items": "List what a response has answered",
    "/v1/files": "List files",
    "/v1/files/{id}": "Describe a file",
    "/v1/files/{id}/content": "Get a file",
    "/v1/batches": "List batches, the newest first",
    "/v1/batches/{id}": "Tell how far a batch is",
    "/v1/videos/{id}": "Tell how far a job is",
    "/v1/videos/{id}/content": "Get a job's video",
    "/files/{id}": "Get a result by its name",
    "/health/live": "Is the process alive",
    "/health/ready": "Can it answer",
    "/health": "The same, under vLLM's name",
    "/ping": "The same, under SageMaker's name",
    "/version": "Tell the version of the server",
    "/metrics": "Prometheus metrics",
    "/openapi.json": "This document",
}
_UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600},
    },
}
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


def openapi(models: list[str], videos: list[str]) -> dict[str, Any]:
    """Return the document (OpenAPI 3.1); `models` and `videos` are the names that requests may give."""
    kinds = [kind for kind, _ in _POSTS.values()]
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for kind in kinds:
        names = videos if kind in _VIDEO_KINDS else models
        if "model" in (properties := components[kind.__name__]["properties"]):
            properties["model"] = {"type": "string", "enum": names}
    paths: dict[str, Any] = {path: {"post": _post(kind, text)} for path, (kind, text) in _POSTS.items()}
    for path, text in _GETS.items():
        paths.setdefault(path, {})["get"] = _get(path, text)
    upload = {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}
    refusals = _responses("400", "401", "413", "415", "429", "503")
    paths["/v1/files"]["post"] = {"summary": "Keep a file", "requestBody": upload, "responses": refusals}
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


def _post(kind: type[msgspec.Struct], text: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    refusals = ("400", "401", "404", "413", "415", "429")
    if kind in _ANTHROPIC_KINDS:
        responses = _responses(*refusals, "529", error="AnthropicError")
    else:
        responses = _responses(*refusals, "503")
    return {"summary": text, "requestBody": body, "responses": responses}


def _get(path: str, text: str) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": text, "responses": _responses("401", "404", "503")}
    if "{" in path:
        name = path[path.index("{") + 1 : path.index("}")]
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _responses(*statuses: str, error: str = "Error") -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    refused = {status: {"description": "refused", "content": content} for status in statuses}
    return {"200": {"description": "answered"}, **refused}
