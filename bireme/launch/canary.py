"""Tiny generations that prove a path through the deployment.

Each has a cache_salt of its own, so that it finds and leaves no KV. A refusal says nothing about what is broken.
"""

from __future__ import annotations

import base64
import http.client
import json
import re
import secrets
import struct
import zlib
from dataclasses import dataclass
from typing import Any

from bireme.canary_mark import PARAMETER, new_mark
from bireme.errors import BiremeError, RequestError, ResourceExhaustedError, UnavailableError, from_message
from bireme.launch.doors import connect
from bireme.launch.peer import NotOursError, check_ours

_TEXT = "The oars of the upper bank and those of the lower move as one. "
_MAX_WORDS = 1024
_NUM_TOKENS = 2  # prefill makes the first; the second needs the KV where decode is
_PICTURE_SIDE = 56  # pixels: two patches or more for every vision tower
_BUSY = "overloaded"  # the frontend's code of a full queue, busy workers and too many connections
_QUEUE_LIMIT = "max_queue_time_s"  # what all engines name when a request waited for longer
# Triton's own words for a stub that does not react within a second.
_UNHEALTHY = re.compile(r"Stub process .* is not healthy")


@dataclass(frozen=True, slots=True)
class CanaryResult:
    error: str = ""  # empty: it worked
    is_silent: bool = False  # the stub said nothing itself; an error of its own is an answer
    is_unreachable: bool = False  # the port does not take connections: its door says so
    is_wrong: bool = False  # refused as a request that nobody could serve
    is_busy: bool = False  # refused because a queue is full, or all workers are busy

    @property
    def is_ok(self) -> bool:
        return not self.error

    @property
    def is_refused(self) -> bool:
        return self.is_wrong or self.is_busy


@dataclass(frozen=True, slots=True)
class PairResult:
    """At most one of the two is at fault."""

    prefill: CanaryResult
    decode: CanaryResult | None  # None: it was not asked


@dataclass(frozen=True, slots=True)
class CanaryPrompt:
    """Plain text: no id means anything special to the model."""

    text: str
    input_ids: tuple[int, ...]
    key: str = ""  # the deployment's: it signs what marks a canary

    def sampling(self) -> dict[str, Any]:
        return {"max_tokens": _NUM_TOKENS, "ignore_eos": True, "cache_salt": new_mark(self.key)}

    def openai_sampling(self) -> dict[str, Any]:
        values = self.sampling()
        return {"max_tokens": values.pop("max_tokens"), "bireme": values}


def make_prompt(http_address: str, tokenizer: str, num_tokens: int, timeout_s: float, key: str = "") -> CanaryPrompt:
    """Return `num_tokens`; the text may have up to twice as many. Raises BiremeError."""
    words, count = re.findall(r"\S+ ", _TEXT), 1
    while True:
        text = "".join(words[at % len(words)] for at in range(count))
        answer = _ask(http_address, f"/v2/models/{tokenizer}/generate", {"text_input": text}, timeout_s)
        if not answer.result.is_ok:
            raise UnavailableError(f"{tokenizer}: {answer.result.error}")
        found = answer.values.get("input_ids")
        ids: list[Any] = found if isinstance(found, list) else [found]
        if not all(isinstance(token, int) for token in ids):
            raise BiremeError(f"{tokenizer}: it answered {str(found)[:80]} instead of token ids")
        if len(ids) >= num_tokens or count >= _MAX_WORDS:
            return CanaryPrompt(text, tuple(ids[:num_tokens]), key)
        count *= 2


def probe_decode(http_address: str, model: str, prompt: CanaryPrompt, timeout_s: float) -> CanaryResult:
    values = {"input_ids": prompt.input_ids, **prompt.sampling()}
    return _ask(http_address, f"/v2/models/{model}/generate_stream", values, timeout_s).result


def probe_pair(http_address: str, prefill: str, decode: str, prompt: CanaryPrompt, timeout_s: float) -> PairResult:
    request_id = f"canary-{secrets.token_hex(8)}"
    values = {"input_ids": prompt.input_ids, **prompt.sampling()}
    first = _ask(http_address, f"/v2/models/{prefill}/generate", values | {"request_id": request_id}, timeout_s)
    if not first.result.is_ok or "disaggregated_params" not in first.values:
        return PairResult(first.result, None)
    values["disaggregated_params"] = first.values["disaggregated_params"]
    second = _ask(http_address, f"/v2/models/{decode}/generate_stream", values, timeout_s).result
    if second.is_ok:
        return PairResult(CanaryResult(), second)
    _ask(http_address, f"/v2/models/{prefill}/generate", {"request_id": request_id, "abort": True}, timeout_s)
    if second.is_busy:  # a moment later it may take a prompt, which is no sign of a transfer that fails
        return PairResult(CanaryResult(), second)
    alone = probe_decode(http_address, decode, prompt, timeout_s)
    if not alone.is_ok:
        return PairResult(CanaryResult(), alone)
    return PairResult(CanaryResult(f"{decode} can't take over its prompts: {second.error}"), CanaryResult())


def probe_text(http_address: str, model: str, prompt: CanaryPrompt, timeout_s: float) -> CanaryResult:
    values = {"text_input": prompt.text, **prompt.sampling()}
    return _ask(http_address, f"/v2/models/{model}/generate", values, timeout_s).result


def probe_chat(
    http_address: str, model: str, prompt: CanaryPrompt, has_picture: bool, timeout_s: float
) -> CanaryResult:
    """Chat; with a picture where the model takes one."""
    content: Any = prompt.text
    if has_picture:
        picture = {"type": "image_url", "image_url": {"url": _picture_url()}}
        content = [picture, {"type": "text", "text": prompt.text}]
    request = {"messages": [{"role": "user", "content": content}], **prompt.openai_sampling()}
    return _ask(http_address, f"/v2/models/{model}/generate_stream", {"request": json.dumps(request)}, timeout_s).result


def probe_video(http_address: str, model: str, timeout_s: float) -> CanaryResult:
    request = {"prompt": "a ship", "num_frames": 1, "num_inference_steps": 1}
    return _ask(http_address, f"/v2/models/{model}/generate_stream", {"request": json.dumps(request)}, timeout_s).result


def probe_openai(
    address: str, model: str, key: str, prompt: CanaryPrompt, timeout_s: float, has_tls: bool = False
) -> CanaryResult:
    """Complete through the OpenAI frontend. `key`: its launcher's."""
    request = {"model": model, "prompt": prompt.text, **prompt.openai_sampling()}
    return _ask(address, "/v1/completions", request, timeout_s, key, has_tls).result


def probe_embedding(http_address: str, model: str, prompt: CanaryPrompt, timeout_s: float) -> CanaryResult:
    values = {"text_input": _TEXT, PARAMETER: new_mark(prompt.key)}
    return _ask(http_address, f"/v2/models/{model}/generate", values, timeout_s).result


def probe_openai_embedding(
    address: str, model: str, key: str, prompt: CanaryPrompt, timeout_s: float, has_tls: bool = False
) -> CanaryResult:
    request = {"model": model, "input": _TEXT, "encoding_format": "base64", "user": new_mark(prompt.key)}
    return _ask(address, "/v1/embeddings", request, timeout_s, key, has_tls).result


def probe_ready(address: str, timeout_s: float, has_tls: bool = False) -> CanaryResult:
    return _ask(address, "/health/ready", None, timeout_s, has_tls=has_tls).result


@dataclass(frozen=True, slots=True)
class _CanaryAnswer:
    result: CanaryResult
    values: dict[str, Any]  # of the last event


def _ask(
    address: str, path: str, values: dict[str, Any] | None, timeout_s: float, key: str = "",
    has_tls: bool = False,
) -> _CanaryAnswer:  # fmt: skip
    connection = connect(address, timeout_s, has_tls)
    try:
        connection.connect()
        if key:
            check_ours(connection.sock, timeout_s)
        body = None if values is None else json.dumps(values)
        method = "GET" if body is None else "POST"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connection.request(method, path, body, {"Content-Type": "application/json"} | headers)
        response = connection.getresponse()
        return _read(response.status, response.read().decode(errors="replace"))
    except TimeoutError:
        return _CanaryAnswer(CanaryResult(f"no answer within {timeout_s:g} s", is_silent=True), {})
    except ConnectionError as error:
        return _CanaryAnswer(CanaryResult(f"{type(error).__name__}: {error}", is_unreachable=True), {})
    except (OSError, http.client.HTTPException, NotOursError) as error:
        return _CanaryAnswer(CanaryResult(f"{type(error).__name__}: {error}"), {})
    finally:
        connection.close()


def _read(status: int, text: str) -> _CanaryAnswer:
    """Errors in mid-stream come with status 200, as an event."""
    values: dict[str, Any] = {}
    for line in text.splitlines():
        try:
            event = json.loads(line.removeprefix("data:").strip() or "{}")
        except ValueError:
            continue
        if isinstance(event, dict) and "error" in event:
            return _CanaryAnswer(_failure(status, event["error"]), {})
        values = event if isinstance(event, dict) and event else values
    return _CanaryAnswer(CanaryResult("" if status == http.client.OK else f"HTTP {status}: {text[:200]}"), values)


def _failure(status: int, error: Any) -> CanaryResult:
    """`error`: Triton's text, or OpenAI's object."""
    if isinstance(error, dict):
        text = str(error.get("message", error))
        is_wrong = status == http.client.BAD_REQUEST
        is_busy = status == http.client.TOO_MANY_REQUESTS or error.get("code") == _BUSY
    else:
        text = str(error)
        refusal = from_message(text)
        is_wrong, is_busy = isinstance(refusal, RequestError), isinstance(refusal, ResourceExhaustedError)
    return CanaryResult(
        text or "an error without a text",
        is_silent=bool(_UNHEALTHY.search(text)),
        is_wrong=is_wrong,
        is_busy=is_busy or _QUEUE_LIMIT in text,
    )


def _picture_url() -> str:
    """Return a gray PNG as a data URL, of a random shade: in no cache."""
    row = b"\0" + bytes([secrets.randbelow(256)]) * 3 * _PICTURE_SIDE
    header = struct.pack(">IIBBBBB", _PICTURE_SIDE, _PICTURE_SIDE, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(row * _PICTURE_SIDE)), (b"IEND", b""))
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"
