"""The benchmarks' load package, and servers that speak just enough of Triton's protocols to be loaded."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable, Sequence

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from benchmarks.load.workload import Workload, make_workload


def answer_to(ids: Sequence[int], num_tokens: int) -> list[int]:
    """Stand-in for the mocker: tokens that depend on the prompt and the place."""
    return [(sum(ids) + 7 * i) % 1000 for i in range(num_tokens)]


@pytest.fixture
def workload() -> Workload:
    return make_workload(answer_to, num_prompts=8, prompt_tokens=4, max_tokens=6, to_text=spell)


def spell(ids: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in ids)


class FakeServer:
    """Streams the right answer, one token a response; `spoil` may change a request's list of responses."""

    def __init__(self) -> None:
        self.spoil: Callable[[list[int]], list[int]] = lambda tokens: tokens
        self.target = ""
        self.delay_s = 0.0
        self.cancelled = 0

    def responses(self, ids: Sequence[int], max_tokens: int) -> list[tuple[int, bool]]:
        tokens = self.spoil(answer_to(ids, max_tokens))
        return [(token, i + 1 == len(tokens)) for i, token in enumerate(tokens)]

    async def model_stream_infer(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        try:
            async for request in requests:
                inputs = {
                    tensor.name: raw for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
                }
                ids = struct.unpack(f"<{len(inputs['input_ids']) // 4}i", inputs["input_ids"])
                for token, is_last in self.responses(ids, struct.unpack("<i", inputs["max_tokens"])[0]):
                    await asyncio.sleep(self.delay_s)
                    yield pb.ModelStreamInferResponse(infer_response=infer_response(request.id, token, is_last))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def generate_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            assert line.startswith(b"POST /v2/models/generate/generate_stream")
            head = await reader.readuntil(b"\r\n\r\n")
            body = json.loads(
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            )
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            for token, is_last in self.responses(body["input_ids"], body["max_tokens"]):
                await asyncio.sleep(self.delay_s)
                event = {
                    "output_ids": token,
                    "text_output": spell([token]),
                    "finish_reason": "length" if is_last else "",
                }
                data = b"data: " + json.dumps(event).encode() + b"\n\n"
                writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            writer.write(b"0\r\n\r\n")
        writer.close()


def infer_response(request_id: str, token: int, is_last: bool) -> pb.ModelInferResponse:
    text, reason = spell([token]).encode(), b"length" if is_last else b""
    tensors = {
        "output_ids": ("INT32", struct.pack("<i", token)),
        "text_output": ("BYTES", struct.pack("<I", len(text)) + text),
        "finish_reason": ("BYTES", struct.pack("<I", len(reason)) + reason),
    }
    return pb.ModelInferResponse(
        model_name="decode",
        id=request_id,
        outputs=[
            pb.ModelInferResponse.InferOutputTensor(name=name, datatype=kind, shape=[1])
            for name, (kind, _) in tensors.items()
        ],
        raw_output_contents=[raw for _, raw in tensors.values()],
    )


@pytest.fixture
async def grpc_server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(
        fake.model_stream_infer, pb.ModelInferRequest.FromString, pb.ModelStreamInferResponse.SerializeToString
    )
    handlers = {"ModelStreamInfer": handler}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers)])
    fake.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield fake
    await server.stop(0)


@pytest.fixture
async def http_server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    server = await asyncio.start_server(fake.generate_stream, "127.0.0.1", 0)
    fake.target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield fake
    server.close()
