"""Parameters and geometry out of config.json are those of transformers' models and of the engine's own probe."""

from __future__ import annotations

import json
import time

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bireme.engines.torch.forward.modules import probe, route_attention
from bireme.engines.torch.weights.architectures import PROVED
from bireme.errors import ConfigError
from bireme.launch.footprint.config_fields import ConfigFields, UncountedError, read_config
from bireme.launch.footprint.decoder_shape import read_shape
from bireme.launch.footprint.families import FAMILIES
from tests.engines.torch.tiny_models import BASE, SETTINGS

NOT_MADE_OF_DEFAULTS = {"ministral", "nemotron", "hunyuan_v1_dense", "dots1"}  # transformers fails at them
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    **{name: value for name, value in BASE.items() if not name.endswith("_token_id")},
}


def model_of(model_type, **changes):
    settings = {name: value for name, value in (BASE | SETTINGS[model_type] | changes).items() if value is not None}
    config = AutoConfig.for_model(model_type, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    tree = json.loads(config.to_json_string()) | {"architectures": [type(model).__name__]}
    return model, read_shape(ConfigFields(tree))


@pytest.mark.parametrize("model_type", SETTINGS)
def test_a_class_is_counted_to_the_last_parameter_and_attends_as_the_probe_sees(model_type):
    model, shape = model_of(model_type)
    assert shape.parameters.total == sum(parameter.numel() for parameter in model.parameters())
    route_attention(model)
    seen = [(one.num_kv_heads, one.key_size, one.value_size, one.window) for one in probe(model, torch.device("cpu"))]
    assert [(*sizes, window) for sizes, window in zip(shape.key_sizes, shape.windows, strict=True)] == seen


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "starcoder2", "opt"])
def test_a_head_that_is_tied_counts_once(model_type):
    model, shape = model_of(model_type, tie_word_embeddings=True)
    assert shape.parameters.head == 0
    assert shape.parameters.total == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("model_type", sorted(SETTINGS.keys() - NOT_MADE_OF_DEFAULTS))
def test_what_a_config_leaves_out_is_what_its_class_takes(model_type):
    """Whether the head is tied, biases, and windows without layer_types."""
    left_out = {"tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias", "qkv_bias", "layer_types"}
    config = AutoConfig.for_model(model_type, num_hidden_layers=8)
    tree = {name: value for name, value in json.loads(config.to_json_string()).items() if name not in left_out}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tree | {"model_type": model_type}))
    tree |= {"architectures": [type(model).__name__]}
    shape = read_shape(ConfigFields(tree))
    assert shape.parameters.total == sum(parameter.numel() for parameter in model.parameters())


def test_every_class_that_the_engine_runs_is_counted():
    assert FAMILIES.keys() == PROVED


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": -64}, "hidden_size: -64; 1 to"),
        ({"hidden_size": 10**30}, "hidden_size: 1000000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000; 1 to 10000"),
        ({"num_attention_heads": "eight"}, "num_attention_heads: 'eight' is not a whole number"),
        ({"num_attention_heads": 4096, "head_dim": None}, "4096 heads in 64 values"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide 4 heads"),
        ({"vocab_size": True}, "vocab_size: True is not a whole number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: 'no' is not true or false"),
        ({"text_config": [1]}, r"text_config: \[1\] is not an object"),
    ],
)
def test_a_config_that_lies_is_refused_by_key_and_value(changes, text):
    with pytest.raises(ConfigError, match=text) as caught:
        read_shape(ConfigFields(LLAMA | changes))
    assert not isinstance(caught.value, UncountedError)


def test_layer_types_of_another_number_of_layers_are_refused():
    tree = LLAMA | {"architectures": ["Gemma3ForCausalLM"], "layer_types": ["full_attention"]}
    with pytest.raises(ConfigError, match="layer_types has 1 entries for 3 layers"):
        read_shape(ConfigFields(tree))


@pytest.mark.parametrize(
    "changes", [{"hidden_size": None}, {"architectures": ["MambaForCausalLM"]}, {"architectures": 3}]
)
def test_what_is_not_known_is_told_apart_from_what_is_wrong(changes):
    with pytest.raises(UncountedError):
        read_shape(ConfigFields(LLAMA | changes))


@pytest.mark.parametrize("text", ["{", "[]", '{"a": ' * 3000, "\xff"])
def test_a_config_that_can_t_be_read_is_named(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_large_model_is_counted_in_milliseconds(tmp_path):
    large = LLAMA | {"num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248, "vocab_size": 128256}
    large |= {"num_attention_heads": 128, "num_key_value_heads": 8, "head_dim": 128}
    began = time.process_time()
    shape = read_shape(ConfigFields(large))
    assert shape.parameters.total == 405_853_388_800  # Llama 3.1 405B
    assert time.process_time() - began < 0.05
