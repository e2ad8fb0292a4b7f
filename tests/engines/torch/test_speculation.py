"""With drafts an engine says what it says without: whatever is drafted, and whatever a request asks for."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from bireme.engines.torch.forward import decoder_weights
from bireme.errors import RequestError
from bireme.logits.registry import register, unregister
from bireme.messages import ProcessorCall
from bireme.settings import SpeculativeConfig
from tests.engines.torch.host_resident import HostResident
from tests.engines.torch.known_answers import NGRAM, WholeDrafts, draft_known
from tests.engines.torch.test_disaggregated import Pair
from tests.engines.torch.test_equality import MODELS, ON_MODULES
from tests.engines.torch.test_late_choices import LATE, TOKENIZER, alike, asked, opened, told
from tests.engines.torch.torch_harness import MIXED, Harness, make_prompts, request

PROMPTS = make_prompts(*MIXED)
FEW = PROMPTS[:6]
needs_tokenizer = pytest.mark.skipif(TOKENIZER is None, reason="models/tiny-llama is missing: make models")
SAMPLED = {"temperature": 0.9, "seed": 7, "top_p": 0.95}


@contextlib.contextmanager
def on_modules(name):
    with pytest.MonkeyPatch.context() as patch:
        if name == ON_MODULES:
            patch.setattr(decoder_weights, "FAMILIES", ())
        yield


@pytest.fixture(scope="module")
def engine(tiny):
    with Harness(tiny("llama").path, speculative_config=NGRAM, max_num_tokens=64) as harness:
        yield harness


@pytest.fixture(scope="module")
def guided():
    """A model with a tokenizer, so with guides, and drafts."""
    with opened(speculative_config=NGRAM) as harness:
        yield harness


def without_drafts(engine, requests):
    """Return what it says without them, and have it draft that from then on."""
    speculation = engine.core._parts.speculation
    speculation.is_on = False
    results = [engine.submit(one) for one in requests]
    assert [result.finish.error for result in results] == [""] * len(requests)
    prompts = [memoryview(one.prompt).cast("i").tolist() for one in requests]
    draft_known(engine, prompts, [result.tokens for result in results])
    return results


def said(results):
    return [(one.tokens, one.logprobs, one.finish.reason, one.finish.stop_token_id) for one in results]


def num_accepted(results):
    return sum(result.finish.usage.accepted_tokens for result in results)


@pytest.mark.parametrize("name", MODELS)
def test_drafts_of_all_lengths_change_no_token(tiny, name):
    model = tiny(name)
    with (
        on_modules(name),
        Harness(model.path, speculative_config=NGRAM, max_num_tokens=64, tokens_per_block=8) as engine,
    ):
        draft_known(engine, PROMPTS, model.expect(PROMPTS))
        results = [engine.submit(request(prompt)) for prompt in PROMPTS]
        assert [result.finish.error or result.tokens for result in results] == model.expect(PROMPTS)
        assert num_accepted(results) > 16 * 48 / 2 and engine.manager.num_referenced == 0


@needs_tokenizer
def test_whatever_a_request_asks_for_it_gets_the_same(guided):
    requests = [asked(at) for at in range(len(LATE))]
    before = without_drafts(guided, requests)
    results = [guided.submit(one) for one in requests]
    assert [told(result) for result in results] == alike([told(result) for result in before])
    assert all(result.finish.usage.accepted_tokens for result in results if len(result.tokens) > 9)


@needs_tokenizer
@pytest.mark.skipif(torch.cuda.is_available(), reason="it draws on the host what a GPU has drawn itself")
def test_what_the_host_has_to_choose_is_chosen_behind_a_step_that_chose_for_all_rows(guided):
    requests = [asked(at) for at in (1, 4, 6, 7, 9, 11, 13)]
    before = without_drafts(guided, requests)
    parts, forward = guided.core._parts, guided.core._parts.forward
    resident = HostResident.put_into(parts)
    try:
        results = [guided.submit(one) for one in requests]
        assert [told(result)[:4] for result in results] == [told(result)[:4] for result in before]
        assert num_accepted(results) > 60 and resident.num_verified > 4
    finally:
        forward.resident = forward.mixed = forward.verifying = None


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_the_last_token_may_be_anywhere_in_a_burst(engine, max_tokens):
    requests = [request(prompt, max_tokens) for prompt in FEW]
    before = without_drafts(engine, requests)
    results = [engine.submit(one) for one in requests]
    assert said(results) == said(before)
    assert all(result.finish.usage.completion_tokens == max_tokens for result in results)


def test_a_processor_sees_each_verified_token_once_and_no_draft(engine):
    seen = []

    class Watching:
        def __init__(self, context):
            pass

        def __call__(self, token_ids, logits):
            seen.append(list(token_ids))

    register("watching", Watching)
    try:
        one = request(PROMPTS[0], 30, logits_processors=(ProcessorCall("watching", {}),))
        without_drafts(engine, [one])
        before, seen[:] = list(seen), []
        assert num_accepted([engine.submit(one)]) > 10 and seen == before
    finally:
        unregister("watching")


def test_ngrams_of_a_text_that_repeats_are_accepted_and_told(engine, tiny):
    prompt = PROMPTS[1] * 4
    with Harness(tiny("llama").path, speculative_config=NGRAM) as fresh:
        result = fresh.submit(request(prompt, 200))
        assert [result.finish.error or result.tokens] == tiny("llama").expect([prompt], 200)
        usage = result.finish.usage
        assert 0 < usage.accepted_tokens <= usage.drafted_tokens
        counted = {name: value for name, _, value in fresh.metrics.take_delta().counters}
        assert counted["bireme_draft_tokens_total"] == usage.drafted_tokens
        assert counted["bireme_accepted_draft_tokens_total"] == usage.accepted_tokens
        assert counted["bireme_generated_tokens_total"] == 200


def test_a_predicted_output_is_drafted_and_changes_no_token(engine):
    first = without_drafts(engine, [request(PROMPTS[3])])[0].tokens
    edited = np.array([*first[:20], 5, 6, *first[22:]], "<i4").tobytes()
    with Harness(engine.engine._context.model_path, speculative_config=NGRAM) as fresh:
        fresh.core._parts.speculation.lengths = WholeDrafts()  # whatever steps take on this machine
        result = fresh.submit(request(PROMPTS[3], prediction=edited))
        assert result.finish.error or result.tokens == first
        assert result.finish.usage.accepted_tokens > 20
        for wrong, text in ((b"abc", "3 bytes"), (np.array([1 << 20], "<i4").tobytes(), "token id 1048576")):
            with pytest.raises(RequestError, match=f"prediction: {text}"):
                fresh.submit(request(PROMPTS[3], prediction=wrong))


def test_preempted_and_drafted_requests_say_the_same(tiny):
    model = tiny("llama")
    settings = {"queue": {"capacity_scheduler_policy": "MAX_UTILIZATION"}, "max_tokens": 320, "tokens_per_block": 8}
    with Harness(model.path, max_num_tokens=64, speculative_config=NGRAM, **settings) as engine:
        draft_known(engine, PROMPTS, model.expect(PROMPTS))
        results = [engine.submit(request(prompt)) for prompt in PROMPTS]
        assert [result.finish.error or result.tokens for result in results] == model.expect(PROMPTS)
        assert engine.core.scheduler.num_preemptions > 0 and num_accepted(results) > 200
        assert engine.manager.num_referenced == 0


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_small_pool_without_eviction_has_room_for_drafts(tiny, name):
    model = tiny(name)
    with Harness(model.path, max_tokens=320, tokens_per_block=8, max_num_tokens=64, speculative_config=NGRAM) as engine:
        draft_known(engine, PROMPTS, model.expect(PROMPTS))
        assert engine.run([request(prompt) for prompt in PROMPTS]) == model.expect(PROMPTS)
        assert engine.core.scheduler.num_preemptions == 0


def test_blocks_and_events_are_of_accepted_tokens_alone(tiny):
    model, events = tiny("llama"), []
    prompt, answer = PROMPTS[1], model.expect(PROMPTS[1:2])[0]
    for draws in (False, True):
        settings = {"tokens_per_block": 4, "event_buffer_max_size": 100, "speculative_config": NGRAM}
        with Harness(model.path, **settings) as engine:
            draft_known(engine, [prompt], [answer]).is_on = draws
            assert engine.run([request(prompt)]) == [answer]
            events.append(stored(engine.engine.kv_events()))
            result = engine.submit(request([*prompt, *answer, 7], 4))
            assert result.finish.usage.cached_tokens == (len(prompt) + len(answer) - 1) // 4 * 4
    assert events[0] == events[1]


def stored(events):
    return [block.tokens for event in events for block in getattr(event, "blocks", ())]


@pytest.mark.parametrize("cut", [1, 17, 47])
def test_a_stream_that_moved_in_the_middle_of_a_burst_goes_on_exactly(engine, cut):
    requests = [request(prompt, **SAMPLED) for prompt in FEW]
    whole = [result.tokens for result in without_drafts(engine, requests)]
    resumed = [
        request(prompt + tokens[:cut], num_resumed=cut, **SAMPLED) for prompt, tokens in zip(FEW, whole, strict=True)
    ]
    assert engine.run(resumed) == [tokens[cut:] for tokens in whole]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_decode_drafts_behind_a_prefill_worker_that_does_not(tiny, name):
    model = tiny(name)
    with Pair(model.path, 32, 16, speculative_config=NGRAM) as pair:
        draft_known(pair.decode, PROMPTS, model.expect(PROMPTS))
        assert pair.run(PROMPTS) == model.expect(PROMPTS)
        assert num_accepted(pair.decode.results.values()) > 16 * 48 / 2
        assert num_accepted(pair.prefill.results.values()) == 0
        pair.assert_nothing_is_held()


def test_a_drafter_that_fails_leaves_requests_without_drafts(engine, caplog):
    requests = [request(prompt) for prompt in FEW]
    whole = [result.tokens for result in without_drafts(engine, requests)]
    speculation = engine.core._parts.speculation
    speculation.drafter.propose = lambda most, budget: 1 / 0
    assert engine.run(requests) == whole
    assert not speculation.is_on and "drafts_off" in caplog.text


def test_tokens_that_a_stop_ends_are_not_counted_as_accepted(engine):
    first = without_drafts(engine, [request(PROMPTS[2], 20)])[0].tokens
    stop = first[9]
    at = first.index(stop)
    result = engine.submit(request(PROMPTS[2], 20, stop_token_ids=(stop,)))
    assert (result.finish.reason, result.tokens) == ("stop", first[:at])
    assert result.finish.usage.accepted_tokens < at == result.finish.usage.completion_tokens
    assert msgspec.structs.asdict(result.finish.usage)["drafted_tokens"] >= result.finish.usage.accepted_tokens


def test_a_batch_that_is_drafted_for_lands_each_step_and_others_are_started_ahead(tiny):
    model = tiny("llama")
    with Harness(model.path, speculative_config=NGRAM, max_num_tokens=64) as engine:
        resident = HostResident.put_into(engine.core._parts)
        speculation = draft_known(engine, FEW, model.expect(FEW))
        assert engine.run([request(prompt) for prompt in FEW]) == model.expect(FEW)
        ahead = resident.num_ahead  # parts of prompts, and tokens behind which no draft has room
        assert num_accepted(engine.results.values()) > 6 * 48 / 2 and ahead < 30
        assert resident.num_verified > 4
        speculation.lengths.is_hopeful = lambda plan, most: False
        assert engine.run([request(prompt) for prompt in FEW]) == model.expect(FEW)
        assert resident.num_ahead - ahead > 30


@pytest.mark.parametrize(("rate", "least", "most"), [(1.0, 3.9, 4.0), (0.5, 1.6, 2.2), (0.0, 1.0, 1.0)])
def test_synthetic_drafts_are_right_as_often_as_the_settings_say(tiny, rate, least, most):
    drafts = SpeculativeConfig(decoding_type="Synthetic", max_draft_len=3, acceptance_rate=rate)
    with Harness(tiny("llama").path, speculative_config=drafts, load_format="dummy") as engine:
        speculation = engine.core._parts.speculation
        speculation.lengths = WholeDrafts()
        results = [engine.submit(request(prompt, 81, seed=at, temperature=1.0)) for at, prompt in enumerate(FEW)]
        assert [(result.finish.error, len(result.tokens)) for result in results] == [("", 81)] * len(FEW)
        drafted = sum(result.finish.usage.drafted_tokens for result in results) / 3  # bursts
        assert least <= num_accepted(results) / drafted + 1 <= most


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU plain steps are measured before")
def test_on_a_cpu_some_steps_go_without_drafts_however_good_these_are(tiny):
    with Harness(tiny("llama").path, speculative_config=NGRAM, max_num_tokens=64) as engine:
        without_drafts(engine, [one := request(FEW[0], 120, ignore_eos=True)])
        rows: list[int] = []
        engine.core._parts.speculation.by_cpu = SimpleNamespace(
            landed=lambda works, _: rows.append(works[0].decode_rows)
        )
        assert num_accepted([engine.submit(one)]) > 60
    plain = [at for at, count in enumerate(rows[:-1]) if count == 1]
    assert len(plain) == 2 and plain[1] == plain[0] + 1 and max(rows) > 1
