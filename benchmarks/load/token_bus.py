"""Load over the token bus, with the very client that pipelines and the frontend use (bireme.workers.bus)."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

from benchmarks.load.meter import LoadError, Trace
from benchmarks.load.workload import TEMPERATURE
from bireme.messages import EngineRequest, Finish, SamplingParams
from bireme.workers.bus import Bus, BusRequest
from bireme.workers.grpc import GrpcChannel

STALL_TIMEOUT_S = 30.0


class TokenBus:
    def __init__(self, target: str, worker: str = "decode") -> None:
        self.target, self.worker = target, worker
        self._requests: dict[int, BusRequest] = {}
        self._channel = GrpcChannel(target)

    async def open(self) -> None:
        self._bus = Bus(self.worker, self._channel, STALL_TIMEOUT_S, metrics=None)

    async def request(self, slot: int, trace: Trace) -> None:
        sink = TraceSink(trace)
        self._requests[slot] = self._bus.submit(make_request(trace), sink)
        try:
            await sink.ended
        except asyncio.CancelledError:
            self.drop(slot)
            raise

    def drop(self, slot: int) -> None:
        if request := self._requests.get(slot):
            request.abort()

    async def close(self) -> None:
        await self._bus.close()
        await self._channel.close()


def make_request(trace: Trace) -> EngineRequest:
    prompt = trace.prompt
    temperature = None if prompt.seed is None else TEMPERATURE
    sampling = SamplingParams(
        max_tokens=len(prompt.expected), ignore_eos=True, temperature=temperature, seed=prompt.seed
    )
    return EngineRequest(prompt=prompt.ids_bytes, sampling=sampling)


class TraceSink:
    """Hands an engine's news to a trace; what the trace finds wrong ends the request."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._wrong: LoadError | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def push(self, tokens: Sequence[int], logprobs: object = None, prompt_logprobs: object = None) -> None:
        try:
            self._trace.push(array("i", tokens))
        except LoadError as error:
            self._wrong = self._wrong or error

    def finish(self, finish: Finish) -> None:
        try:
            if self._wrong or finish.error:
                raise self._wrong or LoadError(finish.error)
            if finish.reason == "cancelled" and (self._trace.is_dropped or self._trace.is_stalled):
                raise LoadError("cancelled by this client")
            self._trace.finish(finish.reason)
        except LoadError as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: LoadError | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
