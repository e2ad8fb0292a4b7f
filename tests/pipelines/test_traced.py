"""What a traced request tells of its attempts: a tree, whatever happens to its workers and its client."""

import asyncio

import pytest

from bireme.errors import EngineLostError, KvTransferError, ResourceExhaustedError
from bireme.observability.traces import Traces
from tests.observability.span_trees import check_tree, shown
from tests.pipelines.conftest import until

FULL = ResourceExhaustedError("queue: 8 requests wait")


async def traced(bench, **settings):
    test = await bench(**settings)
    test.traces, test.read = Traces(test.metrics, 1.0), []
    test.traces.subscribe(test.read.append, wants_token_times=True)
    test.pipeline._services.traces = test.traces
    return test


async def test_a_request_tells_of_each_step_on_its_way(bench):
    test = await traced(bench, prefill=2, decode=2)
    call = test.ask(stream=True)
    await test.workers.emit(4)
    await call.end()
    [trace] = test.read
    check_tree(trace)
    assert shown(trace) == [
        "generate",
        "  tokenize",
        "  attempt",
        "    route",
        "    prefill",
        "      queue",
        "      prefill_chunk",
        "    decode",
        "      queue",
        "      generate",
    ]
    route = next(span for span in trace.spans if span.name == "route").attributes
    assert (route["prefill"], route["decode"], route["reason"]) == ("prefill", "decode", "round_robin")
    assert {one["worker"] for one in route["candidates"]} == {"prefill", "prefill_1", "decode", "decode_1"}
    assert all("cost" in one for one in route["candidates"])


async def test_a_sequence_tells_its_account_and_when_its_tokens_came(bench):
    test = await traced(bench)
    call = test.ask(stream=True, num_return_sequences=2)
    await until(lambda: len(test.workers.running) == 2)
    await test.workers.emit(4)
    await call.end()
    [trace] = test.read
    assert [one.index for one in trace.sequences] == [0, 1]
    for one in trace.sequences:
        assert (one.finish_reason, one.usage.completion_tokens, one.prompt.tolist()) == ("length", 4, [104, 105])
        assert trace.root.start_us <= one.first_token_us <= one.token_times.times_us[0] <= trace.root.end_us
        assert sum(one.token_times.counts) == 4


async def test_a_migration_is_a_second_attempt_that_names_the_loss(bench):
    test = await traced(bench, decode=2)
    call = test.ask(stream=True)
    await test.workers.emit(2)
    test.workers.running[0].fail(EngineLostError("its engine died"))
    await test.workers.emit(2)
    await call.end()
    [trace] = test.read
    check_tree(trace)
    first, second = [span for span in trace.spans if span.name == "attempt"]
    assert first.error == second.attributes["after"] and "its engine died" in first.error and second.error == ""
    assert [span.attributes["worker"] for span in trace.spans if span.name == "decode"] == ["decode", "decode_1"]
    assert sum(trace.sequences[0].token_times.counts) == 4 and trace.root.error == ""


async def test_kv_that_does_not_arrive_is_an_attempt_of_its_own(bench):
    test = await traced(bench, prefill=1)
    test.workers.errors.append(KvTransferError("prefill is gone"))
    call = test.ask()
    await until(lambda: "decode context_and_generation 0" in test.workers.log)
    await test.workers.emit(4)
    await call.end()
    [trace] = test.read
    check_tree(trace)
    assert [span.name for span in trace.spans if span.name in ("attempt", "prefill", "decode")] == [
        *("attempt", "prefill", "decode"),
        *("attempt", "decode"),
    ]


async def test_a_cancelled_request_says_so_where_it_was(bench):
    test = await traced(bench, prefill=1)
    call = test.ask(stream=True)
    await test.workers.emit()
    call.cancelled.set()
    with pytest.raises(asyncio.CancelledError):
        await call.end()
    [trace] = test.read
    check_tree(trace)
    errors = {span.name: span.error.partition(":")[0] for span in trace.spans if span.error}
    assert errors == {"generate": "CANCELLED", "attempt": "CANCELLED", "decode": "CANCELLED"}
    assert trace.sequences[0].num_tokens == 1


async def test_a_sequence_of_which_only_the_end_was_lost_has_its_account(bench):
    test = await traced(bench)
    call = test.ask()
    await test.workers.reached("decode")
    test.workers.running[0].sink.push([5, 6, 7, 8])
    test.workers.running[0].fail(EngineLostError("its engine died"))
    await call.end()
    [trace] = test.read
    check_tree(trace)
    [sequence] = trace.sequences
    assert (sequence.finish_reason, sequence.num_tokens, sequence.usage.completion_tokens) == ("length", 4, 4)


async def test_a_request_that_fails_ends_its_tree_with_the_error(bench):
    test = await traced(bench)
    test.workers.errors.append(FULL)
    with pytest.raises(ResourceExhaustedError):
        await test.ask().end()
    [trace] = test.read
    check_tree(trace)
    assert trace.root.error.startswith("RESOURCE_EXHAUSTED: ") and trace.sequences[0].usage is None


async def test_a_placement_that_is_refused_is_told(bench):
    test = await traced(bench)
    test.pipeline._services.router.place = lambda *_, **__: (_ for _ in ()).throw(FULL)
    with pytest.raises(ResourceExhaustedError):
        await test.ask().end()
    [trace] = test.read
    assert [span.error.partition(":")[0] for span in trace.spans if span.name == "route"] == ["RESOURCE_EXHAUSTED"]


async def test_an_untraced_request_asks_engines_for_nothing(bench):
    test = await bench()
    call = test.ask()
    await test.workers.reached("decode")
    assert test.workers.running[0].request.traceparent == ""
    await test.workers.emit(4)
    await call.end()


async def test_a_reader_of_accounts_alone_asks_engines_and_router_for_nothing(bench):
    test = await bench(prefill=1)
    test.traces, test.read = Traces(test.metrics), []
    test.traces.subscribe(test.read.append, wants_all=True, wants_details=False)
    test.pipeline._services.traces = test.traces
    call = test.ask()
    await test.workers.reached("decode")
    assert test.workers.running[0].request.traceparent == ""
    await test.workers.emit(4)
    await call.end()
    [trace] = test.read
    check_tree(trace)
    assert shown(trace) == ["generate", "  tokenize", "  attempt"]
    [sequence] = trace.sequences
    assert (sequence.num_tokens, sequence.usage.prefill_worker, sequence.finish_reason) == (4, "prefill", "length")
