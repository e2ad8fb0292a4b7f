"""Admission to the bounded transfer buffer, first come first served.

What can never fit is refused at once, so the head of the queue always fits into the drained buffer and no wait is
endless.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from bireme.errors import RequestError
from bireme.kv.transfer.chunks import TransferPlan

DEFAULT_LIMIT_BYTES = 1 << 30
_T = TypeVar("_T")


class TransferBuffer(Generic[_T]):
    """Counts bytes; owns no memory. Used by one thread."""

    def __init__(self, max_tokens: int | None, bytes_per_token: int) -> None:
        """`max_tokens` None: 1 GiB, and a transfer larger than that goes alone, bounded by /dev/shm."""
        self._max_tokens = max_tokens
        self.limit_bytes = DEFAULT_LIMIT_BYTES if max_tokens is None else max_tokens * bytes_per_token
        self.used_bytes = 0
        self._waiting: deque[tuple[_T, int]] = deque()

    def check(self, plan: TransferPlan) -> None:
        """Raise RequestError for a transfer that could never start."""
        if self._max_tokens is not None and plan.num_bytes > self.limit_bytes:
            raise RequestError(
                f"KV transfer of {plan.num_tokens} tokens ({plan.num_bytes} bytes); the buffer holds"
                f" {self._max_tokens} tokens ({self.limit_bytes} bytes): raise"
                " cache_transceiver_config.max_tokens_in_buffer or send a shorter prompt"
            )

    def enqueue(self, item: _T, num_bytes: int) -> None:
        self._waiting.append((item, num_bytes))

    def admit(self) -> _T | None:
        """Return the head of the queue if it fits (its bytes are in use from now), else None."""
        if not self._waiting:
            return None
        item, num_bytes = self._waiting[0]
        if self.used_bytes and self.used_bytes + num_bytes > self.limit_bytes:
            return None
        self._waiting.popleft()
        self.used_bytes += num_bytes
        return item

    def put_back(self, item: _T, num_bytes: int) -> None:
        """Undo an admission: the item is the head again."""
        self.free(num_bytes)
        self._waiting.appendleft((item, num_bytes))

    def withdraw(self, item: _T) -> None:
        self._waiting = deque(entry for entry in self._waiting if entry[0] is not item)

    def free(self, num_bytes: int) -> None:
        self.used_bytes -= num_bytes
        assert self.used_bytes >= 0
