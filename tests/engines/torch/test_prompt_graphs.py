"""Graphs of short prompts answer as the same passes launched kernel by kernel."""

from __future__ import annotations

import threading

import pytest
import torch

pytest.importorskip("triton.language", reason="triton is not installed: it comes with torch's CUDA builds")
from bireme.config import CudaGraphConfig
from bireme.engines.torch import kernels
from bireme.engines.torch.forward import decoder_weights, prompt_graphs
from bireme.engines.torch.forward.forward import StepPath
from bireme.engines.torch.forward.prompt_graphs import PromptGraphs, sizes_up_to
from tests.engines.engine_fixtures import wait_for
from tests.engines.torch import tiny_models
from tests.engines.torch.test_fused_decoder import KINDS, SMALL, of_a_soak
from tests.engines.torch.torch_harness import Harness, make_prompts, request

IS_CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.usefixtures("few_programs")
ENGINE = {"max_seq_len": 40, "max_num_tokens": 16, "max_batch_size": 2, "tokens_per_block": 4}
FIRST, SECOND, LONG, OTHER, LAST = make_prompts(14, 5, 35, 9, 6, seed=4)
ASKED = [
    [request(LONG, 2)],  # in chunks, of which only the last is sampled
    [request(SECOND, 2)],  # fewer tokens than the graph has been given before
    [request([*LONG[:24], 7, 8, 9], 2)],  # the rest behind a prefix
    [request(FIRST, 2, temperature=0.9, seed=3, logprobs=1)],
]
BESIDE = [[request(FIRST, 1, prompt_logprobs=1)], [request(LAST, 2), request(OTHER, 2)]]  # for which there is none


class ComputedAgain:
    """In the place of a CUDA graph."""

    def __init__(self, compute, pool, vary):
        compute()
        self.replay, self.pool = compute, lambda: pool


@pytest.fixture(params=["mistral", *(of_a_soak(kind) for kind in KINDS if kind != "mistral")])
def path(request, tmp_path):
    return tiny_models.save(tmp_path, request.param, **(SMALL | KINDS[request.param]))


@pytest.fixture(autouse=True)
def on_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    if not IS_CUDA:
        monkeypatch.setattr(prompt_graphs, "make_graph", ComputedAgain)
        monkeypatch.setattr(prompt_graphs, "_SIZES", (16, 32))  # what Triton's interpreter does in seconds


def graphs_of(engine, has_grid_positions=False):
    """Return the engine's graphs once all are made; where there is no GPU it is given some here.

    Prompts that steps of any rows would take are for them, too.
    """
    parts, path = engine.core._parts, StepPath.PROMPT_GRAPH
    forward = parts.forward
    forward.mixed = None
    if path not in forward.graphs and IS_CUDA:
        pytest.skip("the model's modules do what no graph holds")
    if path not in forward.graphs:
        shape = ([group.window for group in engine.manager.groups], parts.limits, torch.device("cpu"))
        forward.graphs[path] = PromptGraphs(forward.decoder.compute, *shape, has_grid_positions)
        engine.engine._post(lambda: None)  # it sleeps
    made = forward.graphs[path]
    wait_for(lambda: not made._to_make, 60)
    engine.settle()
    return made


def replays(graphs, monkeypatch):
    """Return a list that grows by the number of rows of each replay."""
    found, replay = [], graphs.replay

    def counted(batch, size):
        logits = replay(batch, size)
        found.append(len(logits))
        return logits

    monkeypatch.setattr(graphs, "replay", counted)
    return found


def answers(engine, requests):
    """Return tokens, and log probabilities to three places, of requests that begin in one step."""
    gate = threading.Event()
    engine.engine._post(gate.wait)
    found = [engine.submit(one) for one in requests]
    gate.set()
    assert [result.finish.error for result in found] == [""] * len(found)
    return [(result.tokens, rounded(result.logprobs), rounded(result.prompt_logprobs)) for result in found]


def rounded(logprobs):
    return [[(one.token, round(one.logprob, 3)) for one in position] for position in logprobs or []]


@pytest.mark.parametrize("is_fused", [True, of_a_soak(False)])
def test_an_engine_with_them_answers_as_one_without(path, is_fused, monkeypatch):
    if not is_fused:
        monkeypatch.setattr(decoder_weights, "FAMILIES", ())
    with Harness(path, **ENGINE, cuda_graph_config=None) as engine:
        assert StepPath.PROMPT_GRAPH not in engine.core._parts.forward.graphs
        expected = [answers(engine, requests) for requests in [*ASKED, *BESIDE]]
    with Harness(path, **ENGINE) as engine:
        graphs = graphs_of(engine)
        assert sorted(graphs._graphs) == list(prompt_graphs._SIZES[:1])
        counted = replays(graphs, monkeypatch)
        assert [answers(engine, requests) for requests in ASKED] == expected[: len(ASKED)]
        assert counted == [0, 0, 1, 1, 1, 1]
        assert [answers(engine, requests) for requests in BESIDE] == expected[len(ASKED) :] and len(counted) == 6


def test_a_prompt_beside_a_decode_goes_without(tmp_path, monkeypatch):
    with Harness(tiny_models.save(tmp_path, "mistral", **SMALL), **ENGINE) as engine:
        expected = engine.run([request(OTHER, 2)])
        counted = replays(graphs_of(engine), monkeypatch)
        decodes = engine.submit(request(SECOND, 30))
        assert decodes.has_tokens.wait(60) and counted == [1]
        assert engine.run([request([*OTHER[:3], 5, *OTHER[4:]], 1), request(OTHER, 2)])[1:] == expected
        assert decodes.finish.error == "" and counted == [1]


@pytest.mark.skipif(IS_CUDA, reason="where there is a GPU, what pictures need may be missing")
def test_positions_in_three_dimensions_and_text_behind_pictures(tmp_path, monkeypatch):
    from tests.engines.torch.picture_deployment import Deployment
    from tests.engines.torch.picture_models import PictureModel, pixels, qwen2_5_vl

    model = PictureModel(tmp_path, qwen2_5_vl)
    asked = [(model.prompt(make_prompts(9)[0]), []), (model.prompt(FIRST[:5], None, FIRST), [pixels(1)])]
    with Deployment(model.path, "agg", max_num_tokens=16, max_batch_size=2) as deployment:
        counted = replays(graphs_of(deployment.engines["decode"], has_grid_positions=True), monkeypatch)
        for ids, pictures in asked:
            expected = model.generate(deployment.prepare(ids, pictures)[0], pictures, 3)
            assert deployment.run(ids, pictures, 3) == expected
            assert counted and not counted.clear()


def test_they_are_made_while_nothing_runs(tmp_path, monkeypatch):
    with Harness(tiny_models.save(tmp_path, "mistral", **SMALL), **ENGINE) as engine:
        graphs, seen = engine.core._parts.forward.graphs, []
        makes = {"make_next_graph": lambda _: bool(seen.append(engine.core.is_empty)), "size_for": lambda *_: 0}
        graphs[StepPath.PROMPT_GRAPH] = type("Maker", (), makes)()
        engine.run([request(FIRST, 4), request(SECOND, 3)])
        wait_for(lambda: seen, 30)
        del graphs[StepPath.PROMPT_GRAPH]
    assert all(seen)


def test_one_that_cannot_be_made_is_the_last_to_be_tried(tmp_path, monkeypatch, caplog):
    def refuse(compute, pool, vary):
        raise RuntimeError("no room\nmore")

    monkeypatch.setattr(prompt_graphs, "make_graph", refuse)
    with Harness(tiny_models.save(tmp_path, "mistral", **SMALL), **ENGINE) as engine, caplog.at_level("WARNING"):
        graphs = graphs_of(engine)
        assert not graphs._graphs and not graphs._to_make and len(engine.run([request(FIRST, 2)])[0]) == 2
    told = [record.getMessage() for record in caplog.records if record.msg.startswith("prompt_graph_off")]
    size = sizes_up_to(ENGINE["max_num_tokens"])[-1]
    assert told == [f"prompt_graph_off tokens={size} reason=no room"] or (IS_CUDA and not told)


@pytest.mark.skipif(not IS_CUDA, reason="needs a GPU")
@pytest.mark.parametrize("config", [None, CudaGraphConfig(enable_padding=False)])
def test_settings_turn_them_off(tmp_path, config):
    path = tiny_models.save(tmp_path, "mistral", **SMALL)
    with Harness(path, **ENGINE, cuda_graph_config=config) as engine:
        assert StepPath.PROMPT_GRAPH not in engine.core._parts.forward.graphs


@pytest.mark.parametrize(
    ("longest", "expected"), [(2048, [32, 64, 128, 192, 256]), (24, [32]), (100, [32, 64, 128]), (64, [32, 64])]
)
def test_sizes_are_those_that_a_chunk_can_have(monkeypatch, longest, expected):
    monkeypatch.undo()
    assert sizes_up_to(longest) == expected
