"""What a traced sequence tells: an attempt each time it is placed, with its calls and what their engines say."""

from __future__ import annotations

import sys
from dataclasses import asdict

import msgspec

from bireme.kv.routing.placement import Candidate, Placement
from bireme.messages import EngineRequest, EngineSpan, Finish
from bireme.request_trace import RequestTrace, Span, TokenTimes, TracedSequence, error_text

MAX_CANDIDATES = 16  # told of a placement, the cheapest ones; of a stage with more workers their number says so


class SequenceSpans:
    """Made only for a request that is traced; used on the loop's thread."""

    def __init__(self, trace: RequestTrace, sequence: TracedSequence) -> None:
        self._trace, self._sequence = trace, sequence
        self._num_attempts = 0
        self._attempt: Span | None = None
        self._call: Span | None = None  # of the attempt, while its answer is awaited
        self._error = ""  # of the attempt, where another one follows
        trace.sequences.append(sequence)
        if trace.keeps_token_times:
            sequence.token_times = TokenTimes()

    def begin_attempt(self) -> None:
        self._num_attempts += 1
        self._attempt = self._trace.begin("attempt", number=self._num_attempts, sequence=self._sequence.index)
        if self._error:
            self._attempt.attributes["after"] = self._error
        self._error = ""

    def end_attempt(self, num_tokens: int) -> None:
        """Note how many tokens there are. End it with the error that is raised, if any, or the one that was noted."""
        self._sequence.num_tokens = num_tokens
        error = sys.exception()
        text = error_text(error) if error is not None else self._error
        if self._call is not None:
            self._end_call(text)
        if self._attempt is not None:
            self._trace.end(self._attempt, text)
            self._attempt = None

    def note_error(self, error: BaseException) -> None:
        self._error = error_text(error)

    def begin_route(self) -> Span:
        return self._trace.begin("route", self._attempt)

    def refused(self, route: Span, error: BaseException) -> None:
        self._trace.end(route, error_text(error))

    def routed(self, route: Span, placement: Placement, candidates: list[Candidate]) -> None:
        self._trace.end(
            route,
            prefill=placement.prefill or "",
            decode=placement.decode,
            reason=placement.reason,
            is_short=placement.is_short,
            num_candidates=len(candidates),
            candidates=_told(candidates, placement),
        )
        if placement.cached_tokens is not None:
            route.attributes["cached_tokens"] = placement.cached_tokens

    def begin_call(self, name: str, worker: str, request: EngineRequest) -> EngineRequest:
        """Return the request for an engine that is to tell what it does."""
        trace = self._trace
        if not trace.has_details:
            return request
        self._call = span = trace.begin(name, self._attempt, worker=worker)
        if request.dp_rank is not None:
            span.attributes["dp_rank"] = request.dp_rank
        return msgspec.structs.replace(request, traceparent=trace.traceparent(span), tracestate=trace.tracestate)

    def prefilled(self, told: list[EngineSpan] | None) -> None:
        if self._call is not None:  # else an attempt before had the prompt computed
            self._end_call("", told)

    def decoded(self, finish: Finish) -> None:
        if (call := self._call) is not None:
            call.attributes["reason"] = finish.reason
            self._end_call(finish.error, finish.spans)

    def first_token(self, at: float) -> None:
        self._sequence.first_token_us = self._trace.at(at)

    def ended(self, finish: Finish, reason: str) -> None:
        """Take the whole sequence's account."""
        self._sequence.usage, self._sequence.finish_reason = finish.usage, reason

    def note_tokens(self, num_tokens: int) -> None:
        if (times := self._sequence.token_times) is not None:
            times.note(self._trace.now(), num_tokens)

    @property
    def has_details(self) -> bool:
        return self._trace.has_details

    @property
    def keeps_token_times(self) -> bool:
        return self._sequence.token_times is not None

    def _end_call(self, error: str, told: list[EngineSpan] | None = None) -> None:
        assert self._call is not None
        self._trace.end(self._call, error)
        self._trace.hang(self._call, told)
        self._call = None


def _told(candidates: list[Candidate], placement: Placement) -> list[dict[str, object]]:
    chosen = (placement.prefill, placement.decode)
    ranked = sorted(candidates, key=lambda one: (one.worker not in chosen, one.cost))
    return [asdict(one) for one in ranked[:MAX_CANDIDATES]]
