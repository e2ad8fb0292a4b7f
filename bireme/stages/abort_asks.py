"""Stopping a request by its id in a worker of several stubs: the one that is told to may not be the one that has it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING

from bireme.errors import NotFoundError
from bireme.messages import encode
from bireme.stages.requests import RequestNames

if TYPE_CHECKING:
    from bireme.engines.stub.client import EngineClient

ANSWER_S = 2.0  # a stub that stands still may have the request; it is ended soon, and the request with it


class AbortAsks:
    """Asks the other stubs, and answers theirs. Used on one loop."""

    def __init__(self, engine: EngineClient, names: RequestNames) -> None:
        self._engine, self._names = engine, names
        self._asks: dict[int, tuple[set[int], asyncio.Future[bool]]] = {}  # stubs that have not answered; the result
        self._numbers = itertools.count(1)

    async def ask(self, name: str) -> bool:
        """Have the other stub that runs the request stop it; return whether one did."""
        if not self._engine.peers:
            return False
        ask, found = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asks[ask] = (set(self._engine.peers), found)
        try:
            self._engine.tell(encode(("abort", ask, name)))
            return await asyncio.wait_for(found, ANSWER_S)
        except TimeoutError:
            return False
        finally:
            del self._asks[ask]

    def on_told(self, verb: str, slot: int, ask: int, value: str | bool) -> None:
        if verb == "abort":
            self._engine.tell(encode(("aborted", ask, self._abort(str(value)))), slot)
            return
        silent, found = self._asks.get(ask, (set(), None))
        silent.discard(slot)
        if found is not None and not found.done() and (value or not silent):
            found.set_result(bool(value))

    def _abort(self, name: str) -> bool:
        with contextlib.suppress(NotFoundError):
            if number := self._names.find(name):
                self._engine.abort(number)
            return True
        return False
