"""The fused decoder with its resident decode steps answers as transformers' modules do, whatever a request asks for."""

from __future__ import annotations

import logging

import msgspec
import pytest
import torch

pytest.importorskip("triton.language", reason="triton is not installed: it comes with torch's CUDA builds")
from bireme.config import CudaGraphConfig
from bireme.engines.torch import kernels
from bireme.engines.torch.forward import decoder_weights
from bireme.engines.torch.forward.decode_graphs import graph_sizes
from bireme.engines.torch.forward.graphs import capture
from bireme.engines.torch.forward.modules import Modules
from bireme.serving_options import ServingOptions
from tests.engines.engine_fixtures import wait_for
from tests.engines.torch import tiny_models
from tests.engines.torch.torch_harness import Harness, make_prompts, request

PROMPTS = make_prompts(5, 9, 3, seed=1)
ASKED = [
    [request(PROMPTS[0], 5), request(PROMPTS[1], 3, temperature=1.1, seed=5, top_p=0.9)],
    [request(PROMPTS[2], 4, temperature=0.8, seed=9, top_k=20, min_p=0.02), request(PROMPTS[1], 3, logprobs=2)],
    [request(PROMPTS[0], 3, temperature=1.0, seed=3, repetition_penalty=1.4), request(PROMPTS[2], 4)],
    [request(PROMPTS[0], 4, bad_token_ids=((5,), (9, 3)), logit_bias={7: 2.0}, logprobs=1), request(PROMPTS[2], 4)],
]
SHORT = [[request(PROMPTS[1], 3), request(PROMPTS[2], 2)]]
# What families differ in; small enough for Triton's interpreter.
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
KINDS = {
    "mistral": {"sliding_window": 10},
    "gemma2": {
        "num_hidden_layers": 2,
        "sliding_window": 10,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 2.0,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
}
ENGINE = {"max_seq_len": 24, "max_batch_size": 2, "tokens_per_block": 4}


def of_a_soak(value):
    """Return a parameter that takes Triton's interpreter long: where there is no GPU, `make soak` has it."""
    return value if torch.cuda.is_available() else pytest.param(value, marks=pytest.mark.soak)


@pytest.fixture(scope="module", params=["mistral", *(of_a_soak(kind) for kind in KINDS if kind != "mistral")])
def answer(request, tmp_path_factory):
    """Return what an engine answers, by its settings: of the first kind all that may be asked."""
    path = tiny_models.save(tmp_path_factory.mktemp("model"), request.param, **(SMALL | KINDS[request.param]))
    asked = ASKED if request.param == "mistral" or torch.cuda.is_available() else SHORT

    def run(is_fused, **settings):
        with Harness(path, **ENGINE, **settings) as engine:
            assert (engine.core._parts.forward.resident is not None) is is_fused
            return [engine.run(requests) for requests in asked]

    return run


@pytest.mark.parametrize("is_serial", [False, True] if torch.cuda.is_available() else [False])
def test_an_engine_on_the_fused_decoder_answers_as_one_on_modules(answer, monkeypatch, is_serial):
    with monkeypatch.context() as changed:
        changed.setattr(kernels, "is_usable", lambda device: False)
        changed.setattr(decoder_weights, "FAMILIES", ())
        expected = answer(is_fused=False)
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    assert answer(is_fused=True, disable_overlap_scheduler=is_serial) == expected


def test_prompts_that_join_decodes_in_parts_are_answered_as_alone(tmp_path, monkeypatch):
    path = tiny_models.save(tmp_path, "mistral", **(SMALL | KINDS["mistral"]))
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    asked = [request(prompt, 6, temperature=at % 2, seed=at) for at, prompt in enumerate(make_prompts(11, 3, 13, 7))]
    settings = {**ENGINE, "max_batch_size": 4, "max_num_tokens": 9, "enable_block_reuse": False}
    with Harness(path, **settings) as engine:
        expected = [engine.run([one])[0] for one in asked]
        first = engine.submit(request(PROMPTS[0], 18))
        assert first.has_tokens.wait(60)
        assert engine.run(asked) == expected and first.finish.error == ""
        engine.settle()
        counters = engine.metrics.take_delta().counters
    steps = {labels[-1]: count for name, labels, count in counters if name == "bireme_engine_steps_total"}
    assert steps["mixed"] > 8 and set(steps) == {"mixed", "resident"}


def test_blocks_that_come_back_beside_a_running_decode_come_once(tmp_path, monkeypatch, caplog):
    path = tiny_models.save(tmp_path, "mistral", **SMALL)
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    first, second = (request(prompt, 2) for prompt in make_prompts(9, 9, seed=2))
    with Harness(path, **ENGINE, max_tokens=4 * 10, host_cache_size=1 << 16) as engine:
        expected = [engine.run([one])[0] for one in (first, second)]
        for prompt in make_prompts(9, 9, 9, 9, seed=3):
            engine.run([request(prompt, 2)])
            engine.settle()
        before = engine.manager.tiers.counts.onboarded.total()
        decodes = engine.submit(request(PROMPTS[0], 14))
        assert decodes.has_tokens.wait(60)
        assert engine.run([first, second]) == expected
        assert decodes.finish.error == "" and engine.manager.tiers.counts.onboarded.total() > before
    failures = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    assert failures == []  # an action that fails is logged


@pytest.mark.parametrize("is_serial", [of_a_soak(False), of_a_soak(True)])
def test_what_rests_beside_others_goes_on_with_what_the_device_has_of_it(tmp_path, monkeypatch, is_serial):
    path = tiny_models.save(tmp_path, "mistral", **SMALL)
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    line = request(PROMPTS[0], 12, temperature=1.1, seed=5)
    queue = {"best_effort_share": 0.3}
    with Harness(path, **ENGINE, queue=queue, disable_overlap_scheduler=is_serial) as engine:
        expected = engine.run([line, request(PROMPTS[1], 12)])
        resting = engine.submit(msgspec.structs.replace(line, options=ServingOptions(priority=0.0)))
        assert resting.has_tokens.wait(60)
        live = engine.submit(request(PROMPTS[1], 12))
        assert [live.finish.error, live.tokens] == ["", expected[1]]
        assert [resting.finish.error, resting.tokens] == ["", expected[0]]
        assert engine.core.scheduler.best_effort.num_rests > 5


def test_a_later_life_compares_it_with_what_the_modules_computed_in_the_first(tmp_path, monkeypatch):
    path, context = tiny_models.save(tmp_path, "mistral", **SMALL), {"findings_path": tmp_path / "found"}
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    with Harness(path, **ENGINE, context=context) as engine:
        expected = engine.run([request(PROMPTS[2], 3)])
    monkeypatch.setattr(Modules, "compute", None)
    with Harness(path, **ENGINE, context=context) as engine:
        assert engine.core._parts.forward.resident is not None and engine.run([request(PROMPTS[2], 3)]) == expected


class ComputedAgain:
    """In the place of a CUDA graph."""

    def __init__(self, resident, size):
        self.replay = lambda: resident._compute(size)

    def pool(self):
        return (0, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="real graphs are made there, by every test of this module")
def test_a_graph_is_made_when_a_step_needs_it_or_while_nothing_runs(tmp_path, monkeypatch, caplog):
    path = tiny_models.save(tmp_path, "mistral", **SMALL)
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    with Harness(path, **ENGINE) as engine, caplog.at_level("INFO"):
        resident = engine.core._parts.forward.resident
        expected = engine.run([request(PROMPTS[2], 3)])
        monkeypatch.setattr(resident, "_make", lambda size, pool: ComputedAgain(resident, size))
        resident._to_make = [1, 2]
        assert engine.run([request(PROMPTS[2], 3)]) == expected
        wait_for(lambda: not resident._to_make, 30)
    made = [record.args[0] for record in caplog.records if record.msg.startswith("decode_graph_made")]
    assert made == [1, 2]


def refuse(size, pool):
    raise RuntimeError("no room")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are graphs already")
def test_steps_go_on_without_graphs_that_cannot_be_made(tmp_path, monkeypatch, caplog):
    path = tiny_models.save(tmp_path, "mistral", **SMALL)
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    with Harness(path, **ENGINE) as engine:
        resident = engine.core._parts.forward.resident
        expected = engine.run([request(PROMPTS[2], 3)])
        monkeypatch.setattr(resident, "_make", refuse)
        resident._to_make = [1, 2]
        assert engine.run([request(PROMPTS[2], 3)]) == expected
        wait_for(lambda: not resident._to_make, 30)
        assert engine.run([request(PROMPTS[2], 3)]) == expected
    assert sorted(record.args[0] for record in caplog.records if record.msg.startswith("graph_off")) == [1, 2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_garbage_on_the_gpu_is_not_freed_within_a_capture():
    """Collecting it there broke the capture."""
    x = torch.zeros(8, device="cuda")

    def graph_of(action):
        graph = torch.cuda.CUDAGraph()
        with capture(graph, None):
            action()
        return graph

    garbage = [graph_of(lambda: x.add_(1)), torch.zeros(1 << 20).pin_memory(), torch.cuda.Event()]
    garbage.append(garbage)
    del garbage
    kept = []
    graph = graph_of(lambda: (kept.extend([] for _ in range(100_000)), x.add_(1)))
    before = x[0].item()
    graph.replay()
    assert x[0].item() == before + 1


def test_graphs_are_made_for_the_sizes_that_the_settings_name():
    assert graph_sizes(None, 64) == []
    assert graph_sizes(CudaGraphConfig(batch_sizes=(8, 2, 100)), 64) == [2, 8]
    assert graph_sizes(CudaGraphConfig(max_batch_size=4), 64) == [1, 2, 4]
    assert graph_sizes(CudaGraphConfig(), 8)[-1] == 8


def test_random_weights_of_a_configuration_need_no_weights_file(tmp_path):
    folder = tiny_models.save(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    with Harness(folder, load_format="dummy", dtype="bfloat16") as engine:
        assert len(engine.run([request(PROMPTS[0], 5)])[0]) == 5
        assert engine.capacity.dtype == "bfloat16"
