"""Callables for the control thread, from any thread; an eventfd wakes its poll."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable


class Mailbox:
    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._letters: deque[Callable[[], None]] = deque()
        self._is_closed = False

    def post(self, letter: Callable[[], None]) -> bool:
        """Queue it. False after `close`: it will not run."""
        with self._lock:
            if self._is_closed:
                return False
            self._letters.append(letter)
            os.eventfd_write(self.descriptor, 1)
            return True

    def take(self) -> list[Callable[[], None]]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        with self._lock:
            letters = list(self._letters)
            self._letters.clear()
        return letters

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.descriptor)
