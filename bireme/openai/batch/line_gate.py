"""How many lines of batches run at once in a process: many while nobody else asks; beside live requests few, where the
engines don't let them rest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from bireme.best_effort import QUIET_S
from bireme.openai.http.call import Call, Post


@dataclass(frozen=True, slots=True)
class Endpoint:
    post: Post
    check_model: Callable[[str], object]  # raises HttpError for a model that is not served there


class LineGate:
    """`async with gate` around a line, in the order in which they come; `live` wraps what answers all other requests.
    Used on one loop.
    """

    def __init__(self, most: int, most_beside_live: int) -> None:
        self._most, self._most_beside_live = most, most_beside_live
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_running = self._num_live = 0
        self._quiet: asyncio.TimerHandle | None = None  # while the last live request has just ended

    def live(self, post: Post) -> Post:
        """Return the same, for a request that is no line."""

        async def answer(call: Call, data: bytes) -> None:
            self._num_live += 1
            self._end_quiet()
            try:
                await post(call, data)
            finally:
                self._num_live -= 1
                if not self._num_live:
                    self._quiet = asyncio.get_running_loop().call_later(QUIET_S, self._pass_on)

        return answer

    async def __aenter__(self) -> None:
        if not self._waiting and self._has_room():
            self._num_running += 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # it had its turn just now
                self._leave()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _has_room(self) -> bool:
        is_beside = self._num_live or self._quiet is not None
        return self._num_running < (self._most_beside_live if is_beside else self._most)

    def _leave(self) -> None:
        self._num_running -= 1
        self._let_in()

    def _pass_on(self) -> None:
        self._end_quiet()
        self._let_in()

    def _end_quiet(self) -> None:
        if self._quiet is not None:
            self._quiet.cancel()
            self._quiet = None

    def _let_in(self) -> None:
        while self._waiting and self._has_room():
            place = self._waiting.popleft()
            if not place.done():
                self._num_running += 1
                place.set_result(None)
