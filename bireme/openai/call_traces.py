"""Traces of the frontend's calls: begun with a request for an answer, ended with its last byte."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from bireme.errors import RequestCancelledError
from bireme.observability.timelines import RESPONSE_ID
from bireme.observability.traces import TraceIdentity, Traces
from bireme.openai.http.call import Call, Patience
from bireme.openai.http.error_replies import HttpError
from bireme.openai.keys import OPEN, Tenant
from bireme.request_trace import RequestTrace, Span, SpanLink, error_text, new_span_id, parse_traceparent

_LONG_WAIT_S, _MAX_WAITS = 0.005, 64


class BackgroundWork(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def tenant(self) -> Tenant: ...

    @property
    def link(self) -> str: ...


class CallTraces:
    def __init__(self, traces: Traces) -> None:
        self._traces = traces

    async def close(self) -> None:
        await self._traces.close()

    def begin(self, call: Call, link: str = "") -> None:
        """Give the call its trace, if anybody wants it; log and reply tell the id of each.

        `link`: the traceparent of what has made it, if it is a line of a batch.
        """
        traces, given = self._traces, call.header(b"traceparent")
        identity = self._identify(call, given) if given else traces.identify()
        call.notes["trace_id"] = identity.trace_id
        if not (identity.is_sampled or traces.wants_all):  # most of them: every call counts here
            call.add_header(b"traceresponse", b"00-%b-%016x-00" % (identity.trace_id.encode(), new_span_id()))
            return
        call.trace = trace = traces.begin(f"{call.method} {call.path}", identity, call.arrived_at)
        assert trace is not None, "it is wanted"
        trace.request_id, trace.tenant = call.request_id.decode(), call.tenant.name
        trace.root.attributes |= {"http.request.method": call.method, "http.route": call.path}
        _add_link(trace, link)
        call.add_header(b"traceresponse", trace.traceparent(trace.root).encode())
        self._traces.begun(trace)

    def _identify(self, call: Call, given: bytes) -> TraceIdentity:
        """Several traceparents are none."""
        if call.is_repeated(b"traceparent"):
            given = b","
        state = b",".join(value for name, value in call.headers if name == b"tracestate")
        return self._traces.identify(given.decode("latin-1"), state.decode("latin-1"))

    def end(self, call: Call) -> None:
        trace = call.trace
        assert trace is not None
        trace.is_canary = call.is_canary
        trace.root.attributes |= _facts(call)
        if call.notes.get("outcome") == RequestCancelledError.code:
            note_failure(trace, asyncio.CancelledError())
        self._traces.end(trace)

    def begin_background(self, path: str, job: BackgroundWork) -> RequestTrace | None:
        """Begin the trace of work that goes on when its request has its answer: one of its own, by the answer's id."""
        trace = self._traces.begin(f"background {path}", self._traces.identify(), time.monotonic())
        if trace is not None:
            trace.request_id, trace.tenant = job.id, job.tenant.name
            _add_link(trace, job.link)
            self._traces.begun(trace)
        return trace

    def end_background(self, trace: RequestTrace, error: BaseException | None, **attributes: str) -> None:
        trace.root.attributes |= attributes
        self._traces.end(trace, error)


def note_response(call: Call, response_id: str) -> None:
    """Keep the answer's own id, by which its caller knows it."""
    if call.trace is not None:
        call.trace.root.attributes[RESPONSE_ID] = response_id


def note_failure(trace: RequestTrace, error: BaseException) -> None:
    """Keep what the caller is told, for the end of the trace."""
    trace.root.error = f"{error.code}: {error}" if isinstance(error, HttpError) else error_text(error)


def _facts(call: Call) -> dict[str, object]:
    notes = call.notes
    named = {
        "gen_ai.request.model": notes.get("model"),
        "gen_ai.usage.input_tokens": notes.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": notes.get("generated_tokens"),
        "outcome": notes.get("outcome"),
        "key": call.tenant.name if call.tenant is not OPEN else None,
    }
    return {"http.response.status_code": call.status} | {name: one for name, one in named.items() if one is not None}


def trace_of(call: Call) -> str:
    """Return the traceparent by which later work names this call; "": nobody traces it."""
    return call.trace.traceparent(call.trace.root) if call.trace is not None else ""


def _add_link(trace: RequestTrace, link: str) -> None:
    if (named := parse_traceparent(link)) is not None:
        trace.links.append(SpanLink(named.trace_id, named.parent_id))


class ClientWait:
    """How long a stream's client was waited for; one span, from the first event to the last."""

    def __init__(self, call: Call) -> None:
        assert call.trace is not None
        self._call, self._trace = call, call.trace
        self._span: Span | None = None  # from the first event on
        self._waited_s = 0.0
        self._waits: list[tuple[int, int]] = []  # the first longer ones: start and length, in microseconds

    async def write(self, data: bytes, is_last: bool, patience: Patience) -> None:
        began = time.monotonic()
        self._span = self._span or self._trace.begin("deliver")
        try:
            await self._call.write_events(data, is_last, patience)
        finally:
            took_s = time.monotonic() - began
            self._waited_s += took_s
            if took_s >= _LONG_WAIT_S and len(self._waits) < _MAX_WAITS:
                self._waits.append((self._trace.at(began), int(1e6 * took_s)))

    def end(self) -> None:
        if self._span is not None:
            self._trace.end(self._span, waited_ms=round(1e3 * self._waited_s, 3))
            if self._waits:
                self._span.attributes["waits"] = self._waits
