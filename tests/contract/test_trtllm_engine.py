"""The TensorRT-LLM engine on the stand-in of both releases: requests, their ends, and its own."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import shutil
import threading
import time

import msgspec
import pytest

from bireme.engines.trtllm import lifecycle
from bireme.errors import ConfigError, ResourceExhaustedError, UnavailableError
from bireme.messages import FinishReason
from tests.contract.trtllm_harness import Harness
from tests.engines.engine_fixtures import wait_for

PROMPT = list(range(400, 480))


@pytest.fixture(scope="session")
def greedy(sample_model):
    """Return what transformers makes of the prompt, whatever the release."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(sample_model("llama"), dtype=torch.float32)
    return model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)[0, len(PROMPT) :].tolist()


def test_tokens_are_those_of_transformers(make_engine, greedy):
    assert make_engine().tokens() == greedy


def test_requests_side_by_side_keep_their_tokens_apart(make_engine):
    harness = make_engine()
    prompts = [PROMPT[: 3 + 7 * at] for at in range(6)]
    alone = [harness.tokens(prompt) for prompt in prompts]
    together = [harness.ask(prompt) for prompt in prompts]
    assert [answer.wait().reason for answer in together] == ["length"] * 6
    assert [answer.tokens for answer in together] == alone


def test_tokens_travel_in_columns_where_nothing_else_is_wanted_and_are_the_same_either_way(make_engine):
    harness = make_engine()
    plain = harness.tokens()
    assert harness.num_plain == len(plain) == 12
    assert harness.tokens(logprobs=0) == plain
    assert harness.num_plain == 12


@pytest.mark.parametrize("interval", [1, 5])
def test_cumulative_results_become_deltas_whatever_the_stream_interval(make_engine, interval):
    harness = make_engine(stream_interval=interval)
    answer = harness.ask(max_tokens=23)
    answer.wait()
    assert len(answer.tokens) == 23
    assert max(len(delta.tokens) for delta in answer.deltas) >= interval
    assert answer.tokens == harness.tokens(max_tokens=23)


def test_a_stop_token_ends_the_answer_and_is_not_delivered(make_engine):
    harness = make_engine()
    whole = harness.tokens()
    answer = harness.ask(stop_token_ids=(whole[5],))
    finish = answer.wait()
    assert (answer.tokens, finish.reason, finish.stop_token_id) == (whole[:5], "stop", whole[5])
    assert finish.usage.completion_tokens == 5


def test_the_end_id_is_not_delivered_although_token_ids_hold_it(make_engine):
    harness = make_engine()
    whole = harness.tokens()
    answer = harness.ask(end_id=whole[4])
    finish = answer.wait()
    assert (answer.tokens, finish.reason, finish.stop_token_id) == (whole[:4], "stop", whole[4])


def test_ignore_eos_goes_past_the_end(make_engine):
    harness = make_engine()
    whole = harness.tokens()
    assert harness.tokens(end_id=whole[4], ignore_eos=True) == whole


def test_the_same_seed_gives_the_same_tokens_and_temperature_alone_is_random(make_engine, profile):
    harness = make_engine(**({"sampler_type": "TRTLLMSampler"} if profile == "1.2.1" else {}))
    greedy = harness.tokens()
    first, again, other = (harness.tokens(temperature=2.0, seed=seed) for seed in (5, 5, 6))
    assert first == again
    assert first != greedy
    assert other != first


@pytest.mark.parametrize("sampling", [{"temperature": 0.0, "top_p": 0.5}, {"temperature": 0.0, "top_k": 50, "seed": 1}])
def test_temperature_zero_is_greedy_whatever_else_is_set(make_engine, sampling):
    harness = make_engine()
    assert harness.tokens(**sampling) == harness.tokens()


def test_log_probabilities_have_the_chosen_token_first(make_engine):
    harness = make_engine()
    answer = harness.ask(logprobs=3)
    answer.wait()
    for token, entry in zip(answer.tokens, answer.logprobs, strict=True):
        assert entry[0][0] == token == entry[1][0]
        assert [item.logprob for item in entry[1:]] == sorted((item.logprob for item in entry[1:]), reverse=True)
        assert len(entry) == 4


def test_zero_log_probabilities_mean_the_chosen_token_s_alone(make_engine):
    harness = make_engine()
    none, two = harness.ask(logprobs=0), harness.ask(logprobs=2)
    assert none.wait().reason == two.wait().reason == "length"
    assert none.logprobs == [entry[:1] for entry in two.logprobs]
    assert all(-30 < entry[0][1] < 0 for entry in none.logprobs)


def test_prompt_log_probabilities_come_once_one_a_token_but_the_first(make_engine):
    answer = make_engine().ask(prompt_logprobs=1)
    answer.wait()
    assert [entry[0][0] for entry in answer.prompt_logprobs] == PROMPT[1:]
    assert all(len(entry) == 2 for entry in answer.prompt_logprobs)
    assert sum(delta.prompt_logprobs is not None for delta in answer.deltas) == 1


def test_a_resumed_request_generates_what_is_left(make_engine):
    harness = make_engine()
    whole = harness.tokens(max_tokens=20)
    rest = harness.ask(PROMPT + whole[:8], max_tokens=20, num_resumed=8)
    finish = rest.wait()
    assert whole[:8] + rest.tokens == whole
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (len(PROMPT), 20)


def test_reused_blocks_are_reported_and_a_salt_keeps_tenants_apart(make_engine):
    harness = make_engine()
    harness.tokens(cache_salt="a")
    same, other = (harness.ask(cache_salt=salt).wait().usage.cached_tokens for salt in "ab")
    assert (same, other) == (64, 0)


def test_logit_bias_moves_the_choice(make_engine):
    harness = make_engine()
    assert harness.tokens(logit_bias={777: 1000.0}, max_tokens=3) == [777] * 3


def test_bad_words_of_one_and_of_several_tokens_never_come(make_engine):
    harness = make_engine()
    whole = harness.tokens()
    assert whole[0] not in harness.tokens(bad_token_ids=((whole[0],),))[:1]
    banned = harness.tokens(bad_token_ids=((whole[0], whole[1]),))
    assert banned[0] == whole[0] and banned[1] != whole[1]


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_min_tokens_holds_for_every_stop_id_and_no_longer(make_engine, is_overlapped):
    harness = make_engine(disable_overlap_scheduler=not is_overlapped)
    whole = harness.tokens()
    assert whole[5] not in whole[:5]
    for least, count in ((5, 5), (6, 12)):
        answer = harness.ask(stop_token_ids=(whole[5], 6), min_tokens=least)
        answer.wait()
        assert len(answer.tokens) == count


def test_min_tokens_beside_ignore_eos_bans_no_other_token(make_engine):
    harness = make_engine()
    last = harness.capacity.vocab_size - 1
    assert harness.tokens(logit_bias={last: 100.0}, ignore_eos=True, min_tokens=3, max_tokens=3) == [last] * 3


# -- refusals and faults


def test_what_tensorrt_llm_refuses_ends_that_request_alone(make_engine, monkeypatch):
    harness = make_engine()
    for kind in (ValueError, TypeError, NotImplementedError, harness.engine._loaded.api.request_error):

        def refuse(*args, kind=kind):
            raise kind("no such thing")

        with monkeypatch.context() as patched:
            patched.setattr(type(harness.llm), "_check_params", refuse)
            finish = harness.ask().wait()
        assert (finish.reason, finish.error.partition(":")[0]) == ("error", "INVALID_ARGUMENT")
        assert "no such thing" in finish.error
    assert len(harness.tokens()) == 12
    assert not harness.exits


def test_a_request_error_while_it_runs_ends_that_request_alone(make_engine):
    harness = make_engine(kv_cache_config={"max_tokens": 256})
    unlimited = msgspec.structs.replace(harness.capacity, max_seq_len=1 << 20, num_blocks=0)
    harness.gate = dataclasses.replace(harness.gate, capacity=unlimited)
    for _ in range(5):  # more in a row than look like a fault of the engine's
        finish = harness.ask(PROMPT * 4).wait()
        assert finish.error.startswith("INTERNAL: TensorRT-LLM: Prompt length (320) exceeds maximum input length")
    assert len(harness.tokens()) == 12
    assert not harness.exits


def test_what_a_result_object_asserts_ends_its_request_alone(make_engine, monkeypatch):
    from tensorrt_llm import _results

    harness = make_engine()
    monkeypatch.setattr(_results.CompletionOutput, "length", 99)
    finish = harness.ask(logprobs=1).wait()
    assert finish.error.startswith("INTERNAL: TensorRT-LLM: logprobs length: 1 != output.length: 99")
    monkeypatch.undo()
    assert len(harness.tokens()) == 12
    assert not harness.exits


def end_worker(harness, monkeypatch):
    """Its loop raises, and nobody looks after its health."""
    monkeypatch.setattr(type(harness.llm), "shutdown", lambda self: pytest.fail("teardown may block for ever"))
    monkeypatch.setattr(type(harness.llm), "_check_health", lambda self: True, raising=False)  # it would notice, later
    monkeypatch.setattr(harness.llm._executor, "_admit", lambda: 1 / 0)
    wait_for(lambda: not harness.llm._executor._thread.is_alive(), 5)


@pytest.mark.parametrize("profile", ["1.2.1"], indirect=True)
def test_a_worker_that_has_ended_ends_the_process_at_once_without_teardown(make_engine, profile, monkeypatch):
    harness = make_engine()
    answer = harness.ask(max_tokens=4000)
    assert answer.has_tokens.wait(30)
    end_worker(harness, monkeypatch)
    harness.ask()
    assert harness.has_exited.wait(5)
    assert harness.exits == [70]
    assert answer.finish is None  # the supervisor's to tell, which may start it elsewhere
    monkeypatch.undo()


@pytest.mark.parametrize("profile", ["1.3", "1.4"], indirect=True)
def test_an_engine_that_says_it_is_dead_ends_the_process_and_no_request(make_engine, profile, monkeypatch, caplog):
    harness = make_engine()
    answer = harness.ask(max_tokens=4000)
    assert answer.has_tokens.wait(30)
    end_worker(harness, monkeypatch)
    assert harness.has_exited.wait(5)
    assert harness.exits == [70]
    assert answer.finish is None
    assert "engine_broken reason=EngineDeadError: The executor worker has ended: division by zero" in caplog.text
    monkeypatch.undo()


@pytest.mark.parametrize("profile", ["1.3", "1.4"], indirect=True)
def test_a_dead_engine_says_so_to_each_that_asks_however_often(make_engine, profile, monkeypatch):
    from tensorrt_llm.executor import EngineDeadError
    from tensorrt_llm.executor.utils import RequestError

    harness = make_engine()
    assert harness.ask(max_tokens=4000).has_tokens.wait(30)
    requests = harness.engine._requests
    [run] = requests._states.values()
    end_worker(harness, monkeypatch)
    assert harness.has_exited.wait(5)
    for asks in (run.result.aresult, run.result.aresult, requests.warm_up):
        with pytest.raises(EngineDeadError):
            asyncio.run_coroutine_threadsafe(asks(), harness.engine._loop).result(5)
    assert not issubclass(EngineDeadError, RequestError)
    monkeypatch.undo()


@pytest.mark.parametrize("text", ["CUDA error: an illegal memory access was encountered", "something is wrong"])
def test_an_engine_whose_every_request_fails_is_ended(make_engine, monkeypatch, text):
    harness = make_engine()
    monkeypatch.setattr(type(harness.llm), "_check_health", lambda self: True, raising=False)  # as 1.2 does
    harness.tokens()
    harness.llm._executor.break_down(RuntimeError(text))
    for count in range(1, 4):
        assert harness.ask().wait().error == f"INTERNAL: TensorRT-LLM: {text}"
        if text.startswith("CUDA") or count == 3:
            assert harness.has_exited.wait(5)
            break
        assert not harness.has_exited.wait(0.2)
    assert harness.exits == [70]


def test_an_engine_that_is_silent_makes_no_progress_with_work_queued(make_engine):
    harness = make_engine()
    harness.tokens()
    wait_for(lambda: harness.engine._loaded.iterations.num_seen >= 13, 5)  # its, and the warm-up's
    harness.llm._executor.break_down(None)
    harness.ask()
    wait_for(lambda: harness.engine.progress().num_running == 1, 5)
    before = harness.engine.progress().step
    assert not harness.has_exited.wait(0.5)
    assert harness.engine.progress().step == before  # what supervisor.stall_timeout_s looks at


def test_a_health_check_that_says_no_ends_the_process(make_engine, profile):
    if profile == "1.2.1":
        pytest.skip("1.2.1 has no check")
    harness = make_engine()
    monitor = lifecycle.LlmMonitor(harness.llm, harness.engine.fail, interval_s=0.05)
    monitor.start()
    assert not harness.has_exited.wait(0.3)
    harness.llm._executor._fatal_error = RuntimeError("gone")
    assert harness.has_exited.wait(5)
    monitor.stop()


@pytest.mark.parametrize("reason", ["end_of_story", None])
def test_an_end_without_a_known_reason_is_an_error_not_a_success(make_engine, monkeypatch, reason):
    from tensorrt_llm import _results

    plain = _results.RequestOutput._finish

    def finish(self, output, response):
        plain(self, output, response)
        output.finish_reason = reason

    harness = make_engine()
    monkeypatch.setattr(_results.RequestOutput, "_finish", finish)
    ending = harness.ask().wait()
    assert ending.reason == "error"
    assert ending.error.startswith("INTERNAL: TensorRT-LLM")
    assert not harness.exits


def test_an_answer_without_outputs_is_an_error(make_engine, monkeypatch):
    from tensorrt_llm import _results

    harness = make_engine()
    monkeypatch.setattr(_results.RequestOutput, "_apply", lambda self, response: self.outputs.clear())
    assert harness.ask().wait().error == "INTERNAL: TensorRT-LLM answered without an output"


# -- aborts and limits


def test_an_abort_ends_with_cancelled_and_frees_the_blocks(make_engine, monkeypatch):
    harness = make_engine()
    monkeypatch.setattr("tensorrt_llm._executor._STEP_S", 0.2)  # an end that is not waited for would come before it
    answer = harness.ask(max_tokens=4000)
    assert answer.has_tokens.wait(10)
    harness.abort(answer)
    assert answer.wait().reason == "cancelled"
    assert harness.llm._executor.blocks.num_used == 0
    assert harness.engine.progress().num_running == 0


def test_an_abort_before_the_first_token_ends_it_too(make_engine):
    harness = make_engine(max_batch_size=1)
    first, second = harness.ask(max_tokens=4000), harness.ask(max_tokens=4000)
    harness.abort(second)
    assert second.wait().reason == "cancelled"
    harness.abort(first)
    first.wait()


def test_unknown_keys_are_ignored_by_abort(make_engine):
    harness = make_engine()
    harness.engine.abort((3, 99))
    assert len(harness.tokens()) == 12


@pytest.mark.parametrize(
    ("yaml", "fields", "word"),
    [
        ({}, {"timeout_ms": 300}, "timeout_ms: 300"),
        ({"scheduler_config": {"max_queue_time_s": 0.3}}, {}, "max_queue_time_s"),
    ],
)
def test_deadlines_end_requests_with_timeout(make_engine, yaml, fields, word):
    harness = make_engine(max_batch_size=1, **yaml)
    first, second = harness.ask(max_tokens=3000), harness.ask(max_tokens=3000, **fields)
    finish = second.wait()
    reason: FinishReason = "timeout"
    assert finish.reason == reason
    assert finish.error.startswith("DEADLINE_EXCEEDED: ") and word in finish.error
    harness.abort(first)
    first.wait()


def test_a_full_queue_refuses_with_its_limit(make_engine):
    harness = make_engine(max_batch_size=1, scheduler_config={"max_queue_size": 2})
    answers = [harness.ask(max_tokens=3000) for _ in range(3)]
    with pytest.raises(ResourceExhaustedError, match="max_queue_size is 2"):
        harness.ask()
    assert harness.engine.progress().num_waiting == 2
    for answer in answers:
        harness.abort(answer)
    for answer in answers:
        answer.wait()


def test_draining_refuses_new_requests_and_finishes_the_old(make_engine):
    harness = make_engine()
    answer = harness.ask(max_tokens=60)
    harness.engine.drain()
    with pytest.raises(UnavailableError, match="draining"):
        harness.ask()
    assert answer.wait().reason == "length"


def test_stopping_ends_what_runs_with_unavailable(make_engine):
    harness = make_engine()
    answer = harness.ask(max_tokens=4000)
    assert answer.has_tokens.wait(10)
    harness.engine.stop()
    assert answer.wait(1).error.startswith("UNAVAILABLE: ")
    harness.engine.stop()  # harmless


def test_a_shutdown_that_takes_long_is_cut_short_and_told_as_the_ordinary_end(make_engine, monkeypatch, caplog):
    harness = make_engine()
    monkeypatch.setattr("tensorrt_llm._llm._SHUTDOWN_S", 1.0)
    monkeypatch.setattr(lifecycle.shut_down, "__defaults__", (0.1,))
    with caplog.at_level("INFO", "bireme.engines.trtllm"):
        harness.engine.stop()
    assert harness.exits == [0]
    assert "llm_shutdown_cut_short" in caplog.text
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


def test_nothing_is_pending_on_a_loop_that_has_ended(make_engine):
    """When it is collected it would be logged as an error, perhaps in the middle of something else."""
    engine = make_engine().engine
    asyncio.run_coroutine_threadsafe(asyncio.sleep(600), engine._loop)
    engine.stop()
    assert not asyncio.all_tasks(engine._loop)


def test_a_shutdown_that_blocks_is_left_behind(make_engine, monkeypatch):
    harness = make_engine()
    blocked = threading.Event()
    monkeypatch.setattr(lifecycle, "SHUTDOWN_S", 0.2)
    monkeypatch.setattr(lifecycle.shut_down, "__defaults__", (0.2,))
    monkeypatch.setattr(harness.llm, "shutdown", lambda: blocked.wait(20), raising=False)
    began = time.monotonic()
    harness.engine.stop()
    assert time.monotonic() - began < 5
    assert harness.exits == [0]
    blocked.set()


# -- start


def test_an_argument_that_the_release_does_not_have_is_named(make_engine):
    with pytest.raises(ConfigError, match="max_bacth_size"):
        make_engine(max_bacth_size=3)


def test_without_chunked_prefill_a_long_prompt_is_refused_with_the_remedy(make_engine):
    from bireme.errors import RequestError

    harness = make_engine(max_num_tokens=64)
    with pytest.raises(RequestError, match=r"80 tokens; max_num_tokens is 64 and enable_chunked_prefill"):
        harness.ask()
    assert len(harness.tokens(PROMPT[:64])) == 12


def test_the_capacity_says_what_the_llm_holds(make_engine, profile):
    harness = make_engine(kv_cache_config={"max_tokens": 4096})
    assert harness.capacity.num_blocks == 128
    assert make_engine().capacity.num_blocks == 2048  # 1.2 tells it by its statistics
    assert make_engine(enable_iter_perf_stats=False).capacity.num_blocks == (0 if profile == "1.2.1" else 2048)


def test_a_pool_that_holds_no_whole_sequence_cuts_the_length(make_engine, caplog):
    assert make_engine().capacity.max_seq_len == 8192
    assert make_engine(kv_cache_config={"max_tokens": 4096}).capacity.max_seq_len == 4096
    assert "max_seq_len_cut from=8192 to=4096" in caplog.text
    windows = {"max_tokens": 4096, "max_attention_window": [512]}
    assert make_engine(kv_cache_config=windows).capacity.max_seq_len == 8192


def test_two_hundred_requests_with_aborts_at_random_each_end_once_and_leave_nothing(make_engine):
    harness, rng = make_engine(max_batch_size=64), random.Random(3)
    answers = []
    for _ in range(200):
        answers.append(harness.ask(PROMPT[: rng.randrange(1, 40)], max_tokens=rng.randrange(1, 12)))
        if rng.random() < 0.5:
            harness.abort(rng.choice(answers))
    reasons = [answer.wait(120).reason for answer in answers]  # an answer that ends twice fails in Answer.take
    assert set(reasons) == {"length", "cancelled"}
    assert harness.engine.progress().num_running + harness.engine.progress().num_waiting == 0
    wait_for(lambda: harness.llm._executor.blocks.num_used == 0, 5)
    assert not harness.exits


def test_a_folder_that_holds_no_model_is_told_with_its_reason(profile, tmp_path, sample_model):
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(sample_model("llama") / file, tmp_path)
    with pytest.raises(ConfigError, match="could not load .*: Executor worker returned error: .*model.safetensors"):
        Harness("decode", tmp_path, {})
