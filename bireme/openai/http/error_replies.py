"""Errors as replies: what a caller may see, in the form of its API. Internal errors and addresses stay in the log.

OpenAI's form is {"error": {message, type, param, code}}. Anthropic's is {"type": "error", "error": {type, message},
"request_id"}, with a type for each status.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from bireme.errors import (
    BiremeError,
    DeadlineExceededError,
    NotFoundError,
    RequestCancelledError,
    RequestError,
    ResourceExhaustedError,
    UnavailableError,
)
from bireme.pipelines.json_body import param_of
from bireme.workers.base import UnreachableError

_RETRY_S = 1
_TOO_LONG = re.compile(r"prompt: (?:[1-9]\d* tokens|\d+ bytes; \d+ tokens)")  # request.py, engines
_MAX_MESSAGE = 8192  # characters
_OVERLOADED = 529  # Anthropic's 503
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}
_encode = msgspec.json.Encoder().encode


class HttpError(Exception):
    """A refusal that has a status of its own."""

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.kind, self.code, self.headers = status, kind, code, headers


class RateLimitError(HttpError):
    """A key has used up its limit of this minute."""

    def __init__(self, message: str, retry_s: float) -> None:
        seconds = max(1, int(retry_s + 0.999))
        headers = ((b"retry-after", str(seconds).encode()),)
        super().__init__(429, f"{message}; try again in {seconds} s", "requests", "rate_limit_exceeded", headers)


def shutting_down() -> UnavailableError:
    return UnavailableError("the server is shutting down; try again")


@dataclass(frozen=True, slots=True)
class ErrorReply:
    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


ErrorForm = Callable[[BaseException, bytes], ErrorReply]  # an error and the request's id


@dataclass(frozen=True, slots=True)
class _Refusal:
    """What a caller may see of an error."""

    status: int
    message: str
    kind: str
    code: str | None
    headers: tuple[tuple[bytes, bytes], ...] = ()
    param: str | None = None


def reply_of(error: BaseException, request_id: bytes = b"") -> ErrorReply:
    shown = _refusal_of(error)
    body = {"message": shown.message[:_MAX_MESSAGE], "type": shown.kind, "param": shown.param, "code": shown.code}
    return ErrorReply(shown.status, _encode({"error": body}), shown.headers)


def anthropic_reply_of(error: BaseException, request_id: bytes) -> ErrorReply:
    shown = _refusal_of(error)
    status = _OVERLOADED if shown.status == 503 else shown.status
    message = shown.message
    if shown.code == "context_length_exceeded":  # clients that shorten their prompts look for these words
        message = f"prompt is too long: {message.removeprefix('prompt: ')}"
    kind = _ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    body = {
        "type": "error",
        "error": {"type": kind, "message": message[:_MAX_MESSAGE]},
        "request_id": request_id.decode(),
    }
    return ErrorReply(status, _encode(body), shown.headers)


def _refusal_of(error: BaseException) -> _Refusal:
    if isinstance(error, HttpError):
        return _Refusal(error.status, str(error), error.kind, error.code, error.headers, param_of(str(error)))
    if isinstance(error, RequestError):
        message = str(error)
        code = "context_length_exceeded" if _TOO_LONG.match(message) else "invalid_value"
        return _Refusal(400, message, "invalid_request_error", code, param=param_of(message))
    if isinstance(error, NotFoundError):
        return _Refusal(404, str(error), "invalid_request_error", "not_found")
    if isinstance(error, ResourceExhaustedError):
        return _retryable(str(error), "overloaded", error.retry_after_s)
    if isinstance(error, UnreachableError):
        return _retryable("the model's server can't be reached; try again", "unavailable")
    if isinstance(error, (UnavailableError, RequestCancelledError)):
        return _retryable(str(error), "unavailable")
    if isinstance(error, DeadlineExceededError):
        return _Refusal(504, str(error), "server_error", "timeout")
    return _Refusal(500, "internal error; the log has it under this x-request-id", "server_error", "internal_error")


def is_internal(error: BaseException) -> bool:
    """Whether only the log shows what happened."""
    if isinstance(error, (HttpError, UnreachableError)):
        return isinstance(error, UnreachableError)
    return not isinstance(error, BiremeError) or type(error).code in ("INTERNAL", "FAILED_PRECONDITION")


def _retryable(message: str, code: str, retry_s: int = _RETRY_S) -> _Refusal:
    return _Refusal(503, message, "server_error", code, ((b"retry-after", str(retry_s).encode()),))
