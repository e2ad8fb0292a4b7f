"""One request as its client sees it, and the totals of all of them.

A `Trace` compares every token with the expected one at the moment it comes; nothing is sampled. Times and
counts enter the totals only while the meter is on; errors always do.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.load.workload import Prompt

MAX_DISTINCT_ERRORS = 50
clock = time.perf_counter


class LoadError(Exception):
    """The server, or the way to it, did not do what it should for this request."""


class WrongAnswerError(LoadError):
    """It answered, and the answer is not the expected one."""


class Meter:
    """Totals of one load. Used from one thread."""

    def __init__(self) -> None:
        self.is_on = False
        self.began_at = self.ended_at = 0.0
        self.tokens = self.responses = self.requests = self.dropped = 0
        self.ttft_s, self.gap_s, self.itl_s = array("d"), array("d"), array("d")
        self.errors: Counter[str] = Counter()

    def start(self) -> None:
        self.is_on, self.began_at = True, clock()

    def stop(self) -> None:
        self.is_on, self.ended_at = False, clock()

    def fail(self, message: str) -> None:
        known = message in self.errors or len(self.errors) < MAX_DISTINCT_ERRORS
        self.errors[message if known else "further errors"] += 1

    def report(self) -> Report:
        """Return the figures of the time that the meter was, or still is, on."""
        seconds = max((self.ended_at or clock()) - self.began_at, 1e-9) if self.began_at else 0.0
        ttft, itl, gap = sorted(self.ttft_s), sorted(self.itl_s), sorted(self.gap_s)
        return Report(
            seconds=round(seconds, 3),
            tokens=self.tokens,
            tokens_per_s=round(self.tokens / seconds, 1) if seconds else 0.0,
            responses_per_s=round(self.responses / seconds, 1) if seconds else 0.0,
            requests=self.requests,
            dropped=self.dropped,
            ttft_p50_ms=_ms(ttft, 0.50),
            ttft_p99_ms=_ms(ttft, 0.99),
            itl_p50_ms=_ms(itl, 0.50),
            itl_p99_ms=_ms(itl, 0.99),
            gap_p99_ms=_ms(gap, 0.99),
            gap_max_ms=_ms(gap, 1.0),
            errors=dict(self.errors),
        )


@dataclass(frozen=True, slots=True)
class Report:
    seconds: float
    tokens: int
    tokens_per_s: float
    responses_per_s: float
    requests: int  # ended as they should
    dropped: int  # left by the client on purpose
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None  # mean gap within a request
    itl_p99_ms: float | None
    gap_p99_ms: float | None  # between two responses with tokens
    gap_max_ms: float | None
    errors: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def percentile(ordered: Sequence[float], q: float) -> float | None:
    """Return the nearest-rank percentile of sorted values; None of no values."""
    if not ordered:
        return None
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)]


def _ms(ordered: Sequence[float], q: float) -> float | None:
    value = percentile(ordered, q)
    return None if value is None else round(1e3 * value, 3)


class Trace:
    """One request under way."""

    __slots__ = ("count", "first_at", "is_dropped", "is_stalled", "last_at", "meter", "prompt", "sent_at", "texts")

    def __init__(self, meter: Meter, prompt: Prompt) -> None:
        self.meter, self.prompt = meter, prompt
        self.sent_at = self.last_at = clock()
        self.first_at = 0.0
        self.count = 0
        self.texts: list[bytes] = []
        self.is_dropped = self.is_stalled = False

    def push(self, tokens: array[int], text: bytes = b"") -> None:
        """Take what one response brought. Raises WrongAnswerError at the first token that is not the expected one."""
        now, meter, num_new = clock(), self.meter, len(tokens)
        if text:
            self.texts.append(text)
        if num_new:
            if tokens != self.prompt.expected[self.count : self.count + num_new]:
                raise WrongAnswerError(self._explain(tokens))
            if meter.is_on:
                meter.tokens += num_new
                (meter.gap_s if self.count else meter.ttft_s).append(now - self.last_at)
            self.first_at = self.first_at or now
            self.count += num_new
            self.last_at = now
        meter.responses += meter.is_on

    def finish(self, reason: str) -> None:
        """Take the end. Raises WrongAnswerError when it came too early, or the text is not that of the tokens."""
        expected = self.prompt
        if reason != "length" or self.count != len(expected.expected):
            raise WrongAnswerError(f"ended with {reason!r} after {self.count} of {len(expected.expected)} tokens")
        if expected.text is not None and self.texts:
            self._check_text(b"".join(self.texts), expected.text)
        if self.meter.is_on:
            self.meter.requests += 1
            if self.count > 1:
                self.meter.itl_s.append((self.last_at - self.first_at) / (self.count - 1))

    def _explain(self, tokens: array[int]) -> str:
        """Name the kind of the fault: it tells where to look."""
        expected, at = self.prompt.expected, self.count
        wrong = next((i for i, (a, b) in enumerate(zip(tokens, expected[at:], strict=False)) if a != b), None)
        if wrong is None:
            return f"{at + len(tokens) - len(expected)} tokens more than asked for"
        got = list(tokens[wrong:])
        if at + wrong and got[0] in expected[: at + wrong]:
            return "a token came again or late"
        if got[0] in expected[at + wrong :]:
            return "tokens are missing before one that is expected later"
        return "a token that belongs to no place of this answer"

    @staticmethod
    def _check_text(data: bytes, expected: str) -> None:
        if data != expected.encode():
            common = next((i for i, (a, b) in enumerate(zip(data, expected.encode(), strict=False)) if a != b), None)
            raise WrongAnswerError(f"the text is not that of the tokens (differs at byte {common})")
