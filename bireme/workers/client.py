"""All workers: unary calls to the models, decode's tokens over the token bus.

Unary calls to the own server are BLS inside Triton; all others go over gRPC, a channel a server. Another server's
worker is called by its id, decode_1@host:8001, and its host is watched.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np

from bireme.config import split_worker, stage_of
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
    Embed,
    EmbedRequest,
    Encode,
    EncodeRequest,
    EngineRequest,
    Finish,
    Release,
    Sink,
    Submit,
    TokenLogprobs,
    Usage,
    decode_spans,
    encode,
    start_command,
)
from bireme.metrics import Registry
from bireme.multimodal.answers import EncodeSink
from bireme.multimodal.wire import EncodeAnswer, decode_answer, decode_answer_json
from bireme.types import Array, Floats, Tensors
from bireme.workers.base import Generation, PrefillResult
from bireme.workers.bus import LOST_STALL_S, Bus
from bireme.workers.grpc import GrpcChannel
from bireme.workers.grpc_tls import GrpcTls
from bireme.workers.host_watch import HostState, HostWatch

Call = Callable[[str, Tensors], Awaitable[Tensors]]
_decode_usage = msgspec.json.Decoder(Usage).decode
_decode_logprobs = msgspec.json.Decoder(list[TokenLogprobs | None]).decode


class Workers:
    """WorkerClient. Used on one loop."""

    def __init__(
        self,
        channel: GrpcChannel | None,
        stall_timeout_s: float,
        metrics: Registry | None = None,
        call: Call | None = None,
        tls: GrpcTls | None = None,
    ) -> None:
        """`channel`: to the own server; None: every worker's id names its server.

        `call`: StageContext.call_async inside Triton; None: over the channel. `tls`: of channels to other servers.
        """
        self.on_silence: Callable[[str, bool], None] = lambda server, is_silent: None
        self._channels: dict[str, GrpcChannel] = {} if channel is None else {"": channel}  # by server
        self._watches: dict[str, HostWatch] = {}  # of the other servers
        self._stall_timeout_s, self._metrics, self._bls, self._tls = stall_timeout_s, metrics, call, tls
        self._buses: dict[str, Bus] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._lives: Mapping[str, int] | None = None  # of the members; None: not known
        self._own_calls: dict[asyncio.Future[Tensors], tuple[str, int]] = {}  # by BLS: worker, its life at the start
        self._far_calls: dict[asyncio.Future[Tensors], str] = {}  # by gRPC: worker
        self._lost_calls: set[asyncio.Future[Tensors]] = set()
        self._encodes: dict[str, Generation] = {}  # on decode workers, by request id

    def set_workers(self, workers: Mapping[str, int]) -> None:
        """One that is gone keeps its streams while they make progress."""
        self._lives = workers
        for call, (worker, life) in self._own_calls.items():
            if life and workers.get(worker, 0) not in (0, life):  # but an answer may be on its way
                asyncio.get_running_loop().call_later(LOST_STALL_S, self._lose, call)
        for worker, bus in list(self._buses.items()):
            bus.is_lost = worker not in workers
            if bus.is_lost and bus.is_idle:
                del self._buses[worker]
        used = {split_worker(worker)[1] for worker in (*workers, *self._buses)}
        for server in self._channels.keys() - used - {""}:
            if not self._channels[server].num_calls:  # else the next change closes it
                self._close_later(self._channels.pop(server))
                self._watches.pop(server).stop()

    async def tokenize(self, text: str) -> list[int]:
        outputs = await self._call("tokenizer", {"text_input": _bytes(text.encode())}, self._stall_timeout_s)
        ids: list[int] = _output(outputs, "input_ids").reshape(-1).tolist()
        return ids

    async def prefill(self, worker: str, request: EngineRequest, request_id: str) -> PrefillResult:
        inputs = _command_inputs(start_command(0, request), request_id)
        return prefill_result(await self._call_worker(worker, inputs, request_id))

    async def abort_prefill(self, worker: str, request_id: str) -> None:
        await self._call(worker, {"abort": np.array([True]), "request_id": _bytes(request_id.encode())})

    async def encode(self, worker: str, request: EncodeRequest, request_id: str) -> EncodeAnswer:
        if stage_of(worker) == "decode":
            return await self._encode_on_bus(worker, request, request_id)
        outputs = await self._call_worker(worker, _command_inputs(start_command(0, request), request_id), request_id)
        return decode_answer_json(bytes(_output(outputs, "embedding_handles").reshape(-1)[0]))

    async def abort_encode(self, worker: str, request_id: str) -> None:
        if stage_of(worker) != "decode":
            with contextlib.suppress(NotFoundError):
                await self.abort_prefill(worker, request_id)
        elif (generation := self._encodes.get(request_id)) is not None:
            generation.abort()

    async def embed(self, worker: str, request: EmbedRequest, request_id: str) -> Floats:
        inputs = _command_inputs(start_command(0, request), request_id)
        outputs = await self._call_worker(worker, inputs, request_id)
        return np.asarray(_output(outputs, "embedding"), np.float32)

    async def abort_embed(self, worker: str, request_id: str) -> None:
        with contextlib.suppress(NotFoundError):
            await self.abort_prefill(worker, request_id)

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
        channel, model = self._model_of(worker)
        if not await channel.is_loaded(model):
            raise UnavailableError(f"{worker}: not loaded")
        await self.ping(worker)

    async def ping(self, worker: str, request_id: str = "") -> None:
        """Return when stub and engine answer. Raises UnavailableError.

        With a request's id (not of decode) NotFoundError, too.
        """
        if stage_of(worker) == "decode":
            await self._bus(worker).check()  # whose stub would refuse a subscription
        else:
            named = {"request_id": _bytes(request_id.encode())} if request_id else {}
            await self._call(worker, {"ping": np.array([True])} | named)

    async def close(self) -> None:
        for watch in self._watches.values():
            watch.stop()
        await asyncio.gather(*(bus.close() for bus in self._buses.values()))
        await asyncio.gather(*(channel.close() for channel in self._channels.values()), *self._closing)

    def _bus(self, worker: str) -> Bus:
        bus = self._buses.get(worker)
        if bus is None:
            channel, model = self._model_of(worker)
            bus = self._buses[worker] = Bus(worker, channel, self._stall_timeout_s, self._metrics, model)
        return bus

    def _model_of(self, worker: str) -> tuple[GrpcChannel, str]:
        """Return a worker's server and its model's name there. Raises UnavailableError."""
        model, server = split_worker(worker)
        channel = self._channels.get(server)
        if channel is None:
            if not server:
                raise UnavailableError(f"{worker}: this process has no tritonserver of its own")
            channel = self._channels[server] = GrpcChannel(server, self._tls)
            self._watches[server] = HostWatch(
                server, partial(self._is_awaited, server), partial(self._note_host, server)
            )
        return channel, model

    def _is_awaited(self, server: str) -> bool:
        return self._channels[server].num_calls > 0 or any(bus.awaits_news for bus in self._buses_of(server))

    def _note_host(self, server: str, state: HostState) -> None:
        self.on_silence(server, state is not HostState.ANSWERS)
        if state is HostState.ANSWERS:
            return
        for call, worker in self._far_calls.items():
            if split_worker(worker)[1] == server:
                self._lose(call)
        if state is HostState.LOST:  # TCP would try the former connection again only after as long a silence
            former, self._channels[server] = self._channels[server], GrpcChannel(server, self._tls)
            asyncio.get_running_loop().call_later(self._stall_timeout_s, self._close_later, former)
        for bus in self._buses_of(server):
            error = EngineLostError(f"{bus.worker}: its host does not answer")
            bus.lose_waiting(error) if state is HostState.SILENT else bus.lose(error)
            bus.channel = self._channels[server]

    def _buses_of(self, server: str) -> list[Bus]:
        return [bus for worker, bus in self._buses.items() if split_worker(worker)[1] == server]

    def _close_later(self, channel: GrpcChannel) -> None:
        task = asyncio.get_running_loop().create_task(channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _call(self, worker: str, inputs: Tensors, limit_s: float = 0.0) -> Tensors:
        if self._bls is not None and "@" not in worker:
            return await self._call_own(self._bls, worker, inputs, limit_s)
        channel, model = self._model_of(worker)
        return await channel.infer(model, inputs)

    async def _call_worker(self, worker: str, inputs: Tensors, request_id: str = "") -> Tensors:
        if self._bls is not None and "@" not in worker:
            return await self._call_own(self._bls, worker, inputs)
        return await self._call_watched(worker, inputs, request_id)

    async def _call_own(self, bls: Call, worker: str, inputs: Tensors, limit_s: float = 0.0) -> Tensors:
        """Triton never ends a call whose stub has died.

        A worker's has when its record is of another life; a model without an engine is given `limit_s`.
        """
        call = asyncio.ensure_future(bls(worker, inputs))
        self._own_calls[call] = worker, (self._lives or {}).get(worker, 0)
        limit = asyncio.get_running_loop().call_later(limit_s, self._lose, call) if limit_s else None
        try:
            return await call
        except asyncio.CancelledError:
            if call not in self._lost_calls:
                raise
            raise EngineLostError(f"{worker}: its stub died with this request") from None
        finally:
            if limit is not None:
                limit.cancel()
            del self._own_calls[call]
            self._lost_calls.discard(call)

    def _lose(self, call: asyncio.Future[Tensors]) -> None:
        if not call.done():
            self._lost_calls.add(call)
            call.cancel()

    async def _call_watched(self, worker: str, inputs: Tensors, request_id: str) -> Tensors:
        """Call a worker while it answers pings and knows the request."""
        call = asyncio.ensure_future(self._call(worker, inputs))
        self._far_calls[call] = worker
        interval_s = self._stall_timeout_s / 2
        pinged_at = time.monotonic()
        try:
            while not (await asyncio.wait({call}, timeout=min(interval_s, LOST_STALL_S)))[0]:
                if self._is_member(worker) and time.monotonic() - pinged_at < interval_s:
                    continue
                await self._ping_beside(call, worker, request_id, interval_s)
                pinged_at = time.monotonic()
            if call in self._lost_calls:
                raise EngineLostError(f"{worker}: its host does not answer")
            return call.result()
        finally:
            call.cancel()
            del self._far_calls[call]
            self._lost_calls.discard(call)

    async def _ping_beside(self, call: asyncio.Future[Tensors], worker: str, request_id: str, limit_s: float) -> None:
        """Return when the worker knows the request or the call has ended. Raises EngineLostError."""
        limit_s = limit_s if self._is_member(worker) else LOST_STALL_S
        ping = asyncio.ensure_future(self.ping(worker, request_id))
        both: set[asyncio.Future[Any]] = {call, ping}
        try:
            if not (await asyncio.wait(both, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED))[0]:
                raise EngineLostError(f"{worker}: no news for {self._stall_timeout_s:g} s (pipeline.stall_timeout_s)")
            if call.done():
                return
            await ping
        except NotFoundError:  # another stub has taken its place, unless the answer is on its way
            if not (await asyncio.wait({call}, timeout=min(limit_s, LOST_STALL_S)))[0]:
                raise EngineLostError(f"{worker}: its stub died with this request") from None
        finally:
            ping.cancel()

    def _is_member(self, worker: str) -> bool:
        return self._lives is None or worker in self._lives

    async def _encode_on_bus(self, worker: str, request: EncodeRequest, request_id: str) -> EncodeAnswer:
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


def _command_inputs(command: Submit | Encode | Embed | Release, request_id: str = "") -> dict[str, Array]:
    """Whole, as `engine_request`: fields without a tensor must not get lost."""
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
        decode_spans(bytes(outputs["spans"].reshape(-1)[0])) if "spans" in outputs else None,
    )


def _bytes(value: bytes) -> Array:
    array = np.empty(1, np.object_)  # np.array([value], object) would work too, but not for an empty string
    array[0] = value
    return array


def _output(outputs: Tensors, name: str) -> Array:
    if name not in outputs:
        raise BiremeError(f"{name}: the worker's answer lacks it; run the same build on both sides")
    return outputs[name]
