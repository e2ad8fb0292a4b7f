"""What gpt-oss takes of a GPU where its experts stay MXFP4: what its model without memory has, tensor by tensor."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bireme.config import EngineConfig, QuantConfig
from bireme.engines.torch.weights.checkpoint import open_checkpoint
from bireme.engines.torch.weights.shared_weights import make_skeleton
from bireme.launch.footprint.config_fields import ConfigFields
from bireme.launch.footprint.decoder_shape import read_shape
from bireme.launch.footprint.engine_footprint import EngineSizes, Surroundings
from tests.engines.torch import tiny_models

ON_GPU = Surroundings(gpu_bytes=80 << 30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_models.save(path, "gpt_oss", **(tiny_models.SETTINGS["gpt_oss"] | {"intermediate_size": 96}))
    config = json.loads((path / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}}
    (path / "config.json").write_text(json.dumps(config))
    return path


def weights_of(config, **settings):
    return EngineSizes(EngineConfig(**settings), read_shape(ConfigFields(config)), None).footprint(ON_GPU).weights


def test_experts_that_stay_are_counted_as_the_files_have_them(folder):
    config = json.loads((folder / "config.json").read_text())
    checkpoint = open_checkpoint(str(folder), load_format="dummy")
    taken = []
    for is_kept in (False, True):
        model = make_skeleton(replace(checkpoint, keeps_experts=is_kept), "bfloat16")
        own = {name: tensor for name, tensor in model.named_buffers() if "inv_freq" not in name}
        taken.append(sum(tensor.nbytes for tensor in (*model.parameters(), *own.values())))
    plain = weights_of(config | {"quantization_config": None})
    assert plain - weights_of(config) == taken[0] - taken[1] > 0
    assert weights_of(config, dtype="bfloat16") == weights_of(config)
    assert weights_of(config, quant_config=QuantConfig(quant_algo="NO_QUANT")) == plain


def test_the_published_model_of_20_billion_takes_what_its_files_do(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_local_experts": 32}
    config |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088}
    config |= {"layer_types": ["sliding_attention", "full_attention"] * 12, "num_experts_per_tok": 4}
    assert weights_of(config) == pytest.approx(13.76e9, rel=0.01)  # of its three files, as they are published
