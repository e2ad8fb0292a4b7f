"""Sessions of the token bus against the real decode stage over a real gRPC connection."""

import asyncio

import msgspec
import pytest

from bireme.canary_mark import new_mark
from bireme.errors import EngineLostError, UnavailableError
from bireme.messages import EngineRequest, Finish, SamplingParams, Usage
from bireme.metrics import Registry
from bireme.serving_options import ServingOptions
from bireme.workers import bus as bus_module
from bireme.workers.base import UnreachableError
from bireme.workers.client import Workers
from bireme.workers.grpc import GrpcChannel

REQUEST = EngineRequest(prompt=b"\1\0\0\0", sampling=SamplingParams())
DONE = Finish("length", Usage())


async def test_tokens_come_to_the_sink_and_end_with_the_finish(bus, recorder):
    sink = recorder()
    request = bus.workers.decode("decode", REQUEST, sink)
    consumer, number = await bus.request_at_engine()
    bus.engine.emit(consumer, {number: 5})
    bus.engine.emit(consumer, {number: 6})
    bus.engine.finish(consumer, number, DONE)
    assert (await sink.end()).reason == "length"
    assert sink.tokens == [5, 6]
    assert request.failure is None and request.was_sent


async def test_requests_that_come_together_go_out_in_one_message(bus, recorder):
    sinks = [recorder() for _ in range(20)]
    for sink in sinks:
        bus.workers.decode("decode", REQUEST, sink)
    await bus.until(lambda: len(bus.engine.requests) == 20)
    assert len(bus.engine.payloads) == 1
    assert bus.server.num_streams == 1


async def test_capacity_of_the_worker_is_known_after_the_welcome(bus, recorder):
    bus.workers.decode("decode", REQUEST, recorder())
    await bus.request_at_engine()
    assert bus.workers.capacity("decode").vocab_size == 1000


async def test_abort_reaches_the_engine(bus, recorder):
    sink = recorder()
    request = bus.workers.decode("decode", REQUEST, sink)
    await bus.request_at_engine()
    request.abort()
    assert (await sink.end()).reason == "cancelled"
    request.abort()  # harmless
    assert len(bus.engine.aborted) == 1


async def test_abort_before_the_subscription_stands_never_reaches_it(bus, recorder):
    sink = recorder()
    bus.workers.decode("decode", REQUEST, sink).abort()
    assert (await sink.end()).reason == "cancelled"
    bus.workers.decode("decode", REQUEST, recorder())
    assert await bus.request_at_engine() == (1, 2)  # of two requests the second, and no other
    assert len(bus.engine.requests) == 1 and not bus.engine.aborted


async def lose_engine(bus, sink):
    """A request runs when its engine dies; return its request and its end."""
    request = bus.workers.decode("decode", REQUEST, sink)
    await bus.request_at_engine()
    bus.engine.die()
    return request, await sink.end()


async def test_engine_death_is_told_as_engine_lost(bus, recorder):
    request, end = await lose_engine(bus, recorder())
    assert end.error.startswith("UNAVAILABLE: engine lost: decode")
    assert isinstance(request.failure, EngineLostError)


async def test_the_next_request_subscribes_to_the_next_life(bus, recorder):
    await lose_engine(bus, recorder())
    bus.engine.requests.clear()  # those of the life that has ended
    bus.engine.come_back()
    later = recorder()
    bus.workers.decode("decode", REQUEST, later)
    consumer, number = await bus.request_at_engine()
    bus.engine.finish(consumer, number, DONE)
    assert (await later.end()).reason == "length"


async def test_a_refused_subscription_costs_nothing(bus, recorder):
    bus.engine.die()
    sink = recorder()
    request = bus.workers.decode("decode", REQUEST, sink)
    assert "being restarted" in (await sink.end()).error
    assert not request.was_sent
    assert type(request.failure) is UnavailableError


async def test_a_refused_subscription_is_left_and_not_cancelled(bus, recorder):
    """Triton 2.51 would count the stream for ever, and wait for it at its exit."""
    bus.engine.die()
    for _ in range(3):
        sink = recorder()
        bus.workers.decode("decode", REQUEST, sink)
        await sink.end()
    await bus.until(lambda: bus.server.num_streams == 0)
    assert bus.server.num_cut == 0


async def test_after_an_engine_s_death_the_stream_is_left_and_not_cancelled(bus, recorder):
    await lose_engine(bus, recorder())
    await bus.until(lambda: bus.server.num_streams == 0)
    assert bus.server.num_cut == 0 and not bus.engine.buses


async def test_a_silent_stub_s_stream_is_cancelled(bus, recorder, monkeypatch):
    monkeypatch.setattr(bus_module, "LEAVE_S", 0.1)
    workers = Workers(GrpcChannel(bus.address), 0.2)
    sink = recorder()
    workers.decode("decode", REQUEST, sink)
    await bus.request_at_engine()
    bus.server.is_deaf = True
    await sink.end()
    await bus.until(lambda: bus.server.num_streams == 0)
    assert bus.server.num_cut == 1
    await workers.close()


async def test_no_server_is_said_with_the_variable_to_set(recorder):
    sink = recorder()
    request = Workers(GrpcChannel("127.0.0.1:1"), 2.0).decode("decode", REQUEST, sink)
    assert "set BIREME_GRPC" in (await sink.end()).error
    assert isinstance(request.failure, UnreachableError)


async def test_a_server_that_goes_away_loses_what_was_sent(bus, recorder):
    sink = recorder()
    request = bus.workers.decode("decode", REQUEST, sink)
    await bus.request_at_engine()
    await bus.server.server.stop(0)
    await sink.end()
    assert isinstance(request.failure, EngineLostError)


async def test_a_silent_stub_is_given_up(bus, recorder):
    workers = Workers(GrpcChannel(bus.address), 0.2)
    sink = recorder()
    workers.decode("decode", REQUEST, sink)
    await bus.request_at_engine()
    bus.server.is_deaf = True
    assert "no news for" in (await sink.end()).error
    await workers.close()


async def test_keepalives_keep_a_quiet_request_alive(bus, recorder):
    workers = Workers(GrpcChannel(bus.address), 0.5)
    sink = recorder()
    workers.decode("decode", REQUEST, sink)
    consumer, number = await bus.request_at_engine()
    await asyncio.sleep(1.5)  # three times as long as a silent stub is waited for
    bus.engine.finish(consumer, number, DONE)
    assert (await sink.end()).reason == "length"
    await workers.close()


async def test_an_idle_subscription_is_closed_and_opened_again(bus, recorder, monkeypatch):
    monkeypatch.setattr(bus_module, "IDLE_S", 0.1)
    consumers = []
    for _ in range(2):
        sink = recorder()
        bus.workers.decode("decode", REQUEST, sink)
        consumer, number = await bus.request_at_engine()
        consumers.append(consumer)
        assert list(bus.engine.buses) == [consumer]
        assert bus.server.num_streams == 1
        bus.engine.finish(consumer, number, DONE)
        assert (await sink.end()).reason == "length"
        await bus.until(lambda: not bus.engine.buses and bus.server.num_streams == 0)
    assert consumers[0] != consumers[1]


async def test_a_long_used_subscription_is_renewed_and_ends_with_its_last_request(bus, recorder, monkeypatch):
    monkeypatch.setattr(bus_module, "RENEW_AFTER", 3)  # the welcome is the first
    monkeypatch.setattr(bus_module, "IDLE_S", 0.2)
    old, new = recorder(), recorder()
    bus.workers.decode("decode", REQUEST, old)
    consumer, number = await bus.request_at_engine()
    bus.engine.emit(consumer, {number: 5})
    await bus.until(lambda: old.tokens == [5])
    bus.engine.emit(consumer, {number: 6})
    await bus.until(lambda: bus.server.num_streams == 2)
    bus.workers.decode("decode", REQUEST, new)
    await bus.until(lambda: len(bus.engine.requests) == 2)
    bus.engine.emit(consumer, {number: 7})
    bus.engine.finish(consumer, number, DONE)
    assert (await old.end()).reason == "length"
    assert old.tokens == [5, 6, 7]
    await bus.until(lambda: bus.server.num_streams == 1)  # the old one's has ended, the new one's goes on
    assert new.tokens == []


async def test_a_subscription_that_the_stub_closed_is_replaced_unseen(bus, recorder):
    first = recorder()
    bus.workers.decode("decode", REQUEST, first)
    consumer, number = await bus.request_at_engine()
    bus.engine.finish(consumer, number, DONE)
    await first.end()
    for subscription in list(bus.stage._bus._open.values()):
        subscription.end()
    await asyncio.sleep(0.05)
    second = recorder()
    bus.workers.decode("decode", REQUEST, second)
    consumer, number = await bus.request_at_engine()
    bus.engine.finish(consumer, number, DONE)
    assert (await second.end()).reason == "length"


async def test_an_abort_outlives_a_subscription_that_the_stub_closed(bus, recorder):
    sink = recorder()
    request = bus.workers.decode("decode", REQUEST, sink)
    await bus.request_at_engine()
    for subscription in list(bus.stage._bus._open.values()):
        subscription.end()
    request.abort()
    assert (await sink.end()).reason == "cancelled"
    bus.workers.decode("decode", REQUEST, recorder())
    assert await bus.request_at_engine() == (2, 1)  # the new subscription's first


async def test_one_broken_sink_does_not_take_the_others_along(bus, recorder):
    class Broken(recorder):
        def push(self, *outputs):
            raise ValueError("broken")

    broken, sound = Broken(), recorder()
    bus.workers.decode("decode", REQUEST, broken)
    bus.workers.decode("decode", REQUEST, sound)
    await bus.until(lambda: len(bus.engine.requests) == 2)
    consumer, _ = next(iter(bus.engine.requests))
    bus.engine.emit(consumer, {1: 5, 2: 6})
    assert "ValueError" in (await broken.end()).error
    await bus.until(lambda: sound.tokens == [6])
    await bus.until(lambda: (consumer, 1) in bus.engine.aborted)


async def test_closing_ends_requests_and_subscription(bus, recorder):
    sink = recorder()
    bus.workers.decode("decode", REQUEST, sink)
    await bus.request_at_engine()
    await bus.workers.close()
    assert "shutting down" in (await sink.end()).error
    await bus.until(lambda: not bus.engine.buses)


@pytest.mark.parametrize("life", [0, 7])
async def test_commands_name_the_life_of_the_welcome(bus, recorder, life):
    bus.engine.number_of_life = life
    bus.workers.decode("decode", REQUEST, recorder())
    await bus.request_at_engine()
    from bireme.messages import decode_commands

    assert decode_commands(bus.engine.payloads[0]).life == life


async def test_big_prompts_are_spread_over_several_messages(bus, recorder):
    big = EngineRequest(prompt=b"\1\0\0\0" * (3 << 18), sampling=SamplingParams())
    for _ in range(3):
        bus.workers.decode("decode", big, recorder())
    await bus.until(lambda: len(bus.engine.requests) == 3)
    assert len(bus.engine.payloads) == 3


async def test_a_check_says_whether_requests_would_be_taken(bus):
    await bus.workers.ping("decode")
    assert bus.workers.capacity("decode").vocab_size == 1000
    bus.engine.die()
    await asyncio.sleep(0.05)
    with pytest.raises(UnavailableError):
        await bus.workers.ping("decode")
    bus.engine.come_back()
    await bus.workers.ping("decode")


async def test_a_check_of_a_stub_that_is_stopped_waits(bus):
    bus.server.is_deaf = True
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(bus.workers.ping("decode"), 0.3)


async def test_gaps_are_those_between_deliveries_of_each_stream(bus, recorder):
    metrics = Registry("generate")
    workers = Workers(GrpcChannel(bus.address), 2.0, metrics)
    sinks = [recorder(), recorder()]
    for sink in sinks:
        workers.decode("decode", REQUEST, sink)
    await bus.until(lambda: len(bus.engine.requests) == 2)
    (consumer, first), (_, second) = bus.engine.requests
    for tokens in ({first: 1}, {first: 2, second: 3}, {first: 4, second: 5}):
        bus.engine.emit(consumer, tokens)
        count = sum(len(sink.tokens) for sink in sinks)
        await bus.until(
            lambda count=count, tokens=tokens: sum(len(sink.tokens) for sink in sinks) == count + len(tokens)
        )
    ((name, _, counts, seconds),) = metrics.take_delta().histograms
    assert (name, sum(counts)) == ("bireme_inter_token_latency_seconds", 3) and seconds > 0
    await workers.close()


async def test_gaps_of_canaries_are_not_counted(bus, recorder, monkeypatch):
    monkeypatch.setenv("BIREME_KEY", "ab" * 32)
    metrics, sink = Registry("generate"), recorder()
    workers = Workers(GrpcChannel(bus.address), 2.0, metrics)
    workers.decode(
        "decode", msgspec.structs.replace(REQUEST, options=ServingOptions(cache_salt=new_mark("ab" * 32))), sink
    )
    await bus.until(lambda: bus.engine.requests)
    ((consumer, number),) = bus.engine.requests
    for token in (1, 2):
        bus.engine.emit(consumer, {number: token})
        await bus.until(lambda token=token: len(sink.tokens) == token)
    assert not metrics.take_delta().histograms
    await workers.close()
