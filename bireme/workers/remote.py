"""Workers of a tritonserver reached over gRPC: for programs outside Triton, such as the OpenAI frontend."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import Any

from bireme.config import stage_of
from bireme.errors import EngineLostError, NotFoundError, UnavailableError
from bireme.messages import Capacity, EngineRequest, Sink
from bireme.metrics import Registry
from bireme.multimodal.wire import EncodeAnswer, EncodeJob
from bireme.types import Array, Tensors
from bireme.workers import unary
from bireme.workers.base import Generation, PrefillResult
from bireme.workers.bus_encodes import BusEncodes
from bireme.workers.buses import Buses
from bireme.workers.channel import infer_request, model_ready, outputs_of, rpc_error, unary_method

_NOBODY = secrets.token_hex(16)  # a request id that no request has


class RemoteWorkers:
    """WorkerClient over one gRPC channel. Use it on one loop."""

    def __init__(self, stall_timeout_s: float, address: str | None = None, metrics: Registry | None = None) -> None:
        self._buses = Buses(stall_timeout_s, address, metrics)
        self._encodes = BusEncodes(self._buses)
        self._stall_timeout_s = stall_timeout_s
        self._infer: Any = None

    async def tokenize(self, text: str) -> list[int]:
        return unary.input_ids(await self._call("tokenizer", unary.tokenize_inputs(text)))

    async def prefill(self, worker: str, request: EngineRequest, request_id: str) -> PrefillResult:
        return unary.prefill_result(await self._watched(worker, unary.prefill_inputs(request, request_id)))

    async def abort_prefill(self, worker: str, request_id: str) -> None:
        await self._call(worker, unary.abort_inputs(request_id))

    async def encode(self, worker: str, job: EncodeJob, request_id: str, timeout_ms: int) -> EncodeAnswer:
        request = unary.encode_request(job, timeout_ms)
        if stage_of(worker) == "decode":
            return await self._encodes.run(worker, request, request_id)
        return unary.encode_answer(await self._watched(worker, unary.prefill_inputs(request, request_id)))

    async def abort_encode(self, worker: str, request_id: str) -> None:
        if stage_of(worker) == "decode":
            return self._encodes.abort(request_id)
        with contextlib.suppress(NotFoundError):
            await self._call(worker, unary.abort_inputs(request_id))

    def decode(self, worker: str, request: EngineRequest, sink: Sink) -> Generation:
        return self._buses.decode(worker, request, sink)

    async def is_ready(self, model: str) -> bool:
        """Ask the server whether a model is ready; false also when no server answers."""
        import grpc

        try:
            return await model_ready(self._buses.channel(), model)
        except grpc.aio.AioRpcError:
            return False

    async def check(self, worker: str) -> None:
        """Return when the worker takes requests: Triton has the model, its stub answers and its engine is up.

        Raises UnavailableError with what the server or the worker says; waits for as long as a dead stub is silent.
        """
        import grpc

        try:
            is_loaded = await model_ready(self._buses.channel(), worker)
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error, self._buses.address) from error
        if not is_loaded:
            raise UnavailableError(f"{worker}: not loaded")
        await (self._buses.check(worker) if stage_of(worker) == "decode" else self._greet(worker))

    def capacity(self, worker: str) -> Capacity | None:
        """Return what a decode worker's engine takes, if it has been heard of."""
        return self._buses.capacity(worker)

    async def close(self) -> None:
        await self._buses.close()
        self._infer = None

    async def _watched(self, worker: str, inputs: dict[str, Array]) -> Tensors:
        """Call a prefill worker for as long as it gives a sign of life: a dead stub would be silent for ever."""
        call = asyncio.ensure_future(self._call(worker, inputs))
        interval_s = self._stall_timeout_s / 2
        try:
            while not (await asyncio.wait({call}, timeout=interval_s))[0]:
                await asyncio.wait_for(self._greet(worker), interval_s)
            return call.result()
        except asyncio.TimeoutError:
            raise EngineLostError(
                f"{worker}: no news for {self._stall_timeout_s:g} s (pipeline.stall_timeout_s)"
            ) from None
        finally:
            call.cancel()

    async def _greet(self, worker: str) -> None:
        """Return when a prefill worker answers and its engine is up. Raises UnavailableError when it is not."""
        with contextlib.suppress(NotFoundError):  # the answer when all is well
            await self.abort_prefill(worker, _NOBODY)

    async def _call(self, model: str, inputs: dict[str, Array]) -> Tensors:
        import grpc

        if self._infer is None:
            self._infer = unary_method(self._buses.channel())
        request = infer_request(model, {name: _plain(array) for name, array in inputs.items()})
        try:
            return outputs_of(await self._infer(request))
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error, self._buses.address) from error


def _plain(array: Array) -> bytes | Array:
    return bytes(array[0]) if array.dtype.kind == "O" else array
