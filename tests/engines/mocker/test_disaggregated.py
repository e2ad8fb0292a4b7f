"""Prefill and decode on the mocker, in two processes, with real bytes through shared memory."""

from __future__ import annotations

import logging
import os
import signal

import msgspec
import pytest

from bireme import disagg
from bireme.discovery import run_folder
from bireme.engines.mocker.tokens import expected_tokens
from bireme.engines.stub.client import EngineClient
from bireme.messages import SamplingParams
from bireme.metrics import Registry
from tests.engines.engine_fixtures import PROMPT, Collector, make_request, recipe_in, wait_for
from tests.kv.publishing.event_readers import StepSubscriber

DISAGGREGATED = {
    "cache_transceiver_config": {"backend": "DEFAULT", "kv_transfer_timeout_ms": 1000},
    "kv_cache_config": {"max_tokens": 4096, "tokens_per_block": 16},
}
PATIENT = DISAGGREGATED | {"cache_transceiver_config": {"backend": "DEFAULT", "kv_transfer_timeout_ms": 600_000}}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def pair(run_dir):
    recipe, log = recipe_in(run_dir, DISAGGREGATED), logging.getLogger("test")
    clients = [EngineClient(recipe, worker, Registry(worker), log, run_dir) for worker in ("prefill", "decode")]
    for client in clients:
        client.start()
    yield clients
    for client in clients:
        client.stop()


def prefill(client, prompt=None, **fields):
    sink = Collector()
    client.submit(make_request(prompt, fields.pop("max_tokens", 20), request_type="context_only", **fields), sink)
    finish = sink.wait()
    assert finish.disaggregated_params, finish
    return sink, finish


def decode(client, params, prompt=None, max_tokens=20, **fields):
    sink = Collector()
    request = make_request(prompt, max_tokens, request_type="generation_only", disaggregated_params=params, **fields)
    client.submit(request, sink)
    return sink


def used_blocks(client):
    gauges = {name: value for name, _, value in client.metrics.take_delta().gauges}
    return gauges.get("bireme_kv_blocks_used", -1)


def test_decode_goes_on_where_prefill_ended(pair):
    first, second = pair
    sink, finish = prefill(first)
    assert (sink.tokens, finish.reason) == (expected_tokens(PROMPT, 1), "not_finished")
    answer = decode(second, finish.disaggregated_params)
    end = answer.wait()
    assert end.reason == "length", end.error
    assert answer.tokens == expected_tokens(PROMPT, 20)
    assert (end.usage.prefill_worker, end.usage.decode_worker) == ("prefill", "decode")


def test_each_process_tells_what_its_steps_did(make_recipe, start_client, tmp_path):
    recipe = make_recipe(engine=DISAGGREGATED, top={"kv_events": {"step_records": True}})
    clients = start_client(recipe, "prefill"), start_client(recipe, "decode")
    records = [run_folder.find(tmp_path / "run", name) for name in ("prefill", "decode")]
    readers = [StepSubscriber(record.step_endpoint) for record in records]
    assert [record.event_endpoint for record in records] == ["", ""]
    for reader in readers:
        assert reader.take()["wall_time"] == 0.0  # a sign of life: it is connected
    sink, finish = prefill(clients[0])
    assert decode(clients[1], finish.disaggregated_params).wait().reason == "length"
    (at_prefill,) = readers[0].until(lambda record: record["wall_time"])[-1:]
    at_decode = readers[1].until(lambda record: record["wall_time"])[-1:]
    while len(at_decode) < 19:
        at_decode += [readers[1].take()]
    scheduled = [record["scheduled_requests"] for record in at_decode]
    assert [one["sum_decode_kv_tokens"] for one in scheduled] == list(range(len(PROMPT), len(PROMPT) + 19))
    assert at_prefill["scheduled_requests"]["sum_prefill_tokens"] == len(PROMPT)
    assert (at_prefill["worker_id"], at_decode[0]["worker_id"]) == ("prefill", "decode")
    for reader in readers:
        reader.close()


def test_many_pairs_at_once_free_everything(pair):
    first, second = pair
    prompts = [[500 + i, *PROMPT[i:]] for i in range(40)]
    params = [prefill(first, prompt)[1].disaggregated_params for prompt in prompts]
    sinks = [decode(second, blob, prompt) for blob, prompt in zip(params, prompts, strict=True)]
    for prompt, sink in zip(prompts, sinks, strict=True):
        assert sink.wait().reason == "length", sink.finishes
        assert sink.tokens == expected_tokens(prompt, 20)
    for client in pair:
        wait_for(lambda client=client: used_blocks(client) == 0)


def test_an_answer_of_one_token_ends_at_once(pair):
    first, second = pair
    _, finish = prefill(first, max_tokens=1)
    assert finish.reason == "length"
    answer = decode(second, finish.disaggregated_params, max_tokens=1)
    assert answer.wait().reason == "length"
    assert answer.tokens == expected_tokens(PROMPT, 1)
    wait_for(lambda: used_blocks(first) == 0)


def test_an_abort_after_the_end_of_prefill_frees_its_lease(make_recipe, start_client):
    client, sink = start_client(make_recipe(engine=PATIENT), "prefill"), Collector()
    number = client.submit(make_request(max_tokens=20, request_type="context_only"), sink)
    sink.wait()
    wait_for(lambda: used_blocks(client) > 0)
    client.abort(number)
    wait_for(lambda: used_blocks(client) == 0)


def test_params_are_good_for_one_request(pair):
    first, second = pair
    params = prefill(first)[1].disaggregated_params
    decode(second, params).wait()
    assert decode(second, params).wait().error.startswith("NOT_FOUND")


def test_params_of_another_prompt_are_refused(pair):
    first, second = pair
    params = prefill(first)[1].disaggregated_params
    other = [*PROMPT[:-1], 7]
    assert "they belong to another prompt" in decode(second, params, other).wait().error


def test_forged_params_are_refused(pair, run_dir):
    first, second = pair
    params = disagg.unseal(prefill(first)[1].disaggregated_params, run_folder.deployment_key(run_dir))
    forged = disagg.seal(msgspec.structs.replace(params, lease_id=99), b"another key")
    assert "bad signature" in decode(second, forged).wait().error


def test_a_lease_that_nobody_claims_is_freed(pair):
    first, _ = pair
    prefill(first)
    wait_for(lambda: used_blocks(first) > 0)
    wait_for(lambda: used_blocks(first) == 0)


@pytest.mark.flaky(reruns=1)
def test_a_dead_prefill_worker_ends_decode_with_an_error(pair):
    first, second = pair
    params = prefill(first)[1].disaggregated_params
    life = first.life
    os.kill(first.pid, signal.SIGKILL)
    wait_for(lambda: first.is_ready and first.life != life)
    finish = decode(second, params).wait()
    assert finish.error.split(":")[0] in ("NOT_FOUND", "UNAVAILABLE")


def test_an_aborted_prefill_leaves_no_lease(make_recipe, start_client):
    client, sink = start_client(make_recipe(engine=PATIENT, prefill_ms=300), "prefill"), Collector()
    number = client.submit(make_request(max_tokens=20, request_type="context_only"), sink)
    client.abort(number)
    assert sink.wait().reason in ("cancelled", "not_finished")  # the step may have begun before the abort
    wait_for(lambda: used_blocks(client) == 0)


def test_stages_refuse_what_is_not_theirs(pair):
    first, second = pair
    wrong, also_wrong = Collector(), Collector()
    first.submit(make_request(), wrong)
    second.submit(make_request(request_type="context_only"), also_wrong)
    assert "a prefill worker serves context_only" in wrong.wait().error
    assert "send it to a prefill worker" in also_wrong.wait().error


def test_first_log_probs_travel_with_the_params(pair, run_dir):
    first, second = pair
    sampling = SamplingParams(max_tokens=20, logprobs=2)
    params = prefill(first, sampling=sampling)[1].disaggregated_params
    opened = disagg.unseal(params, run_folder.deployment_key(run_dir))
    assert opened.first_gen_log_probs is not None
    assert opened.first_gen_log_probs[0][0][0] == opened.first_gen_tokens[0]


def test_a_traced_transfer_tells_its_bytes_and_its_way(pair):
    first, second = pair
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    _, finish = prefill(first, traceparent=traceparent)
    assert [span.name for span in finish.spans] == ["prefill_chunk", "queue"]
    spans = {
        span.name: span for span in decode(second, finish.disaggregated_params, traceparent=traceparent).wait().spans
    }
    transfer = spans["transfer"]
    assert transfer.attributes["bytes"] > 0 and transfer.attributes["way"] in ("mapped", "shm")
    assert spans["queue"].end_us == transfer.start_us and transfer.end_us <= spans["generate"].end_us
