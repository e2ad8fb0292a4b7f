"""All workers of one tritonserver: unary calls to the models, decode's tokens over the token bus.

The same inside Triton, where unary calls are BLS, and outside, where they go over gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
import numpy as np

from bireme.config import stage_of
from bireme.errors import (
    BiremeError,
    EngineLostError,
    NotFoundError,
    RequestCancelledError,
    UnavailableError,
    from_message,
)
from bireme.messages import (
    Capacity,
    Encode,
    EncodeRequest,
    EngineRequest,
    Finish,
    Release,
    Sink,
    Submit,
    TokenLogprobs,
    Usage,
    encode,
    start_command,
)
from bireme.metrics import Registry
from bireme.multimodal.answers import EncodeSink
from bireme.multimodal.wire import EncodeAnswer, decode_answer, decode_answer_json
from bireme.types import Array, Tensors
from bireme.workers.base import Generation, PrefillResult
from bireme.workers.bus import Bus
from bireme.workers.grpc import GrpcChannel

Call = Callable[[str, Tensors], Awaitable[Tensors]]
_decode_usage = msgspec.json.Decoder(Usage).decode
_decode_logprobs = msgspec.json.Decoder(list[TokenLogprobs | None]).decode


class Workers:
    """WorkerClient. Used on one loop."""

    def __init__(
        self,
        channel: GrpcChannel,
        stall_timeout_s: float,
        metrics: Registry | None = None,
        call: Call | None = None,
    ) -> None:
        """`call`: StageContext.call_async, of a pipeline inside Triton; None: unary calls go over the channel, too."""
        self._channel, self._stall_timeout_s, self._metrics = channel, stall_timeout_s, metrics
        self._call: Call = call or channel.infer
        self._call_worker: Call = call or self._call_watched
        self._buses: dict[str, Bus] = {}
        self._encodes: dict[str, Generation] = {}  # on decode workers, by request id

    async def tokenize(self, text: str) -> list[int]:
        outputs = await self._call("tokenizer", {"text_input": _bytes(text.encode())})
        ids: list[int] = _output(outputs, "input_ids").reshape(-1).tolist()
        return ids

    async def prefill(self, worker: str, request: EngineRequest, request_id: str) -> PrefillResult:
        return prefill_result(await self._call_worker(worker, _command_inputs(start_command(0, request), request_id)))

    async def abort_prefill(self, worker: str, request_id: str) -> None:
        await self._call(worker, {"abort": np.array([True]), "request_id": _bytes(request_id.encode())})

    async def encode(self, worker: str, request: EncodeRequest, request_id: str) -> EncodeAnswer:
        if stage_of(worker) == "decode":
            return await self._encode_on_bus(worker, request, request_id)
        outputs = await self._call_worker(worker, _command_inputs(start_command(0, request), request_id))
        return decode_answer_json(bytes(_output(outputs, "embedding_handles").reshape(-1)[0]))

    async def abort_encode(self, worker: str, request_id: str) -> None:
        if stage_of(worker) != "decode":
            with contextlib.suppress(NotFoundError):
                await self.abort_prefill(worker, request_id)
        elif (generation := self._encodes.get(request_id)) is not None:
            generation.abort()

    async def release(self, worker: str, handles: tuple[str, ...]) -> None:
        if stage_of(worker) == "decode":
            self._bus(worker).release(handles)
        else:
            await self._call(worker, _command_inputs(Release(handles)))

    def decode(self, worker: str, request: EngineRequest, sink: Sink) -> Generation:
        return self._bus(worker).submit(request, sink)

    def capacity(self, worker: str) -> Capacity | None:
        bus = self._buses.get(worker)
        return bus.capacity if bus else None

    async def check(self, worker: str) -> None:
        if not await self._channel.is_loaded(worker):
            raise UnavailableError(f"{worker}: not loaded")
        await self.ping(worker)

    async def ping(self, worker: str) -> None:
        """Return when the worker's stub answers and its engine is up. Raises UnavailableError when it is not."""
        if stage_of(worker) == "decode":
            await self._bus(worker).check()  # whose stub would refuse a subscription
        else:
            await self._call(worker, {"ping": np.array([True])})

    async def close(self) -> None:
        await asyncio.gather(*(bus.close() for bus in self._buses.values()))
        await self._channel.close()

    def _bus(self, worker: str) -> Bus:
        bus = self._buses.get(worker)
        if bus is None:
            bus = self._buses[worker] = Bus(worker, self._channel, self._stall_timeout_s, self._metrics)
        return bus

    async def _call_watched(self, worker: str, inputs: Tensors) -> Tensors:
        """Call a worker while it answers pings: a dead stub would be silent forever.

        Inside Triton there are no pings: each would take one of the few threads of BLS.
        """
        call = asyncio.ensure_future(self._call(worker, inputs))
        interval_s = self._stall_timeout_s / 2
        try:
            while not (await asyncio.wait({call}, timeout=interval_s))[0]:
                await asyncio.wait_for(self.ping(worker), interval_s)
            return call.result()
        except asyncio.TimeoutError:
            raise EngineLostError(
                f"{worker}: no news for {self._stall_timeout_s:g} s (pipeline.stall_timeout_s)"
            ) from None
        finally:
            call.cancel()

    async def _encode_on_bus(self, worker: str, request: EncodeRequest, request_id: str) -> EncodeAnswer:
        """Encode on a decode worker that has the vision tower: a request of the token bus that makes no tokens."""
        finished: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()
        sink = EncodeSink(partial(_settle, finished))
        generation = self._encodes[request_id] = self._bus(worker).submit(request, sink)
        try:
            finish = await finished
        finally:
            del self._encodes[request_id]
        if finish.encoded is not None:
            return decode_answer(finish.encoded)
        if generation.failure is not None:
            raise generation.failure
        if not finish.error:
            raise RequestCancelledError("the request was aborted")
        error = from_message(finish.error)
        raise EngineLostError(str(error)) if isinstance(error, UnavailableError) else error


def _settle(finished: asyncio.Future[Finish], finish: Finish) -> None:
    if not finished.done():  # nobody waits any more
        finished.set_result(finish)


def _command_inputs(command: Submit | Encode | Release, request_id: str = "") -> dict[str, Array]:
    """It travels whole, as `engine_request`: fields without a tensor of their own must not get lost."""
    return {
        "engine_request": np.frombuffer(encode(command), np.uint8),
        "request_id": _bytes(request_id.encode()),
    }


def prefill_result(outputs: Tensors) -> PrefillResult:
    prompt_logprobs = None
    if "prompt_log_probs" in outputs:
        entries = _decode_logprobs(bytes(outputs["prompt_log_probs"].reshape(-1)[0]))
        prompt_logprobs = [entry for entry in entries if entry is not None]
    return PrefillResult(
        bytes(_output(outputs, "disaggregated_params").reshape(-1)[0]),
        tuple(_output(outputs, "output_ids").reshape(-1).tolist()),
        _decode_usage(bytes(_output(outputs, "usage").reshape(-1)[0])),
        prompt_logprobs,
    )


def _bytes(value: bytes) -> Array:
    array = np.empty(1, np.object_)  # np.array([value], object) would work too, but not for an empty string
    array[0] = value
    return array


def _output(outputs: Tensors, name: str) -> Array:
    if name not in outputs:
        raise BiremeError(f"{name}: the worker's answer lacks it; run the same build on both sides")
    return outputs[name]
