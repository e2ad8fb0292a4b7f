"""Heads of safetensors files: what an engine loads of them, and heads that lie."""

from __future__ import annotations

import json

import pytest

from bireme.errors import ConfigError
from bireme.launch.footprint.config_fields import read_config
from bireme.launch.footprint.decoder_shape import read_shape
from bireme.launch.footprint.weight_files import read_weight_files
from tests.engines.torch import tiny_models


def write(path, head, num_bytes=0):
    data = head if isinstance(head, bytes) else json.dumps(head).encode()
    path.write_bytes(len(data).to_bytes(8, "little") + data + bytes(num_bytes))


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3_moe", "gpt_oss"])
def test_files_hold_what_config_json_says(tmp_path, model_type):
    tiny_models.save(tmp_path, model_type, **tiny_models.SETTINGS[model_type])
    shape = read_shape(read_config(tmp_path))
    files = read_weight_files(tmp_path, False, len(shape.windows))
    assert files.dtypes == {"F32"} and files.num_bytes == 4 * files.parameters.total
    # These models' heads are their own, whatever their configuration says; learned positions are a matrix.
    assert files.parameters.total == shape.parameters.total + (0 if shape.parameters.head else files.parameters.head)


def test_layers_that_the_model_does_not_have_are_not_loaded(tmp_path):
    tensor = {"dtype": "BF16", "shape": [4, 4], "data_offsets": [0, 32]}
    write(tmp_path / "model.safetensors", {f"model.layers.{at}.mlp.down_proj.weight": tensor for at in range(3)}, 32)
    assert read_weight_files(tmp_path, False, 2).parameters.products == 32


def test_an_index_names_its_files_by_name_alone(tmp_path):
    index = {"weight_map": {"lm_head.weight": "../../etc/one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"one\.safetensors is missing from the model folder"):
        read_weight_files(tmp_path, False, 2)


def test_a_folder_without_files_has_none(tmp_path):
    assert read_weight_files(tmp_path, False, 2) is None


@pytest.mark.parametrize(
    "head",
    [
        b"{",
        b"[1, 2]",
        {"a": 1},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 60]}},
        {"a": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": ["4"], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
    ],
)
def test_a_head_that_lies_is_named_and_nothing_is_allocated(tmp_path, head):
    write(tmp_path / "model.safetensors", head, 8)
    with pytest.raises(ConfigError, match=r"model\.safetensors is corrupted"):
        read_weight_files(tmp_path, False, 2)


def test_a_head_longer_than_its_file_is_not_read(tmp_path):
    (tmp_path / "model.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(ConfigError, match="a head of 4611686018427387904 bytes in a file of 10"):
        read_weight_files(tmp_path, False, 2)
