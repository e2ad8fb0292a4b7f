"""Unary calls of a frontend to prefill workers that answer, refuse, take their time, or are dead."""

import asyncio

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from bireme.errors import EngineLostError, UnavailableError
from bireme.messages import EngineRequest, SamplingParams
from bireme.workers.channel import infer_request
from bireme.workers.remote import RemoteWorkers

REQUEST = EngineRequest(prompt=b"\1\0\0\0", sampling=SamplingParams())
STALL_S = 0.4


class PrefillServer:
    """ModelInfer and ModelReady of a server with one prefill worker."""

    def __init__(self):
        self.prefill_s = 0.0  # how long a prefill takes
        self.refusal = "NOT_FOUND: no request of this id"  # what an abort of an unknown request is told
        self.is_dead = False  # takes calls and never answers
        self.num_checks = 0

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
        if self.is_dead:
            await asyncio.sleep(60)
        if any(tensor.name == "abort" for tensor in request.inputs):
            self.num_checks += 1
            await context.abort(grpc.StatusCode.INTERNAL, self.refusal)
        await asyncio.sleep(self.prefill_s)
        return answer({"disaggregated_params": b"signed", "output_ids": np.array([7], np.int32), "usage": b"{}"})


def answer(tensors):
    request = infer_request("prefill", tensors)
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
    workers = RemoteWorkers(STALL_S, server.address)
    yield workers
    await workers.close()


async def test_a_prefill_is_answered(server, workers):
    result = await workers.prefill("prefill", REQUEST, "mine")
    assert (result.disaggregated_params, result.output_ids, server.num_checks) == (b"signed", (7,), 0)


async def test_a_long_prefill_is_waited_for_while_its_worker_lives(server, workers):
    server.prefill_s = 3 * STALL_S
    assert (await workers.prefill("prefill", REQUEST, "mine")).output_ids == (7,)
    assert server.num_checks >= 2


async def test_a_prefill_on_a_dead_stub_is_lost(server, workers):
    server.is_dead = True
    with pytest.raises(EngineLostError, match="prefill: no news for 0.4 s"):
        await asyncio.wait_for(workers.prefill("prefill", REQUEST, "mine"), 5)


async def test_a_prefill_worker_whose_engine_is_down_is_not_ready(server, workers):
    await workers.check("prefill")
    server.refusal = "UNAVAILABLE: prefill: its engine is not ready; try again"
    with pytest.raises(UnavailableError, match="its engine is not ready"):
        await workers.check("prefill")
