"""Connections that wait for a request or the rest of one: how many there may be, and which goes for a new one.

Whoever can reach the port may open connections and say nothing. Each has a descriptor, and without one left nobody is
heard: the connection that has been silent for the longest is closed before that.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from typing import Protocol

_OWN_DESCRIPTORS = 256  # of files, databases, and connections to workers
_LOG_S = 10.0
logger = logging.getLogger("bireme.openai")


class Waiting(Protocol):
    transport: asyncio.Transport


class IdleConnections:
    """Those of one process, the longest silent first. Used on its loop, in constant time."""

    def __init__(self, most: int, num_descriptors: int) -> None:
        """`num_descriptors`: that this process may have open."""
        self._most = most
        self._most_open = max(num_descriptors - _OWN_DESCRIPTORS, num_descriptors // 2)
        self._all: dict[Waiting, None] = {}
        self._num_closed, self._log_at = 0, 0.0

    def add(self, connection: Waiting, num_open: int) -> None:
        """It waits from now on. `num_open`: connections that are open now, also those with a request under way."""
        self._all[connection] = None
        if len(self._all) > self._most or num_open > self._most_open:
            self._close_oldest()

    def touch(self, connection: Waiting) -> None:
        """It has sent a part of its request's body."""
        if connection in self._all:
            del self._all[connection]
            self._all[connection] = None

    def remove(self, connection: Waiting) -> None:
        """Its request is whole, or it is closed. Harmless when called again."""
        self._all.pop(connection, None)

    def _close_oldest(self) -> None:
        oldest = next(iter(self._all))
        del self._all[oldest]
        oldest.transport.abort()  # a TLS connection that is closed has its descriptor until its silent client answers
        self._num_closed += 1
        if (now := time.monotonic()) >= self._log_at:
            logger.warning(
                "idle_connections_closed count=%d waiting=%d frontend.max_idle_connections=%d most_open=%d",
                self._num_closed, len(self._all), self._most, self._most_open,
            )  # fmt: skip
            self._num_closed, self._log_at = 0, now + _LOG_S


def raise_descriptors() -> int:
    """Let this process have as many descriptors as it may; return how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
