"""How requests say where they go, and what pipelines tell of it."""

import json

import numpy as np
import pytest

from bireme.errors import RequestError, ResourceExhaustedError
from bireme.kv.routing.placement import RoutingRequest
from bireme.pipelines.router import Router
from tests.kv.routing.router_fixtures import capacity, record
from tests.pipelines.conftest import Call

TEXT = "a prompt of some length, so that it has a few full blocks of thirty-two letters each; that will do"
KV = {"router": {"mode": "kv", "transfer_ms": 0}}


async def served(test, call, num_tokens=4):
    await test.workers.emit(num_tokens)
    await call.end()
    return json.loads(call.last("usage")[0])


async def test_a_prompt_that_comes_again_goes_where_it_was_computed(bench):
    test = await bench(decode=4, **KV)
    usages = [await served(test, test.ask(text_input=TEXT)) for _ in range(5)]
    assert len({usage["decode_worker"] for usage in usages}) == 1
    assert [usage["predicted_cached_tokens"] for usage in usages] == [0, 96, 96, 96, 96]


async def test_in_turns_nothing_is_predicted(bench):
    usage = await served(test := await bench(decode=2), test.ask())
    assert usage["predicted_cached_tokens"] is None


async def test_prediction_and_truth_are_counted(bench):
    test = await bench(decode=2, **KV)
    for _ in range(2):
        await served(test, test.ask(text_input=TEXT))
    counters = test.counters()
    assert counters[("bireme_router_prompt_tokens_total",)] == 2 * len(TEXT)
    assert counters[("bireme_router_predicted_tokens_total",)] == 96
    assert counters[("bireme_router_cached_tokens_total",)] == 0  # fake workers keep nothing
    assert counters[("bireme_router_mispredicted_tokens_total",)] == 96
    assert counters[("bireme_routing_decisions_total", "kv")] == 2


async def test_who_computes_prompts_is_counted(bench):
    test = await bench(prefill=1, router={"mode": "round_robin", "transfer_ms": 1, "prefill_ms_per_token": 0.1})
    for length in (5, 50, 60):
        await served(test, test.ask(text_input=TEXT[:length]))
    counters = test.counters()
    assert [counters[("bireme_prompts_placed_total", stage)] for stage in ("decode", "prefill")] == [1, 2]


async def test_a_request_may_name_its_worker(bench):
    test = await bench(prefill=2, decode=3)
    routing = '{"prefill_worker": "prefill_1", "decode_worker": "decode_2"}'
    usage = await served(test, test.ask(routing=routing))
    assert (usage["prefill_worker"], usage["decode_worker"]) == ("prefill_1", "decode_2")


async def test_requests_of_a_session_stay_together(bench):
    test = await bench(decode=3)
    usages = [await served(test, test.ask(session_id="s")) for _ in range(3)]
    assert len({usage["decode_worker"] for usage in usages}) == 1


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"routing": "{"}, "routing: "),
        ({"routing": '{"worker": "decode"}'}, "send a JSON object with mode, prefill_worker, decode_worker"),
        ({"routing": '{"mode": "best"}'}, "routing: Invalid enum value 'best'"),
        (
            {"routing": '{"decode_worker": "decode_9"}'},
            r"routing\.decode_worker: no worker 'decode_9'; there are decode",
        ),
        ({"routing": '{"query_only": true}'}, "the model `router`"),
        ({"session_id": "s" * 257}, "session_id: 257 characters; the limit is 256"),
    ],
)
async def test_what_a_request_says_of_its_placement_is_checked(bench, fields, text):
    test = await bench()
    with pytest.raises(RequestError, match=text):
        await test.ask(**fields).end()


async def test_a_request_is_refused_before_any_worker_has_it_when_all_are_busy(bench):
    test = await bench(router={"busy": [{"max_waiting_tokens": 50}]})
    first = test.ask(text_input=TEXT)
    await test.workers.reached("decode")
    with pytest.raises(ResourceExhaustedError, match="all 1 workers are busy"):
        await test.ask(text_input=TEXT).end()
    await served(test, first)
    assert test.counters()[("bireme_routing_decisions_total", "refused")] == 1
    await served(test, test.ask(text_input=TEXT))


async def test_the_rank_that_was_chosen_gets_the_request(bench):
    test = await bench(decode=1)
    ranks = record("decode", capacity=capacity(attention_dp_size=4))
    test.pipeline._services.router.set_workers({"decode": ranks})
    call = test.ask(routing='{"decode_dp_rank": 2}')
    await test.workers.reached("decode")
    assert test.workers.running[0].request.dp_rank == 2
    await served(test, call)


async def test_the_model_router_tells_workers_overlaps_and_costs(bench):
    test = await bench(Router, prefill=1, decode=2, **KV)
    prompt = np.array([ord(letter) for letter in TEXT], np.int32)
    placed = test.pipeline._services.router.place(RoutingRequest(prompt))
    call = Call(test.pipeline, None, {"text_input": TEXT})
    await call.end()
    assert (call.last("prefill_worker"), call.last("decode_worker")) == ([b"prefill"], [placed.decode.encode()])
    overlaps = dict(zip(call.last("workers"), call.last("overlaps"), strict=True))
    assert overlaps == {b"prefill": 96, b"decode": 0, b"decode_1": 0} | {placed.decode.encode(): 96}
    assert call.last("overlap_tokens") == [96] and len(call.last("costs")) == 3
    assert test.workers.log == []
