"""`tests/gpu/trtllm.sh recipes` to its end: tensorrt_llm is the stand-in, and GPUs are pretended."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.docker.made_environments import make_engine_environment, make_triton_environment

pytestmark = [pytest.mark.server, pytest.mark.slow]
CHECKOUT = Path(__file__).resolve().parents[2]
CONFIG = {
    "dtype": "float32",
    "max_seq_len": 256,
    "enable_chunked_prefill": True,
    "disable_overlap_scheduler": True,
    "cache_transceiver_config": {"backend": "DEFAULT", "max_tokens_in_buffer": 256},
}


@pytest.fixture(scope="module")
def pythons(tmp_path_factory):
    return [make(tmp_path_factory.mktemp("python")) for make in (make_triton_environment, make_engine_environment)]


def run(pythons, programs, *arguments, gpus=2):
    """Run the script where nvidia-smi tells of GPUs of 80 GiB."""
    programs.mkdir(exist_ok=True)
    smi = programs / "nvidia-smi"
    smi.write_text("#!/bin/sh\n" + "echo 81920\n" * gpus)
    smi.chmod(0o755)
    variables = {"BIREME_PYTHON": pythons[0], "BIREME_ENGINE_PYTHON": pythons[1]}
    environment = os.environ | variables | {"PATH": f"{programs}:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    command = ["sh", str(CHECKOUT / "tests" / "gpu" / "trtllm.sh"), "recipes", *map(str, arguments)]
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)


def verdict_of(done):
    """Return what -> outcome and reason, of the table at the end."""
    lines = done.stdout.rpartition("verdict\n")[2].splitlines()
    rows = [line for line in lines if line[:4] in ("pass", "fail", "skip")]
    return {line[17:61].strip(): (line[:4], line[61:].strip()) for line in rows}


def engine(**more):
    return {"engine": "trtllm", "num_threads": 1, "engine_config": CONFIG | more}


@pytest.mark.soak
def test_recipes_are_tried_and_the_verdict_tells_of_each(pythons, sample_model, write_recipe, tmp_path):
    model = sample_model("llama")
    apart = write_recipe(model, {"prefill": engine() | {"devices": [0]}, "decode": engine() | {"devices": [1]}})
    large = write_recipe(model, {"decode": engine(tensor_parallel_size=4)})
    absent = write_recipe(Path("org/absent"), {"decode": engine()})
    broken = write_recipe(model, {"decode": engine(max_batch_sise=3)})
    done = run(pythons, tmp_path / "programs", apart, large, absent, broken)
    rows = verdict_of(done)
    assert done.returncode == 1, done.stdout + done.stderr
    assert rows["tensorrt_llm"][0] == rows["GPUs"][0] == rows["tritonserver"][0] == "pass", done.stdout
    assert rows[apart.name][0] == rows[f"{apart.name}, decode alone"][0] == "pass", done.stdout
    assert rows[f"{apart.name}: prefill and decode answer as one"] == ("pass", "the same greedy answer")
    assert rows[large.name] == ("skip", "4 GPUs are needed, 2 are here")
    assert rows[absent.name][0] == "skip" and "model org/absent is not here" in rows[absent.name][1]
    assert rows[broken.name][0] == "fail" and "max_batch_size?" in rows[broken.name][1]


def test_without_gpus_there_is_nothing_to_try(pythons, tmp_path):
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (programs / "nvidia-smi").chmod(0o755)
    environment = os.environ | {"BIREME_PYTHON": pythons[0], "PATH": f"{programs}:{os.environ['PATH']}"}
    script = str(CHECKOUT / "tests" / "gpu" / "trtllm.sh")
    done = subprocess.run(["sh", script, "recipes"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and verdict_of(done)["GPUs"][0] == verdict_of(done)["tensorrt_llm"][0] == "fail"
