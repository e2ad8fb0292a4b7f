"""Requests that were in an engine when it stalled, and nobody could tell for whose sake: they begin one at a time.

One of them may stall this engine, too. So each is alone among its like until it has made a few tokens, and is named
meanwhile (own_work.py): a second stall ends it and not those that wait. Other requests are served beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from bireme.engines.base import PlainTokens, RequestKey, StepOutput
from bireme.own_work import OwnWork

_NUM_TOKENS = 2  # that its prompt and one step of its own have made: it has come past the place


class Trials:
    """Belongs to the IO thread."""

    def __init__(self, own_work: OwnWork) -> None:
        self._own_work = own_work
        self._waiting: deque[tuple[RequestKey, Callable[[], bool]]] = deque()
        self._num_tokens = 0
        self.tried: RequestKey | None = None

    def add(self, key: RequestKey, start: Callable[[], bool]) -> None:
        """`start` is called in its turn; it returns whether the engine has it."""
        self._waiting.append((key, start))
        self._go_on()

    def remove(self, key: RequestKey) -> bool:
        """Return whether it was waiting, and is forgotten now."""
        before = len(self._waiting)
        self._waiting = deque(item for item in self._waiting if item[0] != key)
        return len(self._waiting) < before

    def see(self, deltas: Iterable[StepOutput], plain: PlainTokens | None) -> None:
        key = self.tried
        if plain is not None:
            self._num_tokens += plain.keys.count(key) if key is not None else 0
        mine = [delta for delta in deltas if delta.key == key]
        self._num_tokens += sum(len(delta.tokens) for delta in mine)
        if self._num_tokens >= _NUM_TOKENS or any(delta.finish is not None for delta in mine):
            self._own_work.try_alone(None)
            self.tried = None
            self._go_on()

    def _go_on(self) -> None:
        while self.tried is None and self._waiting:
            key, start = self._waiting.popleft()
            self.tried, self._num_tokens = key, 0
            self._own_work.try_alone(key)
            if not start():
                self._own_work.try_alone(None)
                self.tried = None
