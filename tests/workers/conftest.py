"""A gRPC server that speaks as much KServe as the token bus needs, with the decode stage behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import models
from tritonclient.grpc import service_pb2

from bireme.config import Recipe
from bireme.conversion import convert
from bireme.engines.stub.fake_client import FakeEngineClient
from bireme.errors import BiremeError, to_message
from bireme.messages import Finish
from bireme.metrics import Registry
from bireme.stages.decode import Decode
from bireme.text.tokenizer import TextTokenizer
from bireme.types import Cancelled, StageContext
from bireme.workers.client import Workers
from bireme.workers.grpc import GrpcChannel, outputs_of


class StubServer:
    """ModelStreamInfer over a stage: requests of one stream run side by side, as in Triton."""

    def __init__(self, stage: Decode) -> None:
        self.stage = stage
        self.num_streams = 0
        self.num_cut = 0  # streams that their client cancelled
        self.is_deaf = False  # takes requests and never answers, like a stub that was stopped

    async def start(self) -> int:
        self.server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(
            self._stream,
            service_pb2.ModelInferRequest.FromString,
            service_pb2.ModelStreamInferResponse.SerializeToString,
        )
        service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelStreamInfer": handler})
        self.server.add_generic_rpc_handlers((service,))
        port: int = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        return port

    async def _stream(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        self.num_streams += 1
        is_over = False
        out: asyncio.Queue[Any] = asyncio.Queue()
        cancelled = Cancelled()
        pump = asyncio.ensure_future(self._pump(requests, out, cancelled))
        try:
            while (message := await out.get()) is not None:
                yield message
            is_over = True
        finally:
            self.num_streams -= 1
            self.num_cut += not is_over
            cancelled.set()
            pump.cancel()

    async def _pump(self, requests: AsyncIterator[Any], out: asyncio.Queue[Any], cancelled: Cancelled) -> None:
        tasks = []
        async for request in requests:
            if not self.is_deaf:
                tasks.append(asyncio.ensure_future(self._serve(request, out, cancelled)))
        await asyncio.gather(*tasks)
        out.put_nowait(None)

    async def _serve(self, request: Any, out: asyncio.Queue[Any], cancelled: Cancelled) -> None:
        loop = asyncio.get_running_loop()

        def send(response: Any) -> None:
            raw = response.tensors()["steps"].tobytes()
            answer = service_pb2.ModelInferResponse(raw_output_contents=[raw])
            message = service_pb2.ModelStreamInferResponse(infer_response=answer)
            loop.call_soon_threadsafe(out.put_nowait, message)

        inputs = service_pb2.ModelInferResponse(raw_output_contents=request.raw_input_contents)
        for tensor in request.inputs:
            inputs.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        try:
            await self.stage.handle(outputs_of(inputs), send, cancelled)
        except BiremeError as error:
            out.put_nowait(service_pb2.ModelStreamInferResponse(error_message=to_message(error)))


class Recorder:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()

    def push(self, tokens: Any, logprobs: Any = None, prompt_logprobs: Any = None) -> None:
        self.tokens.extend(tokens)

    def finish(self, finish: Finish) -> None:
        self.ended.set_result(finish)

    async def end(self) -> Finish:
        return await asyncio.wait_for(self.ended, 5)


class BusBench:
    def __init__(self, engine: FakeEngineClient, stage: Decode, server: StubServer, address: str) -> None:
        self.engine, self.stage, self.server, self.address = engine, stage, server, address
        self.workers = Workers(GrpcChannel(address), 2.0)

    async def until(self, condition: Any) -> None:
        """Wait until it holds."""
        for _ in range(500):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it never came true")

    async def request_at_engine(self) -> tuple[int, int]:
        """Return (consumer, number) of the only request, once it is there."""
        await self.until(lambda: self.engine.requests)
        return next(iter(self.engine.requests))


@pytest.fixture
async def bus() -> AsyncIterator[BusBench]:
    engine = FakeEngineClient()
    stage = Decode(engine, TextTokenizer(Inner(models.WordLevel({"a": 1}, unk_token="a"))))
    recipe = convert({"model": "none", "workers": {"decode": {"engine": "mocker"}}, "name": "test"}, Recipe, "test")
    await stage.start(StageContext("decode", recipe, recipe.entry("decode"), Registry("decode")))
    server = StubServer(stage)
    bench = BusBench(engine, stage, server, f"127.0.0.1:{await server.start()}")
    yield bench
    await bench.workers.close()
    await stage.stop()
    await server.server.stop(0)


@pytest.fixture
def recorder() -> type[Recorder]:
    return Recorder
