"""Which of what a campaign saw must not be: nothing else decides whether it has failed.

A failed request belongs to the faults under whose windows it ran. It is excused where one of them excuses its way
and the error is an honest one. Readiness lies when it says ready while a way in answers nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.chaos.faults import HONEST, excuses, may_hang
from benchmarks.chaos.records import Hit, Probe, Readiness, Request, Seen, ServerDeath
from benchmarks.chaos.ways import Way

LIE_S = 5.0  # readiness may be wrong for so long
RESOLUTION_S = 0.5  # probes are a second apart: a way is down for half of that less or more than they show
AFTERMATH_S = 3.0  # connections that a dead process held are found broken, one after the other
STALL_TIMEOUT_S = 30.0  # the recipes' pipeline.stall_timeout_s: an engine that is not back by then is late

LOCK_TIMEOUT_S = 20.0  # a server that waits for a dead stub's lock ends itself after ten seconds, and some to notice
DEATH_SEEN_S = 2.0  # a death is seen so long after it at most

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not be. `hits`: the numbers of the faults that it is counted under."""

    kind: str  # wrong, hung, failed, dishonest, lie, not_recovered, server_died, left, stop, load
    text: str
    hits: tuple[int, ...] = ()


def judge(seen: Seen, hits: Sequence[Hit], ways: Mapping[str, Way]) -> list[Violation]:
    outages = [outage(death, seen, ways) for death in seen.deaths if _is_explained(death, hits)]
    found = [item for request in seen.requests if (item := judge_request(request, hits, ways, outages))]
    found += [
        Violation("wrong", f"probe of {probe.way}: {probe.error}", hits_under(probe.sent, probe.ended, hits))
        for probe in seen.probes
        if probe.error.startswith("WRONG")
    ]
    found += lies(seen, hits, ways)
    for death in seen.deaths:
        if not _is_explained(death, hits):
            under = hits_under(death.at, death.at, hits)
            found.append(Violation("server_died", f"tritonserver died{_names(under, hits)}", under))
    for number, hit in enumerate(hits):
        if hit.recovered is None:
            found.append(Violation("not_recovered", f"{hit.fault}: not all was well again", (number,)))
    return _merged(found)


def judge_request(
    request: Request, hits: Sequence[Hit], ways: Mapping[str, Way], outages: Sequence[Span]
) -> Violation | None:
    way = ways[request.way]
    num_decode = sum(name.startswith("decode") for name in ways)
    if request.outcome in ("ok", "dropped"):
        return None
    under = hits_under(request.began, request.ended, hits)
    what = f"{way.name}: {request.error}" + _names(under, hits)
    if request.outcome == "wrong":
        return Violation("wrong", what, under)
    if request.outcome == "hung":
        return None if any(may_hang(hits[number].fault, way) for number in under) else Violation("hung", what, under)
    is_without_server = any(begin <= request.ended and request.began <= end for begin, end in outages)
    if not is_without_server and not any(_excuses(hits[number], way, num_decode) for number in under):
        return Violation("failed", what, under)
    return None if HONEST.search(request.error) else Violation("dishonest", what, under)


def lies(seen: Seen, hits: Sequence[Hit], ways: Mapping[str, Way]) -> list[Violation]:
    """Return where a way in answered nothing for more than LIE_S while readiness said ready all the time.

    `degraded` is the truth about a worker that a client calls itself. Time in which the machine did not run the
    observer is nobody's.
    """
    found = []
    for name, way in ways.items():
        told = ready_spans(seen.readiness, is_strict=way.is_direct)
        for down in down_spans([probe for probe in seen.probes if probe.way == name]):
            for begin, end in _overlaps(down, told):
                if end - begin > LIE_S + RESOLUTION_S + seen.delay_s(begin, end):
                    under = hits_under(begin, end, hits)
                    text = f"ready for {end - begin:.1f} s while {name} answered nothing" + _names(under, hits)
                    found.append(Violation("lie", text, under))
    return found


def down_spans(probes: Sequence[Probe]) -> list[Span]:
    """Return from when to when a way answered nothing: from its first failed probe to the next that succeeds.

    Both count from when they were sent. A way that is down at the end is so until its last probe's end.
    """
    spans: list[Span] = []
    since: float | None = None
    for probe in sorted(probes, key=lambda probe: probe.sent):
        if probe.error and since is None:
            since = probe.sent
        elif not probe.error and since is not None:
            spans.append((since, probe.sent))
            since = None
    if since is not None:
        spans.append((since, max(probe.ended for probe in probes)))
    return spans


def ready_spans(samples: Sequence[Readiness], is_strict: bool) -> list[Span]:
    """Return from when to when every answer was `ready`; with `is_strict` `degraded` is none."""
    spans: list[Span] = []
    since = last = math.nan
    for sample in samples:
        is_ready = sample.is_ready and not (is_strict and sample.status != "ready")
        if is_ready:
            since, last = (sample.at if math.isnan(since) else since), sample.at
        elif not math.isnan(since):
            spans.append((since, last))
            since = math.nan
    return spans if math.isnan(since) else [*spans, (since, last)]


def longest_lie_s(seen: Seen, hit: Hit, ways: Mapping[str, Way]) -> float:
    """Return how long readiness lied about any way under one fault; for the table."""
    window = hit.window()
    return max(
        (
            min(end, window[1]) - max(begin, window[0])
            for name, way in ways.items()
            for down in down_spans([probe for probe in seen.probes if probe.way == name])
            for begin, end in _overlaps(down, ready_spans(seen.readiness, is_strict=way.is_direct))
            if end > window[0] and begin < window[1]
        ),
        default=0.0,
    )


def judge_drain(requests: Sequence[Request], signaled: float) -> list[Violation]:
    """What ran when the stop was asked for ends as it should; what came later is refused honestly."""
    found = []
    for request in requests:
        if request.outcome in ("wrong", "hung") or (request.outcome == "failed" and request.began < signaled):
            found.append(Violation("stop", f"under way at the stop: {request.way}: {request.outcome} {request.error}"))
        elif request.outcome == "failed" and not HONEST.search(request.error):
            found.append(Violation("stop", f"after the stop: {request.way}: {request.error}"))
    return _merged(found)


def outage(death: ServerDeath, seen: Seen, ways: Mapping[str, Way]) -> Span:
    """Return from when to when a dead server can be noticed: until every way has answered what was sent after it."""
    served = {name: math.inf for name, way in ways.items() if way.is_probed}
    for probe in seen.probes:
        if probe.sent > death.at and not probe.error and probe.way in served:
            served[probe.way] = min(served[probe.way], probe.ended)
    return death.at - DEATH_SEEN_S, max(served.values(), default=math.inf) + AFTERMATH_S


def _excuses(hit: Hit, way: Way, num_decode: int) -> bool:
    is_late = hit.recovery_s is None or hit.recovery_s > STALL_TIMEOUT_S
    return excuses(hit.fault, way, is_late, num_decode)


def _is_explained(death: ServerDeath, hits: Sequence[Hit]) -> bool:
    """Return whether a fault before this death may end the server.

    Triton 2.51 goes down with a stub that dies or stands still while it holds one of the locks that they share, ten
    seconds later at times (docs/troubleshooting.md); and a launch may begin again without its run folder.
    """
    for hit in hits:
        is_stub = hit.fault.kind.startswith("stub") or hit.fault.victim.endswith(".stub")
        begin, end = hit.window()
        if hit.fault.kind.startswith(("server", "run")) and begin <= death.at <= end + AFTERMATH_S:
            return True
        if is_stub and begin <= death.at <= end + LOCK_TIMEOUT_S:
            return True
    return False


def hits_under(began: float, ended: float, hits: Sequence[Hit]) -> tuple[int, ...]:
    spans = [hit.window() for hit in hits]
    return tuple(n for n, (begin, end) in enumerate(spans) if began <= end + AFTERMATH_S and ended >= begin)


def _names(under: Sequence[int], hits: Sequence[Hit]) -> str:
    return f" (under {', '.join(str(hits[number].fault) for number in under)})" if under else " (under no fault)"


def _overlaps(span: Span, others: Sequence[Span]) -> list[Span]:
    found = [(max(span[0], begin), min(span[1], end)) for begin, end in others]
    return [(begin, end) for begin, end in found if end > begin]


def _merged(found: Sequence[Violation]) -> list[Violation]:
    """Return each text once, with how often it came."""
    counts = Counter((item.kind, item.text, item.hits) for item in found)
    return [Violation(kind, f"{n} x {text}" if n > 1 else text, hits) for (kind, text, hits), n in counts.items()]
