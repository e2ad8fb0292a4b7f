"""Unary calls of a frontend to prefill workers that answer, refuse, take their time, or are dead; encodes."""

import asyncio

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from bireme.errors import EngineLostError, RequestCancelledError, RequestError, UnavailableError
from bireme.messages import EncodeRequest, EngineRequest, Finish, SamplingParams, Usage
from bireme.multimodal.wire import EncodeAnswer, encode_answer
from bireme.workers import client
from bireme.workers.client import Workers
from bireme.workers.grpc import GrpcChannel, infer_request

REQUEST = EngineRequest(prompt=b"\1\0\0\0", sampling=SamplingParams())
STALL_S = 3.0


class PrefillServer:
    """ModelInfer and ModelReady of a server with one prefill worker."""

    def __init__(self):
        self.answers_after = 0  # pings
        self.refusal = ""  # what a ping is told
        self.is_dead = False  # takes calls and never answers
        self.num_calls = self.num_pings = 0
        self.pinged_for = []  # request ids

    async def start(self):
        self.server = grpc.aio.server()
        handlers = {
            "ModelInfer": grpc.unary_unary_rpc_method_handler(
                self.infer, service_pb2.ModelInferRequest.FromString, service_pb2.ModelInferResponse.SerializeToString
            ),
            "ModelReady": grpc.unary_unary_rpc_method_handler(
                self.ready, service_pb2.ModelReadyRequest.FromString, service_pb2.ModelReadyResponse.SerializeToString
            ),
        }
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),)
        )
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        return f"127.0.0.1:{port}"

    async def ready(self, request, context):
        return service_pb2.ModelReadyResponse(ready=True)

    async def infer(self, request, context):
        self.num_calls += 1
        if self.is_dead:
            await asyncio.sleep(60)
        if any(tensor.name == "ping" for tensor in request.inputs):
            self.num_pings += 1
            names = [tensor.name for tensor in request.inputs]
            if "request_id" in names:
                self.pinged_for.append(request.raw_input_contents[names.index("request_id")][4:].decode())
            if self.refusal:
                await context.abort(grpc.StatusCode.INTERNAL, self.refusal)
            return answer({"state": b"ready"})
        while self.num_pings < self.answers_after:
            await asyncio.sleep(0.01)
        return answer({"disaggregated_params": b"signed", "output_ids": np.array([7], np.int32), "usage": b"{}"})


def answer(tensors):
    request = service_pb2.ModelInferRequest.FromString(infer_request("prefill", tensors))
    response = service_pb2.ModelInferResponse(raw_output_contents=request.raw_input_contents)
    for tensor in request.inputs:
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    return response


@pytest.fixture
async def server():
    server = PrefillServer()
    server.address = await server.start()
    yield server
    await server.server.stop(0)


@pytest.fixture
async def workers(server):
    workers = Workers(GrpcChannel(server.address), STALL_S)
    yield workers
    await workers.close()


async def test_a_prefill_is_answered(server, workers):
    result = await workers.prefill("prefill", REQUEST, "mine")
    assert (result.disaggregated_params, result.output_ids, server.num_pings) == (b"signed", (7,), 0)


async def test_a_long_prefill_is_waited_for_while_its_worker_lives(server, workers):
    server.answers_after = 2
    assert (await workers.prefill("prefill", REQUEST, "mine")).output_ids == (7,)
    assert server.pinged_for == ["mine"] * 2


async def test_a_prefill_on_a_dead_stub_is_lost(server, workers):
    server.is_dead = True
    with pytest.raises(EngineLostError, match="prefill: no news for 3 s"):
        await asyncio.wait_for(workers.prefill("prefill", REQUEST, "mine"), 30)


async def test_a_prefill_that_died_with_its_stub_is_lost_though_the_next_stub_answers_pings(server, workers):
    server.answers_after, server.refusal = 2, "NOT_FOUND: request_id: mine is not under way; it may have ended"
    with pytest.raises(EngineLostError, match="prefill: its stub died with this request"):
        await asyncio.wait_for(workers.prefill("prefill", REQUEST, "mine"), 30)
    assert server.pinged_for == ["mine"]


async def test_an_answer_that_is_on_its_way_when_nobody_knows_of_its_request_any_more_is_taken(server, workers):
    server.answers_after, server.refusal = 1, "NOT_FOUND: request_id: mine is not under way; it may have ended"
    assert (await workers.prefill("prefill", REQUEST, "mine")).output_ids == (7,)
    assert server.pinged_for == ["mine"]


async def test_a_prefill_on_a_server_that_discovery_has_lost_is_waited_for_while_it_answers(server, monkeypatch):
    monkeypatch.setattr(client, "LOST_STALL_S", 0.1)
    worker = f"prefill@{server.address}"
    far, server.answers_after = Workers(None, STALL_S), 2
    far.set_workers({worker: 1})
    prefill = asyncio.ensure_future(far.prefill(worker, REQUEST, "mine"))
    while not server.num_calls:
        await asyncio.sleep(0.01)
    far.set_workers({})
    assert (await asyncio.wait_for(prefill, 30)).output_ids == (7,)
    await far.close()


@pytest.fixture
async def inside(monkeypatch):
    """Workers of a pipeline inside Triton, whose calls of own models end when `answers` is set."""
    monkeypatch.setattr(client, "LOST_STALL_S", 0.05)
    answers = asyncio.Event()

    async def bls(model, inputs):
        await answers.wait()
        return {"disaggregated_params": np.array([b"signed"], object), "output_ids": np.array([7], np.int32),
                "usage": np.array([b"{}"], object)}  # fmt: skip

    inside = Workers(None, STALL_S / 10, call=bls)
    inside.answers = answers
    inside.set_workers({"prefill": 1})
    yield inside
    await inside.close()


async def test_inside_triton_a_prefill_is_lost_once_its_worker_has_another_engine(inside):
    prefill = asyncio.ensure_future(inside.prefill("prefill", REQUEST, "mine"))
    await asyncio.sleep(0)
    inside.set_workers({"prefill": 0})
    inside.set_workers({"prefill": 2})
    with pytest.raises(EngineLostError, match="prefill: its stub died with this request"):
        await asyncio.wait_for(prefill, 30)


async def test_inside_triton_a_prefill_of_the_present_engine_is_waited_for(inside):
    inside.set_workers({"prefill": 2})
    prefill = asyncio.ensure_future(inside.prefill("prefill", REQUEST, "mine"))
    inside.set_workers({"prefill": 2, "decode": 5})
    await asyncio.sleep(0.2)
    inside.answers.set()
    assert (await prefill).output_ids == (7,)


async def test_inside_triton_a_prefill_that_is_given_up_is_cancelled_and_not_lost(inside):
    prefill = asyncio.ensure_future(inside.prefill("prefill", REQUEST, "mine"))
    await asyncio.sleep(0)
    inside.set_workers({"prefill": 2})
    prefill.cancel()
    with pytest.raises(asyncio.CancelledError):
        await prefill


async def test_inside_triton_a_tokenizer_that_does_not_answer_is_lost(inside):
    with pytest.raises(EngineLostError, match="tokenizer: its stub died with this request"):
        await asyncio.wait_for(inside.tokenize("text"), 30)


async def test_a_prefill_worker_whose_engine_is_down_is_not_ready(server, workers):
    await workers.check("prefill")
    server.refusal = "UNAVAILABLE: prefill: its engine is not ready; try again"
    with pytest.raises(UnavailableError, match="its engine is not ready"):
        await workers.check("prefill")


async def test_inside_triton_calls_are_the_context_s_and_nobody_pings():
    asked = []

    async def call(model, inputs):
        asked.append((model, sorted(inputs)))
        await asyncio.sleep(STALL_S)
        return {"disaggregated_params": np.array([b"signed"], object), "output_ids": np.array([7], np.int32),
                "usage": np.array([b"{}"], object)}  # fmt: skip

    workers = Workers(GrpcChannel("127.0.0.1:1"), STALL_S, call=call)
    assert (await workers.prefill("prefill", REQUEST, "mine")).output_ids == (7,)
    assert asked == [("prefill", ["engine_request", "request_id"])]


# Encodes on decode workers


PICTURES = EncodeRequest(sources=())


class OneBus(Workers):
    """Takes requests and releases of its only bus; the test says how they end."""

    failure = None
    was_sent = True

    def _bus(self, worker):
        self.worker = worker
        return self

    def submit(self, request, sink):
        self.request, self.sink = request, sink
        return self

    def abort(self):
        self.sink.finish(Finish("cancelled", Usage()))


@pytest.fixture
def bus():
    return OneBus(GrpcChannel("127.0.0.1:1"), STALL_S)


async def begin(bus):
    running = asyncio.ensure_future(bus.encode("decode_1", PICTURES, "mine"))
    await asyncio.sleep(0)
    return running


async def test_the_answer_comes_with_the_finish(bus):
    running = await begin(bus)
    answer = EncodeAnswer(pictures=(), embeddings=b"rows")
    bus.sink.finish(Finish("stop", Usage(), encoded=encode_answer(answer)))
    assert await running == answer and (bus.worker, bus.request) == (
        "decode_1",
        PICTURES,
    )


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("INVALID_ARGUMENT: images[0]: no", RequestError),
        ("UNAVAILABLE: it broke down", EngineLostError),  # the engine had it: another may be tried at once
    ],
)
async def test_an_engine_s_error_is_raised(bus, text, kind):
    running = await begin(bus)
    bus.sink.finish(Finish("error", Usage(), error=text))
    with pytest.raises(kind, match=text.partition(": ")[2].replace("[", r"\[")):
        await running


async def test_a_bus_that_never_opened_says_so_itself(bus):
    running = await begin(bus)
    bus.failure = UnavailableError("decode_1 is loading")
    bus.sink.finish(Finish("error", Usage(), error="UNAVAILABLE: decode_1 is loading"))
    with pytest.raises(UnavailableError) as caught:
        await running
    assert caught.value is bus.failure


async def test_an_abort_ends_it_once(bus):
    running = await begin(bus)
    await bus.abort_encode("decode_1", "mine")
    await bus.abort_encode("decode_1", "another")
    with pytest.raises(RequestCancelledError):
        await running
    await bus.abort_encode("decode_1", "mine")
