"""Workers of the same tritonserver: unary calls by BLS, decode over the token bus on gRPC loopback."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

from bireme.config import stage_of
from bireme.errors import NotFoundError
from bireme.messages import Capacity, EngineRequest, Sink
from bireme.metrics import Registry
from bireme.multimodal.wire import EncodeAnswer, EncodeJob
from bireme.types import Tensors
from bireme.workers import unary
from bireme.workers.base import Generation, PrefillResult
from bireme.workers.bus_encodes import BusEncodes
from bireme.workers.buses import Buses

Call = Callable[[str, Tensors], Awaitable[Tensors]]


class LocalWorkers:
    """WorkerClient of a pipeline inside Triton. `call` is StageContext.call_async: a bounded pool of threads."""

    def __init__(
        self, call: Call, stall_timeout_s: float, address: str | None = None, metrics: Registry | None = None
    ) -> None:
        self._call = call
        self._buses = Buses(stall_timeout_s, address, metrics)
        self._encodes = BusEncodes(self._buses)

    async def tokenize(self, text: str) -> list[int]:
        return unary.input_ids(await self._call("tokenizer", unary.tokenize_inputs(text)))

    async def prefill(self, worker: str, request: EngineRequest, request_id: str) -> PrefillResult:
        return unary.prefill_result(await self._call(worker, unary.prefill_inputs(request, request_id)))

    async def abort_prefill(self, worker: str, request_id: str) -> None:
        await self._call(worker, unary.abort_inputs(request_id))

    async def encode(self, worker: str, job: EncodeJob, request_id: str, timeout_ms: int) -> EncodeAnswer:
        request = unary.encode_request(job, timeout_ms)
        if stage_of(worker) == "decode":
            return await self._encodes.run(worker, request, request_id)
        return unary.encode_answer(await self._call(worker, unary.prefill_inputs(request, request_id)))

    async def abort_encode(self, worker: str, request_id: str) -> None:
        if stage_of(worker) == "decode":
            return self._encodes.abort(request_id)
        with contextlib.suppress(NotFoundError):
            await self._call(worker, unary.abort_inputs(request_id))

    def decode(self, worker: str, request: EngineRequest, sink: Sink) -> Generation:
        return self._buses.decode(worker, request, sink)

    def capacity(self, worker: str) -> Capacity | None:
        return self._buses.capacity(worker)

    async def close(self) -> None:
        await self._buses.close()
