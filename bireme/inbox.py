"""From any thread to one reader, which is called once for all that waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Inbox(Generic[_T]):
    """`put` on any thread; `drain` on the reader's."""

    def __init__(self, call: Callable[[], None]) -> None:
        """`call`: has the reader drain soon, on the thread that puts. Not called again before a drain has begun.

        So a reader drains whenever it was called, also when nothing waits: the drain before has taken that, too.
        """
        self._items: deque[_T] = deque()
        self._call, self._has_called = call, False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: _T) -> None:
        """Never waits."""
        self._items.append(item)
        if not self._has_called:
            self._has_called = True
            self._call()

    def drain(self) -> Iterator[_T]:
        """Take what is there, the oldest first, and what comes meanwhile."""
        self._has_called = False  # before the items are read: for later ones the reader is called again
        while self._items:
            yield self._items.popleft()
