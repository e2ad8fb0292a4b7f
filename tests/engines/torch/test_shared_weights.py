"""Weights in memory that engines share: arranged once, mapped by others, and the same tokens."""

from __future__ import annotations

import contextlib
import json
import sys

import pytest
import torch

from bireme.config import EngineConfig
from bireme.engines.memory.client import WeightsHold
from bireme.engines.memory.service import MemoryService
from bireme.engines.memory.wire import socket_path
from bireme.engines.registry import prepare
from bireme.engines.torch.forward.decoder_weights import fuse
from bireme.engines.torch.weights.checkpoint import open_checkpoint, read_model
from bireme.engines.torch.weights.shared_weights import SharedTensor, arrange, load_shared, make_skeleton, put_in
from bireme.errors import UnavailableError
from tests.engines.torch import picture_models, tiny_models
from tests.engines.torch.torch_harness import KEY, Harness, make_prompts, request

CPU = torch.device("cpu")
PROMPTS = make_prompts(3, 45, 70, seed=5)
REQUESTS = [request(prompt) for prompt in PROMPTS]


@pytest.fixture
def service(tmp_path):
    made = MemoryService(socket_path(tmp_path), KEY)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def load(service, tmp_path):
    """Return a function that loads a checkpoint as an engine with the memory service does."""
    with contextlib.ExitStack() as held:

        def load(path, worker, weights="w", **settings):
            hold = WeightsHold(tmp_path, KEY, worker, weights)
            held.callback(hold.close)
            return load_shared(open_checkpoint(path, **settings), "float32", CPU, hold, 5)

        yield load


def engine(tmp_path, model, worker="decode"):
    def hold(weights):
        return WeightsHold(tmp_path, KEY, worker, weights)

    return Harness(model.path, worker=worker, context={"hold_weights": hold, "hold_wait_s": 5})


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_an_engine_that_maps_weights_says_what_generate_says(tiny, service, tmp_path, name):
    model = tiny(name)
    with engine(tmp_path, model) as first:
        assert first.run(REQUESTS) == model.expect(PROMPTS)
        with engine(tmp_path, model, "prefill") as second:
            assert second.run(REQUESTS) == model.expect(PROMPTS)


def test_only_one_copy_is_mapped(tiny, load):
    before = mapped_files()
    first, second = (load(tiny("llama").path, worker) for worker in ("prefill", "decode"))
    assert (first.has_loaded, second.has_loaded) == (True, False)
    with torch.no_grad():
        assert all(map(torch.equal, first.model.parameters(), second.model.parameters()))
    assert len(mapped_files() - before) == 1


def mapped_files():
    """Return the inodes of shared weights that this process has mapped."""
    with open("/proc/self/maps") as maps:
        return {line.split()[4] for line in maps if "bireme-weights" in line}


def test_projections_that_lie_side_by_side_are_joined_without_a_copy(tiny, load):
    model = load(tiny("qwen3").path, "decode").model
    layers = fuse(model, 64).layers
    own = [layer.self_attn.q_proj.weight.data_ptr() for layer in model.model.layers]
    assert [layer.qkv.data_ptr() for layer in layers] == own
    separate = read_model(open_checkpoint(tiny("qwen3").path), "float32", CPU)
    for joined, expected in zip(layers, fuse(separate, 64).layers, strict=True):
        assert torch.equal(joined.qkv, expected.qkv) and torch.equal(joined.gate_up, expected.gate_up)


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3", "gpt2"])
def test_a_model_of_mapped_tensors_computes_what_its_source_does(load, tmp_path, kind):
    check_mapped(load, tiny_models.save(tmp_path / "model", kind, **tiny_models.SETTINGS[kind]))


def test_a_model_that_takes_pictures_is_mapped_whole(load, tmp_path):
    picture_models.llava(tmp_path / "model")
    check_mapped(load, str(tmp_path / "model"))


def check_mapped(load, path):
    first, second = (load(path, worker).model for worker in ("prefill", "decode"))
    with torch.inference_mode():
        ids = torch.arange(10, 40)[None]
        found = [model(ids).logits for model in (read_model(open_checkpoint(path), "float32", CPU), first, second)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_random_weights_are_shared_too(tiny, load):
    first = load(tiny("llama").path, "prefill", load_format="dummy").model
    second = load(tiny("llama").path, "decode", load_format="dummy").model
    assert all(map(torch.equal, first.parameters(), second.parameters()))


def test_a_standby_has_the_models_own_module_loaded(tmp_path):
    config = {"architectures": ["NemotronForCausalLM"], "model_type": "nemotron"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    prepare("torch", str(tmp_path), EngineConfig(load_format="dummy"))
    assert "transformers.models.nemotron.modeling_nemotron" in sys.modules


def test_a_table_of_another_model_is_not_taken_and_the_engine_loads_by_itself(tiny, load, caplog):
    load(tiny("llama").path, "prefill")
    found = load(tiny("gemma3").path, "decode")
    assert found.has_loaded and not found.is_shared
    assert "weights_not_shared reason=the table of the shared weights is another model's" in caplog.text


def test_a_table_that_points_outside_of_the_memory_is_not_taken(tiny):
    checkpoint = open_checkpoint(tiny("llama").path)
    table, num_bytes = arrange(make_skeleton(checkpoint, "float32"))
    last = table[-1]
    table[-1] = SharedTensor(last.names, last.dtype, last.shape, num_bytes)
    with pytest.raises(UnavailableError, match="lies at"):
        put_in(make_skeleton(checkpoint, "float32"), table, torch.zeros(num_bytes, dtype=torch.uint8))


def test_without_a_service_the_engine_loads_by_itself_and_says_why(tiny, tmp_path, caplog):
    model = tiny("llama")
    with engine(tmp_path, model) as alone:
        assert alone.run(REQUESTS) == model.expect(PROMPTS)
    assert "weights_not_shared reason=this launch has no memory service" in caplog.text
