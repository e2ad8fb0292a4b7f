"""The mocker alone, in this process."""

from __future__ import annotations

import threading
import time
from collections import defaultdict

import msgspec
import numpy as np
import pytest

from bireme.canary_mark import new_mark
from bireme.config import EngineConfig, KvCacheConfig, Limits, MockerConfig, SchedulerConfig
from bireme.engines.base import EngineContext
from bireme.engines.child.validate import Gate
from bireme.engines.mocker.engine import MockEngine
from bireme.engines.mocker.tokens import expected_tokens, plain_ids, printable_ids
from bireme.engines.registry import create_engine
from bireme.errors import ConfigError, ResourceExhaustedError, UnavailableError
from bireme.kv.blocks.events import BlocksRemoved, BlocksStored
from bireme.kv.blocks.hashing import event_seed, sequence_hashes
from bireme.kv.wire.step_records import StepRing
from bireme.messages import SamplingParams
from bireme.metrics import Registry
from tests.engines.engine_fixtures import PROMPT, VOCAB_SIZE, check_canaries_are_apart, make_request, wait_for

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Emitted:
    """Collects what an engine emits."""

    def __init__(self):
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.finishes: dict[int, object] = {}
        self.deltas: list[object] = []
        self.batches: list[int] = []
        self.times: list[float] = []

    def __call__(self, step, deltas, plain=None):
        self.times.append(time.monotonic())
        self.batches.append(len(deltas) + (len(plain.keys) if plain else 0))
        for key, token in zip(plain.keys, plain.tokens, strict=True) if plain else ():
            assert key[1] not in self.finishes
            self.tokens[key[1]].append(token)
        for delta in deltas:
            number = delta.key[1]
            assert number not in self.finishes
            self.deltas.append(delta)
            self.tokens[number] += delta.tokens
            if delta.finish is not None:
                self.finishes[number] = delta.finish

    def finish_of(self, number):
        wait_for(lambda: number in self.finishes)
        return self.finishes[number]


@pytest.fixture
def start():
    engines: list[MockEngine] = []

    def make(config=None, steps=None, **mocker):
        settings = MockerConfig(**({"vocab_size": VOCAB_SIZE, "step_ms": 1.0} | mocker))
        config = msgspec.structs.replace(config or EngineConfig(), mocker=settings)
        metrics, emitted = Registry("decode"), Emitted()
        engine = create_engine("mocker", EngineContext("decode", "decode", "", config, metrics, steps=steps))
        engines.append(engine)
        engine.capacity = engine.start(emitted)
        return engine, emitted, metrics

    yield make
    for engine in engines:
        engine.stop()


def submit(engine, number, request):
    """Submit what the gate makes of it, as the engine's process does."""
    engine.submit((0, number), Gate("decode", engine.capacity, Limits(), b"k").admit(request))


def test_tokens_depend_on_prompt_and_position_alone(start):
    engine, emitted, _ = start()
    submit(engine, 1, make_request(max_tokens=300))
    submit(engine, 2, make_request([*PROMPT, 5], 10))
    assert emitted.finish_of(1).reason == emitted.finish_of(2).reason == "length"
    assert emitted.tokens[1] == expected_tokens(PROMPT, 300)
    assert emitted.tokens[2] == expected_tokens([*PROMPT, 5], 10)


def test_expected_tokens_are_stable_and_avoid_the_first_ids():
    tokens = expected_tokens(PROMPT, 1000)
    assert tokens[:4] == expected_tokens(PROMPT, 4)
    assert tokens[500:] == expected_tokens(PROMPT, 500, first=500)
    assert min(tokens) >= 300
    assert len(set(tokens)) > 900


def test_the_context_that_is_told_is_what_the_pool_holds(start):
    engine, _, _ = start(EngineConfig(max_seq_len=1024, kv_cache_config=KvCacheConfig(max_tokens=256)))
    assert engine.capacity.max_seq_len == 256


def test_the_pace_does_not_drift(start):
    engine, emitted, _ = start(step_ms=2.0)
    submit(engine, 1, make_request(max_tokens=100))
    emitted.finish_of(1)
    gaps = (emitted.times[-1] - emitted.times[0]) / 99
    assert gaps >= 0.0019  # never ahead of the model; how far behind depends on the machine


def test_a_stop_token_ends_the_answer_and_is_not_delivered(start):
    engine, emitted, _ = start()
    answer = expected_tokens(PROMPT, 20)
    sampling = SamplingParams(max_tokens=20, stop_token_ids=(answer[7],))
    submit(engine, 1, make_request(sampling=sampling))
    finish = emitted.finish_of(1)
    assert (finish.reason, finish.stop_token_id) == ("stop", answer[7])
    assert emitted.tokens[1] == answer[:7]


def test_min_tokens_puts_the_stop_off(start):
    engine, emitted, _ = start()
    answer = expected_tokens(PROMPT, 20)
    sampling = SamplingParams(max_tokens=20, min_tokens=12, stop_token_ids=(answer[7],))
    submit(engine, 1, make_request(sampling=sampling))
    assert emitted.finish_of(1).reason == "length"


def test_log_probs_come_one_entry_a_token(start):
    engine, emitted, _ = start()
    sampling = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=0)
    submit(engine, 1, make_request(sampling=sampling))
    emitted.finish_of(1)
    first = emitted.deltas[0]
    assert [entry[0][0] for entry in first.logprobs] == first.tokens
    assert len(first.logprobs[0]) == 3
    assert len(first.prompt_logprobs) == len(PROMPT) - 1


def test_a_repeated_prompt_hits_the_prefix_cache(start):
    engine, emitted, _ = start(EngineConfig(kv_cache_config=KvCacheConfig(tokens_per_block=16)))
    for number in (1, 2):
        submit(engine, number, make_request(max_tokens=2))
        emitted.finish_of(number)
    submit(engine, 3, make_request(max_tokens=2, cache_salt="other"))
    cached = [emitted.finish_of(number).usage.cached_tokens for number in (1, 2, 3)]
    assert cached == [0, 48, 0]


def test_prompts_that_come_together_have_their_common_beginning_computed_once(start):
    engine, emitted, _ = start(EngineConfig(kv_cache_config=KvCacheConfig(tokens_per_block=16)), prefill_ms=5.0)
    for number in range(1, 31):
        prompt = np.array([*range(160), 200 + number], np.int32).tobytes()
        submit(engine, number, msgspec.structs.replace(make_request(max_tokens=2), prompt=prompt))
    cached = [emitted.finish_of(number).usage.cached_tokens for number in range(1, 31)]
    assert sorted(cached) == [0, *[160] * 29]


def test_a_prompt_whose_common_beginning_is_given_up_is_computed(start):
    engine, emitted, _ = start(EngineConfig(max_num_tokens=8), step_ms=5.0)
    for number in (1, 2):
        submit(engine, number, make_request(max_tokens=2))
    engine.abort((0, 1))
    assert emitted.finish_of(1).reason == "cancelled"
    assert emitted.finish_of(2).reason == "length"


def held_after(events, held=()):
    """Return the hashes that a reader of events believes to be held."""
    held = set(held)
    for event in events:
        if isinstance(event, BlocksStored):
            held.update(block.block_hash for block in event.blocks)
        else:
            held.difference_update(event.block_hashes)
    return held


def with_events(**kv):
    return EngineConfig(kv_cache_config=KvCacheConfig(tokens_per_block=16, event_buffer_max_size=1000, **kv))


def test_events_name_the_blocks_of_prompt_and_answer(start):
    engine, emitted, _ = start(with_events())
    submit(engine, 1, make_request(max_tokens=40))
    emitted.finish_of(1)
    computed = [*PROMPT, *expected_tokens(PROMPT, 39)]  # the last token has no KV
    hashes, events = sequence_hashes(computed, 16), []
    wait_for(lambda: events.extend(engine.kv_events()) or held_after(events) == set(hashes))
    assert [event.parent_hash for event in events] == [None, hashes[2]]
    assert [token for event in events for block in event.blocks for token in block.tokens] == computed[:80]


def test_events_of_salts_and_adapters_have_hashes_of_their_own(start):
    engine, emitted, _ = start(with_events())
    submit(engine, 1, make_request(max_tokens=1, cache_salt="tenant"))
    emitted.finish_of(1)
    (event,) = engine.kv_events()
    seed = event_seed("", "tenant")
    assert [block.block_hash for block in event.blocks] == sequence_hashes(PROMPT, 16, seed)
    assert event.cache_salt == "tenant"


def test_the_next_turn_of_a_conversation_finds_the_answer_of_the_last(start):
    engine, emitted, _ = start(with_events())
    submit(engine, 1, make_request(max_tokens=40))
    emitted.finish_of(1)
    submit(engine, 2, make_request([*PROMPT, *expected_tokens(PROMPT, 40), 7, 8, 9], max_tokens=1))
    assert emitted.finish_of(2).usage.cached_tokens == 80  # of 50 + 39


def test_blocks_that_are_evicted_are_told_the_least_recently_used_first(start):
    engine, emitted, _ = start(with_events(max_tokens=128))
    prompts, held, removed = {n: [n] * 48 for n in (1, 2, 3)}, set(), []
    for number, prompt in prompts.items():
        submit(engine, number, make_request(prompt, max_tokens=1))
        emitted.finish_of(number)
        events = engine.kv_events()
        removed += [value for event in events if isinstance(event, BlocksRemoved) for value in event.block_hashes]
        held = held_after(events, held)
    first, second, third = (sequence_hashes(prompt, 16) for prompt in prompts.values())
    assert removed == first[:0:-1] and held == {first[0], *second, *third}


def test_without_a_buffer_there_are_no_events(start):
    engine, emitted, _ = start(EngineConfig(kv_cache_config=KvCacheConfig(tokens_per_block=16)))
    submit(engine, 1, make_request(max_tokens=2))
    emitted.finish_of(1)
    assert engine.kv_events() == []


def test_progress_tells_what_is_to_be_computed_and_what_is_held(start):
    config = EngineConfig(max_batch_size=1, kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=1600))
    engine, emitted, _ = start(config)
    assert (engine.progress().num_blocks, engine.progress().num_blocks_used) == (100, 0)
    submit(engine, 1, make_request(max_tokens=1000))
    wait_for(lambda: emitted.tokens[1])
    submit(engine, 2, make_request(list(range(300, 370)), max_tokens=1000))
    progress = engine.progress()
    assert (progress.num_waiting, progress.num_waiting_tokens, progress.num_blocks_used) == (1, 70, 66)
    for number in (2, 1):
        engine.abort((0, number))
        emitted.finish_of(number)
    assert engine.progress().num_waiting_tokens == 0


def test_a_full_pool_makes_requests_wait(start):
    engine, emitted, _ = start(EngineConfig(kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=128)))
    for number in (1, 2, 3):
        submit(engine, number, make_request([number] * 20, 60))
    for number in (1, 2, 3):
        assert emitted.finish_of(number).reason == "length"
    assert max(emitted.batches) == 1


def test_a_request_that_fills_the_pool_is_served(start):
    engine, emitted, _ = start(EngineConfig(kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=128)))
    submit(engine, 1, make_request(max_tokens=100))
    assert emitted.finish_of(1).usage.completion_tokens == 128 - len(PROMPT)


def test_a_full_queue_refuses_at_once(start):
    config = EngineConfig(max_batch_size=1, scheduler_config=SchedulerConfig(max_queue_size=2))
    engine, emitted, _ = start(config, step_ms=20.0)
    submit(engine, 1, make_request(max_tokens=1000))
    wait_for(lambda: emitted.tokens[1])
    submit(engine, 2, make_request())
    submit(engine, 3, make_request())
    with pytest.raises(ResourceExhaustedError, match="max_queue_size is 2"):
        submit(engine, 4, make_request())


def test_a_queue_time_limit_and_a_deadline_end_requests(start):
    config = EngineConfig(max_batch_size=1, scheduler_config=SchedulerConfig(max_queue_time_s=0.05))
    engine, emitted, _ = start(config)
    submit(engine, 1, make_request(max_tokens=100_000, timeout_ms=300))
    submit(engine, 2, make_request())
    assert emitted.finish_of(2).error.startswith("DEADLINE_EXCEEDED: queue time")
    finish = emitted.finish_of(1)
    assert (finish.reason, finish.error.split(" have")[0]) == ("timeout", "DEADLINE_EXCEEDED: timeout_ms: 300")


def test_higher_priority_goes_first(start):
    engine, emitted, _ = start(EngineConfig(max_batch_size=1), step_ms=5.0)
    submit(engine, 1, make_request(max_tokens=10))
    wait_for(lambda: emitted.tokens[1])
    submit(engine, 2, make_request(max_tokens=1, priority=0.1))
    submit(engine, 3, make_request(max_tokens=1, priority=0.9))
    emitted.finish_of(2)
    assert list(emitted.finishes) == [1, 3, 2]


def test_a_long_prompt_is_prefilled_in_chunks(start):
    engine, emitted, _ = start(EngineConfig(max_num_tokens=16))
    submit(engine, 1, make_request(max_tokens=1))
    emitted.finish_of(1)
    assert engine.progress().step == 4  # 50 tokens, 16 a step


def test_step_records_add_up_to_what_was_asked(start):
    ring, num_requests = StepRing(), 12
    config = EngineConfig(max_num_tokens=64, max_batch_size=4, kv_cache_config=KvCacheConfig(tokens_per_block=16))
    engine, emitted, _ = start(config, ring, step_ms=0.2)
    prompts = [[7] * 32 + [number] * (5 + 9 * number) for number in range(1, num_requests)] + [PROMPT]
    for number, prompt in enumerate(prompts, 1):
        submit(engine, number, make_request(prompt, 10 + number))
    usages = [emitted.finish_of(number).usage for number in range(1, num_requests + 1)]
    wait_for(lambda: engine.progress().step_began_at == 0)
    records = ring.drain()
    steps, queues = [one.scheduled_requests for one in records], [one.queued_requests for one in records]
    assert len(records) == engine.progress().step and min(one.wall_time for one in records) > 0
    computed = sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)
    assert sum(one.sum_prefill_tokens for one in steps) == computed < sum(map(len, prompts))
    read = [usage.prompt_tokens + at for usage in usages for at in range(usage.completion_tokens - 1)]
    assert sum(one.num_decode_requests for one in steps) == len(read)
    assert sum(one.sum_decode_kv_tokens for one in steps) == sum(read)
    assert queues[0].num_prefill_requests > 0 and queues[0].sum_prefill_tokens > 0
    assert queues[-1].num_prefill_requests == queues[-1].sum_prefill_tokens == 0
    assert any(one.var_prefill_length for one in queues) and any(one.var_decode_kv_tokens for one in steps)


def test_a_chunk_reads_what_was_computed_of_its_prompt_before(start):
    ring = StepRing()
    engine, emitted, _ = start(EngineConfig(max_num_tokens=16), ring)
    submit(engine, 1, make_request(max_tokens=1))
    emitted.finish_of(1)
    wait_for(lambda: engine.progress().step == 4)
    steps = [one.scheduled_requests for one in ring.drain()]
    assert [(one.sum_prefill_tokens, one.sum_prefill_kv_tokens) for one in steps] == [
        (16, 0),
        (16, 16),
        (16, 32),
        (2, 48),
    ]
    assert {one.kind for one in steps} == {"prefill"}


def test_records_of_steps_that_follow_each_other_tell_the_pace(start):
    ring = StepRing()
    engine, emitted, _ = start(None, ring, step_ms=2.0)
    submit(engine, 1, make_request(max_tokens=40))
    emitted.finish_of(1)
    wait_for(lambda: engine.progress().step == 40)
    records = ring.drain()
    ends = records[-1].ts - records[0].ts
    assert sum(one.wall_time for one in records[1:]) == pytest.approx(ends, abs=0.002)


def test_blocks_are_free_after_aborts(start):
    engine, emitted, metrics = start()
    for number in range(1, 20):
        submit(engine, number, make_request([number] * 40, 10_000))
    wait_for(lambda: emitted.tokens[19])
    for number in range(1, 20):
        engine.abort((0, number))
    assert {emitted.finish_of(number).reason for number in range(1, 20)} == {"cancelled"}
    gauge = lambda: {name: value for name, _, value in metrics.take_delta().gauges}  # noqa: E731
    wait_for(lambda: gauge()["bireme_kv_blocks_used"] == 0)


def test_canaries_are_counted_apart_from_load(start, monkeypatch):
    monkeypatch.setenv("BIREME_KEY", "ab" * 32)
    engine, emitted, metrics = start()
    for number, salt in enumerate([new_mark("ab" * 32), "", new_mark("ab" * 32)]):
        submit(engine, number, make_request(max_tokens=2, cache_salt=salt))
    for number in range(3):
        emitted.finish_of(number)
    engine.stop()
    check_canaries_are_apart(metrics.take_delta(), len(PROMPT))


def test_a_draining_engine_refuses(start):
    engine, _, _ = start()
    engine.drain()
    with pytest.raises(UnavailableError, match="draining"):
        submit(engine, 1, make_request())


def test_as_fast_as_it_can_means_no_sleep(start):
    engine, emitted, _ = start(step_ms=0.0)
    submit(engine, 1, make_request(max_tokens=5000))
    emitted.finish_of(1)
    assert emitted.tokens[1] == expected_tokens(PROMPT, 5000)


def test_submits_from_many_threads_all_end(start):
    engine, emitted, _ = start(step_ms=0.0)

    def submit_many(base):
        for i in range(50):
            submit(engine, base + i, make_request([base + i], 3))

    threads = [threading.Thread(target=submit_many, args=(1000 * n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_for(lambda: len(emitted.finishes) == 200)
    numbers = [1000 * n + i for n in range(1, 5) for i in range(50)]
    assert {finish.reason for finish in emitted.finishes.values()} == {"length"}
    assert dict(emitted.tokens) == {number: expected_tokens([number], 3) for number in numbers}


def test_printable_ids_decode_to_plain_text(sample_model):
    folder = sample_model()
    ids, vocab_size = printable_ids(str(folder))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [tokenizer.decode([int(token)]) for token in ids]
    assert all(text.isascii() and text.isprintable() and text.strip() for text in texts)
    assert 300 <= ids.min() and ids.max() < vocab_size


def test_without_a_tokenizer_the_vocabulary_must_be_named(start):
    with pytest.raises(ConfigError, match="set mocker.vocab_size"):
        start(vocab_size=0)


def test_an_unknown_engine_is_refused():
    with pytest.raises(ConfigError, match="known engines: torch, trtllm, mocker"):
        create_engine("vllm", None)
    assert plain_ids(100)[0] == 0


def best_effort(share=0.1, **config):
    return EngineConfig(scheduler_config=SchedulerConfig(best_effort_share=share), **config)


def test_best_effort_requests_get_their_share_beside_others_and_all_alone(start):
    engine, emitted, metrics = start(best_effort(share=0.1), step_ms=2.0)
    submit(engine, 1, make_request(max_tokens=400))
    wait_for(lambda: emitted.tokens[1])
    submit(engine, 2, make_request(list(range(300, 340)), max_tokens=500, priority=0.0))
    emitted.finish_of(1)
    beside = len(emitted.tokens[2])
    assert 20 <= beside <= 50  # of 400 steps
    counters = {name: value for name, _, value in metrics.take_delta().counters}
    assert counters["bireme_best_effort_rests_total"] > 300
    assert emitted.finish_of(2).reason == "length"
    assert emitted.tokens[2] == expected_tokens(list(range(300, 340)), 500)


def test_a_prompt_does_not_wait_for_a_best_effort_one_even_if_both_begin_alike(start):
    prompt = list(range(300, 900)) * 5
    config = best_effort(share=0.001, max_num_tokens=400, kv_cache_config=KvCacheConfig(tokens_per_block=16))
    engine, emitted, _ = start(config, step_ms=20.0)
    submit(engine, 1, make_request(prompt, max_tokens=3, priority=0.0))
    wait_for(lambda: engine.progress().step)  # 400 of its 3,000 tokens
    submit(engine, 2, make_request([*prompt[:2900], 5], max_tokens=3))
    assert emitted.finish_of(2).reason == "length" and not emitted.tokens[1]
    assert emitted.finish_of(1).reason == "length"


def test_best_effort_requests_end_though_others_prompts_never_do(start):
    engine, emitted, _ = start(best_effort(), step_ms=5.0)
    submit(engine, 1, make_request(max_tokens=3, priority=0.0))
    number = 1
    while 1 not in emitted.finishes:
        number += 1
        submit(engine, number, make_request([number] * 20, 1))
        wait_for(lambda number=number: number in emitted.finishes)
        assert number < 5000
    assert emitted.tokens[1] == expected_tokens(PROMPT, 3)


def test_a_traced_request_is_told_queue_chunks_and_steps(start):
    engine, emitted, _ = start(EngineConfig(max_num_tokens=4, max_batch_size=1))
    submit(engine, 1, make_request(max_tokens=5, traceparent=TRACEPARENT))
    submit(engine, 2, make_request(max_tokens=2))
    spans = {span.name: span for span in emitted.finish_of(1).spans}
    chunks = [span.attributes["tokens"] for span in emitted.finish_of(1).spans if span.name == "prefill_chunk"]
    assert chunks == [4] * (len(PROMPT) // 4) + [len(PROMPT) % 4] * (len(PROMPT) % 4 > 0)
    assert spans["generate"].attributes == {"tokens": 5, "steps": 4}
    assert spans["queue"].start_us <= spans["prefill_chunk"].start_us <= spans["generate"].start_us
    assert emitted.finish_of(2).spans is None


def test_a_traced_request_that_never_ran_tells_of_its_queue(start):
    engine, emitted, _ = start(EngineConfig(max_batch_size=1), step_ms=20.0)
    submit(engine, 1, make_request(max_tokens=50))
    submit(engine, 2, make_request(max_tokens=5, traceparent=TRACEPARENT))
    engine.abort((0, 2))
    assert [span.name for span in emitted.finish_of(2).spans] == ["queue"]
