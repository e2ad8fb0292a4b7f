"""Which requests are traced, and who reads a trace when its request has ended.

    traces = Traces(metrics, sample_ratio=0.01)
    traces.subscribe(reader, wants_all=True)            # before the first request
    identity = traces.identify(traceparent, tracestate) # of each request
    trace = traces.begin("generate", identity, arrived_at)  # None: nobody wants it
    traces.end(trace, error)                            # hands it to all readers

A reader is a callable that takes a RequestTrace. It is called on the entry's loop, so it must be quick and never waits
for a disk or a peer. It gets sampled traces; with `wants_all` every one, and tells them apart by `is_sampled`. It must
not keep a prompt (`TracedSequence.prompt`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from bireme.metrics import Registry
from bireme.request_trace import (
    RequestTrace,
    Traceparent,
    clean_tracestate,
    error_text,
    new_trace_number,
    parse_traceparent,
)
from bireme.types import Tensors, info_of

logger = logging.getLogger("bireme.observability")

Reader = Callable[[RequestTrace], None]
_ID_BITS = 64  # of a trace id that decide, as in OpenTelemetry's own sampler
_DECIDES = 2**_ID_BITS - 1


class RunningTraces(Protocol):
    """Who wants to know of requests before they have ended."""

    def begin(self, trace: RequestTrace) -> None: ...

    def drop(self, trace: RequestTrace) -> None:
        """It has ended, and no reader gets it."""


class TraceIdentity(NamedTuple):
    """Which trace a request belongs to; known of each while traces are on, also of those that nobody wants."""

    trace_id: str
    is_sampled: bool
    caller: Traceparent | None = None  # None: the trace begins here
    tracestate: str = ""


class Traces:
    """One an entry process; used on its loop."""

    def __init__(self, metrics: Registry, sample_ratio: float | None = None) -> None:
        """`sample_ratio`: of requests whose caller says nothing; None: none is sampled, whatever callers say."""
        self._metrics = metrics
        self._exports = sample_ratio is not None
        self._bound = round((sample_ratio or 0.0) * 2**_ID_BITS)
        self._readers: list[Reader] = []
        self._closers: list[Callable[[], None]] = []
        self._running: list[RunningTraces] = []
        self.wants_all = self._wants_token_times = self._wants_all_details = False  # some reader does

    @property
    def has_readers(self) -> bool:
        return bool(self._readers)

    def subscribe(
        self,
        reader: Reader,
        *,
        wants_all: bool = False,
        wants_token_times: bool = False,
        wants_details: bool = True,
        running: RunningTraces | None = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        """Have `reader` called with each sampled trace that has ended, or with every one.

        `wants_token_times`: sequences note when each delta came. `wants_details`: whether `wants_all` goes for what
        router and engines tell as well, which costs the most; sampled traces have it anyway. `running`: told of traces
        as soon as it is known whose they are. `close`: called at the end of the process, on a thread that may wait;
        within a few seconds.
        """
        self._readers.append(reader)
        if running is not None:
            self._running.append(running)
        if close is not None:
            self._closers.append(close)
        self.wants_all = self.wants_all or wants_all
        self._wants_all_details = self._wants_all_details or (wants_all and wants_details)
        self._wants_token_times = self._wants_token_times or wants_token_times

    async def close(self) -> None:
        """Let readers write what they hold."""
        for close in self._closers:
            await asyncio.to_thread(close)

    def identify(self, traceparent: str = "", tracestate: str = "") -> TraceIdentity:
        """Return the trace that the caller names, or a new one. A malformed traceparent is counted, and none."""
        if traceparent and (caller := parse_traceparent(traceparent)) is not None:
            state = clean_tracestate(tracestate) if tracestate else ""
            return TraceIdentity(caller.trace_id, self._exports and caller.is_sampled, caller, state)
        if traceparent:
            self._metrics.add("bireme_traceparents_ignored_total")
        number = new_trace_number()
        return TraceIdentity(f"{number:032x}", number & _DECIDES < self._bound)

    def begin(self, name: str, identity: TraceIdentity, arrived_at: float) -> RequestTrace | None:
        """Return None for a request that no reader wants. `arrived_at`: time.monotonic()."""
        if not (identity.is_sampled or self.wants_all):
            return None
        return RequestTrace(
            name,
            identity.caller,
            identity.is_sampled,
            arrived_at,
            trace_id=identity.trace_id,
            tracestate=identity.tracestate,
            keeps_token_times=self._wants_token_times,
            has_details=identity.is_sampled or self._wants_all_details,
        )

    def begun(self, trace: RequestTrace) -> None:
        """Show a trace that has its request's id to those who want to know of running ones."""
        for running in self._running:
            running.begin(trace)

    def end(self, trace: RequestTrace, error: BaseException | None = None) -> None:
        """End it and hand it to its readers; a reader that fails is logged, and costs the request nothing."""
        trace.finish("" if error is None else error_text(error))
        if trace.is_canary:
            for running in self._running:
                running.drop(trace)
            return
        for reader in self._readers:
            try:
                reader(trace)
            except Exception:
                logger.exception("trace_reader_failed trace_id=%s", trace.trace_id)


def begin_trace(traces: Traces, name: str, inputs: Tensors, arrived_at: float) -> RequestTrace | None:
    """Begin the trace of a request that came through Triton.

    Its request parameters name the caller: a client's own, or headers that the server turns into them.
    """
    info = info_of(inputs)
    given = {name.lower(): value for name, value in info.parameters.items()}  # an HTTP header's as it was sent
    identity = traces.identify(str(given.get("traceparent", "")), str(given.get("tracestate", "")))
    trace = traces.begin(name, identity, arrived_at)
    if trace is not None:
        trace.request_id = info.request_id
    return trace


@contextlib.contextmanager
def traced_call(traces: Traces | None, name: str, inputs: Tensors) -> Iterator[RequestTrace | None]:
    """Trace a request that a client sends to a model itself; it ends with the error that is raised within."""
    if traces is None:
        yield None
        return
    trace, error = begin_trace(traces, name, inputs, time.monotonic()), None
    try:
        yield trace
    except BaseException as raised:
        error = raised
        raise
    finally:
        if trace is not None:
            traces.end(trace, error)
