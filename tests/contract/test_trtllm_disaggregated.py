"""Prefill and decode apart on the stand-in: the handoff, its limits, and what an abort must not do."""

from __future__ import annotations

import base64
import time

import msgspec
import pytest

from bireme import disagg
from bireme.engines.trtllm.disaggregation import RequestIds, export, restore
from bireme.errors import ConfigError, KvTransferError, NotFoundError, RequestError, from_message
from bireme.messages import ProcessorCall
from tests.contract.trtllm_harness import PROMPT
from tests.engines.engine_fixtures import wait_for

KEY = b"k" * 32
APART = {"cache_transceiver_config": {"backend": "DEFAULT", "max_tokens_in_buffer": 8192}}


@pytest.fixture
def pair(make_engine):
    """Return (prefill, decode)."""
    return make_engine("prefill", **APART), make_engine("decode", **APART)


def prefill(harness, prompt=None, **fields):
    """Return what decode gets: over the wire and back."""
    answer = harness.ask(prompt, request_type="context_only", **fields)
    finish = answer.wait()
    assert not finish.error, finish.error
    return disagg.unseal(disagg.seal(answer.exported, KEY), KEY), finish


def decode(harness, params, prompt=None, **fields):
    answer = harness.ask(prompt, params, request_type="generation_only", **fields)
    answer.wait()
    return answer


def test_prefill_and_decode_give_the_tokens_of_one_engine(pair):
    first, second = pair
    params, finish = prefill(first)
    assert finish.reason == "not_finished"
    answer = decode(second, params)
    assert answer.tokens == second.tokens()
    assert answer.tokens[0] == params.first_gen_tokens[0]


def test_the_opaque_state_travels_as_base64(pair):
    params, _ = prefill(pair[0])
    state = base64.b64decode(params.opaque_state, validate=True)
    if not pair[0].engine._loaded.api.version.startswith("1.2"):  # the Python transceiver's name lies elsewhere
        assert not state and params.engine_state["ctx_info_endpoint"].startswith("file://")
    else:
        assert state.startswith(b"{")
    msgspec.json.encode(params)


@pytest.mark.parametrize("runtime", ["CPP", "PYTHON"])
def test_a_prefill_that_exports_nothing_is_an_error(make_engine, profile, monkeypatch, runtime):
    if profile == "1.2.1" and runtime == "PYTHON":
        pytest.skip("1.2.1 has no Python transceiver")
    chosen = {} if profile == "1.2.1" else {"transceiver_runtime": runtime}
    first = make_engine("prefill", cache_transceiver_config=APART["cache_transceiver_config"] | chosen)
    executor = type(first.llm._executor)
    plain = executor._end
    monkeypatch.setattr(executor, "_end", lambda self, one, reason, exported=None, **more: plain(self, one, reason))
    finish = first.ask(request_type="context_only").wait()
    assert finish.error == "INTERNAL: TensorRT-LLM exported no KV of this prefill; see its log"


def test_a_runtime_that_a_backend_does_not_have_is_told_at_the_start(make_engine, profile):
    if profile == "1.2.1":
        pytest.skip("1.2.1 has no Python transceiver")
    with pytest.raises(ConfigError, match="the Python transceiver moves KV by NIXL alone"):
        make_engine("decode", cache_transceiver_config={"backend": "UCX", "transceiver_runtime": "PYTHON"})
    make_engine("decode", cache_transceiver_config={"backend": "UCX", "transceiver_runtime": "CPP"})


def test_a_model_that_asks_for_the_python_transceiver_is_told_where_the_backend_is_another(make_engine, profile):
    ucx = {"backend": "UCX", "max_tokens_in_buffer": 8192}
    if profile == "1.2.1":
        make_engine("decode", cache_transceiver_config=ucx)
        return
    with pytest.raises(ConfigError, match="this model asks for the Python transceiver.*set DEFAULT"):
        make_engine("decode", cache_transceiver_config=ucx)  # a Llama


def test_what_would_end_the_worker_is_refused_before_it(make_engine, profile):
    alone, overlapped = make_engine(), make_engine(disable_overlap_scheduler=False, **APART)
    with pytest.raises(RequestError, match="request_type: context_only, but this worker moves no KV"):
        alone.ask(request_type="context_only")
    if profile == "1.2.1":
        with pytest.raises(RequestError, match="can't prefill alone beside its overlap scheduler"):
            overlapped.ask(request_type="context_only")
    else:
        assert prefill(overlapped)[1].reason == "not_finished"
    assert alone.tokens() == overlapped.tokens()


def test_1_2_refuses_log_probabilities_before_it_prefills(pair, profile):
    if profile != "1.2.1":
        pytest.skip("1.3 carries those of the first token")
    with pytest.raises(RequestError, match=r"logprobs: 2; TensorRT-LLM 1\.2\.1 gives none after a KV transfer"):
        pair[0].ask(request_type="context_only", logprobs=2)
    assert pair[0].llm._executor.blocks.num_used == 0


def test_log_probabilities_of_the_first_token_reach_the_client(pair, profile):
    if profile == "1.2.1":
        pytest.skip("1.2.1 does not carry those of the first token")
    params, _ = prefill(pair[0], logprobs=2)
    answer = decode(pair[1], params, logprobs=2)
    whole = pair[1].ask(logprobs=2)
    whole.wait()
    tokens = [[item.token for item in entry] for entry in answer.logprobs]
    assert tokens == [[item.token for item in entry] for entry in whole.logprobs]
    assert answer.logprobs[0][0][1] == pytest.approx(whole.logprobs[0][0][1], abs=1e-5)


def test_ranks_of_log_probabilities_survive(make_engine, profile):
    if profile == "1.2.1":
        pytest.skip("1.2.1's params have no log probabilities")
    harness = make_engine("prefill", **APART)
    params, _ = prefill(harness, logprobs=2)
    entry = params.engine_state["first_gen_log_probs"][0]
    assert sorted(item["rank"] for item in entry) == [1, 2]
    restored = restore(params, harness.engine._loaded.api)
    assert {value.rank for value in restored.first_gen_log_probs[0].values()} == {1, 2}


def test_handles_of_embeddings_stay_with_prefill_and_those_of_positions_go_on(pair):
    api = pair[0].engine._loaded.api
    handles = {"multimodal_embedding_handles": [{"a": 1}], "multimodal_hashes": [[1] * 8]}
    positions = {"mrope_position_ids_handle": {"b": 2}, "mrope_position_deltas_handle": {"c": 3}}
    fields = {"request_type": "context_only", "first_gen_tokens": [5], "opaque_state": b"kv"}
    given = api.disaggregated_params(**fields, **handles, **positions)
    state = export(given, api)["engine_state"]
    assert {name: state[name] for name in positions} == positions
    assert not state.keys() & handles.keys()


def test_usage_tells_what_prefill_found_cached_not_what_was_transferred(pair):
    prefill(pair[0])
    params, _ = prefill(pair[0])
    finish = decode(pair[1], params).finish
    assert finish.usage.cached_tokens == params.cached_tokens == 64
    assert finish.usage.prefill_worker == "prefill"
    assert finish.usage.prompt_tokens == len(PROMPT)


def test_exported_blocks_are_freed_when_decode_has_them(pair):
    params, _ = prefill(pair[0])
    blocks = pair[0].llm._executor.blocks
    assert blocks.num_used == 3
    decode(pair[1], params)
    wait_for(lambda: blocks.num_used == 0, 5)


def test_the_time_limit_of_a_transfer_is_always_set(make_engine):
    harness = make_engine("prefill", **APART)
    assert harness.llm.args.cache_transceiver_config.kv_transfer_timeout_ms == 60_000


def test_kv_that_nobody_fetches_is_freed_in_time(make_engine):
    transceiver = APART["cache_transceiver_config"] | {"kv_transfer_timeout_ms": 300}
    harness = make_engine("prefill", cache_transceiver_config=transceiver)
    params, _ = prefill(harness)
    assert params.expires_at - time.time() < 1
    wait_for(lambda: harness.llm._executor.blocks.num_used == 0, 5)


def test_a_prefill_serves_one_decode(pair):
    params, _ = prefill(pair[0])
    decode(pair[1], params)
    with pytest.raises(NotFoundError, match="fetched before"):
        decode(pair[1], params)


def test_params_whose_time_is_over_are_refused(pair):
    params, _ = prefill(pair[0])
    with pytest.raises(NotFoundError, match="time was over"):
        decode(pair[1], msgspec.structs.replace(params, expires_at=time.time() - 1))


def test_kv_that_never_arrives_ends_the_request_with_unavailable(make_engine):
    quick = {"cache_transceiver_config": {"backend": "DEFAULT", "kv_transfer_timeout_ms": 300}}
    first, second = make_engine("prefill", **quick), make_engine("decode", **quick)
    params, _ = prefill(first)
    lost = base64.b64encode(b'{"path": "/nowhere/lost.kv", "length": 80}').decode()
    if not params.opaque_state:
        lost, state = "", params.engine_state | {"ctx_info_endpoint": "file:///nowhere/lost.kv"}
        params = msgspec.structs.replace(params, engine_state=state)
    answer = decode(second, msgspec.structs.replace(params, opaque_state=lost))
    assert isinstance(from_message(answer.finish.error), KvTransferError)
    assert len(second.tokens()) == 12


def test_an_abort_during_the_transfer_waits_for_the_first_token(make_engine, monkeypatch):
    first = make_engine("prefill", **APART)
    params, _ = prefill(first)
    second = make_engine("decode", **APART)
    monkeypatch.setattr("tensorrt_llm._executor._TRANSFER_S", 0.4)
    answer = second.ask(None, params, request_type="generation_only", max_tokens=2000)
    time.sleep(0.1)
    second.abort(answer)
    assert answer.wait().reason == "cancelled"
    executor = second.llm._executor
    wait_for(lambda: executor.blocks.num_used == 0, 5)
    assert executor.leaked == 0


def test_an_abort_after_the_first_token_is_not_deferred(pair):
    params, _ = prefill(pair[0])
    answer = pair[1].ask(None, params, request_type="generation_only", max_tokens=4000)
    assert answer.has_tokens.wait(10)
    pair[1].abort(answer)
    assert answer.wait().reason == "cancelled"
    assert len(answer.tokens) < 2000


def test_a_first_token_that_ends_the_answer_needs_no_transfer(pair):
    params, _ = prefill(pair[0])
    token = params.first_gen_tokens[0]
    before = pair[1].llm._executor._num_completed
    answer = decode(pair[1], params, stop_token_ids=(token,))
    assert (answer.tokens, answer.finish.reason, answer.finish.stop_token_id) == ([], "stop", token)
    assert pair[1].llm._executor._num_completed == before


def test_a_prefill_that_ends_at_the_end_id_says_stop(pair):
    token = pair[0].tokens()[0]
    params, finish = prefill(pair[0], end_id=token)
    assert (finish.reason, params.first_gen_tokens) == ("stop", (token,))


def test_one_token_in_all_exports_nothing(pair):
    params, finish = prefill(pair[0], max_tokens=1)
    assert finish.reason == "length"
    assert pair[0].llm._executor.blocks.num_used == 0
    answer = decode(pair[1], params, max_tokens=1)
    assert (answer.tokens, answer.finish.reason) == (list(params.first_gen_tokens), "length")


def test_logits_processors_are_refused_with_the_reason(pair):
    calls = (ProcessorCall("allowed_tokens", {"token_ids": [5, 6]}),)
    with pytest.raises(RequestError, match="allowed_tokens; TensorRT-LLM runs none together with disaggregated"):
        pair[0].ask(request_type="context_only", logits_processors=calls)


def test_an_unknown_processor_is_named_before_the_combination(pair):
    calls = (ProcessorCall("temprature", {}),)
    with pytest.raises(RequestError, match="temprature does not exist; did you mean temperature"):
        pair[0].ask(request_type="context_only", logits_processors=calls)


def test_ids_of_transfers_are_unique_and_above_those_of_the_engine(make_engine, profile):
    if profile == "1.2.1":
        pytest.skip("1.2.1's params have no disagg_request_id")
    harness = make_engine("prefill", **APART)
    ids = [prefill(harness)[0].engine_state["disagg_request_id"] for _ in range(3)]
    assert len(set(ids)) == 3
    assert all(2**42 < number < 2**63 for number in ids)


def test_ids_of_one_millisecond_differ_by_count_worker_and_life(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1.8e9)
    makers = [RequestIds(worker, life) for worker in ("prefill", "prefill_1") for life in (1, 2)]
    assert len({maker.next() for maker in makers for _ in range(1000)}) == 4000
