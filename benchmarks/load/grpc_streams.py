"""gRPC load on a decoupled model (decode, generate): one ModelStreamInfer a slot.

A slot's stream stays open from request to request, the cheapest way for both sides; with
`stream_per_request` each request opens its own, as a client must that wants to cancel.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb

from benchmarks.load.meter import LoadError, Trace
from benchmarks.load.workload import Prompt

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
MAX_CHANNELS = 4
CLOSE_S = 3.0
OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))


class GrpcStreams:
    def __init__(self, target: str, model: str, stream_per_request: bool = False) -> None:
        self.target, self.model, self.stream_per_request = target, model, stream_per_request
        self._channels: list[grpc.aio.Channel] = []
        self._calls: dict[int, Any] = {}
        self._count = 0

    async def open(self) -> None:
        self._channels = [grpc.aio.insecure_channel(self.target, OPTIONS) for _ in range(MAX_CHANNELS)]

    async def request(self, slot: int, trace: Trace) -> None:
        call = self._calls.get(slot) or self._open(slot)
        self._count += 1
        message = make_request(self.model, str(self._count), trace.prompt)
        try:
            await call.write(message)
            if self.stream_per_request:
                await call.done_writing()
            while not take(await call.read(), message.id, trace):
                pass
            if self.stream_per_request:
                await self._expect_end(slot, call)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            self.drop(slot)
            raise LoadError(f"stream: {_describe(error)}") from error
        except asyncio.CancelledError as error:
            self.drop(slot)
            if trace.is_dropped or trace.is_stalled:  # our own call.cancel(); otherwise the task is cancelled
                raise LoadError("cancelled by this client") from error
            raise
        except LoadError:
            self.drop(slot)
            raise

    def drop(self, slot: int) -> None:
        call = self._calls.pop(slot, None)
        if call is not None:
            call.cancel()

    async def close(self) -> None:
        idle = [asyncio.create_task(_end(call)) for call in self._calls.values()]
        if idle:
            await asyncio.wait(idle, timeout=CLOSE_S)
        for slot in list(self._calls):
            self.drop(slot)
        for channel in self._channels:
            await channel.close()

    def _open(self, slot: int) -> Any:
        call = self._channels[slot % len(self._channels)].stream_stream(
            METHOD,
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )()
        self._calls[slot] = call
        return call

    async def _expect_end(self, slot: int, call: Any) -> None:
        if await call.read() is not grpc.aio.EOF:
            raise LoadError("a response came after the last")
        self._calls.pop(slot, None)


async def _end(call: Any) -> None:
    """Close our side and wait for the server's: an idle stream ends without being cancelled."""
    with contextlib.suppress(grpc.RpcError, asyncio.CancelledError, asyncio.InvalidStateError):
        await call.done_writing()
        await call.read()


def make_request(model: str, request_id: str, prompt: Prompt) -> pb.ModelInferRequest:
    tensor = pb.ModelInferRequest.InferInputTensor
    inputs = [
        tensor(name="input_ids", datatype="INT32", shape=[len(prompt.ids)]),
        tensor(name="max_tokens", datatype="INT32", shape=[1]),
        tensor(name="ignore_eos", datatype="BOOL", shape=[1]),
    ]
    contents = [prompt.ids_bytes, len(prompt.expected).to_bytes(4, "little"), b"\1"]
    if model.startswith("generate"):
        inputs.append(tensor(name="stream", datatype="BOOL", shape=[1]))
        contents.append(b"\1")
    return pb.ModelInferRequest(model_name=model, id=request_id, inputs=inputs, raw_input_contents=contents)


def take(response: Any, request_id: str, trace: Trace) -> bool:
    """Check one response; return whether it was the request's last. Raises LoadError."""
    if response is grpc.aio.EOF:
        raise LoadError("the stream ended before the request")
    if response.error_message:
        raise LoadError(response.error_message)
    inner = response.infer_response
    if inner.id != request_id:
        raise LoadError(f"a response of request {inner.id!r} came to request {request_id!r}")
    tokens, text, reason = array("i"), b"", b""
    for output, content in zip(inner.outputs, inner.raw_output_contents, strict=True):
        name = output.name
        if name == "output_ids":
            tokens.frombytes(content)
        elif name == "text_output":
            text = content[4:]
        elif name == "finish_reason":
            reason = content[4:]
    trace.push(tokens, text)
    if reason:
        trace.finish(reason.decode())
    return bool(reason)


def _describe(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}"
    return f"{type(error).__name__}: {error}"
