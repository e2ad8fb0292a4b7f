"""One request through generate: what goes out, and what happens when workers or clients go away."""

import asyncio
import gc
import json

import numpy as np
import pytest

from bireme.canary_mark import new_mark
from bireme.discovery.records import WorkerRecord
from bireme.errors import (
    BiremeError,
    DeadlineExceededError,
    EngineLostError,
    EngineStalledError,
    KvTransferError,
    NotFoundError,
    RequestError,
    ResourceExhaustedError,
    UnavailableError,
)
from bireme.kv.routing.router import RoutingRequest
from bireme.types import RequestInfo
from bireme.workers.base import UnreachableError
from bireme.workers.fake import OWN_PREFILL_MS, PREFILL_USAGE, token_at
from tests.kv.routing.router_fixtures import capacity
from tests.pipelines.conftest import until

PROMPT = [ord("h"), ord("i")]
EXPECTED = [token_at(PROMPT, position) for position in range(4)]
ENGINE_DOWN = UnavailableError("its engine is starting")
QUICK = {"pipeline": {"stall_timeout_s": 0.2}}


async def test_stream_sends_each_token_and_its_text_at_once(bench):
    test = await bench()
    call = test.ask(stream=True)
    await test.workers.emit()
    assert call.tokens == EXPECTED[:1]
    await test.workers.emit(3)
    await call.end()
    assert call.tokens == EXPECTED
    assert call.text == "".join(map(chr, EXPECTED))
    assert call.last("finish_reason") == [b"length"]


async def test_without_stream_there_is_exactly_one_response(bench):
    test = await bench()
    call = test.ask()
    await test.workers.emit(4)
    await call.end()
    assert len(call.responses) == 1
    assert call.tokens == EXPECTED


async def test_token_ids_are_taken_instead_of_text(bench):
    test = await bench()
    call = test.ask(text_input="hi", input_ids=[1])
    with pytest.raises(RequestError, match="both of text_input and input_ids"):
        await call.end()


async def test_a_text_of_too_many_tokens_reaches_no_engine(bench):
    test = await bench(limits={"max_prompt_tokens": 4})
    with pytest.raises(RequestError, match="prompt: 5 tokens; limits.max_prompt_tokens is 4"):
        await test.ask(text_input="hello").end()
    assert not test.workers.log


async def test_sequences_of_one_request_are_told_apart_by_index(bench):
    test = await bench()
    call = test.ask(stream=True, num_return_sequences=2)
    await until(lambda: len(test.workers.running) == 2)
    await test.workers.emit(4)
    await call.end()
    for index in (0, 1):
        mine = [response for response in call.responses if response["index"].tolist() == [index]]
        assert [token for response in mine for token in response["output_ids"].tolist()] == EXPECTED


async def test_sequences_come_in_one_response_without_stream(bench):
    test = await bench()
    call = test.ask(num_return_sequences=2, return_num_output_tokens=True)
    await until(lambda: len(test.workers.running) == 2)
    await test.workers.emit(4)
    await call.end()
    assert len(call.responses) == 1
    assert len(call.last("text_output")) == 2
    assert call.last("index") == [0, 1]
    assert call.last("num_output_tokens") == [4, 4]
    assert call.last("sequence_index") == [0, 1]


@pytest.mark.parametrize("more", [{}, {"return_finish_reason": True}], ids=["trtllm", "vllm"])
async def test_what_became_of_drafts_is_told_when_asked_and_counts_what_was_delivered(bench, more):
    test = await bench()
    test.workers.drafts = (12, 9)  # more than a stop string left
    call = test.ask(return_perf_metrics=True, **more)
    await test.workers.emit(4)
    await call.end()
    assert call.last("acceptance_rate") == pytest.approx([4 / 12])
    assert (call.last("total_accepted_draft_tokens"), call.last("total_draft_tokens")) == ([4], [12])


async def test_the_rate_of_nothing_drafted_is_0_and_nothing_is_told_unasked(bench):
    test = await bench()
    calls = [test.ask(stream=True, return_perf_metrics=is_asked) for is_asked in (True, False)]
    await until(lambda: len(test.workers.running) == 2)
    await test.workers.emit(4)
    for call in calls:
        await call.end()
    assert (calls[0].last("acceptance_rate"), calls[0].last("total_draft_tokens")) == ([0], [0])
    assert "acceptance_rate" not in calls[1].responses[-1]


async def test_a_stop_string_aborts_in_the_engine_and_ends_with_stop(bench):
    test = await bench()
    call = test.ask(stream=True, max_tokens=50, stop_words=[chr(EXPECTED[2])])
    await test.workers.emit(3)
    await call.end()
    assert call.text == "".join(map(chr, EXPECTED[:2]))
    assert call.last("finish_reason") == [b"stop"]
    assert not test.workers.running


async def test_disaggregated_request_is_prefilled_and_decode_takes_over(bench):
    test = await bench(prefill=1)
    call = test.ask(stream=True)
    await test.workers.emit(4)
    await call.end()
    assert test.workers.log == ["prefill context_only", "decode generation_only 0"]
    assert call.tokens == EXPECTED
    assert not test.workers.leases


@pytest.mark.parametrize("prefill", [0, 1], ids=["aggregated", "disaggregated"])
async def test_log_probabilities_of_the_prompt_come_once_wherever_it_is_computed(bench, prefill):
    test = await bench(prefill=prefill)
    call = test.ask(stream=True, prompt_logprobs=[0])
    await test.workers.emit(4)
    await call.end()
    found = [json.loads(part["prompt_log_probs"][0]) for part in call.responses if "prompt_log_probs" in part]
    assert found == [[None, [[PROMPT[1], -0.5]]]]


async def test_they_come_when_the_first_token_ends_the_answer(bench):
    test = await bench(prefill=1)
    call = test.ask(stream=True, prompt_logprobs=[0])
    await test.workers.reached("decode")
    test.workers.running[0].end("stop")
    await call.end()
    assert sum("prompt_log_probs" in response for response in call.responses) == 1


async def test_prefill_that_is_down_is_passed_by(bench):
    test = await bench(prefill=1)
    test.workers.down["prefill"] = ENGINE_DOWN
    call = test.ask(stream=True)
    await test.workers.emit(4)
    await call.end()
    assert test.workers.log == ["prefill context_only", "decode context_and_generation 0"]
    assert call.tokens == EXPECTED


async def test_enforced_disaggregation_waits_for_prefill_and_then_refuses(bench):
    pipeline = {"enforce_disaggregation": True, "stall_timeout_s": 0.2}
    test = await bench(prefill=1, pipeline=pipeline)
    test.workers.down["prefill"] = ENGINE_DOWN
    call = test.ask(stream=True)
    with pytest.raises(UnavailableError, match="its engine is starting"):
        await call.end()
    assert not any("decode" in entry for entry in test.workers.log)


async def test_enforced_disaggregation_goes_on_when_prefill_is_back(bench):
    test = await bench(prefill=1, pipeline={"enforce_disaggregation": True})
    test.workers.down["prefill"] = ENGINE_DOWN
    call = test.ask(stream=True)
    await until(lambda: "prefill context_only" in test.workers.log)
    test.workers.down.clear()
    await test.workers.emit(4)
    await call.end()
    assert call.tokens == EXPECTED
    assert test.workers.log[-1] == "decode generation_only 0"


async def test_a_lease_that_is_gone_means_prefill_again(bench):
    test = await bench(prefill=1)
    test.workers.errors.append(NotFoundError("the lease is gone"))
    call = test.ask(stream=True)
    await until(lambda: test.workers.log.count("decode generation_only 0") == 2)
    await test.workers.emit(4)
    await call.end()
    assert [entry for entry in test.workers.log if "abort" not in entry] == [
        "prefill context_only",
        "decode generation_only 0",
        "prefill context_only",
        "decode generation_only 0",
    ]
    assert call.tokens == EXPECTED


async def test_a_refusing_decode_worker_does_not_waste_the_prefill(bench):
    test = await bench(prefill=1)
    test.workers.down["decode"] = ENGINE_DOWN
    call = test.ask(stream=True)
    await until(lambda: "decode generation_only 0" in test.workers.log and not test.workers.running)
    test.workers.down.clear()
    await test.workers.emit(4)
    await call.end()
    assert call.tokens == EXPECTED
    assert test.workers.log.count("prefill context_only") == 1


async def test_a_lease_is_freed_once_decode_computes_the_prompt_itself(bench):
    test = await bench(prefill=1, decode=2, router={"mode": "round_robin", "transfer_ms": 0})
    test.workers.down["decode"] = ENGINE_DOWN
    call = test.ask(stream=True)
    await until(lambda: test.workers.leases)
    test.pipeline._services.router.set_workers({"decode_1": WorkerRecord(worker="decode_1")})  # prefill has left
    await test.workers.reached("decode_1")
    await until(lambda: not test.workers.leases)
    await test.workers.emit(4)
    await call.end()
    assert call.tokens == EXPECTED


async def test_giving_up_on_decode_frees_the_lease(bench):
    test = await bench(prefill=1, **QUICK)
    test.workers.down["decode"] = ENGINE_DOWN
    with pytest.raises(UnavailableError):
        await test.ask().end()
    await until(lambda: not test.workers.leases)


async def test_what_prefill_does_not_find_is_told_and_not_tried_again(bench):
    test = await bench(prefill=1)
    test.workers.down["prefill"] = NotFoundError("lora_name: no such adapter")
    with pytest.raises(NotFoundError, match="no such adapter"):
        await test.ask().end()
    assert len(test.workers.log) == 1


async def test_stream_goes_on_exactly_on_another_replica(bench):
    test = await bench(decode=2)
    call = test.ask(stream=True)
    await test.workers.emit(2)
    await test.workers.lose("decode")
    await test.workers.reached("decode_1")
    await test.workers.emit(2)
    await call.end()
    assert call.tokens == EXPECTED
    assert call.text == "".join(map(chr, EXPECTED))
    assert test.workers.log[-1] == "decode_1 context_and_generation 2"
    assert test.counters()[("bireme_migrations_total",)] == 1


async def test_a_stream_goes_on_at_its_own_revision_alone(bench):
    test = await bench(decode=3)
    revisions = {"decode": "old", "decode_1": "new", "decode_2": "old"}
    test.pipeline._services.set_workers(
        {name: WorkerRecord(worker=name, revision=of) for name, of in revisions.items()}
    )
    call = test.ask(stream=True, routing='{"decode_worker": "decode"}')
    await test.workers.emit(2)
    await test.workers.lose("decode")
    await test.workers.reached("decode_2")
    await test.workers.emit(2)
    await call.end()
    assert call.tokens == EXPECTED


@pytest.mark.parametrize(("before", "gaps"), [(0, 0), (2, 1)], ids=["no token", "two tokens"])
async def test_a_loss_is_a_gap_between_tokens_only_where_there_were_some(bench, before, gaps):
    test = await bench(decode=2)
    call = test.ask(stream=True)
    await test.workers.emit(before)
    await test.workers.lose("decode")
    await test.workers.reached("decode_1")
    await test.workers.emit(4 - before)
    await call.end()
    observed = test.observed()
    assert observed.get("bireme_inter_token_latency_seconds", 0) == gaps
    assert observed["bireme_time_to_first_token_seconds"] == observed["bireme_time_per_output_token_seconds"] == 1


async def test_what_was_in_a_stalled_engine_is_tried_alone_by_the_next_one(bench):
    test = await bench(decode=2)
    call = test.ask(stream=True)
    await test.workers.emit(1)
    test.workers.running[0].fail(EngineStalledError("its engine stood still"))
    await test.workers.emit(1)
    assert test.workers.running[0].request.was_in_stall
    await test.workers.lose(test.workers.running[0].worker)
    await test.workers.emit(1)
    assert not test.workers.running[0].request.was_in_stall
    await test.workers.emit(1)
    await call.end()
    assert call.tokens == EXPECTED


async def test_an_engine_lost_between_the_last_token_and_the_end_costs_nothing(bench):
    test = await bench(pipeline={"migration_limit": 0})
    call = test.ask(stream=True)
    await test.workers.emit(3)
    test.workers.running[-1].sink.push((EXPECTED[3],))
    await test.workers.lose("decode")
    await call.end()
    assert call.tokens == EXPECTED
    assert call.last("finish_reason") == [b"length"]
    assert json.loads(call.last("usage")[0])["completion_tokens"] == len(EXPECTED)


async def test_a_stream_lost_where_its_context_is_full_has_all_its_tokens(bench):
    test = await bench(pipeline={"migration_limit": 0})
    test.workers.capacities["decode"] = capacity(max_seq_len=1024, tokens_per_block=3, num_blocks=2).within_pool()
    call = test.ask(stream=True, max_tokens=50)
    await test.workers.emit(4)
    await test.workers.lose("decode")
    await call.end()
    assert (call.tokens, call.last("finish_reason")) == (EXPECTED, [b"length"])


async def test_stream_waits_for_the_only_worker_to_come_back(bench):
    test = await bench()
    call = test.ask(stream=True)
    await test.workers.emit(2)
    test.workers.down["decode"] = ENGINE_DOWN
    await test.workers.lose("decode")
    await until(lambda: "decode context_and_generation 2" in test.workers.log and not test.workers.running)
    test.workers.down.clear()
    await test.workers.emit(2)
    await call.end()
    assert call.tokens == EXPECTED


async def test_refusals_of_an_engine_that_drains_cost_no_migration(bench):
    test = await bench(pipeline={"migration_limit": 0})
    for text in ("it is draining", "its engine process is not connected", "its engine has ended", "it is starting"):
        test.workers.errors.append(UnavailableError(text))
    call = test.ask(stream=True)
    await until(lambda: test.workers.log.count("decode context_and_generation 0") == 5)
    await test.workers.emit(4)
    await call.end()
    assert call.tokens == EXPECTED
    assert test.counters()[("bireme_migrations_total",)] == 0


async def test_an_engine_that_refuses_for_too_long_ends_the_request(bench):
    test = await bench(**QUICK)
    test.workers.errors.extend(UnavailableError("it is draining") for _ in range(1000))
    with pytest.raises(UnavailableError, match="draining"):
        await test.ask().end()


async def test_kv_that_does_not_arrive_is_prefill_s_fault_and_decode_does_it_alone(bench):
    test = await bench(prefill=1)
    test.workers.errors.append(KvTransferError("no room in /dev/shm"))
    call = test.ask(stream=True)
    await until(lambda: "decode context_and_generation 0" in test.workers.log)
    assert test.pipeline._services.router.place(RoutingRequest(np.array(PROMPT, np.int32))).prefill is None
    await test.workers.emit(4)
    await call.end()
    assert call.tokens == EXPECTED and test.workers.leases == {}
    assert [entry for entry in test.workers.log if "abort" not in entry] == [
        "prefill context_only",
        "decode generation_only 0",
        "decode context_and_generation 0",
    ]
    assert test.counters()[("bireme_migrations_total",)] == 0


async def test_enforced_disaggregation_waits_when_kv_does_not_arrive(bench):
    test = await bench(prefill=1, pipeline={"enforce_disaggregation": True, "migration_limit": 0})
    test.workers.errors.extend(KvTransferError("no room in /dev/shm") for _ in range(2))
    call = test.ask(stream=True)
    await until(lambda: test.workers.log.count("decode generation_only 0") == 3)
    await test.workers.emit(4)
    await call.end()
    assert call.tokens == EXPECTED and test.workers.log.count("decode generation_only 0") == 3


async def test_a_prefill_that_fails_after_its_client_has_gone_is_not_reported(bench, caplog):
    async def refuse(worker, request_id):
        raise UnavailableError(f"{worker} is down")

    test = await bench(prefill=1)
    test.workers.hold.add("prefill")
    test.workers.abort_prefill = refuse
    call = test.ask()
    await until(lambda: test.workers.waiting)
    call.cancelled.set()
    with pytest.raises(asyncio.CancelledError):
        await call.end()
    test.workers.waiting.popitem()[1].set_exception(EngineLostError("died"))
    await asyncio.sleep(0.01)
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_stream_ends_when_its_worker_stays_away(bench):
    test = await bench(**QUICK)
    call = test.ask(stream=True)
    await test.workers.emit(2)
    test.workers.down["decode"] = ENGINE_DOWN
    await test.workers.lose("decode")
    with pytest.raises(UnavailableError):
        await call.end()
    assert call.tokens == EXPECTED[:2]


async def test_past_the_migration_limit_the_stream_ends(bench):
    test = await bench(pipeline={"migration_limit": 1})
    call = test.ask(stream=True)
    for _ in range(2):
        await test.workers.emit(1)
        await test.workers.lose("decode")
    with pytest.raises(UnavailableError, match="migration_limit"):
        await call.end()


async def test_an_unreachable_server_is_said_at_once(bench):
    test = await bench()
    test.workers.down["decode"] = UnreachableError("no Triton gRPC endpoint; set BIREME_GRPC")
    call = test.ask()
    with pytest.raises(UnavailableError, match="BIREME_GRPC"):
        await call.end()


async def test_a_full_queue_is_the_clients_to_retry(bench):
    test = await bench()
    test.workers.errors.append(ResourceExhaustedError("queue full"))
    with pytest.raises(ResourceExhaustedError, match="queue full"):
        await test.ask().end()


async def test_a_full_queue_does_not_end_a_stream_that_moves(bench):
    test = await bench()
    call = test.ask(stream=True)
    await test.workers.emit(2)
    test.workers.errors.append(ResourceExhaustedError("queue full"))
    await test.workers.lose("decode")
    await until(lambda: test.workers.log.count("decode context_and_generation 2") == 2)
    await test.workers.emit(2)
    await call.end()
    assert call.tokens == EXPECTED


async def test_cancel_while_tokenizing_ends_the_request(bench):
    test = await bench()
    test.workers.hold.add("tokenizer")
    call = test.ask()
    await test.workers.reached("tokenizer")
    call.cancelled.set()
    with pytest.raises(asyncio.CancelledError):
        await call.end()
    assert not test.workers.log


async def test_cancel_during_prefill_aborts_it(bench):
    test = await bench(prefill=1)
    test.workers.hold.add("prefill")
    call = test.ask()
    await until(lambda: test.workers.waiting)
    call.cancelled.set()
    with pytest.raises(asyncio.CancelledError):
        await call.end()
    await until(lambda: "prefill abort" in test.workers.log)
    assert test.workers.log == ["prefill context_only", "prefill abort"]
    assert not test.workers.waiting and not test.workers.leases


async def test_cancel_between_prefill_and_decode_frees_the_lease(bench):
    test = await bench(prefill=1)
    call = test.ask()
    await test.workers.reached("decode")
    assert test.workers.leases
    call.cancelled.set()
    with pytest.raises(asyncio.CancelledError):
        await call.end()
    await until(lambda: not test.workers.leases and not test.workers.running)


async def test_cancel_while_decoding_aborts_in_the_engine(bench):
    test = await bench()
    call = test.ask(stream=True)
    await test.workers.emit(2)
    generation = test.workers.running[0]
    call.cancelled.set()
    with pytest.raises(asyncio.CancelledError):
        await call.end()
    assert generation.is_aborted
    assert test.counters()[("bireme_requests_total", "CANCELLED")] == 1


async def test_cancel_between_attempts_ends_the_request(bench):
    test = await bench()
    test.workers.down["decode"] = ENGINE_DOWN
    call = test.ask()
    await until(lambda: test.workers.log and not test.workers.running)
    call.cancelled.set()
    with pytest.raises(asyncio.CancelledError):
        await call.end()
    assert test.pipeline._services.num_active == 0


async def test_one_request_too_many_is_refused(bench):
    test = await bench(limits={"max_concurrent_requests": 1})
    first = test.ask()
    await test.workers.reached("decode")
    with pytest.raises(ResourceExhaustedError, match="max_concurrent_requests is 1"):
        await test.ask().end()
    await test.workers.emit(4)
    await first.end()


async def test_the_clients_deadline_reaches_the_engine_and_binds(bench, monkeypatch):
    monkeypatch.setattr("bireme.pipelines.sequence.DEADLINE_GRACE_S", 0.02)
    test = await bench()
    call = test.ask(RequestInfo(timeout_ms=50))
    await test.workers.reached("decode")
    assert 0 < test.workers.running[0].request.timeout_ms <= 50
    with pytest.raises(DeadlineExceededError):
        await call.end()


async def test_usage_says_who_served_it(bench):
    test = await bench(prefill=1)
    call = test.ask()
    await test.workers.emit(4)
    await call.end()
    usage = call.last("usage")[0]
    assert b'"prefill_worker":"prefill"' in usage and b'"decode_worker":"decode"' in usage


async def test_a_prefill_s_cost_is_counted_once(bench):
    test = await bench(prefill=1)
    call = test.ask()
    await test.workers.emit(4)
    await call.end()
    usage = json.loads(call.last("usage")[0])
    assert (usage["prefill_ms"], usage["queue_ms"], usage["cached_tokens"]) == (5.0, 2.0, 1)


async def test_after_a_move_the_context_that_was_computed_again_counts_too(bench):
    test = await bench(prefill=1)
    call = test.ask()
    await test.workers.emit(2)
    await test.workers.lose("decode")
    await test.workers.emit(2)
    await call.end()
    usage = json.loads(call.last("usage")[0])
    assert usage["prefill_ms"] == PREFILL_USAGE.prefill_ms + OWN_PREFILL_MS
    assert usage["cached_tokens"] == 1 and usage["prefill_worker"] == "prefill"


async def test_a_foreign_error_of_the_engine_is_passed_on(bench):
    test = await bench()
    test.workers.errors.append(BiremeError("out of memory"))
    with pytest.raises(BiremeError, match="out of memory"):
        await test.ask().end()


async def test_engine_lost_in_the_queue_counts_as_a_migration(bench):
    test = await bench(decode=2)
    test.workers.errors.append(EngineLostError("died"))
    call = test.ask()
    await test.workers.reached("decode_1")
    await test.workers.emit(4)
    await call.end()
    assert call.tokens == EXPECTED
    assert test.counters()[("bireme_migrations_total",)] == 1


async def test_stopping_closes_the_workers(bench):
    test = await bench()
    await test.pipeline.stop()
    assert test.workers.is_closed


async def test_canaries_are_counted_apart_from_load(bench, monkeypatch):
    monkeypatch.setenv("BIREME_KEY", "ab" * 32)
    bench = await bench(prefill=1)
    call = bench.ask(cache_salt=new_mark("ab" * 32))
    await bench.workers.emit(4)
    await call.end()
    delta = bench.metrics.take_delta()
    assert {name: value for name, _, value in delta.counters if value} == {"bireme_canaries_total": 1}
    assert not delta.histograms
