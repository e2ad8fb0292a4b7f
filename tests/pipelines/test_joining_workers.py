"""Workers of other servers that join, drain and are lost while requests run."""

import asyncio

import pytest

from bireme.discovery.records import WorkerRecord
from bireme.errors import UnavailableError
from bireme.workers.base import UnreachableError
from bireme.workers.fake import token_at

SHARED = {"discovery": {"backend": "directory", "folder": "/nowhere"}}
PROMPT = [ord(letter) for letter in "hi"]
EXPECTED = [token_at(PROMPT, position) for position in range(4)]
OTHER = "decode@b:8001"


def view(*names, **states):
    return {
        name: WorkerRecord(worker=name.partition("@")[0], state=states.get(name.partition("@")[0], "ready"))
        for name in names
    }


def services_of(test):
    return test.pipeline._services


async def test_a_worker_that_joins_gets_the_next_request(bench):
    test = await bench(**SHARED)
    services_of(test).set_workers(view("decode", OTHER))
    assert test.workers.members == {"decode", OTHER}
    calls = [test.ask() for _ in range(2)]
    await test.workers.reached(OTHER)
    await test.workers.reached("decode")
    await test.workers.emit(4)
    for call in calls:
        await call.end()
        assert call.tokens == EXPECTED


async def test_a_stream_goes_on_exactly_on_another_server(bench):
    test = await bench(**SHARED)
    services_of(test).set_workers(view(OTHER))
    call = test.ask(stream=True)
    await test.workers.emit(2)
    services_of(test).set_workers(view("decode"))
    await test.workers.lose(OTHER)
    await test.workers.reached("decode")
    await test.workers.emit(2)
    await call.end()
    assert call.tokens == EXPECTED


async def test_a_request_waits_for_a_first_worker(bench):
    test = await bench(**SHARED)
    services_of(test).set_workers({})
    call = test.ask()
    services_of(test).set_workers(view(OTHER))
    await test.workers.emit(4)
    await call.end()
    assert call.tokens == EXPECTED


async def test_without_any_worker_it_ends_after_the_stall_time(bench):
    test = await bench(pipeline={"stall_timeout_s": 0.05}, **SHARED)
    services_of(test).set_workers({})
    with pytest.raises(UnavailableError, match="no decode worker takes requests now"):
        await test.ask().end()


async def test_a_server_that_can_t_be_reached_is_passed_by_for_another(bench):
    test = await bench(**SHARED)
    services_of(test).set_workers(view(OTHER, "decode"))
    test.workers.down[OTHER] = UnreachableError("no Triton gRPC endpoint")
    for _ in range(2):
        call = test.ask()
        await asyncio.wait_for(test.workers.reached("decode"), 5)
        await test.workers.emit(4)
        await call.end()
        assert call.tokens == EXPECTED


async def test_a_draining_worker_keeps_what_it_has_and_gets_nothing_new(bench):
    test = await bench(decode=2, **SHARED)
    services_of(test).set_workers(view("decode"))
    first = test.ask()
    await test.workers.reached("decode")
    services_of(test).set_workers(view("decode", "decode_1", decode="draining"))
    second = test.ask()
    await test.workers.reached("decode_1")
    await test.workers.emit(4)
    for call in (first, second):
        await call.end()
    assert sorted(line.split()[0] for line in test.workers.log) == ["decode", "decode_1"]


async def test_the_capacity_is_known_from_records_alone(bench):
    from bireme.messages import Capacity

    test = await bench(**SHARED)
    capacity = Capacity(
        max_seq_len=7, max_batch_size=1, max_num_tokens=1, max_queue_size=1, tokens_per_block=1, num_blocks=1,
        vocab_size=9,
    )  # fmt: skip
    services_of(test).set_workers({OTHER: WorkerRecord(worker="decode", capacity=capacity)})
    assert services_of(test).capacity() == capacity
