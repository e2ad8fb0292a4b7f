"""Encodes on a decode worker that has the vision tower: requests of the token bus that make no tokens."""

from __future__ import annotations

import asyncio
from functools import partial

from bireme.errors import BiremeError, EngineLostError, RequestCancelledError, UnavailableError, from_message
from bireme.messages import EngineRequest, Finish
from bireme.multimodal.answers import EncodeSink
from bireme.multimodal.wire import EncodeAnswer, decode_answer
from bireme.workers.base import Generation
from bireme.workers.buses import Buses


class BusEncodes:
    """Used on one loop."""

    def __init__(self, buses: Buses) -> None:
        self._buses = buses
        self._running: dict[str, Generation] = {}  # by request id

    async def run(self, worker: str, request: EngineRequest, request_id: str) -> EncodeAnswer:
        """Return the answer. Raises EngineLostError when the engine was lost with it."""
        finished: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()
        sink = EncodeSink(partial(_settle, finished))
        generation = self._running[request_id] = self._buses.decode(worker, request, sink)
        try:
            finish = await finished
        finally:
            del self._running[request_id]
        if finish.encoded is not None:
            return decode_answer(finish.encoded)
        raise _reason(generation, finish)

    def abort(self, request_id: str) -> None:
        if (generation := self._running.get(request_id)) is not None:
            generation.abort()


def _settle(finished: asyncio.Future[Finish], finish: Finish) -> None:
    if not finished.done():  # nobody waits any more
        finished.set_result(finish)


def _reason(generation: Generation, finish: Finish) -> BiremeError:
    if generation.failure is not None:
        return generation.failure
    if not finish.error:
        return RequestCancelledError("the request was aborted")
    error = from_message(finish.error)
    return EngineLostError(str(error)) if isinstance(error, UnavailableError) else error
