"""Ends of requests, limits and failures of the torch engine: every request ends once and gives its blocks back."""

from __future__ import annotations

import time

import pytest
import torch

from bireme.canary_mark import new_mark
from bireme.engines.torch.forward import library_loading
from bireme.errors import ConfigError, RequestError, ResourceExhaustedError, UnavailableError
from bireme.kv.blocks.events import BlocksRemoved
from bireme.kv.blocks.hashing import sequence_hashes
from bireme.messages import ProcessorCall
from tests.engines.engine_fixtures import check_canaries_are_apart
from tests.engines.torch.tiny_models import EOS
from tests.engines.torch.torch_harness import MIXED, Harness, Result, make_prompts, request

PROMPTS = make_prompts(*MIXED)


@pytest.fixture(scope="module")
def llama(tiny):
    return tiny("llama")


@pytest.fixture
def engine(llama):
    with Harness(llama.path, max_batch_size=4, max_num_tokens=64) as harness:
        yield harness


def test_an_abort_while_running_ends_as_cancelled_and_frees_blocks(engine):
    result = engine.submit(request(PROMPTS[3], 400))
    assert result.has_tokens.wait(30)
    engine.abort(result)
    assert (result.finish.reason, result.finish.error) == ("cancelled", "")
    assert engine.manager.num_referenced == 0
    assert result.finish.usage.completion_tokens == len(result.tokens)


def test_an_abort_while_waiting_ends_as_cancelled(engine):
    running = [engine.submit(request(PROMPTS[3], 400)) for _ in range(4)]
    waiting = engine.submit(request(PROMPTS[2], 400))
    engine.abort(waiting)
    assert (waiting.finish.reason, waiting.tokens) == ("cancelled", [])
    for result in running:
        engine.abort(result)
        assert result.finish.reason == "cancelled"
    assert engine.manager.num_referenced == 0


def test_an_abort_of_an_unknown_request_is_ignored(engine, llama):
    engine.engine.abort((3, 99))
    assert engine.run([request(PROMPTS[1])]) == llama.expect([PROMPTS[1]])


def test_many_aborts_at_random_times_leave_no_block_referenced(engine):
    results = [engine.submit(request(prompt, 300)) for prompt in PROMPTS * 3]
    for index, result in enumerate(results):
        engine.abort(result)
        time.sleep(0.002 * (index % 5))
    assert {result.finish.reason for result in results} <= {"cancelled", "length"}
    assert all(len(result.finishes) == 1 for result in results)
    assert (engine.manager.num_referenced, engine.core.num_running, engine.core.num_waiting) == (0, 0, 0)


def test_a_full_queue_refuses_and_takes_requests_again_later(llama):
    with Harness(llama.path, max_batch_size=1, queue={"max_queue_size": 2}) as engine:
        running = engine.submit(request(PROMPTS[3], 400))
        assert running.has_tokens.wait(30)
        waiting = [engine.submit(request(PROMPTS[0], 4)) for _ in range(2)]
        with pytest.raises(ResourceExhaustedError, match="max_queue_size is 2"):
            engine.submit(request(PROMPTS[0], 4))
        engine.abort(running)
        assert [result.finish.reason for result in waiting] == ["length"] * 2
        assert engine.run([request(PROMPTS[0], 4)])


def test_a_deadline_ends_a_running_request_as_timeout(engine):
    result = engine.submit(request(PROMPTS[3], 440, timeout_ms=60))
    assert result.finish.reason == "timeout"
    assert result.finish.error.startswith("DEADLINE_EXCEEDED: timeout_ms: 60")
    assert engine.manager.num_referenced == 0


def test_a_deadline_ends_a_waiting_request(llama):
    with Harness(llama.path, max_batch_size=1) as engine:
        running = engine.submit(request(PROMPTS[3], 440))
        late = engine.submit(request(PROMPTS[3], 4, timeout_ms=30))
        assert (late.finish.reason, late.tokens) == ("timeout", [])
        engine.abort(running)
        assert running.finish.reason == "cancelled"


def test_waiting_longer_than_the_queue_limit_ends_as_timeout(llama):
    with Harness(llama.path, max_batch_size=1, queue={"max_queue_time_s": 0.05}) as engine:
        running = engine.submit(request(PROMPTS[3], 440))
        late = engine.submit(request(PROMPTS[3], 4))
        assert late.finish.error.startswith("DEADLINE_EXCEEDED: queue time")
        assert "max_queue_time_s" in late.finish.error
        engine.abort(running)
        assert running.finish.reason == "cancelled"


def test_higher_priority_is_let_in_first(llama):
    order: list[str] = []
    with Harness(llama.path, max_batch_size=1) as engine:
        running = engine.submit(request(PROMPTS[3], 400))
        assert running.has_tokens.wait(30)
        results = {
            name: engine.submit(request(PROMPTS[0], 2, priority=priority))
            for name, priority in (("low", 0.1), ("first", 0.5), ("second", 0.5), ("high", 0.9))
        }
        engine.abort(running)
        waits = {name: result.finish.usage.queue_ms for name, result in results.items()}
        began = {name: waits[name] + index * 1e-6 for index, name in enumerate(results)}
        order = sorted(began, key=lambda name: began[name])
    assert order == ["high", "first", "second", "low"]


def test_the_end_of_sequence_ends_as_stop_and_is_not_delivered(engine, llama):
    prompt, expected = next(
        (prompt, tokens)
        for prompt in make_prompts(*range(4, 60), seed=5)
        for tokens in llama.expect([prompt], 48, EOS)
        if tokens[-1] == EOS
    )
    result = engine.submit(request(prompt, ignore_eos=False))
    assert (result.finish.reason, result.finish.stop_token_id) == ("stop", EOS)
    assert result.tokens == expected[:-1]


def test_a_stop_token_ends_as_stop_and_is_not_delivered(engine, llama):
    expected = llama.expect([PROMPTS[1]])[0]
    result = engine.submit(request(PROMPTS[1], stop_token_ids=(expected[10],)))
    assert (result.finish.reason, result.finish.stop_token_id) == ("stop", expected[10])
    assert result.tokens == expected[: expected.index(expected[10])]


def test_without_max_tokens_it_goes_to_the_end_of_the_context(llama):
    with Harness(llama.path, max_seq_len=80) as engine:
        result = engine.submit(request(PROMPTS[2], None))
        assert (result.finish.reason, len(result.tokens)) == ("length", 35)


def test_usage_counts_tokens_and_times(engine):
    usage = engine.submit(request(PROMPTS[2], 12)).finish.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (45, 12, 0)
    assert usage.prefill_ms > 0 and usage.decode_ms > 0 and usage.queue_ms >= 0
    assert usage.decode_worker == "decode"


def test_log_probabilities_come_with_their_tokens(engine):
    result = engine.submit(request(PROMPTS[2], 5, logprobs=3))
    assert result.finish.reason == "length"
    assert [entry[0][0] for entry in result.logprobs] == result.tokens
    assert all(len(entry) == 4 and entry[0] == entry[1] for entry in result.logprobs)  # greedy: itself the likeliest


def test_prompt_log_probabilities_equal_those_of_the_model(llama):
    with Harness(llama.path, max_num_tokens=24) as engine:
        engine.run([request(PROMPTS[3], 1)])  # what is cached must not be left out
        result = engine.submit(request(PROMPTS[3], 1, prompt_logprobs=0))
        assert result.finish.reason == "length"
    with torch.inference_mode():
        logits = llama.module(torch.tensor([PROMPTS[3]])).logits[0].log_softmax(-1)
    expected = [float(logits[i, token]) for i, token in enumerate(PROMPTS[3][1:])]
    assert result.prompt_logprobs is not None
    assert [entry[0][0] for entry in result.prompt_logprobs] == PROMPTS[3][1:]
    assert [entry[0][1] for entry in result.prompt_logprobs] == pytest.approx(expected, abs=1e-3)


def test_min_tokens_holds_the_end_back(engine, llama):
    expected = llama.expect([PROMPTS[1]])[0]
    result = engine.submit(request(PROMPTS[1], stop_token_ids=(expected[0],), min_tokens=6))
    assert result.finish.reason in ("stop", "length")
    assert len(result.tokens) >= 6 and expected[0] not in result.tokens[:6]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"multimodal": b"[]"}, "multimodal"),
        ({"guided_decoding": {"json": {}}}, "guided_decoding"),
        ({"request_type": "context_only"}, "cache_transceiver_config.backend"),
        ({"logits_processors": (ProcessorCall("top_q"),)}, "did you mean top_"),
    ],
)
def test_what_can_never_run_is_refused_at_submit(engine, changes, text):
    with pytest.raises(RequestError, match=text):
        engine.submit(request(PROMPTS[0], **({"max_tokens": 4} | changes)))


def test_what_a_pool_of_windows_can_never_hold_is_refused_with_both_numbers(llama):
    windows = {"max_attention_window": [100], "max_tokens": 64}
    with Harness(llama.path, **windows) as engine, pytest.raises(RequestError, match="5 KV blocks .* pool has 4"):
        assert engine.capacity.max_seq_len == 512  # windows do not limit the context that is told
        engine.submit(request(PROMPTS[2], 30))


def test_the_context_that_is_told_is_what_the_pool_holds(llama):
    with Harness(llama.path, max_tokens=64) as engine:
        assert engine.capacity.max_seq_len == 64


def test_a_prompt_longer_than_a_step_is_refused_without_chunking(llama):
    with Harness(llama.path, max_num_tokens=32, enable_chunked_prefill=False) as engine:
        with pytest.raises(RequestError, match="enable_chunked_prefill is false"):
            engine.submit(request(PROMPTS[2], 4))
        short = [prompt for prompt in PROMPTS if len(prompt) <= 32]
        assert engine.run([request(prompt) for prompt in short]) == llama.expect(short)


def test_a_draining_engine_refuses_and_finishes_what_runs(engine, llama):
    result = engine.submit(request(PROMPTS[1]))
    engine.engine.drain()
    with pytest.raises(UnavailableError, match="draining"):
        engine.submit(request(PROMPTS[1]))
    assert result.finish.reason == "length"
    assert [result.tokens] == llama.expect([PROMPTS[1]])


def test_stopping_ends_what_runs_with_unavailable(llama):
    with Harness(llama.path) as engine:
        result = engine.submit(request(PROMPTS[1], 400))
        assert result.has_tokens.wait(30)
    assert result.finish.error.startswith("UNAVAILABLE")


def computing(engine):
    """Return what computes every step with a prompt from now on."""
    engine.core._parts.forward.mixed = None
    return engine.core._parts.forward


def test_a_step_that_raises_fails_its_requests_and_the_next_ones_work(engine, llama):
    forward = computing(engine)
    compute, forward.compute = forward.compute, lambda batch: 1 / 0
    result = engine.submit(request(PROMPTS[1]))
    assert result.finish.error.startswith("INTERNAL: ZeroDivisionError")
    forward.compute = compute
    assert engine.manager.num_referenced == 0
    assert engine.run([request(PROMPTS[1])]) == llama.expect([PROMPTS[1]])


def test_out_of_memory_ends_the_request_that_needs_most_and_nobody_else(engine, llama, caplog):
    forward = computing(engine)
    compute = forward.compute

    def small_steps_fit(batch):
        if batch.ids.shape[1] > 40:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 GiB. GPU 0 has 2 GiB free.")
        return compute(batch)

    forward.compute = small_steps_fit
    small = [engine.submit(request(PROMPTS[1])), engine.submit(request(PROMPTS[0]))]
    large = engine.submit(request(PROMPTS[4]))
    assert large.finish.error.startswith("INTERNAL: out of memory in a step") and large.tokens == []
    assert "max_num_tokens" in large.finish.error
    assert [result.finish.error for result in small] == ["", ""]
    assert [result.tokens for result in small] == llama.expect([PROMPTS[1], PROMPTS[0]])
    assert engine.manager.num_referenced == 0


def test_what_ends_between_steps_is_told_before_the_next_step(engine):
    step, seen = engine.core.step, []

    def watch():
        seen.append(len(ended.finishes))
        if len(seen) == 3:
            engine.abort(ended)
        return step()

    with engine.engine._wake:  # the first step has both
        ended, other = engine.submit(request(PROMPTS[1], 400)), engine.submit(request(PROMPTS[0], 8))
        engine.core.step = watch
    assert other.finish.reason == "length" and ended.finish.reason == "cancelled"
    assert seen[:4] == [0, 0, 0, 1]


def test_a_request_that_the_sampler_refuses_fails_alone(engine, llama, monkeypatch):
    sampler = engine.core._parts.sampler
    add = sampler.add

    def refuse(key, params, *rest):
        if params.logprobs == 7:
            raise RequestError("not this one")
        add(key, params, *rest)

    monkeypatch.setattr(sampler, "add", refuse)
    good, bad = engine.submit(request(PROMPTS[1])), engine.submit(request(PROMPTS[2], logprobs=7))
    assert bad.finish.error == "INVALID_ARGUMENT: not this one"
    assert (good.finish.error, [good.tokens]) == ("", llama.expect([PROMPTS[1]]))
    assert engine.manager.num_referenced == 0


def test_sampling_without_a_seed_draws_one(engine):
    assert len(engine.run([request(PROMPTS[1], 8, temperature=1.0)])[0]) == 8


def test_steps_that_fail_again_and_again_end_the_process(engine):
    computing(engine).compute = lambda batch: 1 / 0
    results: list[Result] = []
    for _ in range(3):
        results.append(engine.submit(request(PROMPTS[1])))
        assert results[-1].finish.error.startswith("INTERNAL")
    engine.engine._thread.join(10)
    assert engine.died == [70]


def test_a_broken_loop_ends_the_process_even_where_requests_cannot_be_ended(engine, monkeypatch):
    monkeypatch.setattr(engine.core.requests, "fail_all", lambda error: 1 / 0)
    monkeypatch.setattr(engine.core.scheduler, "schedule", lambda: 1 / 0)
    engine.submit(request(PROMPTS[1]))
    engine.engine._thread.join(10)
    assert engine.died == [70]


def test_a_start_that_fails_waits_for_the_thread_that_is_in_cuda_s_libraries(monkeypatch):
    """The exit status says whose fault it is; a process that crashes as it exits has another one."""
    ended = []
    monkeypatch.setattr(library_loading, "_call", lambda device: (time.sleep(0.05), ended.append(device)))
    with pytest.raises(ConfigError), library_loading.LoadedLibraries(torch.device("cuda")):
        raise ConfigError("no such model")
    assert ended


def test_progress_counts_steps_and_requests(engine):
    before = engine.engine.progress()
    assert (before.num_waiting, before.num_running, before.step_began_at) == (0, 0, 0.0)
    engine.run([request(PROMPTS[1], 5)])
    engine.settle()
    assert engine.engine.progress().step >= before.step + 5


def test_metrics_tell_requests_tokens_and_blocks(engine):
    engine.run([request(PROMPTS[2], 5), request(PROMPTS[1], 7)])
    engine.settle()
    delta = engine.metrics.take_delta()
    counters = {(name, labels[1:]): value for name, labels, value in delta.counters}
    gauges = {name: value for name, _, value in delta.gauges}
    assert counters["bireme_requests_total", ("length",)] == 2
    assert counters["bireme_generated_tokens_total", ()] == 12
    assert counters["bireme_prompt_tokens_total", ()] == 65
    assert (gauges["bireme_kv_blocks_used"], gauges["bireme_requests_running"]) == (0, 0)
    histograms = {name for name, *_ in delta.histograms}
    assert {"bireme_time_to_first_token_seconds", "bireme_engine_step_seconds"} <= histograms


def test_canaries_are_counted_apart_from_load(engine, monkeypatch):
    monkeypatch.setenv("BIREME_KEY", "ab" * 32)
    engine.settle()
    engine.metrics.take_delta()
    salts = [new_mark("ab" * 32), "", new_mark("ab" * 32)]
    engine.run([request(PROMPTS[2], 2, cache_salt=salt) for salt in salts])
    engine.settle()
    check_canaries_are_apart(engine.metrics.take_delta(), len(PROMPTS[2]))


def test_kv_events_replayed_give_what_can_be_reused(llama):
    held: set[int] = set()
    with Harness(llama.path, max_batch_size=4, max_tokens=256, event_buffer_max_size=1000) as engine:
        engine.run([request(prompt, 20) for prompt in PROMPTS])
        result = engine.submit(request(PROMPTS[3], 20))
        tokens = PROMPTS[3] + result.tokens if result.finish.reason == "length" else []
        engine.settle()
        for event in engine.engine.kv_events():
            if isinstance(event, BlocksRemoved):
                held.difference_update(event.block_hashes)
            else:
                held.update(block.block_hash for block in event.blocks)
        assert len(held) == engine.manager.num_cached
        assert set(sequence_hashes(tokens[:-1], 16)) <= held
        assert engine.engine.kv_events() == []


def test_many_deadlines_of_requests_long_over_are_swept(llama):
    with Harness(llama.path) as engine:
        for _ in range(6):
            engine.run([request([5, 6], 1, timeout_ms=3_600_000) for _ in range(400)])
        assert len(engine.core.requests.deadlines) <= 2100
