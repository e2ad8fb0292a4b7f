"""Checkpoints that the methods' own libraries write are to this engine what transformers makes of them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from bireme.config import EngineConfig, QuantConfig
from bireme.engines.torch import kernels
from bireme.engines.torch.forward.weight_form import choose_form
from bireme.engines.torch.storage import WeightForm
from bireme.engines.torch.weights.checkpoint import open_checkpoint, read_model
from bireme.engines.torch.weights.stored_linear import StoredLinear
from tests.engines.torch import tiny_models
from tests.engines.torch.quantizing_libraries import CASES, MODULES
from tests.engines.torch.torch_harness import Harness, make_prompts, request
from tests.repository.house import CHECKOUT

PROMPTS = make_prompts(3, 20, 45)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """Return a function that gives the folder of a case; libraries that are not installed skip theirs."""
    folder = tmp_path_factory.mktemp("libraries")

    def is_there(case):
        return importlib.util.find_spec(MODULES.get(case.split()[0], "transformers")) is not None

    program = [sys.executable, "-m", "tests.engines.torch.quantizing_libraries", str(folder), *filter(is_there, CASES)]
    done = subprocess.run(program, cwd=CHECKOUT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]

    def get(case):
        if not is_there(case):
            pytest.skip(f"needs {MODULES[case.split()[0]]}")
        return folder / case

    return get


@pytest.mark.parametrize("case", CASES)
def test_weights_and_tokens_are_those_of_transformers_own_dequantized_model(quantized, case):
    path, expected = str(quantized(case) / "quantized"), load_file(quantized(case) / "expected.safetensors")
    model = read_model(open_checkpoint(path), "float32", torch.device("cpu"))
    weights = dict(model.named_parameters(remove_duplicate=False))
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight), name
    model.set_attn_implementation("eager")
    answers = tiny_models.generate(model, PROMPTS, 16)
    plain = QuantConfig(quant_algo="NO_QUANT")
    with Harness(path, max_num_tokens=24, tokens_per_block=8, quant_config=plain) as engine:
        assert engine.run([request(prompt, 16) for prompt in PROMPTS]) == answers


PARTLY = [case for case in CASES if case.endswith("attention plain")]


@pytest.fixture
def usable(monkeypatch):
    pytest.importorskip("triton.language", reason="triton is not installed: it comes with torch's CUDA builds")
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)


@pytest.mark.usefixtures("usable")
@pytest.mark.parametrize("case", PARTLY)
def test_what_a_list_leaves_plain_is_plain_beside_what_stays_as_it_is(quantized, case):
    path, expected = str(quantized(case) / "quantized"), load_file(quantized(case) / "expected.safetensors")
    cpu = torch.device("cpu")
    model = read_model(choose_form(open_checkpoint(path), EngineConfig(), cpu), "float32", cpu)
    for name, weight in expected.items():
        module = model.get_submodule(name.rpartition(".")[0])
        assert isinstance(module, StoredLinear) == ("mlp." in name), name
        found = module.stored.dequantized() if isinstance(module, StoredLinear) else module.weight
        assert torch.equal(found, weight), name


@pytest.mark.usefixtures("usable", "few_programs")
def test_an_engine_of_mixed_layers_says_what_transformers_dequantized_model_does(quantized):
    case = next(case for case in PARTLY if "int4" in case)  # whose products take activations as they are
    path = str(quantized(case) / "quantized")
    model = read_model(open_checkpoint(path), "float32", torch.device("cpu"))
    model.set_attn_implementation("eager")
    answers = tiny_models.generate(model, PROMPTS[:2], 6)
    with Harness(path, max_num_tokens=24, tokens_per_block=8, max_batch_size=2, max_seq_len=64) as engine:
        forward = engine.core._parts.forward
        assert forward.form is WeightForm.INT4_GROUPS and forward.resident is not None
        assert engine.run([request(prompt, 6) for prompt in PROMPTS[:2]]) == answers
