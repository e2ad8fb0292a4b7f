"""Which path each step takes: one row of the table in forward/forward.py after the other, by the engine's own count."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from bireme.engines.torch import kernels
from bireme.engines.torch.forward.forward import Forward, StepPath
from bireme.engines.torch.forward.prompt_graphs import PromptGraphs
from bireme.engines.torch.scheduling.metrics import TorchMetrics
from bireme.engines.torch.step import Batch
from bireme.metrics import Registry
from tests.engines.engine_fixtures import wait_for
from tests.engines.torch import tiny_models
from tests.engines.torch.tiny_models import SETTINGS
from tests.engines.torch.torch_harness import Harness, make_prompts, request

IS_CUDA = torch.cuda.is_available()
on_gpu = pytest.mark.skipif(not IS_CUDA, reason="needs a GPU")
on_cpu = pytest.mark.skipif(IS_CUDA, reason="paths of a CPU")
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
PROMPT, FIRST, SECOND = make_prompts(9, 9, 10)


@pytest.fixture
def start(tmp_path):
    """Start an engine on a fused family, or on GPT-2, which runs on modules."""
    started = []

    def make(is_fused, **settings):
        family, changes = ("mistral", SMALL) if is_fused else ("gpt2", SETTINGS["gpt2"])
        path = tiny_models.save(tmp_path, family, **changes)
        engine = Harness(
            path, **{"max_seq_len": 32, "max_batch_size": 2, "max_num_tokens": 12, "tokens_per_block": 4, **settings}
        )
        started.append(engine)
        forward = engine.core._parts.forward
        sized = [maker.graphs for maker in (forward.mixed, forward.resident) if maker is not None]
        prompts = [graphs for graphs in forward.graphs.values() if isinstance(graphs, PromptGraphs)]
        wait_for(lambda: not any(one.to_make for one in sized) and not any(one._to_make for one in prompts), 60)
        engine.settle()
        engine.metrics.take_delta()
        return engine

    yield make
    for engine in started:
        engine.engine.stop()


def paths(engine):
    """Return the steps by path since the last call."""
    engine.settle()
    counters = engine.metrics.take_delta().counters
    return {labels[-1]: count for name, labels, count in counters if name == "bireme_engine_steps_total"}


def test_steps_of_a_path_are_counted_together_and_soon():
    registry = Registry("decode")
    accounts = TorchMetrics(registry, "decode")

    def told(path, count):
        for _ in range(count):
            accounts.stepped(path, 0.001, 1)
        counters = registry.take_delta().counters
        return {labels[-1]: count for name, labels, count in counters if name == "bireme_engine_steps_total"}

    assert told(StepPath.PACKED, 3) == {}
    assert told(StepPath.RESIDENT, 64) == {"packed": 3}
    assert told(StepPath.RESIDENT, 65) == {"resident": 128}


def two_prompts(engine):
    """Run three steps: a prompt and the beginning of another, its rest beside a decode, a decode."""
    gate = threading.Event()
    engine.engine._post(gate.wait)
    asked = [engine.submit(request(FIRST, 3)), engine.submit(request(SECOND, 1))]
    gate.set()
    assert [result.finish.error for result in asked] == ["", ""]
    return paths(engine)


@on_cpu
@pytest.mark.parametrize(("is_fused", "path"), [(True, "packed"), (False, "modules")])
def test_on_a_cpu_one_path_computes_every_step(start, is_fused, path, caplog):
    caplog.set_level(logging.INFO)
    engine = start(is_fused)
    engine.run([request(PROMPT, 4)])
    assert paths(engine) == {path: 4}
    assert f"step_paths {path}\n" in caplog.text


@pytest.mark.usefixtures("few_programs")
def test_decodes_of_the_fused_decoder_are_resident_and_other_steps_are_its_own(start, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    engine = start(True, cuda_graph_config=None)
    engine.run([request(PROMPT, 4)])
    assert paths(engine) == {"fused": 1, "resident": 3}
    assert two_prompts(engine) == {"fused": 2, "resident": 1}
    assert "step_paths resident,fused\n" in caplog.text


@pytest.mark.usefixtures("few_programs")
def test_steps_with_few_tokens_of_prompts_are_mixed_with_decodes_or_without(start, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    engine = start(True)
    engine.run([request(PROMPT, 4)])
    assert paths(engine) == {"mixed": 1, "resident": 3}
    assert two_prompts(engine) == {"mixed": 2, "resident": 1}
    paths_there = "resident,mixed,prompt_graph,fused" if IS_CUDA else "resident,mixed,fused"
    assert f"step_paths {paths_there}\n" in caplog.text


@pytest.mark.usefixtures("few_programs")
def test_a_prompt_whose_log_probabilities_are_wanted_is_not_mixed(start, monkeypatch):
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    engine = start(True)
    engine.run([request(PROMPT, 2, prompt_logprobs=1)])
    assert paths(engine) == {"fused": 1, "resident": 1}


@on_gpu
def test_a_short_chunk_behind_many_tokens_alone_is_a_graph_of_the_fused_decoder(start, monkeypatch):
    monkeypatch.setattr("bireme.engines.torch.forward.mixed_steps._MOST_SEEN", 8)
    engine = start(True)
    engine.run([request(PROMPT, 4)])
    assert paths(engine) == {"prompt_graph": 1, "resident": 3}


@on_gpu
def test_decodes_and_short_prompts_of_modules_are_graphs_and_other_steps_are_not(start, caplog):
    caplog.set_level(logging.INFO)
    engine = start(False)
    engine.run([request(PROMPT, 4)])
    assert paths(engine) == {"prompt_graph": 1, "decode_graph": 3}
    assert two_prompts(engine) == {"modules": 2, "decode_graph": 1}
    assert "step_paths decode_graph,prompt_graph,modules\n" in caplog.text


@on_gpu
def test_without_graphs_modules_compute_every_step(start):
    engine = start(False, cuda_graph_config=None)
    engine.run([request(PROMPT, 4)])
    assert paths(engine) == {"modules": 4}


class Held:
    """Graphs of steps of one length, and a decoder."""

    def __init__(self, length=0):
        self.length = length

    def size_for(self, batch):
        return self.length if batch.ids.shape[1] == self.length else 0

    def replay(self, batch, size):
        return torch.full((1, 1), float(size))

    def compute(self, batch):
        return torch.zeros(1, 1)


@pytest.mark.parametrize(
    ("length", "path"), [(1, StepPath.DECODE_GRAPH), (2, StepPath.PROMPT_GRAPH), (3, StepPath.MODULES)]
)
def test_a_step_takes_the_first_graph_that_holds_it_and_else_the_decoder(length, path):
    forward = Forward(Held(), None)
    forward.graphs = {StepPath.DECODE_GRAPH: Held(1), StepPath.PROMPT_GRAPH: Held(2)}
    ids = torch.zeros(1, length, dtype=torch.int64)
    found, logits = forward.compute(Batch(ids, ids, None, [], [], []))
    assert (found, int(logits)) == (path, 0 if path is StepPath.MODULES else length)
    assert forward.paths == [StepPath.DECODE_GRAPH, StepPath.PROMPT_GRAPH, StepPath.MODULES]
