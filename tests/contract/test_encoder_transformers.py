"""The TensorRT-LLM encoder runs where tensorrt_llm does: with the transformers 4.57 that its images have."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from bireme.config import CHECKOUT
from tests.contract import stand_in_workers

PROGRAM = Path(__file__).parent / "encoder_counts.py"
OLDEST = ("transformers==4.57.1", "huggingface_hub<1", "tokenizers>=0.22,<=0.23.0")  # of TensorRT-LLM 1.2
# What the encoder's modules take of transformers: in 4.57 as in 5.
TAKEN = {
    "AutoConfig",
    "AutoImageProcessor",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "get_anyres_image_grid_shape",
    "logging",
    "unpad_image",
}


@pytest.fixture(scope="module")
def loaded():
    """Return the modules, of bireme and transformers, that come with the encoder's."""
    code = "import sys, bireme.engines.trtllm.encoder; print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return [name for name in names if name.startswith(("bireme.", "transformers"))]


def taken_of_transformers(module):
    path = CHECKOUT / (module.replace(".", "/") + ".py")
    tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {name.name for node in imports if (node.module or "").startswith("transformers") for name in node.names}


def test_the_encoder_takes_of_transformers_only_what_its_oldest_release_has(loaded):
    assert not [name for name in loaded if name.startswith("transformers")], "imported before it is needed"
    assert set().union(*map(taken_of_transformers, loaded)) <= TAKEN


def test_the_torch_engine_s_attention_which_needs_a_later_transformers_stays_out(loaded):
    assert "bireme.engines.torch.forward.attention" not in loaded


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Picture models as they are published: written by transformers 4."""
    from tests.engines.torch import picture_models

    made = []
    for make in (picture_models.llava, picture_models.qwen2_5_vl, picture_models.llava_next):
        folder = tmp_path_factory.mktemp(make.__name__)
        make(folder)
        made.append(folder)
    path = made[1] / "preprocessor_config.json"
    tree = json.loads(path.read_text())
    sizes = tree.pop("size")
    path.write_text(json.dumps(tree | {"min_pixels": sizes["shortest_edge"], "max_pixels": sizes["longest_edge"]}))
    return made


def facts(python, folders):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (CHECKOUT, stand_in_workers.STAND_IN)))}
    done = subprocess.run([python, PROGRAM, *folders], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.soak  # it installs an environment
def test_transformers_4_counts_pictures_as_the_torch_engine_s_does(folders, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    python = str(tmp_path / "bin" / "python")
    done = subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *OLDEST], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"transformers 4.57 can't be fetched: {done.stderr.strip()[-200:]}")
    (site,) = tmp_path.glob("lib/python3*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    older, newer = facts(python, folders), facts(sys.executable, folders)
    assert older["transformers"].startswith("4.57") and newer["transformers"].startswith("5.")
    assert older["models"] == newer["models"]
