"""What can go wrong, as one tree; a message on the wire starts with its code.

BiremeError                       INTERNAL
├── RequestError                  INVALID_ARGUMENT     the caller's fault: value, limit and remedy
├── NotFoundError                 NOT_FOUND            a model, request, lease or file that is not there
├── ResourceExhaustedError        RESOURCE_EXHAUSTED   a full queue or buffer; try again later
├── UnavailableError              UNAVAILABLE          a worker is down or not in the recipe; try again
│   ├── EngineLostError                                the engine died with the request in flight
│   │   └── EngineStalledError                         it stood still, for the sake of a request that nobody can tell
│   └── KvTransferError                                the KV of its prefill did not arrive: decode is well
├── DeadlineExceededError         DEADLINE_EXCEEDED    the request's own time limit, or the queue's
├── RequestCancelledError         CANCELLED            the client went away or asked to abort
└── ConfigError                   FAILED_PRECONDITION  a recipe or engine YAML that can't be served

gRPC streams carry only a string and HTTP generate answers 400 whatever the status, so the
text itself says the code: `UNAVAILABLE: prefill is not in recipe tiny`.
"""

from __future__ import annotations

import re
from typing import ClassVar


class BiremeError(Exception):
    """Base of every error that this package raises on purpose."""

    code: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False


class RequestError(BiremeError):
    """The request cannot be served as given."""

    code = "INVALID_ARGUMENT"


class NotFoundError(BiremeError):
    """What the request names does not exist, or no longer."""

    code = "NOT_FOUND"


class ResourceExhaustedError(BiremeError):
    """A bounded queue or buffer is full; the same request may succeed later."""

    code = "RESOURCE_EXHAUSTED"
    retryable = True

    def __init__(self, *args: object, retry_after_s: int = 1) -> None:
        """`retry_after_s`: when it may succeed; it does not travel, unless the text says it too."""
        super().__init__(*args)
        self.retry_after_s = retry_after_s


class UnavailableError(BiremeError):
    """The worker that should serve this is not available now."""

    code = "UNAVAILABLE"
    retryable = True


class EngineLostError(UnavailableError):
    """The engine process died, or was restarted, while the request was in flight."""


class EngineStalledError(EngineLostError):
    """The engine stood still and was killed; whose work it was in could not be told, so it may be this request's."""


class KvTransferError(UnavailableError):
    """The KV of a prefill did not reach decode: prefill, or the transport, is at fault."""


class DeadlineExceededError(BiremeError):
    """The request's own deadline, or the queue-time limit, has passed."""

    code = "DEADLINE_EXCEEDED"


class RequestCancelledError(BiremeError):
    """The client cancelled, went away, or an abort named this request."""

    code = "CANCELLED"


class ConfigError(BiremeError):
    """A recipe, engine YAML or model folder can't be served."""

    code = "FAILED_PRECONDITION"


_BY_CODE: dict[str, type[BiremeError]] = {
    kind.code: kind
    for kind in (
        BiremeError,
        RequestError,
        NotFoundError,
        ResourceExhaustedError,
        UnavailableError,
        DeadlineExceededError,
        RequestCancelledError,
        ConfigError,
    )
}


def drop_frames(error: BaseException) -> None:
    """Call it where an error is handled: answered, or ignored.

    A task or future keeps its exception, the exception its traceback's frames, and a frame often that very task
    (asyncio.wait_for's own does on Python 3.11): the request with its body would stay until a collection.
    """
    open_ends: list[BaseException | None] = [error]
    while open_ends:
        one = open_ends.pop()
        if one is not None and one.__traceback__ is not None:
            one.__traceback__ = None
            open_ends += [one.__cause__, one.__context__]


# A worker that was not there, and one that refused, must differ on the wire as well.
_MARKS: dict[type[BiremeError], str] = {
    EngineLostError: "engine lost: ",
    EngineStalledError: "engine stalled: ",
    KvTransferError: "KV transfer failed: ",
}


def to_message(error: BaseException) -> str:
    """Return the wire form `CODE: text`; foreign exceptions are INTERNAL with their type's name."""
    if isinstance(error, BiremeError):
        return f"{error.code}: {_MARKS.get(type(error), '')}{error}"
    return f"INTERNAL: {type(error).__name__}: {error}"


def from_message(message: str) -> BiremeError:
    """Parse `CODE: text` back into the tree; text without a known code becomes BiremeError."""
    code, separator, text = message.partition(": ")
    kind = _BY_CODE.get(code)
    if kind is UnavailableError:
        for marked, mark in _MARKS.items():
            if text.startswith(mark):
                return marked(text[len(mark) :])
    if separator and kind is not None:
        return kind(text)
    return BiremeError(message)


_CODED = re.compile(rf"\b(?:{'|'.join(_BY_CODE)}): .*", re.DOTALL)
_GONE = ("not ready", "not healthy", "unknown model", "no available", "is not found")  # Triton's words for a model


def find_error(message: str) -> BiremeError | None:
    """Return the error whose `CODE: text` stands in a text of Triton's or gRPC's; None without one."""
    coded = _CODED.search(message)
    return from_message(coded.group()) if coded else None


def parse_error(message: str) -> BiremeError:
    """Return the error of Triton's text; a missing model is UNAVAILABLE."""
    if (error := find_error(message)) is not None:
        return error
    return UnavailableError(message) if any(words in message for words in _GONE) else BiremeError(message)


def one_line(error: BaseException, max_chars: int = 500) -> str:
    """Return a foreign exception's text without line breaks: validators give the reason after the first one."""
    lines = (line.strip() for line in str(error).splitlines())
    return " ".join(filter(None, lines))[:max_chars] or type(error).__name__
