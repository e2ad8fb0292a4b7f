"""The stub's side of the token bus."""

import asyncio

import numpy as np
import pytest

from bireme.errors import NotFoundError, RequestError, ResourceExhaustedError, UnavailableError
from bireme.messages import Abort, Commands, EngineRequest, SamplingParams, Step, Submit, Welcome, encode, unpack_bus
from bireme.stages import bus

REQUEST = EngineRequest(prompt=b"\1\0\0\0", sampling=SamplingParams())


def items_of(call):
    return [item for response in call.sent for item in unpack_bus(response.tensors()["steps"].tobytes())]


async def subscribe(test):
    """Return the running call, the consumer's id and the engine's number for it."""
    call = await test.ask(subscribe=b"open").begun()
    [welcome] = items_of(call)
    call.sent.clear()
    assert isinstance(welcome, Welcome)
    return call, welcome, next(reversed(test.engine.buses))


def commands(*items):
    return np.frombuffer(encode(Commands(1, list(items))), np.uint8)


async def test_welcome_names_consumer_life_and_capacity(decode):
    test = await decode()
    _, welcome, _ = await subscribe(test)
    assert len(welcome.consumer) == 32
    assert welcome.life == 1
    assert welcome.capacity.vocab_size == 1000


async def test_commands_reach_the_engine_unread_and_steps_come_back(decode):
    test = await decode()
    call, welcome, number = await subscribe(test)
    payload = commands(Submit(1, REQUEST))
    assert await test.ask(consumer=welcome.consumer, commands=payload).end() == []
    assert test.engine.payloads == [payload.tobytes()]
    test.engine.emit(number, {1: 97})
    assert items_of(call) == [Step(1, 1, [1], [97])]


async def test_consumer_ids_are_needed_to_command(decode):
    test = await decode()
    await subscribe(test)
    with pytest.raises(NotFoundError, match="subscribe again"):
        await test.ask(consumer=b"guess", commands=commands()).end()


async def test_late_steps_go_out_in_one_response(decode):
    test = await decode()
    call, _, number = await subscribe(test)
    test.engine.emit(number, {1: 97})
    test.engine.emit(number, {1: 98})
    assert call.sent[0].is_urgent  # many requests' tokens: not behind those of single streams
    merged = call.sent[0].merge(call.sent[1])
    assert [step.tokens for step in unpack_bus(merged.tensors()["steps"].tobytes())] == [[97], [98]]


async def test_a_consumer_that_falls_behind_is_dropped_and_its_requests_aborted(decode):
    test = await decode(limits={"max_bus_buffer_bytes": 600})
    call, welcome, number = await subscribe(test)
    await test.ask(consumer=welcome.consumer, commands=commands(Submit(1, REQUEST))).end()
    for token in range(100):
        if number in test.engine.buses:
            test.engine.emit(number, {1: token})
    with pytest.raises(ResourceExhaustedError, match="max_bus_buffer_bytes is 600"):
        await call.end()
    assert (number, 1) in test.engine.aborted
    assert test.metrics.take_delta().counters == [("bireme_bus_dropped_total", ("decode",), 1.0)]


async def test_what_was_sent_no_longer_counts_as_behind(decode):
    test = await decode(limits={"max_bus_buffer_bytes": 600})
    call, _, number = await subscribe(test)
    for token in range(100):
        test.engine.emit(number, {1: token})
        call.sent.pop().tensors()
    assert not call.task.done()


async def test_keep_is_answered_with_an_empty_step(decode):
    test = await decode()
    call, welcome, _ = await subscribe(test)
    await test.ask(subscribe=b"keep", consumer=welcome.consumer).end()
    assert items_of(call) == [Step(1, 0)]


async def test_close_ends_it_and_aborts_what_it_runs(decode):
    test = await decode()
    call, welcome, number = await subscribe(test)
    await test.ask(consumer=welcome.consumer, commands=commands(Submit(1, REQUEST))).end()
    await test.ask(subscribe=b"close", consumer=welcome.consumer).end()
    await call.end()
    assert (number, 1) in test.engine.aborted


async def test_a_client_that_is_gone_ends_it(decode):
    test = await decode()
    call, _, number = await subscribe(test)
    call.cancelled.set()
    await call.end()
    assert number not in test.engine.buses


async def test_engine_death_is_told_and_the_subscription_ends(decode, monkeypatch):
    test = await decode()
    call, welcome, _ = await subscribe(test)
    test.engine.die()
    assert items_of(call) == [Step(1, 0, lost=True)]
    with pytest.raises(UnavailableError):
        await test.ask(consumer=welcome.consumer, commands=commands()).end()
    with pytest.raises(UnavailableError, match="subscribe again"):
        await call.end()


async def test_a_silent_consumer_is_let_go(decode, monkeypatch):
    monkeypatch.setattr(bus, "SILENCE_S", 0.0)
    test = await decode()
    call, _, _ = await subscribe(test)
    with pytest.raises(UnavailableError, match="nothing heard"):
        await call.end()


async def test_an_engine_that_is_not_ready_refuses_subscriptions(decode):
    test = await decode()
    test.engine.die()
    with pytest.raises(UnavailableError, match="being restarted"):
        await test.ask(subscribe=b"open").end()


async def test_empty_command_batches_are_refused(decode):
    test = await decode()
    _, welcome, _ = await subscribe(test)
    with pytest.raises(RequestError, match="commands: empty"):
        await test.ask(consumer=welcome.consumer, commands=np.zeros(0, np.uint8)).end()
    await asyncio.sleep(0)


async def test_requests_that_can_not_reach_the_engine_are_refused_one_by_one(decode):
    test = await decode()
    call, welcome, number = await subscribe(test)
    await test.ask(consumer=welcome.consumer, commands=commands(Submit(1, REQUEST))).end()
    test.engine.is_connected = False
    await test.ask(consumer=welcome.consumer, commands=commands(Abort(1), Submit(2, REQUEST))).end()
    (step,) = items_of(call)
    assert list(step.finished) == [2] and step.finished[2].error.startswith("UNAVAILABLE: the engine process")
    test.engine.emit(number, {1: 97})  # who has the engine goes on with it
    assert items_of(call)[-1].tokens == [97]
