"""gRPC load on a decoupled model (decode, generate): one ModelStreamInfer a slot.

A slot's stream stays open from request to request, the cheapest way for both sides; with
`stream_per_request` each request opens its own, as a client must that wants to cancel.
"""

from __future__ import annotations

import asyncio
import struct
from array import array

from tritonclient.grpc import service_pb2 as pb

from benchmarks.load.http2 import Connection, Stream, StreamError
from benchmarks.load.meter import LoadError, Trace, WrongAnswerError
from benchmarks.load.workload import TEMPERATURE, Prompt

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
MAX_CONNECTIONS = 4
CLOSE_S = 3.0


class GrpcStreams:
    def __init__(self, target: str, model: str, stream_per_request: bool = False) -> None:
        self.target, self.model, self.stream_per_request = target, model, stream_per_request
        self._connections: list[Connection | None] = [None] * MAX_CONNECTIONS
        self._connecting = asyncio.Lock()
        self._calls: dict[int, Call] = {}
        self._count = 0

    async def open(self) -> None: ...

    async def request(self, slot: int, trace: Trace) -> None:
        self._count += 1
        call = self._calls.get(slot) or await self._open(slot)
        try:
            await call.run(make_request(self.model, str(self._count), trace.prompt), trace)
            if self.stream_per_request:
                await call.finish()
                self._calls.pop(slot, None)  # a late drop may have taken it
        except BaseException:
            self.drop(slot)  # never use a stream again on which something went wrong
            raise

    def drop(self, slot: int) -> None:
        call = self._calls.pop(slot, None)
        if call is not None:
            call.cancel()

    async def close(self) -> None:
        """End idle streams in good order, then cancel what is left."""
        ends = [asyncio.create_task(call.finish()) for call in self._calls.values()]
        if ends:
            await asyncio.wait(ends, timeout=CLOSE_S)
        for end in ends:
            if end.done():
                end.exception()  # nothing to tell any more
        for slot in list(self._calls):
            self.drop(slot)
        for connection in self._connections:
            if connection is not None:
                connection.close()

    async def _open(self, slot: int) -> Call:
        call = self._calls[slot] = Call(await self._connect(slot % MAX_CONNECTIONS))
        return call

    async def _connect(self, at: int) -> Connection:
        async with self._connecting:
            connection = self._connections[at]
            if connection is None or connection.is_closed:
                connection = self._connections[at] = await self._new_connection()
            return connection

    async def _new_connection(self) -> Connection:
        host, _, port = self.target.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(lambda: Connection(self.target), host, int(port))
        except OSError as error:
            raise LoadError(f"no connection: {type(error).__name__}") from error
        return connection


class Call:
    """A stream and the request that runs on it."""

    def __init__(self, connection: Connection) -> None:
        self._stream: Stream = connection.open_stream(METHOD, self._take, self._ended)
        self._trace: Trace | None = None
        self._request_id = ""
        self._done: asyncio.Future[None] | None = None
        self._has_ended = asyncio.Event()
        self._wrong: LoadError | None = None  # what came when no request was running

    async def run(self, message: pb.ModelInferRequest, trace: Trace) -> None:
        """Send and take all responses. Raises LoadError."""
        if self._wrong:
            raise self._wrong
        self._trace, self._request_id = trace, message.id
        self._done = asyncio.get_running_loop().create_future()
        self._stream.send(message.SerializeToString())
        await self._done

    async def finish(self) -> None:
        """Close our side, wait for the server's. Raises LoadError when more than the end comes."""
        self._stream.end()
        await self._has_ended.wait()
        if self._wrong:
            raise self._wrong

    def cancel(self) -> None:
        self._stream.cancel()
        self._has_ended.set()
        self._fail(LoadError("cancelled by this client"))

    def _take(self, data: bytes) -> None:
        if self._done is None or self._done.done() or self._trace is None:
            self._wrong = WrongAnswerError("a response came after the last")
            return
        try:
            if take(pb.ModelStreamInferResponse.FromString(data), self._request_id, self._trace):
                self._done.set_result(None)
        except LoadError as error:
            self._done.set_exception(error)

    def _ended(self, error: StreamError | None) -> None:
        self._has_ended.set()
        self._fail(LoadError(f"stream: {error or 'it ended before the request'}"))

    def _fail(self, error: LoadError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        elif self._done is None:
            self._wrong = error


def make_request(model: str, request_id: str, prompt: Prompt) -> pb.ModelInferRequest:
    tensor = pb.ModelInferRequest.InferInputTensor
    inputs = [
        tensor(name="input_ids", datatype="INT32", shape=[len(prompt.ids)]),
        tensor(name="max_tokens", datatype="INT32", shape=[1]),
        tensor(name="ignore_eos", datatype="BOOL", shape=[1]),
    ]
    contents = [prompt.ids_bytes, len(prompt.expected).to_bytes(4, "little"), b"\1"]
    if prompt.seed is not None:
        inputs.append(tensor(name="temperature", datatype="FP32", shape=[1]))
        inputs.append(tensor(name="seed", datatype="UINT64", shape=[1]))
        contents += [struct.pack("<f", TEMPERATURE), struct.pack("<Q", prompt.seed)]
    if model.startswith("generate"):
        inputs.append(tensor(name="stream", datatype="BOOL", shape=[1]))
        contents.append(b"\1")
    return pb.ModelInferRequest(model_name=model, id=request_id, inputs=inputs, raw_input_contents=contents)


def take(response: pb.ModelStreamInferResponse, request_id: str, trace: Trace) -> bool:
    """Check one response; return whether it was the request's last. Raises LoadError."""
    if response.error_message:
        raise LoadError(response.error_message)
    return take_tensors(response.infer_response, request_id, trace)


def take_tensors(inner: pb.ModelInferResponse, request_id: str, trace: Trace) -> bool:
    """Check the tensors of one response; return whether it was the request's last. Raises LoadError."""
    if inner.id != request_id:
        raise WrongAnswerError(f"a response of request {inner.id!r} came to request {request_id!r}")
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
