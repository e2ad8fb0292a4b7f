"""GGUF files are served as the models that they were made of: greedy tokens are transformers', of each architecture."""

import os
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bireme.config import QuantConfig
from bireme.engines.torch.weights.checkpoint import open_checkpoint, read_model
from bireme.errors import ConfigError
from tests.engines.torch import tiny_models
from tests.engines.torch.test_disaggregated import Pair
from tests.engines.torch.torch_harness import Harness, make_prompts, request
from tests.gguf import models
from tests.gguf.files import write

PROMPTS = make_prompts(3, 20, 45, 70)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(cache_home, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))


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


def k_blocks(block_type, num_rows, num_blocks, random):
    """Random blocks of 256 values with scales near 0.01."""
    kind = gguf.GGMLQuantizationType[block_type]
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = random.integers(0, 256, (num_rows, num_blocks, size), dtype=np.uint8)
    for at in {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}[block_type]:
        blocks[..., at : at + 2] = np.float16([1e-3]).view(np.uint8)
    return blocks.reshape(num_rows, -1), kind


# A program of its own, because transformers needs accelerate for this, which engines import it without.
LOADED = """
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
for file in map(Path, sys.argv[1:]):
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(state, file.with_suffix(".safetensors"))
"""
TYPES = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def save_k(folder, block_type):
    """Write a model whose matrices are random blocks of 256."""
    model = models.build("llama", **models.WIDE)
    tensors, random = models.tensors_of("llama", model), np.random.default_rng(3)
    raw = {
        name: k_blocks(block_type, len(values), values.shape[1] // 256, random)
        for name, values in tensors.items()
        if values.ndim == 2
    }
    plain = {name: values for name, values in tensors.items() if values.ndim == 1}
    texts = models.metadata_of("llama", model) | models.byte_tokenizer(model.config.vocab_size)
    return write(folder / "k.gguf", texts, plain, raw=raw)


@pytest.fixture(scope="module")
def files_of_types(tmp_path_factory):
    """Return a file of each type, beside which the weights lie that transformers makes of it."""
    files = {}
    for name in TYPES:
        folder = tmp_path_factory.mktemp(name)
        kind = gguf.GGMLQuantizationType[name]
        files[name] = save_k(folder, name) if name.endswith("_K") else models.save(folder, "llama", kind)
    done = subprocess.run([sys.executable, "-c", LOADED, *files.values()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return files


@pytest.mark.parametrize("block_type", TYPES)
def test_blocks_of_each_type_are_the_weights_that_transformers_makes_of_them(files_of_types, block_type):
    file = files_of_types[block_type]
    wanted = load_file(file.with_suffix(".safetensors"))
    loaded = read_model(open_checkpoint(str(file)), "float32", CPU).state_dict()
    assert loaded.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(tensor, loaded[name]), name


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2"])
def test_quantized_tokens_are_transformers_aggregated_and_disaggregated_with_reuse(tmp_path, architecture):
    file = models.save(tmp_path, architecture, gguf.GGMLQuantizationType.Q4_1)
    checkpoint = open_checkpoint(str(file))
    model = read_model(checkpoint, "float32", CPU)
    model.set_attn_implementation("eager")
    expected = tiny_models.generate(model, PROMPTS, 24)
    with Pair(str(file), 8, 8, dtype="float32", quant_config=QuantConfig(quant_algo="NO_QUANT")) as pair:
        assert pair.run(PROMPTS, max_tokens=24) == expected
        assert pair.run(PROMPTS, max_tokens=24) == expected  # from reused blocks
        pair.assert_nothing_is_held()


def test_a_file_in_parts_is_the_model_of_one(tmp_path):
    model = models.build("qwen2")
    tensors, texts = models.tensors_of("qwen2", model), models.metadata_of("qwen2", model)
    texts |= models.byte_tokenizer(model.config.vocab_size)
    names = sorted(tensors)
    for part, own in enumerate((names[::2], names[1::2])):
        split = {"split.no": part, "split.count": 2, "split.tensors.count": len(names)}
        more = texts if part == 0 else {"general.architecture": "qwen2"}
        write(tmp_path / f"m-{part + 1:05d}-of-00002.gguf", more | split, {name: tensors[name] for name in own})
    checkpoint = open_checkpoint(str(tmp_path / "m-00002-of-00002.gguf"))
    loaded = read_model(checkpoint, "float32", CPU).state_dict()
    assert len(checkpoint.shards) == 2
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


def test_files_with_other_weights_have_other_digests_and_copies_the_same(tmp_path):
    first = models.save(tmp_path, "llama")
    copy = tmp_path / "elsewhere.gguf"
    copy.write_bytes(first.read_bytes())
    other = models.save(tmp_path, "llama", gguf.GGMLQuantizationType.F32, "other.gguf", seed=1)
    digests = [open_checkpoint(str(file)).digest for file in (first, copy, other)]
    assert digests[0] == digests[1] != digests[2]


def test_a_head_that_does_not_fit_its_weights_is_refused_before_they_are_read(tmp_path):
    model = models.build("llama")
    tensors = models.tensors_of("llama", model)
    texts = models.metadata_of("llama", model) | models.byte_tokenizer(model.config.vocab_size)
    for name, instead, text in (
        (
            "blk.1.ffn_up.weight",
            np.ones((64, 64)),
            "blk.1.ffn_up.weight has shape .64, 64., by its metadata it has .128, 64.",
        ),
        ("blk.2.attn_v.weight", None, "lacks 1 tensors that the model needs, model.layers.2.self_attn.v_proj.weight"),
    ):
        changed = {key: value for key, value in (tensors | {name: instead}).items() if value is not None}
        file = write(tmp_path / "bad.gguf", texts, changed)
        with pytest.raises(ConfigError, match=text):
            read_model(open_checkpoint(str(file)), "float32", CPU)


def test_a_file_that_is_cut_short_while_it_is_loaded_is_an_error_with_its_name(tmp_path):
    file = models.save(tmp_path, "llama")
    checkpoint = open_checkpoint(str(file))
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(ConfigError, match="tiny.gguf: .* is cut short; fetch the file again"):
        read_model(checkpoint, "float32", CPU)
