"""Drafts of a second model change no token, whatever happens to the blocks that both share."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from bireme.errors import ConfigError
from bireme.settings import SpeculativeConfig
from tests.engines.torch import tiny_models
from tests.engines.torch.known_answers import WholeDrafts
from tests.engines.torch.test_disaggregated import Pair
from tests.engines.torch.test_equality import ON_MODULES
from tests.engines.torch.test_late_choices import LATE, MODEL, TOKENIZER, alike, asked, opened, told
from tests.engines.torch.test_speculation import num_accepted, on_modules
from tests.engines.torch.test_tiers import settle
from tests.engines.torch.torch_harness import MIXED, Harness, make_prompts, request

PROMPTS = make_prompts(*MIXED)
FEW = PROMPTS[:6]
SAMPLED = {"temperature": 0.9, "seed": 7, "top_p": 0.95, "top_k": 200}


def drafting(path, most=3):
    return {
        "speculative_config": SpeculativeConfig(
            decoding_type="Draft_Target", max_draft_len=most, speculative_model=str(path)
        )
    }


def whole(engine):
    """Have all drafts verified; return the engine's speculation."""
    speculation = engine.core._parts.speculation
    speculation.lengths, speculation.is_on = WholeDrafts(), True
    return speculation


@pytest.fixture(scope="module")
def near(tiny, tmp_path_factory):
    """Return a model folder whose draws are often, but not always, those of the tiny model of a name."""

    def make(name):
        folder = tmp_path_factory.mktemp("near")
        model = type(tiny(name).module)(tiny(name).module.config)
        model.load_state_dict(tiny(name).module.state_dict())
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.01)
        model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def engine(tiny, near):
    settings = {"max_num_tokens": 64, "tokens_per_block": 8}
    with Harness(tiny("llama").path, **settings, **drafting(near("llama"))) as harness:
        whole(harness)
        yield harness


@pytest.mark.parametrize(("name", "of_draft"), [("llama", "qwen3"), ("gemma3", "gemma3"), (ON_MODULES, "llama")])
def test_drafts_of_another_model_change_no_token(tiny, near, name, of_draft):
    model = tiny(name)
    settings = {"max_num_tokens": 64, "tokens_per_block": 8}
    with on_modules(name), Harness(model.path, **settings, **drafting(near(of_draft))) as engine:
        speculation = whole(engine)
        results = [engine.submit(request(prompt)) for prompt in PROMPTS[:9]]
        assert [result.finish.error or result.tokens for result in results] == model.expect(PROMPTS[:9])
        tried = sum(result.finish.usage.drafted_tokens for result in results)
        assert speculation.is_on and tried > 250 and engine.manager.num_referenced == 0
        assert of_draft != name or 0.1 * tried < num_accepted(results) < 0.95 * tried


@pytest.mark.parametrize("sampling", [{}, SAMPLED])
def test_a_draft_model_equal_to_the_target_says_what_that_draws(tiny, sampling):
    with Harness(tiny("llama").path, **drafting(tiny("llama").path, 4), max_num_tokens=256) as engine:
        whole(engine)
        results = [engine.submit(request(prompt, **sampling)) for prompt in FEW]
        tried = sum(result.finish.usage.drafted_tokens for result in results)
        assert tried > 6 * 47 * 0.7 and num_accepted(results) >= 0.98 * tried


def test_a_draft_is_of_the_length_that_pays(tiny):
    with Harness(tiny("llama").path, **drafting(tiny("llama").path, 4)) as engine:
        speculation = engine.core._parts.speculation
        measured = speculation.lengths
        assert engine.run([request(prompt) for prompt in FEW]) == tiny("llama").expect(FEW)
        whole(engine)  # on a busy machine none has paid
        assert engine.run([request(prompt) for prompt in FEW]) == tiny("llama").expect(FEW)
        assert measured._drafting is speculation.drafter.costs and speculation.drafter.costs.num_landed


@pytest.mark.skipif(TOKENIZER is None, reason="models/tiny-llama is missing: make models")
def test_whatever_a_request_asks_for_it_gets_the_same():
    requests = [asked(at) for at in range(len(LATE))]
    with opened(**drafting(MODEL)) as guided:
        speculation = whole(guided)
        speculation.is_on = False
        before = [told(guided.submit(one)) for one in requests]
        whole(guided)
        results = [guided.submit(one) for one in requests]
        accepted = num_accepted(results)
        assert [told(result) for result in results] == alike(before) and accepted > 50


def test_a_cached_prefix_is_computed_once(engine, tiny):
    prompt = make_prompts(100, seed=5)[0]
    other = [*prompt[:96], 9, 8, 7]
    computed, costs = [], engine.core._parts.speculation.drafter.costs
    landed = costs.landed
    try:
        for asked_for, most in ((prompt, 130), (other, 40)):
            computed.clear()
            costs.landed = lambda works, _: computed.extend(works)
            assert engine.run([request(asked_for, 12)]) == tiny("llama").expect([asked_for], 12)
            assert 0 < sum(work.prefill_tokens for work in computed) < most
    finally:
        costs.landed = landed


@pytest.mark.parametrize("cut", [1, 17])
def test_a_stream_that_moved_in_the_middle_of_a_burst_goes_on_exactly(engine, cut):
    speculation = engine.core._parts.speculation
    requests = [request(prompt, **SAMPLED) for prompt in FEW]
    speculation.is_on = False
    tokens = engine.run(requests)
    speculation.is_on = True
    moved = [request(prompt + own[:cut], num_resumed=cut, **SAMPLED) for prompt, own in zip(FEW, tokens, strict=True)]
    assert engine.run(requests) == tokens
    assert engine.run(moved) == [own[cut:] for own in tokens]


def test_preempted_requests_and_blocks_from_host_memory_say_the_same(tiny, near):
    model = tiny("llama")
    settings = {"queue": {"capacity_scheduler_policy": "MAX_UTILIZATION"}, "max_tokens": 320, "tokens_per_block": 8}
    settings |= {"host_cache_size": 1 << 22, "max_num_tokens": 64}
    with Harness(model.path, **settings, **drafting(near("llama"))) as engine:
        speculation = whole(engine)
        for _ in range(2):
            results = [engine.submit(request(prompt)) for prompt in PROMPTS]
            assert [result.finish.error or result.tokens for result in results] == model.expect(PROMPTS)
            settle(engine)
        assert engine.core.scheduler.num_preemptions > 0 and num_accepted(results) > 50
        assert engine.manager.tiers.pools[1][0].num_cached > 0
        assert speculation.is_on and engine.manager.num_referenced == 0


def test_decode_drafts_what_prefill_sent_without_a_draft_model_there(tiny, near):
    model = tiny("gemma3")
    with Pair(model.path, 32, 16, **drafting(near("gemma3"))) as pair:
        whole(pair.decode)
        assert pair.prefill.core._parts.speculation is None
        assert pair.run(PROMPTS) == model.expect(PROMPTS)
        assert num_accepted(pair.decode.results.values()) > 100
        pair.assert_nothing_is_held()


@pytest.mark.skipif(torch.cuda.is_available(), reason="pools there are cut from what the GPU has")
def test_pools_of_the_draft_model_are_counted(tiny):
    without, with_draft = 0, 0
    settings = {"max_seq_len": 512, "max_batch_size": 256, "max_num_tokens": 256, "tokens_per_block": 512}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bireme.engines.torch.loading.CPU_POOL_BYTES", 1 << 24)
        with Harness(tiny("llama").path, **settings) as engine:
            without = engine.capacity.num_blocks
        with Harness(tiny("llama").path, **settings, **drafting(tiny("llama").path)) as engine:
            with_draft = engine.capacity.num_blocks
    assert with_draft == without // 2


def test_a_draft_model_whose_logits_are_not_finite_drafts_nothing(engine, tiny):
    drafter = engine.core._parts.speculation.drafter
    run = drafter._forward.run

    def broken(plan):
        computed = run(plan)
        computed.logits = torch.full_like(computed.logits, float("nan"))
        return computed

    drafter._forward.run = broken
    try:
        results = [engine.submit(request(prompt, 10)) for prompt in FEW]
        assert [result.finish.error or result.tokens for result in results] == tiny("llama").expect(FEW, 10)
        assert engine.core._parts.speculation.is_on
        assert sum(result.finish.usage.drafted_tokens for result in results) == 0
    finally:
        drafter._forward.run = run


def test_an_engine_ends_with_a_drafter_that_fails_and_goes_on_without(engine, tiny, caplog):
    speculation = engine.core._parts.speculation
    run, speculation.drafter._forward.run = speculation.drafter._forward.run, lambda plan: 1 / 0
    try:
        assert engine.run([request(prompt) for prompt in FEW]) == tiny("llama").expect(FEW)
        assert not speculation.is_on and "drafts_off" in caplog.text
    finally:
        speculation.drafter._forward.run, speculation.is_on = run, True


def refusal(tiny, path):
    with pytest.raises(ConfigError) as refused:
        Harness(tiny("llama").path, **drafting(path))
    return str(refused.value)


def test_what_can_not_draft_is_refused_by_name(tiny, tmp_path):
    assert "speculative_model: /no/where: model folder /no/where does not exist" in refusal(tiny, "/no/where")
    other = tiny_models.save(tmp_path / "other", "llama", vocab_size=300)
    assert "its vocabulary has 300 tokens, the model's 512" in refusal(tiny, other)
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    assert "MambaForCausalLM: not supported by the torch engine" in refusal(tiny, other)
    config["architectures"] = ["LlavaForConditionalGeneration"]
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    assert "speculative_config.speculative_model" in refusal(tiny, other)


@pytest.mark.skipif(TOKENIZER is None, reason="models/tiny-llama is missing: make models")
def test_another_tokenizer_is_refused_by_the_first_token_that_differs(tmp_path):
    shutil.copytree(MODEL, tmp_path / "draft")
    path = tmp_path / "draft" / "tokenizer.json"
    tree = json.loads(path.read_text())
    words = tree["model"]["vocab"]
    first, second = sorted(words, key=words.get)[300:302]
    words[first], words[second] = words[second], words[first]
    path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match="another tokenizer: 2 tokens differ") as refused:
        opened(**drafting(tmp_path / "draft"))
    assert "tokenizer.json" in str(refused.value)
