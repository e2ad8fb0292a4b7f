"""GGUF files are served as the models that they were made of: greedy tokens are transformers', of each architecture."""

import pytest
import torch

from bireme.engines.torch.weights.checkpoint import open_checkpoint, read_model
from tests.engines.torch import tiny_models
from tests.engines.torch.torch_harness import Harness, make_prompts, request
from tests.gguf import models

PROMPTS = make_prompts(3, 20, 45, 70)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("architecture", models.SETTINGS)
def test_a_float32_file_is_the_model_that_was_written(tmp_path, architecture):
    model = models.build(architecture)
    model.set_attn_implementation("eager")
    file = models.save(tmp_path, architecture)
    loaded = read_model(open_checkpoint(str(file)), "float32", CPU)
    assert type(loaded) is type(model)
    wanted = model.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.allclose(tensor, wanted[name], atol=1e-6), name
    expected = tiny_models.generate(model, PROMPTS, 24)
    assert len({token for tokens in expected for token in tokens}) > 20
    with Harness(str(file), max_num_tokens=24, tokens_per_block=8) as engine:
        assert engine.run([request(prompt, 24) for prompt in PROMPTS]) == expected
