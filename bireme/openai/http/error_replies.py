"""Errors in the form of OpenAI's clients: a status, and {"error": {message, type, param, code}}.

What a caller may see is decided here: internal errors and addresses stay in the log.
"""

from __future__ import annotations

import re
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
    """The error of requests that the drain timeout ends."""
    return UnavailableError("the server is shutting down; try again")


@dataclass(frozen=True, slots=True)
class ErrorReply:
    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


def reply_of(error: BaseException) -> ErrorReply:
    if isinstance(error, HttpError):
        return _reply(error.status, str(error), error.kind, error.code, error.headers, param_of(str(error)))
    if isinstance(error, RequestError):
        message = str(error)
        code = "context_length_exceeded" if _TOO_LONG.match(message) else "invalid_value"
        return _reply(400, message, "invalid_request_error", code, param=param_of(message))
    if isinstance(error, NotFoundError):
        return _reply(404, str(error), "invalid_request_error", "not_found")
    if isinstance(error, ResourceExhaustedError):
        return _retryable(str(error), "overloaded")
    if isinstance(error, UnreachableError):
        return _retryable("the model's server can't be reached; try again", "unavailable")
    if isinstance(error, (UnavailableError, RequestCancelledError)):
        return _retryable(str(error), "unavailable")
    if isinstance(error, DeadlineExceededError):
        return _reply(504, str(error), "server_error", "timeout")
    return _reply(500, "internal error; the log has it under this x-request-id", "server_error", "internal_error")


def is_internal(error: BaseException) -> bool:
    """Whether only the log shows what happened."""
    if isinstance(error, (HttpError, UnreachableError)):
        return isinstance(error, UnreachableError)
    return not isinstance(error, BiremeError) or type(error).code in ("INTERNAL", "FAILED_PRECONDITION")


def _retryable(message: str, code: str) -> ErrorReply:
    return _reply(503, message, "server_error", code, ((b"retry-after", str(_RETRY_S).encode()),))


def _reply(
    status: int,
    message: str,
    kind: str,
    code: str | None,
    headers: tuple[tuple[bytes, bytes], ...] = (),
    param: str | None = None,
) -> ErrorReply:
    body = {"error": {"message": message[:8192], "type": kind, "param": param, "code": code}}
    return ErrorReply(status, _encode(body), headers)
