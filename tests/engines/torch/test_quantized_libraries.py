"""Checkpoints that the methods' own libraries write are to this engine what transformers makes of them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from bireme.config import QuantConfig
from bireme.engines.torch.weights.checkpoint import open_checkpoint, read_model
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
