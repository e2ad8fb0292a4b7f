"""What the TensorRT-LLM engine passes on: processors, guides, adapters, ranks, priorities, metrics, KV events."""

from __future__ import annotations

import functools
import itertools
import re
import time
from datetime import timedelta

import pytest

from bireme.engines.trtllm import iterations as iterations_module
from bireme.engines.trtllm import loading
from bireme.errors import ConfigError, RequestError
from bireme.kv.blocks import hashing
from bireme.kv.blocks.events import BlocksStored
from bireme.messages import ProcessorCall
from bireme.metrics import Registry
from bireme.serving_options import KvCacheRetentionConfig, TokenRangeRetention
from bireme.text.tokenizer import load_tokenizer
from tests.contract.trtllm_harness import PROMPT, UNSET
from tests.engines.engine_fixtures import wait_for
from tests.observability.collector import Collector

tokenizer_of = functools.cache(load_tokenizer)


def last_call(harness):
    return harness.llm.last_call


def test_a_processor_works_in_the_engine(make_engine):
    harness = make_engine()
    calls = (ProcessorCall("forced_sequence", {"token_ids": [11, 12, 13]}),)
    answer = harness.ask(logits_processors=calls)
    assert answer.wait().reason == "stop"
    assert answer.tokens == [11, 12, 13]


def test_a_processor_is_refused_with_speculation(make_engine):
    speculation = {"decoding_type": "NGram", "max_draft_len": 3, "max_matching_ngram_size": 2}
    harness = make_engine(speculative_config=speculation)
    with pytest.raises(RequestError, match="together with speculative decoding"):
        harness.ask(logits_processors=(ProcessorCall("allowed_tokens", {"token_ids": [5]}),))


def test_a_processor_that_raises_leaves_the_tokens_as_they_are(make_engine):
    from bireme.logits import registry

    class Broken:
        def __init__(self, context):
            pass

        def __call__(self, token_ids, logits):
            logits.fill_(0)
            raise RuntimeError("planted")

    registry.register("broken_in_test", Broken)
    try:
        harness = make_engine()
        assert harness.tokens(logits_processors=(ProcessorCall("broken_in_test", {}),)) == harness.tokens()
        assert not harness.exits
    finally:
        registry.unregister("broken_in_test")


def test_a_guide_needs_its_backend(make_engine):
    harness = make_engine()
    with pytest.raises(RequestError, match="guided_decoding_backend is not set"):
        harness.ask(guided_decoding={"regex": "a+"})


def test_a_guide_reaches_the_engine_which_then_has_a_tokenizer(make_engine, monkeypatch):
    harness = make_engine(guided_decoding_backend="xgrammar")
    assert harness.llm.args.skip_tokenizer_init is False
    seen = []
    plain = type(harness.llm)._check_params
    monkeypatch.setattr(type(harness.llm), "_check_params", lambda *args: (seen.append(args[1]), plain(*args))[1])
    harness.tokens(guided_decoding={"choice": ["yes", "no."]})
    assert seen[-1].guided_decoding.regex == r"(yes|no\.)"


GUIDES = [
    ({"choice": ["a.b (c)", "[x]-{2}", "1/2 | 3", 'it\'s "so"']}, r'a\.b \(c\)|\[x\]-\{2\}|1/2 \| 3|it\'s "so"'),
    ({"regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
    ({"grammar": 'root ::= "<" [0-9] [0-9] ">"'}, "<[0-9]{2}>"),
    (
        {"json": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}},
        r'\s*\{\s*"n"\s*:\s*[12]\s*\}',
    ),
]


@pytest.mark.parametrize(("guide", "pattern"), GUIDES, ids=[next(iter(guide)) for guide, _ in GUIDES])
def test_answers_follow_their_guide(make_engine, sample_model, guide, pattern):
    harness = make_engine(guided_decoding_backend="xgrammar")
    answer = harness.ask(guided_decoding=guide, max_tokens=200)
    assert answer.wait().reason == "stop"
    text = tokenizer_of(str(sample_model("llama"))).decode(answer.tokens)
    assert re.fullmatch(pattern, text), text


def test_a_guide_that_can_not_be_compiled_ends_its_request_with_the_reason(make_engine):
    harness = make_engine(guided_decoding_backend="xgrammar")
    finish = harness.ask(guided_decoding={"grammar": "root ::= ("}).wait()
    assert finish.error.startswith("INVALID_ARGUMENT: guided_decoding.grammar: TensorRT-LLM refuses it: ")
    assert len(harness.tokens()) == 12
    assert not harness.exits


def test_an_adapter_is_named_by_its_folder(make_engine, tmp_path):
    folders = [tmp_path / "poet", tmp_path / "chemist"]
    for folder in folders:
        folder.mkdir()
    harness = make_engine(enable_lora=True, lora_config={"lora_dir": list(map(str, folders))})
    assert harness.capacity.lora_names == ("poet", "chemist")
    harness.tokens(lora_name="chemist")
    given = last_call(harness)["lora_request"]
    assert (given.lora_name, given.lora_int_id, given.lora_path) == ("chemist", 2, str(tmp_path / "chemist"))
    with pytest.raises(RequestError, match="no adapter 'nobody'; this worker has poet, chemist"):
        harness.ask(lora_name="nobody")


def test_an_adapter_that_is_not_there_is_refused_before_the_load(make_engine):
    with pytest.raises(ConfigError, match=r"lora_config\.lora_dir: /adapters/poet is no folder"):
        make_engine(enable_lora=True, lora_config={"lora_dir": ["/adapters/poet"]})


def test_a_rank_pins_the_request_strictly_and_must_exist(make_engine):
    harness = make_engine(tensor_parallel_size=4, enable_attention_dp=True)
    assert harness.capacity.attention_dp_size == 4
    harness.tokens(dp_rank=3)
    given = last_call(harness)["scheduling_params"]
    assert (given.attention_dp_rank, given.attention_dp_relax) == (3, False)
    with pytest.raises(RequestError, match="dp_rank: 4; this worker has ranks 0 to 3"):
        harness.ask(dp_rank=4)


def test_a_priority_is_passed_where_the_release_has_one(make_engine, profile):
    harness = make_engine()
    harness.tokens(priority=0.9)
    assert last_call(harness).get("priority") == (0.9 if profile != "1.2.1" else None)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_priorities_without_effect_are_told_once(make_engine, profile, caplog, policy):
    harness = make_engine(**({"scheduler_config": {"waiting_queue_policy": policy}} if profile != "1.2.1" else {}))
    harness.tokens(priority=0.9)
    harness.tokens(priority=0.1)
    told = [record.getMessage() for record in caplog.records if "priority_without_effect" in record.getMessage()]
    if profile != "1.2.1" and policy == "priority":
        assert not told
    else:
        (line,) = told
        assert ("waiting_queue_policy" if profile != "1.2.1" else "has none") in line


def test_autodeploy_takes_its_size_as_world_size(make_engine, caplog):
    left_out = {"moe_expert_parallel_size": 3, "cp_config": {"cp_type": "HELIX"}}
    left_out["scheduler_config"] = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    harness = make_engine(backend="_autodeploy", tensor_parallel_size=4, **left_out)
    assert type(harness.llm).__name__ == "AutoDeployLLM"
    assert harness.llm.args.world_size == 4
    assert len(harness.tokens()) == 12
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [sum(name in text for text in warned) for name in left_out] == [1, 1, 1]
    assert sum("tensor_parallel_size to=world_size" in text for text in warned) == 1
    assert len(warned) == 4


def test_autodeploy_has_limits_of_its_own(make_engine, profile):
    harness = make_engine(backend="_autodeploy", max_batch_size=UNSET)
    expected = 8 if profile == "1.2.1" else 2048
    assert harness.capacity.max_batch_size == harness.engine._loaded.num_places == expected


def test_autodeploy_would_keep_a_prompt_waiting_that_no_step_can_hold(make_engine):
    harness = make_engine(backend="_autodeploy", max_num_tokens=64)
    with pytest.raises(RequestError, match="80 tokens; max_num_tokens is 64 and enable_chunked_prefill is false"):
        harness.ask()
    assert len(harness.tokens(PROMPT[:60])) == 12


def test_iterations_become_metrics(make_engine):
    harness = make_engine(kv_cache_config={"max_tokens": 4096})
    answer = harness.ask(max_tokens=3000)
    assert answer.has_tokens.wait(10)
    wait_for(lambda: harness.counter("bireme_kv_blocks_used") > 0, 5)
    assert harness.counter("bireme_kv_blocks_total") == 128
    harness.abort(answer)
    answer.wait()
    wait_for(lambda: harness.counter("bireme_kv_blocks_used") == 0, 5)


def test_the_last_iteration_s_blocks_do_not_stay_while_the_engine_is_idle(make_engine, monkeypatch):
    from tensorrt_llm._executor import Executor

    # Told before the iteration's requests were freed; while idle nothing follows.
    monkeypatch.setattr(Executor, "_stats", lambda self, began: {"kvCacheStats": {"usedNumBlocks": 7}})
    told: list[float] = []
    set_gauge = Registry.set

    def note(self, name, value, *labels):
        told.extend([value] if name == "bireme_kv_blocks_used" else [])
        set_gauge(self, name, value, *labels)

    monkeypatch.setattr(Registry, "set", note)
    harness = make_engine()
    harness.tokens()
    wait_for(lambda: harness.engine._loaded.iterations.num_seen >= 12, 5)
    wait_for(lambda: harness.counter("bireme_kv_blocks_used") == 0, 5)
    assert 7 in told and told[-1] == 0


def test_what_a_release_does_not_tell_is_not_reported_as_zero(make_engine, monkeypatch):
    from tensorrt_llm._executor import Executor

    monkeypatch.setattr(Executor, "_stats", lambda self, began: {"iter": self._iteration})
    harness = make_engine()
    harness.tokens()
    wait_for(lambda: harness.engine._loaded.iterations.num_seen >= 12, 5)
    delta = harness.metrics.take_delta()
    told = {name for name, *_ in (*delta.gauges, *delta.histograms)}
    assert not told & {"bireme_kv_blocks_used", "bireme_kv_blocks_total", "bireme_engine_step_seconds"}


def test_statistics_are_read_at_their_pace_and_an_empty_queue_is_no_error(make_engine, caplog):
    harness = make_engine(kv_cache_config={"event_buffer_max_size": 1000})
    reads, plain = [], harness.llm.get_stats_async
    harness.llm.get_stats_async = lambda timeout: (reads.append(timeout), plain(timeout))[1]
    harness.engine._loaded.iterations.stop()
    iterations = harness.engine._loaded.iterations = loading._iterations(
        harness.context, harness.engine._loaded.api, harness.engine._loaded.arguments, harness.llm
    )
    iterations.start()
    wait_for(lambda: len(reads) > 20, 10)  # ten times a second when idle; after an error once
    harness.tokens()
    wait_for(lambda: iterations.num_seen >= 12, 5)
    assert "read_failed" not in caplog.text
    assert set(reads) == {0}


def test_real_failures_of_reading_are_told_once_a_kind_and_then_counted(make_engine, monkeypatch, caplog):
    import tensorrt_llm

    kinds = itertools.cycle([OSError, ValueError])

    def fail(self, timeout):
        raise next(kinds)("planted")

    monkeypatch.setattr(iterations_module, "_RETRY_S", 0.01)
    monkeypatch.setattr(tensorrt_llm.LLM, "get_stats_async", fail)
    make_engine()

    def told():
        return [record.getMessage() for record in caplog.records if "read_failed" in record.getMessage()]

    wait_for(lambda: "read_failed queue=stats kind=OSError count=10 error=planted" in told(), 10)
    first = [line for line in told() if "count=" not in line]
    assert first == ["read_failed queue=stats kind=OSError", "read_failed queue=stats kind=ValueError"]


def test_ranks_have_rows_of_their_own_and_step_together(make_engine, profile):
    harness = make_engine(tensor_parallel_size=2, enable_attention_dp=True)
    seen = harness.engine._loaded.iterations
    wait_for(lambda: is_still(lambda: seen.num_seen), 5)  # the warm-up's rows are in
    before = seen.num_seen
    harness.metrics.take_delta()
    harness.tokens(max_tokens=20, dp_rank=1)
    wait_for(lambda: seen.num_seen - before >= (20 if profile == "1.2.1" else 40), 5)
    counts = {name: sum(values) for name, _, values, _ in harness.metrics.take_delta().histograms}
    assert counts["bireme_engine_step_seconds"] == 20


def is_still(read, for_s=0.3):
    before = read()
    time.sleep(for_s)
    return read() == before


def test_an_iteration_counts_as_progress(make_engine):
    harness = make_engine(stream_interval=1000)
    before = harness.engine.progress().step
    harness.tokens(max_tokens=150)
    wait_for(lambda: harness.engine.progress().step > before + 100, 5)
    assert len(harness.steps) <= 2  # its news came together


def test_tensorrt_llm_s_own_series_are_relayed(make_engine):
    harness = make_engine(return_perf_metrics=True)
    for _ in range(3):
        harness.tokens()
    wait_for(lambda: harness.counter("trtllm_request_success_total") >= 3, 5)
    assert harness.counter("bireme_requests_total") == 3
    delta = harness.metrics.take_delta()
    counts = {name: sum(values) for name, _, values, _ in delta.histograms}
    assert counts["trtllm_e2e_request_latency_seconds"] >= 3
    assert counts["bireme_queue_seconds"] == 3


def test_without_perf_metrics_the_queue_time_is_not_made_up(make_engine):
    harness = make_engine()
    harness.tokens()
    assert "bireme_queue_seconds" not in {name for name, *_ in harness.metrics.take_delta().histograms}


def test_kv_events_carry_public_hashes(make_engine):
    harness = make_engine(kv_cache_config={"event_buffer_max_size": 1000})
    harness.tokens(max_tokens=2)
    events = []
    wait_for(lambda: events.extend(harness.engine.kv_events()) or events, 5)
    hashes = [block.block_hash for event in events if isinstance(event, BlocksStored) for block in event.blocks]
    assert hashes == hashing.sequence_hashes(PROMPT, 32)


def stored_hashes(harness, count):
    """Wait for so many blocks; return (salt, hash) of each."""
    found = []

    def look():
        events = [event for event in harness.engine.kv_events() if isinstance(event, BlocksStored)]
        found.extend((event.cache_salt, block.block_hash) for event in events for block in event.blocks)
        return len(found) >= count

    wait_for(look, 5)
    return found


def test_blocks_of_a_salted_request_are_never_told_as_anybody_s(make_engine, profile):
    harness = make_engine(kv_cache_config={"event_buffer_max_size": 1000})
    other = list(range(700, 780))
    harness.tokens(cache_salt="tenant", max_tokens=2)
    harness.tokens(other, max_tokens=2)
    plain = [("", value) for value in hashing.sequence_hashes(other, 32)]
    if profile == "1.2.1":  # its events don't say whose the blocks are
        assert stored_hashes(harness, 2) == plain
    else:
        found = stored_hashes(harness, 4)
        assert [salt for salt, _ in found[:2]] == ["tenant", "tenant"] and found[2:] == plain
    harness.tokens(max_tokens=2)  # the same prompt without a salt is anybody's
    assert stored_hashes(harness, 2) == [("", value) for value in hashing.sequence_hashes(PROMPT, 32)]


def test_events_of_ranks_are_told_apart(make_engine):
    kv = {"event_buffer_max_size": 1000}
    harness = make_engine(tensor_parallel_size=2, enable_attention_dp=True, kv_cache_config=kv)
    events = []
    for rank in (1, 0):
        harness.tokens(max_tokens=2, dp_rank=rank)
    wait_for(lambda: events.extend(harness.engine.kv_events()) or len(events) >= 2, 5)
    assert [event.dp_rank for event in events] == [1, 0]
    assert harness.counter("bireme_kv_event_gaps_total") == 0


def test_blocks_that_move_to_host_memory_are_neither_lost_nor_a_gap(make_engine):
    kv = {"event_buffer_max_size": 1000, "max_tokens": 256, "host_cache_size": 1 << 20}
    harness = make_engine(kv_cache_config=kv)
    for at in range(4):
        harness.tokens([500 + at] * 96, max_tokens=2)
    assert len(set(stored_hashes(harness, 12))) == 12
    assert harness.counter("bireme_kv_event_gaps_total") == 0


@pytest.mark.parametrize("profile", ["1.4"], indirect=True)
def test_a_block_with_a_picture_s_digest_is_left_out_and_nothing_is_void(make_engine, profile, monkeypatch, caplog):
    """Of a model that is served as one of text."""
    harness = make_engine(kv_cache_config={"event_buffer_max_size": 1000})
    told = lambda token, at, media: "ab" * 32 if token == PROMPT[40] else token  # noqa: E731
    monkeypatch.setattr(harness.llm._executor.blocks, "_token", told)
    harness.tokens(max_tokens=2)
    assert [value for _, value in stored_hashes(harness, 1)] == hashing.sequence_hashes(PROMPT, 32)[:1]
    assert "kv_event_unread" not in caplog.text


def test_how_blocks_are_kept_goes_on_as_tensorrt_llms_own_object(make_engine, monkeypatch):
    harness = make_engine()
    asked, generate = [], harness.llm.generate_async
    monkeypatch.setattr(
        harness.llm, "generate_async", lambda *args, **more: asked.append(more) or generate(*args, **more)
    )
    ranges = (TokenRangeRetention(token_start=0, token_end=32, priority=90, duration_ms=1500),)
    harness.tokens(kv_cache_retention_config=KvCacheRetentionConfig(token_range_retention_configs=ranges))
    config = asked[0]["kv_cache_retention_config"]
    [kept] = config.token_range_retention_configs
    assert (kept.token_start, kept.token_end, kept.priority) == (0, 32, 90)
    assert (kept.duration_ms, config.decode_retention_priority) == (timedelta(seconds=1.5), 35)


def test_without_a_buffer_there_are_no_events(make_engine, monkeypatch):
    import tensorrt_llm

    asked = []
    monkeypatch.setattr(tensorrt_llm.LLM, "get_kv_cache_events_async", lambda self, timeout: asked.append(timeout))
    harness = make_engine()
    harness.tokens()
    assert harness.engine.kv_events() == asked == []


def test_a_buffer_without_reuse_is_refused_before_the_load(make_engine):
    with pytest.raises(ConfigError, match="without enable_block_reuse there are no KV events"):
        make_engine(kv_cache_config={"event_buffer_max_size": 100, "enable_block_reuse": False})


def test_max_input_len_is_enforced_at_the_gate(make_engine):
    with pytest.raises(RequestError, match="60 tokens; max_input_len is 50"):
        make_engine(max_input_len=50).ask([1] * 60)


def test_a_traced_request_is_told_what_is_known_of_it(make_engine):
    harness = make_engine(return_perf_metrics=True)
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = harness.ask(traceparent=traceparent, tracestate="a=1", max_tokens=6)
    spans = {span.name: span for span in answer.wait().spans}
    assert last_call(harness)["trace_headers"] == {"traceparent": traceparent, "tracestate": "a=1"}
    assert spans["prefill_chunk"].attributes == {"tokens": len(PROMPT)}
    assert spans["generate"].attributes == {"tokens": 6, "steps": 5}
    assert spans["queue"].end_us == spans["prefill_chunk"].start_us <= spans["generate"].start_us
    assert harness.ask().wait().spans is None and last_call(harness)["trace_headers"] is None


def test_tensorrt_llms_own_spans_go_to_the_same_collector_below_the_call(make_engine):
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    with Collector() as collector:
        harness = make_engine(context={"traces_endpoint": collector.endpoint})
        assert harness.llm.args.return_perf_metrics
        harness.tokens(traceparent=f"00-{trace_id}-b7ad6b7169203331-01")
        [span] = collector.trace(trace_id)
    assert (span.name, span.parent_span_id.hex()) == ("llm_request", "b7ad6b7169203331")


def test_a_malformed_traceparent_is_refused_by_the_gate(make_engine):
    with pytest.raises(RequestError, match="traceparent: 'junk'"):
        make_engine().ask(traceparent="junk")
