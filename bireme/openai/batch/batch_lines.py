"""A batch's input line by line: what is wrong with it, and what there is to run.

A line is {"custom_id", "method": "POST", "url", "body"}; its body is that of a request to the url.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from bireme.errors import RequestError
from bireme.openai.http.error_replies import HttpError
from bireme.pipelines.json_body import decode_body, param_of

MAX_PROBLEMS = 100  # that are told; a batch with one has failed
_encode = msgspec.json.Encoder().encode


class BatchLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class _Beginning(msgspec.Struct):
    """What of a request's body decides whether it can be a line."""

    model: str = ""
    stream: bool | None = None
    background: bool | None = None


@dataclass(frozen=True, slots=True)
class CheckedLines:
    count: int
    problems: list[dict[str, Any]]  # OpenAI's errors of a batch, with the line's number from 1


class LineReader:
    """Reads lines one after the other; may block on the disk. Blank ones are none, but have a number."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._file, self._max_bytes = path.open("rb"), max_bytes
        self.number = 0  # of the line that was read last, from 1

    def __iter__(self) -> Iterator[bytes]:
        while data := self._file.readline(self._max_bytes + 2):
            line = data.rstrip(b"\r\n")
            if len(line) > self._max_bytes:
                raise RequestError(f"a line of more than {self._max_bytes} bytes (frontend.max_body_bytes); shorten it")
            self.number += 1
            if line.strip():
                yield line

    def close(self) -> None:
        self._file.close()


def check_lines(
    path: Path, endpoint: str, check_model: Callable[[str], object], max_lines: int, max_bytes: int
) -> CheckedLines:
    """Look at every line; blocks. `check_model` raises HttpError for a model that is not served. Raises OSError."""
    reader = LineReader(path, max_bytes)
    problems: list[dict[str, Any]] = []
    seen: set[str] = set()
    count = 0
    try:
        for data in reader:
            count += 1
            if count > max_lines:
                raise HttpError(
                    400, f"more than {max_lines} lines (frontend.batches.max_lines); split it", code="too_many_lines"
                )
            try:
                line = decode_line(data, endpoint, check_model)
                if line.custom_id in seen:
                    raise HttpError(400, f"custom_id: {line.custom_id[:80]} is that of an earlier line; make it "
                                    "unique", code="duplicate_custom_id")  # fmt: skip
                seen.add(line.custom_id)
            except (RequestError, HttpError) as error:
                problems.append(problem_of(error, reader.number))
                if len(problems) == MAX_PROBLEMS:
                    break
    except (RequestError, HttpError) as error:  # of the whole file
        problems.append(problem_of(error, reader.number + isinstance(error, RequestError)))
    finally:
        reader.close()
    if not count and not problems:
        problems.append(problem_of(HttpError(400, "input_file_id: the file is empty", code="empty_file"), None))
    return CheckedLines(count, problems)


def decode_line(data: bytes, endpoint: str, check_model: Callable[[str], object]) -> BatchLine:
    line = decode_body(data, BatchLine, {"method": "only POST is served"})
    if line.url != endpoint:
        raise HttpError(400, f"url: {line.url[:80]} is not the batch's endpoint {endpoint}", code="mismatched_endpoint")
    try:
        beginning = decode_body(bytes(line.body), _Beginning, {})
    except RequestError as error:
        raise RequestError(f"body.{error}" if param_of(str(error)) else f"body: {error}") from None
    for name in ("stream", "background"):
        if getattr(beginning, name):
            raise RequestError(f"body.{name}: a line has one answer, in the batch's output; remove it")
    check_model(beginning.model)
    return line


def problem_of(error: Exception, line: int | None) -> dict[str, Any]:
    """Return OpenAI's object of what is wrong with a batch; `line` of its input, None: not with one."""
    code = getattr(error, "code", None) if isinstance(error, HttpError) else None
    return {
        "code": code or "invalid_request",
        "message": f"line {line}: {error}"[:1000] if line else str(error)[:1000],
        "param": param_of(str(error)),
        "line": line,
    }


def answered_line(batch_id: str, number: int, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _line(batch_id, number, custom_id, response, None)


def refused_line(batch_id: str, number: int, custom_id: str, code: str, message: str) -> bytes:
    return _line(batch_id, number, custom_id, None, {"code": code, "message": message})


def _line(
    batch_id: str, number: int, custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None
) -> bytes:
    name = f"batch_req_{batch_id.removeprefix('batch_')}{number:x}"
    return _encode({"id": name, "custom_id": custom_id, "response": response, "error": error})
