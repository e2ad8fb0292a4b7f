"""Steps with drafts on the fused decoder say what steps without say: on a GPU by its graphs and kernel by kernel."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.language", reason="triton is not installed: it comes with torch's CUDA builds")
from bireme.engines.torch import kernels
from bireme.engines.torch.forward.decode_graphs import verify_sizes
from bireme.settings import SpeculativeConfig
from tests.engines.torch import tiny_models
from tests.engines.torch.conftest import TinyModel
from tests.engines.torch.known_answers import draft_known
from tests.engines.torch.test_fused_decoder import ENGINE, KINDS, PROMPTS, SMALL, of_a_soak
from tests.engines.torch.tiny_models import SETTINGS
from tests.engines.torch.torch_harness import MIXED, Harness, make_prompts, request

pytestmark = pytest.mark.usefixtures("few_programs")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ALL = [
    [request(PROMPTS[0], 13), request(PROMPTS[2], 13, temperature=1.1, seed=5, top_p=0.9)],
    [
        request(PROMPTS[0], 12, temperature=1.0, seed=3, repetition_penalty=1.4, logprobs=1),
        request(PROMPTS[2], 12, bad_token_ids=((5,), (9, 3)), logit_bias={7: 2.0}, min_tokens=5),
    ],
]
DRAFTS = {"speculative_config": SpeculativeConfig(decoding_type="NGram", max_draft_len=3)}


def steps_of(engine):
    engine.settle()
    counters = engine.metrics.take_delta().counters
    return {labels[-1]: count for name, labels, count in counters if name == "bireme_engine_steps_total"}


def accepted(results):
    return sum(result.finish.usage.accepted_tokens for result in results)


def answered(engine, requests, has_drafts, answers=()):
    """Return tokens and log probabilities of requests that are asked at once, and how many drafts were right."""
    prompts = [memoryview(one.prompt).cast("i").tolist() for one in requests]
    draft_known(engine, prompts, answers or [[]] * len(prompts)).is_on = has_drafts
    results = [engine.submit(one) for one in requests]
    assert [result.finish.error for result in results] == [""] * len(requests)
    return [(result.tokens, result.logprobs) for result in results], accepted(results)


@pytest.mark.parametrize("kind", ["mistral", *(of_a_soak(kind) for kind in KINDS if kind != "mistral")])
def test_drafts_change_nothing_that_a_request_may_ask_for(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    path = tiny_models.save(tmp_path, kind, **(SMALL | KINDS[kind]))
    with Harness(path, **ENGINE, **DRAFTS) as engine:
        expected = [answered(engine, requests, False)[0] for requests in ALL]
        assert "verify" not in steps_of(engine)
        found = [
            answered(engine, requests, True, [tokens for tokens, _ in before])
            for requests, before in zip(ALL, expected, strict=True)
        ]
        for (answers, _), before in zip(found, expected, strict=True):
            for (tokens, entries), (tokens_before, entries_before) in zip(answers, before, strict=True):
                assert tokens == tokens_before and values(entries) == pytest.approx(values(entries_before), abs=1e-3)
        assert sum(count for _, count in found) > 16 and steps_of(engine)["verify"] > 4


def make_graphs(engine):
    """Have its thread make all graphs that it lacks, so that steps of each size are replayed."""

    def make():
        while engine.core.prepare():
            pass

    engine.engine._post(make)
    engine.settle()


def values(logprobs):
    return [one.logprob for entry in logprobs for one in entry]


def test_a_prompt_joins_a_stream_that_drafts_in_steps_without_drafts(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    path = tiny_models.save(tmp_path, "mistral", **(SMALL | KINDS["mistral"]))
    asked = [request(PROMPTS[0], 16), request(make_prompts(17, seed=4)[0], 3, temperature=0.9, seed=2)]
    with Harness(path, **ENGINE, **DRAFTS, max_num_tokens=8, enable_block_reuse=False) as engine:
        (first, second), _ = answered(engine, asked, False)
        steps_of(engine)
        answers, count = answered(engine, asked, True, [first[0], second[0]])
        assert answers == [first, second] and count > 6
        assert {"mixed", "verify"} <= set(steps_of(engine)) <= {"mixed", "verify", "resident"}


@needs_gpu
@pytest.mark.parametrize("settings", [{}, {"cuda_graph_config": None}], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "gpt_oss"])
def test_ten_requests_with_drafts_equal_generate(tmp_path, family, settings):
    model, prompts = TinyModel(tmp_path, family, **SETTINGS.get(family, {})), make_prompts(*MIXED[:10])
    model.module.set_attn_implementation("eager")
    expected = model.expect(prompts, 40)
    with Harness(model.path, tokens_per_block=8, max_num_tokens=64, **settings, **DRAFTS) as engine:
        make_graphs(engine)
        draft_known(engine, prompts, expected)
        results = [engine.submit(request(prompt, 40)) for prompt in prompts]
        assert [result.finish.error or result.tokens for result in results] == expected
        assert accepted(results) > 10 * 40 / 3 and steps_of(engine)["verify"] > 5


@needs_gpu
def test_graphs_of_steps_with_drafts_are_made_and_replayed(tmp_path, caplog):
    model, (prompt,) = TinyModel(tmp_path, "llama"), make_prompts(9)
    (expected,) = model.expect([prompt], 40)
    with caplog.at_level("INFO"), Harness(model.path, **DRAFTS) as engine:
        make_graphs(engine)
        assert sorted(engine.core._parts.forward.verifying.graphs.made) == verify_sizes(16 * 4)
        draft_known(engine, [prompt], [expected])
        result = engine.submit(request(prompt, 40))
        assert (result.finish.error or result.tokens) == expected and accepted([result]) > 20
    assert "verify_graph_off" not in caplog.text and "verify_off" not in caplog.text


def test_rows_of_steps_with_drafts_are_few_sizes_up_to_the_most():
    assert verify_sizes(4) == [2, 4] and verify_sizes(5) == [2, 4, 5]
    sizes = verify_sizes(512)
    assert sizes[0] == 2 and sizes[-1] == 512
    assert all(after - before <= max(16, before // 2 + 2) for before, after in zip(sizes, sizes[1:], strict=False))
