"""The requests that an engine process has taken and not yet answered, and their metrics.

Every request that enters leaves with exactly one Finish. One that nobody waits for any more (its consumer
is gone, or its number was used twice) stays, muted, until the engine has let go of it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from bireme.engines.base import RequestKey
from bireme.messages import Finish
from bireme.metrics import Registry


class Record:
    """One request in flight."""

    __slots__ = ("arrived_at", "digest", "first_at", "is_muted", "num_prompt", "num_tokens")

    def __init__(self, num_prompt: int, digest: str) -> None:
        self.arrived_at = time.monotonic()
        self.first_at = 0.0
        self.num_prompt = num_prompt
        self.num_tokens = 0
        self.digest = digest  # of the prompt; goes into what a context_only request exports
        self.is_muted = False


class Ledger:
    """Owned by the IO thread."""

    def __init__(self, metrics: Registry) -> None:
        self._records: dict[RequestKey, Record] = {}
        self._metrics = metrics

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._records

    def enter(self, key: RequestKey, num_prompt: int, digest: str = "") -> None:
        self._records[key] = Record(num_prompt, digest)

    def get(self, key: RequestKey) -> Record | None:
        return self._records.get(key)

    def of_consumer(self, consumer: int) -> list[RequestKey]:
        return [key for key in self._records if key[0] == consumer]

    def keys(self) -> Iterator[RequestKey]:
        return iter(self._records)

    def count_tokens(self, firsts: list[Record]) -> None:
        """Note the time of first tokens."""
        now = time.monotonic()
        for record in firsts:
            record.first_at = now
            self._metrics.observe("bireme_time_to_first_token_seconds", now - record.arrived_at)

    def leave(self, key: RequestKey, finish: Finish | None) -> None:
        """Forget a request and count how it ended; None: it was never taken by the engine."""
        record = self._records.pop(key, None)
        if record is None or finish is None:
            return
        now, observe = time.monotonic(), self._metrics.observe
        self.count_outcome(finish)
        observe("bireme_request_seconds", now - record.arrived_at)
        observe("bireme_prompt_tokens", record.num_prompt)
        observe("bireme_completion_tokens", record.num_tokens)
        if record.num_tokens > 1:
            observe("bireme_inter_token_latency_seconds", (now - record.first_at) / (record.num_tokens - 1))

    def count_outcome(self, finish: Finish) -> None:
        outcome = finish.error.partition(":")[0] if finish.error else finish.reason
        self._metrics.add("bireme_requests_total", 1, outcome)
        if finish.reason == "cancelled":
            self._metrics.add("bireme_cancellations_total")

    def summary(self) -> str:
        """Return how many requests each consumer has, for the log."""
        counts = Counter(key[0] for key in self._records)
        return ",".join(f"{consumer}:{count}" for consumer, count in sorted(counts.items()))
