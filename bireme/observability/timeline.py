"""A request's timeline: what its trace tells, in the order in which it happened, and what took the time. Pure.

Each millisecond of a request belongs to one cause. A timeline of a request that runs tells what is known so far: an
engine tells of its part at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from bireme.request_trace import Span

Cause = Literal[
    "tokenizing",
    "placement",  # the router's decision
    "queue",  # in an engine, until the request joined the batch
    "prompt",  # its own prompt was computed
    "transfer",  # KV of its prompt came from prefill
    "generation",  # its own tokens were made
    "neighbors",  # its next token waited for prompts of others, computed in the same steps
    "migration",  # from its last progress on one worker until it went on, there or elsewhere
    "reader",  # all was made, and its client had not taken it
    "engine",  # in an engine that has not told more
    "other",
]


class TimelineStep(msgspec.Struct, omit_defaults=True):
    """Something that took time. ms count from the request's arrival; None: it has not ended."""

    name: str  # tokenize, queue, prefill_chunk, transfer, generate, preempted, pictures, embed, ...
    start_ms: float
    end_ms: float | None = None
    tokens: int | None = None  # of the prompt or chunk; that were generated
    step: int | None = None  # the engine's number of it
    steps: int | None = None  # of generation
    neighbors_ms: float | None = None  # of generation: in steps that computed prompts of others as well
    neighbor_tokens: int | None = None  # of those prompts, computed in these steps
    bytes: int | None = None  # of KV
    way: str = ""  # of KV: mapped, or a transfer's name
    error: str = ""  # CODE: text


class TimelineCandidate(msgspec.Struct):
    """A worker as the router saw it."""

    worker: str
    dp_rank: int | None
    cost: float  # in KV blocks
    cached_tokens: int  # of the prompt
    waiting_tokens: float  # prompt tokens to be computed there
    num_blocks: float  # KV blocks in use
    num_requests: float


class TimelinePlacement(msgspec.Struct):
    start_ms: float
    end_ms: float | None
    prefill: str  # "": decode computed the prompt
    decode: str  # "": refused
    reason: str  # what decided: a mode, only, direct, session
    is_short: bool  # prefill was left out: the prompt was not worth a transfer
    cached_tokens: int | None  # that the worker was expected to hold; None: nobody knew
    num_candidates: int
    candidates: list[TimelineCandidate]  # the chosen first, then the cheapest
    error: str


class TimelineCall(msgspec.Struct):
    """One worker's part."""

    worker: str
    start_ms: float
    end_ms: float | None
    error: str
    steps: list[TimelineStep]  # what its engine told; nothing where it died


class TimelineAttempt(msgspec.Struct):
    """A placement and what came of it; another one follows a loss or a refusal."""

    number: int
    sequence: int
    start_ms: float
    end_ms: float | None
    after: str  # CODE: text of what ended the attempt before
    error: str
    placement: TimelinePlacement | None
    prefill: TimelineCall | None
    decode: TimelineCall | None


class TimelineTokens(msgspec.Struct):
    """When a sequence's tokens came to the frontend."""

    sequence: int
    finish_reason: str  # "": it has no end
    first_ms: float | None
    deliveries: list[tuple[float, int]]  # (ms, tokens that came together)
    longest_gap_ms: float  # between two deliveries


class TimelineDelivery(msgspec.Struct):
    """A stream's way to its client."""

    start_ms: float  # the first event
    end_ms: float | None  # the last one was taken
    waited_ms: float  # for the client to take events
    waits: list[tuple[float, float]]  # (start, ms) of the first of them


class TimelineCause(msgspec.Struct):
    cause: Cause
    ms: float
    share: float  # of the duration, 0 to 1


class Timeline(msgspec.Struct):
    """One request."""

    id: str  # x-request-id
    response_id: str  # the answer's own id; "": it has none yet
    trace_id: str
    path: str  # method and path
    model: str
    state: Literal["running", "done", "failed"]
    error: str  # CODE: text
    started_at: float  # Unix time, s
    duration_ms: float  # so far, of one that runs
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    slowest: Cause  # what took the most
    causes: list[TimelineCause]  # the largest first
    steps: list[TimelineStep]  # of the frontend itself: tokenize, pictures, ...
    attempts: list[TimelineAttempt]
    tokens: list[TimelineTokens]
    delivery: TimelineDelivery | None  # of a stream
    object: Literal["bireme.timeline"] = "bireme.timeline"


class KeptSequence(msgspec.Struct, array_like=True, gc=False):
    """What is kept of a TracedSequence."""

    index: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    finish_reason: str
    first_token_us: int
    times_us: list[int]
    counts: list[int]


class KeptTrace(msgspec.Struct, array_like=True, gc=False):
    """What is kept of a RequestTrace: no prompt and no text."""

    request_id: str
    response_id: str
    trace_id: str
    spans: list[Span]  # the root first
    sequences: list[KeptSequence]


def timeline_of(kept: KeptTrace, now_us: int) -> Timeline:
    return _Reading(kept, now_us).timeline()


class _Reading:
    def __init__(self, kept: KeptTrace, now_us: int) -> None:
        self._kept, self._root = kept, kept.spans[0]
        self._end_us = self._root.end_us or now_us
        self._below: dict[int, list[Span]] = {}
        for span in kept.spans[1:]:
            self._below.setdefault(span.parent_id, []).append(span)

    def timeline(self) -> Timeline:
        kept, root, sequences = self._kept, self._root, self._kept.sequences
        top = self._below.get(root.span_id, [])
        timeline = Timeline(
            id=kept.request_id,
            response_id=kept.response_id,
            trace_id=kept.trace_id,
            path=root.name,
            model=str(root.attributes.get("gen_ai.request.model", "")),
            state="running" if not root.end_us else "failed" if root.error else "done",
            error=root.error,
            started_at=root.start_us / 1e6,
            duration_ms=(self._end_us - root.start_us) / 1e3,
            prompt_tokens=sum(one.prompt_tokens for one in sequences),
            cached_tokens=sum(one.cached_tokens for one in sequences),
            generated_tokens=sum(one.generated_tokens or sum(one.counts) for one in sequences),
            slowest="other",
            causes=[],
            steps=[self._step(span) for span in top if span.name not in _OWN_FORMS],
            attempts=list(map(self._attempt, _named_spans(top, "attempt"))),
            tokens=list(map(self._tokens, sequences)),
            delivery=next(map(self._delivery, _named_spans(top, "deliver")), None),
        )
        timeline.causes = causes_of(timeline)
        timeline.slowest = timeline.causes[0].cause if timeline.causes else "other"
        return timeline

    def _ms(self, time_us: int) -> float:
        return round((time_us - self._root.start_us) / 1e3, 3)

    def _end_ms(self, span: Span) -> float | None:
        return self._ms(span.end_us) if span.end_us else None

    def _step(self, span: Span) -> TimelineStep:
        known = {name: span.attributes[name] for name in _STEP_FACTS if name in span.attributes}
        return TimelineStep(span.name, self._ms(span.start_us), self._end_ms(span), error=span.error, **known)

    def _attempt(self, span: Span) -> TimelineAttempt:
        parts = {part.name: part for part in self._below.get(span.span_id, [])}
        return TimelineAttempt(
            number=span.attributes.get("number", 1),
            sequence=span.attributes.get("sequence", 0),
            start_ms=self._ms(span.start_us),
            end_ms=self._end_ms(span),
            after=str(span.attributes.get("after", "")),
            error=span.error,
            placement=self._placement(parts["route"]) if "route" in parts else None,
            prefill=self._call(parts["prefill"]) if "prefill" in parts else None,
            decode=self._call(parts["decode"]) if "decode" in parts else None,
        )

    def _placement(self, span: Span) -> TimelinePlacement:
        facts: dict[str, Any] = span.attributes
        return TimelinePlacement(
            start_ms=self._ms(span.start_us),
            end_ms=self._end_ms(span),
            prefill=facts.get("prefill", ""),
            decode=facts.get("decode", ""),
            reason=facts.get("reason", ""),
            is_short=facts.get("is_short", False),
            cached_tokens=facts.get("cached_tokens"),
            num_candidates=facts.get("num_candidates", 0),
            candidates=[TimelineCandidate(**one) for one in facts.get("candidates", [])],
            error=span.error,
        )

    def _call(self, span: Span) -> TimelineCall:
        steps = sorted(map(self._step, self._below.get(span.span_id, [])), key=lambda one: one.start_ms)
        worker = str(span.attributes.get("worker", ""))
        return TimelineCall(worker, self._ms(span.start_us), self._end_ms(span), span.error, steps)

    def _tokens(self, sequence: KeptSequence) -> TimelineTokens:
        deliveries = [
            (self._ms(time_us), count) for time_us, count in zip(sequence.times_us, sequence.counts, strict=True)
        ]
        gaps = (after[0] - before[0] for before, after in zip(deliveries, deliveries[1:], strict=False))
        first_ms = self._ms(sequence.first_token_us) if sequence.first_token_us else None
        return TimelineTokens(
            sequence.index, sequence.finish_reason, first_ms, deliveries, round(max(gaps, default=0.0), 3)
        )

    def _delivery(self, span: Span) -> TimelineDelivery:
        waits = [(self._ms(start_us), round(us / 1e3, 3)) for start_us, us in span.attributes.get("waits", [])]
        waited_ms = float(span.attributes.get("waited_ms", sum(ms for _, ms in waits)))
        return TimelineDelivery(self._ms(span.start_us), self._end_ms(span), waited_ms, waits)


def _named_spans(spans: list[Span], name: str) -> Iterator[Span]:
    return (span for span in spans if span.name == name)


_OWN_FORMS = ("attempt", "deliver")
_STEP_FACTS = ("tokens", "step", "steps", "bytes", "way", "neighbors_ms", "neighbor_tokens")


def causes_of(timeline: Timeline) -> list[TimelineCause]:
    """Return what took the time, the largest first: of several sequences that of the one that ended last."""
    found: dict[Cause, float] = {}
    for step in timeline.steps:
        if step.name == "tokenize":
            _add(found, "tokenizing", step.start_ms, _end(step.end_ms, timeline))
    attempts = _critical(timeline)
    _add_attempts(found, timeline, attempts)
    _add_reader(found, timeline, attempts)
    _add(found, "other", sum(found.values()), timeline.duration_ms)
    ranked = sorted(found.items(), key=lambda item: -item[1])
    whole = timeline.duration_ms or 1.0
    return [TimelineCause(cause, round(ms, 3), round(ms / whole, 4)) for cause, ms in ranked if ms > 0]


def _add_attempts(found: dict[Cause, float], timeline: Timeline, attempts: list[TimelineAttempt]) -> None:
    progress_ms = 0.0  # until then the request had come without a loss
    for at, attempt in enumerate(attempts):
        end_ms = _end(attempt.end_ms, timeline)
        came = _came(timeline, attempt, end_ms)
        is_lost = at + 1 < len(attempts)
        if at:
            goes_on_ms = max(progress_ms, _goes_on(attempt, came, end_ms))
            _add(found, "migration", progress_ms, goes_on_ms)
            _add_generation(found, attempt, goes_on_ms, end_ms, is_lost=is_lost, came=came)
            progress_ms = goes_on_ms
        else:
            _add_parts(found, attempt, timeline, came, is_lost=is_lost)
            progress_ms = attempt.start_ms
        if came:
            progress_ms = came[-1]


def _came(timeline: Timeline, attempt: TimelineAttempt, end_ms: float) -> list[float]:
    """Return when tokens of an attempt came."""
    deliveries = next((one.deliveries for one in timeline.tokens if one.sequence == attempt.sequence), [])
    return [ms for ms, _ in deliveries if attempt.start_ms <= ms <= end_ms]


def _critical(timeline: Timeline) -> list[TimelineAttempt]:
    """Return the attempts of the sequence that ended last."""
    if not timeline.attempts:
        return []
    last = max(timeline.attempts, key=lambda one: _end(one.end_ms, timeline))
    return [one for one in timeline.attempts if one.sequence == last.sequence]


def _goes_on(attempt: TimelineAttempt, came: list[float], end_ms: float) -> float:
    """Return when a further attempt made its first own token; its end: never."""
    if came:
        return came[0]
    generate = _named(attempt.decode, "generate")
    return generate[0].start_ms if generate else end_ms


def _add_parts(
    found: dict[Cause, float], attempt: TimelineAttempt, timeline: Timeline, came: list[float], is_lost: bool
) -> None:
    """Take the first attempt apart. Of one that was lost only what came of it: the rest is its migration's."""
    end_ms = _end(attempt.end_ms, timeline)
    if attempt.placement is not None:
        _add(found, "placement", attempt.placement.start_ms, _end(attempt.placement.end_ms, timeline))
    if is_lost and not came:
        found.pop("placement", None)
        return
    until_ms = came[-1] if is_lost else end_ms
    explained = 0.0
    for call in filter(None, (attempt.prefill, attempt.decode)):
        for name, cause in _CAUSES.items():
            for step in _named(call, name):
                explained += _add(found, cause, step.start_ms, _end(step.end_ms, timeline))
    first_ms = _generation_start(attempt, came, until_ms)
    began_ms = min((call.start_ms for call in (attempt.prefill, attempt.decode) if call is not None), default=until_ms)
    _add(found, "engine", began_ms + explained, first_ms)
    _add_generation(found, attempt, first_ms, until_ms, is_lost=is_lost, came=came)


def _generation_start(attempt: TimelineAttempt, came: list[float], until_ms: float) -> float:
    generate = _named(attempt.decode, "generate")
    return generate[0].start_ms if generate else came[0] if came else until_ms


def _add_generation(
    found: dict[Cause, float], attempt: TimelineAttempt, first_ms: float, end_ms: float, *, is_lost: bool,
    came: list[float],
) -> None:  # fmt: skip
    if attempt.decode is None:
        return
    until_ms = came[-1] if is_lost and came else min(end_ms, attempt.decode.end_ms or end_ms)
    own_ms = max(0.0, until_ms - first_ms)
    told = _named(attempt.decode, "generate")
    neighbors_ms = min(own_ms, told[0].neighbors_ms or 0.0) if told else 0.0
    preempted_ms = sum((one.end_ms or one.start_ms) - one.start_ms for one in _named(attempt.decode, "preempted"))
    preempted_ms = min(own_ms - neighbors_ms, preempted_ms)
    found["neighbors"] = found.get("neighbors", 0.0) + neighbors_ms
    found["queue"] = found.get("queue", 0.0) + preempted_ms
    found["generation"] = found.get("generation", 0.0) + own_ms - neighbors_ms - preempted_ms


def _add_reader(found: dict[Cause, float], timeline: Timeline, attempts: list[TimelineAttempt]) -> None:
    """What was left after the engine's end, where the client was waited for."""
    delivery = timeline.delivery
    if delivery is None or not delivery.waited_ms or not attempts:
        return
    made_ms = _end(attempts[-1].end_ms, timeline)
    _add(found, "reader", max(made_ms, delivery.start_ms), _end(delivery.end_ms, timeline))


_CAUSES: dict[str, Cause] = {"queue": "queue", "prefill_chunk": "prompt", "transfer": "transfer"}


def _named(call: TimelineCall | None, name: str) -> list[TimelineStep]:
    return [step for step in call.steps if step.name == name] if call is not None else []


def _end(end_ms: float | None, timeline: Timeline) -> float:
    return timeline.duration_ms if end_ms is None else end_ms


def _add(found: dict[Cause, float], cause: Cause, start_ms: float, end_ms: float) -> float:
    took_ms = max(0.0, end_ms - start_ms)
    if took_ms:
        found[cause] = found.get(cause, 0.0) + took_ms
    return took_ms
