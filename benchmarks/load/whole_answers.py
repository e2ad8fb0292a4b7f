"""Unary requests: one question, one whole answer, by gRPC (ModelInfer) or HTTP (generate), checked like a stream."""

from __future__ import annotations

import asyncio
from array import array

import msgspec
from tritonclient.grpc import service_pb2 as pb

from benchmarks.load.grpc_streams import GrpcStreams, make_request, take_tensors
from benchmarks.load.http2 import Stream, StreamError
from benchmarks.load.http_streams import Connection, Event, HttpStreams, first, post, tensors_of
from benchmarks.load.meter import LoadError, Trace, WrongAnswerError
from benchmarks.load.workload import Prompt

METHOD = "/inference.GRPCInferenceService/ModelInfer"
_decode_answer = msgspec.json.Decoder(Event).decode


class GrpcCalls(GrpcStreams):
    """ModelInfer calls on the connections of GrpcStreams."""

    def __init__(self, target: str, model: str = "completion") -> None:
        super().__init__(target, model)
        self._unary: dict[int, UnaryCall] = {}

    async def request(self, slot: int, trace: Trace) -> None:
        self._count += 1
        call = UnaryCall(str(self._count), trace)
        self._unary[slot] = call
        try:
            connection = await self._connect(slot % len(self._connections))
            call.stream = connection.open_stream(METHOD, call.take, call.end)
            call.stream.send(make_request(self.model, call.request_id, trace.prompt).SerializeToString())
            call.stream.end()
            await call.done
        finally:
            if self._unary.get(slot) is call:
                del self._unary[slot]

    def drop(self, slot: int) -> None:
        if call := self._unary.pop(slot, None):
            call.cancel()


class UnaryCall:
    def __init__(self, request_id: str, trace: Trace) -> None:
        self.request_id, self._trace = request_id, trace
        self.stream: Stream | None = None
        self._has_answer = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        if self.stream is not None:
            self.stream.cancel()
        self._fail(LoadError("cancelled by this client"))

    def take(self, data: bytes) -> None:
        try:
            if self._has_answer:
                raise WrongAnswerError("a second answer to one request")
            self._has_answer = True
            if not take_tensors(pb.ModelInferResponse.FromString(data), self.request_id, self._trace):
                raise WrongAnswerError("an answer without a finish reason")
        except LoadError as error:
            self._fail(error)

    def end(self, error: StreamError | None) -> None:
        if error is not None or not self._has_answer:
            self._fail(LoadError(f"call: {error or 'it ended without an answer'}"))
        elif not self.done.done():
            self.done.set_result(None)

    def _fail(self, error: LoadError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class HttpCalls(HttpStreams):
    """POST /v2/models/completion/generate."""

    def __init__(self, target: str, model: str = "completion", sends_text: bool = False) -> None:
        super().__init__(target, model)
        self._sends_text = sends_text

    def _protocol(self) -> type[Connection]:
        return WholeConnection

    def _message(self, prompt: Prompt) -> bytes:
        tensors = tensors_of(prompt)
        if self._sends_text:
            tensors = {name: value for name, value in tensors.items() if name != "input_ids"}
            tensors |= {"text_input": prompt.message, "exclude_input_in_output": True}
        return post(f"/v2/models/{self.model}/generate", self.host, tensors)


class WholeConnection(Connection):
    """Keeps the body until it is whole."""

    def _take_events(self, payload: bytes) -> None:
        assert self._body is not None and self._trace is not None
        self._events += payload
        if self._body.is_complete:
            self._take_answer(self._events)
            self._has_finished = True

    def _take_answer(self, data: bytes) -> None:
        assert self._trace is not None
        answer = _decode_answer(data)
        if answer.error:
            raise LoadError(answer.error)
        ids = answer.output_ids if isinstance(answer.output_ids, list) else [answer.output_ids]
        self._trace.push(array("i", ids), first(answer.text_output).encode())
        self._trace.finish(first(answer.finish_reason))
