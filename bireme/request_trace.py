"""One request's trace: a tree of spans that its entry keeps, and what engines tell of their part.

    entry (frontend, stub)   RequestTrace: root, then spans as they come; the only one that hands traces on
    engine                   EngineSpans, where EngineRequest.traceparent is set; they come back with the Finish

    root                     `POST /v1/chat/completions`, `generate`, ...
      tokenize               tokens
      attempt                number, sequence; error: why it ended. A retry or migration is one more of these
        route                prefill, decode, reason, cached_tokens, candidates (with the cost of each)
        prefill, decode      worker: the entry's call of it, and below it what its engine tells:
          queue              until it joined the batch
          prefill_chunk      tokens, step
          transfer           bytes, way: KV of another worker
          preempted          out of the batch, its blocks given to others
          generate           tokens, steps, first_step, last_step
      deliver                waited_ms: of a stream, from its first event to its last; so long the client was waited for

Times are microseconds since 1970. This module imports nothing that exports: who reads finished traces is
`bireme/observability/traces.py`'s.
"""

from __future__ import annotations

import contextlib
import random
import re
import time
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from bireme.errors import RequestCancelledError, to_message
from bireme.messages import EngineSpan, Usage
from bireme.serving_options import NO_OPTIONS, ServingOptions

MAX_ENGINE_SPANS = 256  # of a request; of more the last take each other's place
MAX_TOKEN_TIMES = 4096  # of a sequence: 64 KiB
MAX_TRACESTATE_CHARACTERS = 512  # what everybody must pass on; more of it is cut
_MAX_MEMBER_CHARACTERS, _MAX_MEMBERS = 128, 32
_MEMBER = re.compile(r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,256}")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
_NUM_CHARACTERS = 55  # of version 00
_SAMPLED, _RANDOM = 1, 2  # flags; the second says that the id's last 56 bits are random


class Traceparent(NamedTuple):
    """Who called, as W3C Trace Context says it."""

    trace_id: str  # 32 hexadecimal digits
    parent_id: int
    flags: int

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & _SAMPLED)


def parse_traceparent(text: str) -> Traceparent | None:
    """Return None for a malformed one. Later versions are read as 00; what they add behind it is ignored."""
    if not _TRACEPARENT.fullmatch(text) or (text.startswith("00") and len(text) != _NUM_CHARACTERS):
        return None
    return Traceparent(text[3:35], int(text[36:52], 16), int(text[53:55], 16))


def clean_tracestate(text: str) -> str:
    """Return what is passed on of a tracestate: "" for a malformed one; the latest members that fit."""
    members = [member for part in text.split(",") if (member := part.strip(" \t"))]
    if len(members) > _MAX_MEMBERS or not all(map(_MEMBER.fullmatch, members)):
        return ""
    if sum(map(len, members)) + len(members) - 1 > MAX_TRACESTATE_CHARACTERS:
        members = [member for member in members if len(member) <= _MAX_MEMBER_CHARACTERS]
    while sum(map(len, members)) + len(members) - 1 > MAX_TRACESTATE_CHARACTERS:
        members.pop()
    return ",".join(members)


def error_text(error: BaseException) -> str:
    """Return `CODE: text` of what ended a span."""
    import asyncio  # a fifth of the CPU of an engine's start, and engines only tell spans

    if isinstance(error, asyncio.CancelledError):
        return f"{RequestCancelledError.code}: its caller is gone, or does not wait any more"
    return to_message(error)


def new_trace_number() -> int:
    return random.getrandbits(128) or 1


def new_trace_id() -> str:
    return f"{new_trace_number():032x}"


def new_span_id() -> int:
    return random.getrandbits(64) or 1


def _offset_us() -> int:
    """Return what makes a time of time.monotonic(), in microseconds, one since 1970."""
    return time.time_ns() // 1000 - int(time.monotonic() * 1e6)


class Span(msgspec.Struct):
    name: str
    span_id: int
    parent_id: int  # 0: none
    start_us: int
    end_us: int = 0  # 0: it is under way
    attributes: dict[str, Any] = {}  # what JSON has; the exporter writes what is nested as text
    error: str = ""  # "CODE: text" of what ended it


class SpanLink(NamedTuple):
    """Another trace that this one comes from: of a batch, or of the request that began a background response."""

    trace_id: str
    span_id: int


class TracedSequence(msgspec.Struct):
    """A sequence of a traced request, for those who read its trace."""

    index: int
    prompt: npt.NDArray[np.int32]  # CPU 1D; a reader must not keep it
    options: ServingOptions = NO_OPTIONS
    usage: Usage | None = None  # None: it has no end
    finish_reason: str = ""
    num_tokens: int = 0  # that came to the entry
    first_token_us: int = 0  # 0: none came
    token_times: TokenTimes | None = None


class TokenTimes:
    """When a sequence's tokens came to the entry; of those after the first MAX_TOKEN_TIMES deltas the last alone."""

    __slots__ = ("counts", "times_us")

    def __init__(self) -> None:
        self.times_us = array("q")
        self.counts = array("L")  # tokens of each

    def note(self, time_us: int, num_tokens: int) -> None:
        if len(self.times_us) < MAX_TOKEN_TIMES:
            self.times_us.append(time_us)
            self.counts.append(num_tokens)
        else:
            self.times_us[-1] = time_us
            self.counts[-1] += num_tokens


class RequestTrace:
    """Used by one request's tasks, on one loop."""

    __slots__ = (
        *(
            "has_details",
            "is_canary",
            "is_sampled",
            "keeps_token_times",
            "links",
            "request_id",
            "root",
            "sequences",
            "spans",
        ),
        *("tenant", "trace_id", "tracestate", "_flags", "_offset_us"),
    )

    def __init__(
        self, name: str, caller: Traceparent | None, is_sampled: bool, arrived_at: float, *, trace_id: str = "",
        tracestate: str = "", keeps_token_times: bool = False, has_details: bool = True,
    ) -> None:  # fmt: skip
        """`arrived_at`: time.monotonic(). `keeps_token_times`: a reader wants to know when tokens came. `has_details`:
        one wants to know what router and engines do.
        """
        self._offset_us = _offset_us()
        self.trace_id = caller.trace_id if caller is not None else trace_id or new_trace_id()
        self.is_sampled, self.tracestate, self.keeps_token_times = is_sampled, tracestate, keeps_token_times
        self.has_details = has_details
        self.request_id = self.tenant = ""  # the caller's, or the frontend's own; the key's name
        self.is_canary = False  # the launch's own probe: nobody gets it
        self._flags = (caller.flags & _RANDOM if caller is not None else _RANDOM) | is_sampled * _SAMPLED
        parent_id = caller.parent_id if caller is not None else 0
        self.root = Span(name, new_span_id(), parent_id, self.at(arrived_at))
        self.spans = [self.root]
        self.links: list[SpanLink] = []
        self.sequences: list[TracedSequence] = []

    def at(self, monotonic_s: float) -> int:
        return int(monotonic_s * 1e6) + self._offset_us

    def now(self) -> int:
        return int(time.monotonic() * 1e6) + self._offset_us

    def begin(self, name: str, parent: Span | None = None, **attributes: Any) -> Span:
        """Return a span from now on; below the root, if there is no parent."""
        span = Span(name, new_span_id(), (parent or self.root).span_id, self.now(), 0, attributes)
        self.spans.append(span)
        return span

    def end(self, span: Span, error: str = "", **attributes: Any) -> None:
        span.end_us, span.error = self.now(), error
        span.attributes.update(attributes)

    @contextlib.contextmanager
    def span(self, name: str, parent: Span | None = None, **attributes: Any) -> Iterator[Span]:
        """Give a span for what is done within, which ends with its error."""
        span = self.begin(name, parent, **attributes)
        try:
            yield span
        except BaseException as error:
            self.end(span, error_text(error))
            raise
        self.end(span)

    def add(self, name: str, parent: Span, start_us: int, end_us: int, attributes: dict[str, Any]) -> None:
        self.spans.append(Span(name, new_span_id(), parent.span_id, start_us, end_us, attributes))

    def hang(self, parent: Span, told: list[EngineSpan] | None) -> None:
        """Take an engine's spans. A clock that differs from ours is set right as far as the call's own time says."""
        if not told:
            return
        behind_us = parent.start_us - min(one.start_us for one in told)
        ahead_us = max(one.end_us for one in told) - (parent.end_us or self.now())
        shift_us = behind_us if behind_us > 0 else -max(0, ahead_us)
        for one in told:
            self.add(one.name, parent, one.start_us + shift_us, one.end_us + shift_us, one.attributes)

    def traceparent(self, span: Span) -> str:
        """Return what tells a callee that it works for this span."""
        return f"00-{self.trace_id}-{span.span_id:016x}-{self._flags:02x}"

    def finish(self, error: str = "") -> None:
        """End the root, and with it whatever has no end yet."""
        error = error or self.root.error
        self.root.end_us, self.root.error = self.now(), error
        for span in self.spans:
            if not span.end_us:
                span.end_us, span.error = self.root.end_us, span.error or error


class PromptWork:
    """Steps that have computed parts of prompts, since an engine began: what a request's tokens waited for in them is
    the difference of two looks.
    """

    __slots__ = ("num_tokens", "seconds")

    def __init__(self) -> None:
        self.seconds, self.num_tokens = 0.0, 0

    def note(self, seconds: float, num_tokens: int) -> None:
        self.seconds += seconds
        self.num_tokens += num_tokens


class EngineSpans:
    """What an engine tells of a request; its times are of time.monotonic()."""

    __slots__ = ("_neighbors", "_offset_us", "spans")

    def __init__(self) -> None:
        self.spans: list[EngineSpan] = []
        self._offset_us = _offset_us()
        self._neighbors = (0.0, 0)  # the work that was done when its own prompt was

    def begin_generation(self, work: PromptWork) -> None:
        """From now on prompts are others'; to be called again after each part of its own."""
        self._neighbors = work.seconds, work.num_tokens

    def add_generation(self, began_at: float, ended_at: float, num_tokens: int, work: PromptWork) -> None:
        seconds, before = self._neighbors
        neighbors: dict[str, float] = {}
        if work.num_tokens > before:
            neighbors = {
                "neighbors_ms": round(1e3 * (work.seconds - seconds), 3),
                "neighbor_tokens": work.num_tokens - before,
            }
        self.add("generate", began_at, ended_at, tokens=num_tokens, steps=num_tokens - 1, **neighbors)

    def add(self, name: str, began_at: float, ended_at: float, **attributes: str | float | bool) -> None:
        start_us, end_us = (int(at * 1e6) + self._offset_us for at in (began_at, ended_at))
        if len(self.spans) >= MAX_ENGINE_SPANS:
            self.spans.pop()
        self.spans.append(EngineSpan(name, start_us, end_us, attributes))
