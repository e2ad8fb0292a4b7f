"""Greedy output equals transformers' generate, token by token in fp32, however the engine is set up."""

from __future__ import annotations

import pytest

from bireme.engines.torch.forward import decoder_weights
from tests.engines.torch.torch_harness import MIXED, Harness, make_prompts, request

ON_MODULES = "gemma3 on modules"  # transformers' own; the others on a decoder of this engine's
MODELS = ("llama", "qwen3", "gemma3", ON_MODULES)
PROMPTS = make_prompts(*MIXED)


@pytest.fixture(autouse=True)
def chosen_decoder(request, monkeypatch):
    if "name" in request.fixturenames and request.getfixturevalue("name") == ON_MODULES:
        monkeypatch.setattr(decoder_weights, "FAMILIES", ())


@pytest.mark.parametrize("name", MODELS)
def test_the_oracle_says_many_different_tokens(tiny, name):
    spoken = {token for tokens in tiny(name).expect(PROMPTS) for token in tokens}
    assert len(spoken) > 150


@pytest.mark.parametrize("name", MODELS)
def test_one_request_alone_equals_generate(tiny, name):
    model = tiny(name)
    with Harness(model.path) as engine:
        for prompt, expected in zip(PROMPTS[:5], model.expect(PROMPTS[:5]), strict=True):
            assert engine.run([request(prompt)]) == [expected]


def test_tokens_travel_in_columns_where_nothing_else_is_wanted_and_are_the_same_either_way(tiny):
    with Harness(tiny("llama").path) as engine:
        plain = engine.run([request(PROMPTS[0], 20)])
        assert engine.num_plain == 18  # all but the first and the last
        assert engine.run([request(PROMPTS[0], 20, logprobs=0)]) == plain
        assert engine.num_plain == 18


@pytest.mark.parametrize("size", [8, 16, 32])
@pytest.mark.parametrize("budget", [24, 40, 2048])
@pytest.mark.parametrize("name", MODELS)
def test_sixteen_requests_at_once_equal_generate(tiny, name, budget, size):
    model = tiny(name)
    with Harness(model.path, max_num_tokens=budget, tokens_per_block=size) as engine:
        assert engine.run([request(prompt) for prompt in PROMPTS]) == model.expect(PROMPTS)
        assert engine.manager.num_referenced == 0


@pytest.mark.parametrize("name", [*MODELS, "gpt_oss"])
def test_reused_blocks_give_the_same_tokens(tiny, name):
    model = tiny(name)
    with Harness(model.path, max_num_tokens=64, tokens_per_block=8) as engine:
        expected = model.expect(PROMPTS)
        assert engine.run([request(prompt) for prompt in PROMPTS]) == expected
        results = [engine.submit(request(prompt)) for prompt in PROMPTS]
        assert [(result.finish.error, result.tokens) for result in results] == [("", tokens) for tokens in expected]
        for result, prompt in zip(results, PROMPTS, strict=True):
            assert result.finish.usage.cached_tokens == (len(prompt) - 1) // 8 * 8


@pytest.mark.parametrize("budget", [24, 2048])
def test_prompts_that_come_together_have_their_common_beginning_computed_once(tiny, budget):
    prompts = [[*PROMPTS[4], 5, 7 + number] for number in range(6)]
    with Harness(tiny("llama").path, max_num_tokens=budget, tokens_per_block=8) as engine:
        results = [engine.submit(request(prompt, 4)) for prompt in prompts]
        whole = len(PROMPTS[4]) // 8 * 8
        assert sorted(result.finish.usage.cached_tokens for result in results) == [0, *[whole] * 5]


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_that_goes_on_from_a_cached_one_equals_generate(tiny, name):
    model = tiny(name)
    prompt = PROMPTS[4]
    with Harness(model.path, max_num_tokens=24) as engine:
        first = engine.run([request(prompt)])[0]
        longer = prompt + first + PROMPTS[1]
        result = engine.submit(request(longer))
        assert result.finish.usage.cached_tokens >= 176
        assert [result.tokens] == model.expect([longer])


@pytest.mark.parametrize("name", MODELS)
def test_without_reuse_nothing_is_cached(tiny, name):
    model = tiny(name)
    with Harness(model.path, enable_block_reuse=False) as engine:
        for _ in range(2):
            assert engine.run([request(prompt) for prompt in PROMPTS]) == model.expect(PROMPTS)
        assert engine.manager.num_cached == 0


@pytest.mark.parametrize("name", [*MODELS, "gpt_oss"])
def test_preempted_requests_equal_generate(tiny, name):
    model = tiny(name)
    settings = {"queue": {"capacity_scheduler_policy": "MAX_UTILIZATION"}, "max_tokens": 320, "tokens_per_block": 8}
    with Harness(model.path, max_num_tokens=64, **settings) as engine:
        assert engine.run([request(prompt) for prompt in PROMPTS]) == model.expect(PROMPTS)
        assert engine.core.scheduler.num_preemptions > 0
        assert engine.manager.num_referenced == 0


@pytest.mark.parametrize("name", MODELS)
def test_a_small_pool_without_eviction_equals_generate(tiny, name):
    model = tiny(name)
    with Harness(model.path, max_tokens=320, tokens_per_block=8, max_num_tokens=64) as engine:
        assert engine.run([request(prompt) for prompt in PROMPTS]) == model.expect(PROMPTS)
        assert engine.core.scheduler.num_preemptions == 0


@pytest.mark.parametrize("name", MODELS)
def test_a_resumed_request_goes_on_as_if_undisturbed(tiny, name):
    model = tiny(name)
    with Harness(model.path, max_num_tokens=40) as engine:
        expected = model.expect(PROMPTS)
        for cut in (1, 17, 47):
            resumed = [
                request(prompt + tokens[:cut], num_resumed=cut)
                for prompt, tokens in zip(PROMPTS, expected, strict=True)
            ]
            assert engine.run(resumed) == [tokens[cut:] for tokens in expected]


def test_a_resumed_sampled_request_with_penalties_goes_on_exactly(tiny):
    model = tiny("llama")
    settings = {"temperature": 0.9, "seed": 7, "repetition_penalty": 1.3, "presence_penalty": 0.4, "top_p": 0.95}
    with Harness(model.path) as engine:
        whole = engine.run([request(PROMPTS[6], **settings)])[0]
        rest = engine.run([request(PROMPTS[6] + whole[:20], num_resumed=20, **settings)])[0]
    assert rest == whole[20:] and len(set(whole)) > 10


def test_a_narrowed_window_changes_the_output(tiny):
    model = tiny("llama")
    with Harness(model.path, max_attention_window=(32,)) as engine:
        got = engine.run([request(prompt) for prompt in PROMPTS])
        assert engine.capacity.max_seq_len == 512
    short = [i for i, prompt in enumerate(PROMPTS) if len(prompt) + 48 <= 32]
    expected = model.expect(PROMPTS)
    assert sum(a == b for a, b in zip(got, expected, strict=True)) < len(PROMPTS) - 4
    assert all(got[i] == expected[i] for i in short)


def test_a_traced_request_that_is_preempted_tells_so(tiny):
    settings = {"queue": {"capacity_scheduler_policy": "MAX_UTILIZATION"}, "max_tokens": 320, "tokens_per_block": 8}
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with Harness(tiny("llama").path, max_num_tokens=64, **settings) as engine:
        results = [engine.submit(request(prompt, traceparent=traceparent)) for prompt in PROMPTS]
        names = [span.name for result in results for span in result.finish.spans]
        assert names.count("preempted") == engine.core.scheduler.num_preemptions > 0
