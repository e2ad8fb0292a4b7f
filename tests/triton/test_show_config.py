"""tools/show_config.py against configurations in Triton's form, and against a real server."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bireme.specs import DECODE, TOKENIZER
from bireme.triton.autocomplete import tensor_config
from tools import show_config


def config_of(spec):
    return {
        "backend": "python",
        "max_batch_size": 0,
        "model_transaction_policy": {"decoupled": spec.decoupled},
        "input": [tensor_config(tensor) | {"optional": tensor.optional} for tensor in spec.inputs],
        "output": [tensor_config(tensor) for tensor in spec.outputs],
    }


@pytest.mark.parametrize("spec", [DECODE, TOKENIZER], ids=lambda spec: spec.name)
def test_a_completed_config_has_no_differences(spec):
    assert show_config.compare(config_of(spec), spec).differences == []


def test_each_difference_is_marked():
    config = config_of(TOKENIZER)
    config["max_batch_size"] = 8
    config["model_transaction_policy"]["decoupled"] = True
    config["input"][0]["data_type"] = "TYPE_INT32"
    config["input"].append({"name": "extra", "data_type": "TYPE_FP32", "dims": ["1"]})
    del config["output"][0]
    result = show_config.compare(config, TOKENIZER)
    assert len(result.differences) == 5
    assert sum(line.startswith("!") for line in result.lines) == 5


def test_a_model_without_a_spec_is_only_listed():
    assert show_config.compare(config_of(TOKENIZER), None).differences == []


@pytest.mark.server
def test_the_program_prints_a_running_server_s_models(server):
    done = subprocess.run(
        [sys.executable, show_config.__file__, "--url", server.http, "echo", "tokens"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "output tokens_out" in done.stdout
    assert done.stdout.splitlines()[-1] == '{"differences": {"echo": [], "tokens": []}}'


def test_no_server_is_said_with_the_remedy():
    done = subprocess.run(
        [sys.executable, show_config.__file__, "--url", "127.0.0.1:1", "echo"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "give its HTTP address with --url" in done.stderr
