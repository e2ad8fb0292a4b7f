"""Every architecture let in equals transformers' generate on a tiny random model; others are refused by name."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from bireme.engines.torch.forward.decoder_weights import FAMILIES
from bireme.engines.torch.weights.architectures import PROVED, check_architecture, position_limit
from bireme.engines.torch.weights.checkpoint import open_checkpoint
from bireme.errors import ConfigError
from tests.engines.torch import tiny_models
from tests.engines.torch.tiny_models import SETTINGS
from tests.engines.torch.torch_harness import Harness, make_prompts, request

PROMPTS = make_prompts(3, 20, 45, 70)


@pytest.mark.parametrize("model_type", SETTINGS)
def test_a_tiny_model_equals_generate(tmp_path, model_type):
    path = tiny_models.save(tmp_path, model_type, **SETTINGS[model_type])
    model = tiny_models.build(model_type, **SETTINGS[model_type])
    model.set_attn_implementation("eager")
    expected = tiny_models.generate(model, PROMPTS, 24)
    assert len({token for tokens in expected for token in tokens}) > 20
    with Harness(path, max_num_tokens=24, tokens_per_block=8) as engine:
        assert engine.run([request(prompt, 24) for prompt in PROMPTS]) == expected
        is_on_modules = "modules" in engine.core._parts.forward.paths
    assert is_on_modules is (type(model).__name__ not in FAMILIES)


def test_what_a_failed_request_left_in_a_block_reaches_nobody(tmp_path):
    path = tiny_models.save(tmp_path, "gpt2", **SETTINGS["gpt2"])
    asked = [request(prompt, 24) for prompt in make_prompts(5, 20, 45, 70, seed=8)]
    with Harness(path, max_num_tokens=24, tokens_per_block=8) as engine:
        expected = engine.run(asked)
    with Harness(path, max_num_tokens=24, tokens_per_block=8) as engine:
        store = engine.core._parts.forward.modules._store
        for pool in (*store.keys, *store.values):
            pool.fill_(float("nan"))
        assert engine.run(asked) == expected


def test_every_architecture_let_in_is_proved_above(tmp_path):
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AutoConfig.for_model(name).model_type] for name in SETTINGS} == PROVED


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "do not use the attention interface"),
        ({"architectures": ["LlamaForCausalML"]}, "did you mean LlamaForCausalLM"),
        ({"architectures": None}, "names no architecture"),
    ],
)
def test_what_is_not_proved_is_refused_with_the_reason(config, text):
    with pytest.raises(ConfigError, match=text):
        check_architecture(SimpleNamespace(**config))


def test_rotary_scaling_that_depends_on_length_limits_the_context():
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 128}
    assert position_limit(SimpleNamespace(max_position_embeddings=512, rope_parameters=rope)) == 128
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 128}
    assert position_limit(SimpleNamespace(max_position_embeddings=512, rope_parameters=yarn)) is None


@pytest.fixture
def folder(tmp_path):
    tiny_models.save(tmp_path, "llama")
    return tmp_path


def load_error(folder, **settings):
    with pytest.raises(ConfigError) as caught:
        Harness(str(folder), **settings)
    return str(caught.value)


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_missing_folder_is_named():
    assert "model folder /nowhere/model does not exist" in load_error("/nowhere/model")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert f"{name} is missing from the model folder" in load_error(folder)


def test_a_config_that_is_not_json_is_named(folder):
    (folder / "config.json").write_text("{")
    assert load_error(folder).startswith("config.json is not valid JSON")


@pytest.mark.parametrize("keep", [0, 5, 400, 100_000])
def test_cut_off_weights_are_named(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert load_error(folder).startswith("model.safetensors is corrupted")


def test_a_missing_shard_is_named(folder):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors is missing" in load_error(folder)


def test_of_a_whole_file_and_an_index_the_whole_file_is_read(folder, caplog):
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert open_checkpoint(str(folder)).shards == (folder / "model.safetensors",) and "index_ignored" in caplog.text


def test_a_checkpoint_with_one_other_tensor_is_another_one(folder):
    path = folder / "model.safetensors"
    tensors, before = load_file(path), open_checkpoint(str(folder)).digest
    assert open_checkpoint(str(folder)).digest == before
    for name in tensors:
        save_file(tensors | {name: tensors[name] + 1}, path, metadata={"format": "pt"})
        assert open_checkpoint(str(folder)).digest != before, name


def test_weights_of_a_smaller_model_are_refused(folder):
    edit(folder, num_hidden_layers=4)
    assert "weights lack" in load_error(folder)


def test_weights_of_another_shape_are_refused(folder):
    edit(folder, intermediate_size=64)
    assert "disagree on a tensor's shape" in load_error(folder)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_seq_len": 1024}, "max_seq_len: 1024; the model was made for 512"),
        ({"max_batch_size": 64, "max_num_tokens": 32}, "max_num_tokens: 32 is less than max_batch_size 64"),
        ({"dtype": "int8"}, "dtype: 'int8'"),
        ({"max_tokens": 8}, "kv_cache_config.max_tokens: 8 is less than one block"),
        ({"max_attention_window": (0,)}, "max_attention_window"),
        ({"trust_remote_code": True}, "trust_remote_code"),
    ],
)
def test_settings_that_can_not_be_served_are_refused_by_name(folder, settings, text):
    assert text in load_error(folder, **settings)


def test_bfloat16_runs_when_asked_for(folder):
    with Harness(str(folder), dtype="bfloat16") as engine:
        assert engine.capacity.dtype == "bfloat16"
        assert len(engine.run([request(PROMPTS[2], 12)])[0]) == 12
