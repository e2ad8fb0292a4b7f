"""Workers of several tritonservers behind one client: channels, lost servers, calls inside Triton."""

import asyncio

import numpy as np
import pytest

from bireme.errors import EngineLostError, UnavailableError
from bireme.messages import EngineRequest, SamplingParams
from bireme.workers import bus as bus_module
from bireme.workers.base import UnreachableError
from bireme.workers.client import Workers
from bireme.workers.grpc import GrpcChannel

REQUEST = EngineRequest(prompt=np.array([1, 2], np.int32).tobytes(), sampling=SamplingParams(max_tokens=4))


async def test_a_worker_s_id_says_where_its_requests_go(bus, recorder):
    workers = Workers(None, 5.0)
    workers.decode(f"decode@{bus.address}", REQUEST, recorder())
    await bus.request_at_engine()
    assert workers.capacity(f"decode@{bus.address}") is not None
    await workers.close()


async def test_without_a_server_of_its_own_a_bare_name_leads_nowhere():
    with pytest.raises(UnavailableError, match="decode: this process has no tritonserver of its own"):
        await Workers(None, 5.0).check("decode")


async def test_a_server_whose_workers_have_left_is_disconnected(bus, recorder):
    workers, name = Workers(GrpcChannel("127.0.0.1:1"), 5.0), f"decode@{bus.address}"
    workers.set_workers([name])
    workers.decode(name, REQUEST, recorder()).abort()
    await bus.until(lambda: bus.server.num_streams == 0 and workers._buses[name].is_idle)
    workers.set_workers([])
    assert not workers._buses and set(workers._channels) == {""}
    await workers.close()


async def test_a_lost_worker_keeps_its_streams_while_it_answers(bus, recorder, monkeypatch):
    monkeypatch.setattr(bus_module, "LOST_STALL_S", 1.0)
    workers, name, sink = Workers(None, 60.0), f"decode@{bus.address}", recorder()
    workers.decode(name, REQUEST, sink)
    consumer, number = await bus.request_at_engine()
    workers.set_workers([])
    await asyncio.sleep(1.5)  # longer than a silent one is waited for
    bus.engine.emit(consumer, {number: 7})
    await bus.until(lambda: sink.tokens == [7])
    await workers.close()


async def test_a_lost_worker_that_is_silent_is_given_up_early(bus, recorder, monkeypatch):
    monkeypatch.setattr(bus_module, "LOST_STALL_S", 0.2)
    workers, name, sink = Workers(None, 60.0), f"decode@{bus.address}", recorder()
    request = workers.decode(name, REQUEST, sink)
    await bus.request_at_engine()
    bus.server.is_deaf = True
    workers.set_workers([])
    await sink.end()
    assert isinstance(request.failure, EngineLostError) and "discovery has lost it" in str(request.failure)
    await workers.close()


async def test_inside_triton_only_the_own_server_s_models_are_called_by_bls(bus):
    calls = []

    async def call(model, inputs):
        calls.append(model)
        return {}

    workers = Workers(GrpcChannel("127.0.0.1:1"), 5.0, call=call)
    await workers._call_worker("prefill", {})
    with pytest.raises(UnreachableError, match=r"no Triton gRPC endpoint at 127.0.0.1:1"):
        await workers._call_worker("prefill@127.0.0.1:1", {"ping": np.array([True])})
    assert calls == ["prefill"]
    await workers.close()
