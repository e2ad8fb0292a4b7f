"""Which workers a session has: its requests stay with them while they are there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import xxhash


class SessionTable:
    """The workers of sessions heard of in the last `ttl_s`; at most `max_sessions`, the one silent longest goes first.

    A new session gets the worker whose hash with it is highest (rendezvous hashing), so that routers that never talk to
    each other choose the same one. The table keeps it there when workers join.
    """

    def __init__(self, ttl_s: float, max_sessions: int) -> None:
        self._ttl_s, self._max_sessions = ttl_s, max_sessions
        self._workers: OrderedDict[tuple[str, str], tuple[str, float]] = (
            OrderedDict()
        )  # -> worker, expiry; oldest first

    def __len__(self) -> int:
        return len(self._workers)

    def worker(self, session_id: str, stage: str, allowed: Iterable[str], now: float) -> str:
        """Return the session's worker of a stage, one of `allowed` (at least one)."""
        self._expire(now)
        names = set(allowed)
        known, _ = self._workers.pop((session_id, stage), ("", 0.0))
        chosen = known if known in names else max(names, key=lambda name: (_affinity(session_id, name), name))
        self._workers[(session_id, stage)] = chosen, now + self._ttl_s
        if len(self._workers) > self._max_sessions:
            self._workers.popitem(last=False)
        return chosen

    def _expire(self, now: float) -> None:
        while self._workers:
            key, (_, expires_at) = next(iter(self._workers.items()))
            if expires_at > now:
                return
            del self._workers[key]


def _affinity(session_id: str, worker: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{session_id}\0{worker}".encode())
