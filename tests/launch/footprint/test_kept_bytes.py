"""What stays as its file has it is counted as engines hold it: by config.json on a GPU, and on a CPU by GGUF's head."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch

from bireme.config import EngineConfig, QuantConfig
from bireme.engines.torch import kernels
from bireme.engines.torch.forward.weight_form import choose_form
from bireme.engines.torch.weights.checkpoint import open_checkpoint, read_model
from bireme.engines.torch.weights.stored_linear import StoredLinear
from bireme.gguf.folder import model_folder
from bireme.gguf.head import read_head
from bireme.launch.footprint.config_fields import ConfigFields, read_config
from bireme.launch.footprint.decoder_shape import read_shape
from bireme.launch.footprint.engine_footprint import EngineSizes, Surroundings
from bireme.launch.footprint.kept_bytes import KeptBytes, kept_blocks
from tests.engines.torch.conftest import cache_home as cache_home
from tests.engines.torch.quantized_checkpoints import LAYOUTS, write
from tests.engines.torch.test_kept_weights import KEPT, OTHERS, OWN
from tests.engines.torch.test_packed_decoder import library
from tests.engines.torch.torch_harness import Harness
from tests.gguf import models

SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 512}
SIZES |= {"head_dim": 256, "intermediate_size": 1024}
GPU, CPU = Surroundings(gpu_bytes=80 << 30), Surroundings()
OLDER_GPU = Surroundings(gpu_bytes=80 << 30, capability=(8, 6))


def weights_of(config, around, blocks=None, **settings):
    sizes = EngineSizes(EngineConfig(**settings), read_shape(ConfigFields(config)), None, blocks)
    return sizes.footprint(around).weights


def saved(config, around):
    """What is counted less than for the same model without quantization_config."""
    return weights_of(config | {"quantization_config": None}, around) - weights_of(config, around)


@pytest.fixture
def made(tmp_path):
    """Return a function that writes a layout; the folder, and its config.json."""

    def make(layout):
        path, _ = write(tmp_path, OWN.get(layout) or LAYOUTS[layout], **SIZES)
        return path, json.loads(Path(path, "config.json").read_text())

    return make


@pytest.mark.parametrize(
    "layout", ["fp8 in blocks of 128", "modelopt", "compressed fp8, channel", "gptq", "compressed int4"]
)
def test_projections_that_stay_on_a_gpu_are_counted_as_their_model_holds_them(made, monkeypatch, layout):
    path, config = made(layout)
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    model = read_model(
        choose_form(open_checkpoint(path), EngineConfig(), torch.device("cpu")), "float32", torch.device("cpu")
    )
    stored = [module.stored for module in model.modules() if isinstance(module, StoredLinear)]
    taken = sum(tensor.nbytes for own in stored for tensor in own.tensors.values())
    plain = sum(4 * own.shape[0] * own.shape[1] for own in stored)
    computed = config | {"dtype": "bfloat16"}  # float32 keeps no 8-bit floats on a GPU
    assert len(stored) == 7 and saved(computed, GPU) == pytest.approx(plain / 2 - taken, rel=0.01)
    assert "fp8" not in layout or saved(config | {"dtype": "float32"}, GPU) == 0
    assert weights_of(config, GPU, quant_config=QuantConfig(quant_algo="NO_QUANT")) == weights_of(
        config | {"quantization_config": None}, GPU
    )


@pytest.mark.parametrize("layout", ["fbgemm", "awq"])
def test_what_a_list_leaves_plain_is_counted_as_the_model_holds_it(tmp_path, monkeypatch, layout):
    own, left = LAYOUTS[layout], ["self_attn", "lm_head"]
    mlps = replace(own, config=own.config | {"modules_to_not_convert": left}, chooses=lambda name: "mlp." in name)
    path, _ = write(tmp_path, mlps, **SIZES)
    config = json.loads(Path(path, "config.json").read_text())
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    cpu = torch.device("cpu")
    model = read_model(choose_form(open_checkpoint(path), EngineConfig(), cpu), "float32", cpu)
    stored = [module.stored for module in model.modules() if isinstance(module, StoredLinear)]
    taken = sum(tensor.nbytes for own in stored for tensor in own.tensors.values())
    plain = sum(2 * own.shape[0] * own.shape[1] for own in stored)
    assert len(stored) == 3 and saved(config | {"dtype": "bfloat16"}, GPU) == pytest.approx(plain - taken, rel=0.01)


@pytest.mark.parametrize("layout", [*KEPT, *OTHERS])
def test_what_is_counted_as_kept_is_what_the_engine_keeps(layout):
    own = (OWN.get(layout) or LAYOUTS[layout]).config
    config = json.loads(json.dumps(MODEL | {"quantization_config": own}))
    assert (saved(config, GPU) > 0) == (layout in KEPT)
    assert saved(config, OLDER_GPU) == (0 if is_fp8(own) else saved(config, GPU))  # dequantized there
    assert (saved(config, CPU) > 0) == (layout in KEPT and ("awq" in layout or "gptq" in layout or "int4" in layout))


def is_fp8(told):
    groups = json.dumps(told.get("config_groups"))
    return told["quant_method"] in ("fp8", "fbgemm_fp8", "modelopt") or '"type": "float"' in groups


MODEL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "dtype": "bfloat16"}
MODEL |= SIZES | {"max_position_embeddings": 512}


@pytest.fixture
def compiled(request, monkeypatch):
    library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(request.getfixturevalue("cache_home")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="engines here compute on the GPU")
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("form", ["Q4_0", "Q8_0"])
def test_blocks_that_stay_on_a_cpu_are_counted_as_the_packed_decoder_holds_them(tmp_path, form):
    file = models.save(tmp_path, "llama", gguf.GGMLQuantizationType[form])
    config, blocks = read_config(model_folder(file)).tree, kept_blocks(read_head(file))
    with Harness(str(file), max_num_tokens=24) as engine:
        decoder = engine.core._parts.forward.decoder
        linears = [linear for layer in decoder._layers for linear in (layer.qkv, layer.output, *layer.mlp.linears)]
        assert blocks.product_bytes == sum(linear.kept.num_bytes for linear in linears)
        assert blocks.head_bytes == pytest.approx(decoder._head.kept.num_bytes, rel=0.05)  # of whole panels
    plain = weights_of(config, CPU)
    assert weights_of(config, CPU, blocks) < plain == weights_of(config, CPU, KeptBytes())
    shared = Surroundings(shares_weights=True)
    assert weights_of(config, shared, blocks) == weights_of(config, shared)  # nothing stays
