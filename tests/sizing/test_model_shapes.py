"""What models weigh and keep, against what their makers say; estimated times against measured ones."""

import json
from pathlib import Path

import pytest

from bireme.errors import ConfigError
from bireme.sizing.machines import GPUS
from bireme.sizing.model_shapes import read_shape, shape_of
from bireme.sizing.recipe_rules import Spent, kv_tokens, rank_weight_bytes
from bireme.sizing.step_times import StepTimes
from bireme.sizing.timings import MeasuredTimings, PeakTimings, RankLayout

CONFIGS = json.loads((Path(__file__).parent / "model_configs.json").read_text())
ONE = RankLayout(ranks=1, attention_dp=False, has_experts=False)


def shape(name, **changes):
    return shape_of(CONFIGS[name] | changes, {}, name, name)


@pytest.mark.parametrize(
    ("name", "billions", "active", "kv_values"),
    [
        ("deepseek-ai/DeepSeek-R1", 671, 37, 576 * 61),
        ("openai/gpt-oss-120b", 117, 5.1, 2 * 8 * 64 * 36),
        ("Qwen/Qwen3-235B-A22B", 235, 22, 2 * 4 * 128 * 94),
        ("nvidia/Llama-4-Maverick-17B-128E-Instruct-FP8", 400, 17, 2 * 8 * 128 * 48),
        ("nvidia/Llama-3.3-70B-Instruct-FP8", 70.6, 70.6, 2 * 8 * 128 * 80),
        ("meta-llama/Llama-3.1-8B-Instruct", 8.03, 8.03, 2 * 8 * 128 * 32),
    ],
)
def test_parameters_are_as_many_as_a_model_is_said_to_have(name, billions, active, kv_values):
    found = shape(name)
    total = found.attention_params + found.mlp_params + found.expert_params + found.embedding_params
    assert total / 1e9 == pytest.approx(billions, rel=0.01)
    assert found.active_params / 1e9 == pytest.approx(active, rel=0.08)
    assert found.kv_values_per_token == kv_values


def test_a_quantized_model_weighs_what_its_parts_weigh():
    r1 = shape("nvidia/DeepSeek-R1-FP4")
    assert (r1.weights, r1.are_attention_weights_quantized) == ("nvfp4", False)
    assert r1.expert_bytes == pytest.approx(654e9 * 0.5625, rel=0.01)
    assert r1.attention_bytes == 2 * r1.attention_params
    shared = RankLayout(ranks=16, attention_dp=True, has_experts=True)
    whole = rank_weight_bytes(r1, shared, slots=288)
    assert whole == pytest.approx(
        r1.attention_bytes + r1.mlp_bytes + r1.embedding_bytes + r1.expert_bytes * 288 / 256 / 16
    )


FLOATS = {"0": {"weights": {"num_bits": 8, "type": "float"}}}


@pytest.mark.parametrize(
    ("quantization", "weights"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_blocks"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}, "nvfp4"),
        ({"quant_method": "compressed-tensors", "config_groups": FLOATS}, "fp8"),
    ],
)
def test_formats_are_told_by_whoever_wrote_the_checkpoint(quantization, weights):
    assert shape("meta-llama/Llama-3.1-8B-Instruct", quantization_config=quantization).weights == weights


def test_integers_of_four_bits_are_no_format_that_is_known():
    groups = {"0": {"weights": {"num_bits": 4, "type": "int"}}}
    with pytest.raises(ConfigError, match="quantization compressed-tensors; BF16, FP8, NVFP4 and MXFP4"):
        shape(
            "Qwen/Qwen3-235B-A22B", quantization_config={"quant_method": "compressed-tensors", "config_groups": groups}
        )


def test_a_folder_s_own_files_win_over_what_is_counted(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["meta-llama/Llama-3.1-8B-Instruct"]))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert read_shape(str(tmp_path)).weights == "fp8"
    index = {"metadata": {"total_size": 9_000_000_000}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_shape(str(tmp_path)).weight_bytes == pytest.approx(9e9)


def test_layers_with_a_window_keep_no_more_than_that():
    found = shape("openai/gpt-oss-120b")
    assert found.kv_values(10_000) == 2 * 8 * 64 * 18 * (10_000 + 128)


def test_an_h100_holds_as_much_kv_as_another_library_counts():
    """448,675 tokens: aiconfigurator-core 0.12.0, estimate_kv_cache, TensorRT-LLM 1.3.0rc20."""
    spent = Spent(step_tokens=8192, fraction=0.9, longest=4096)
    found = kv_tokens(shape("meta-llama/Llama-3.1-8B-Instruct"), GPUS["h100"], ONE, 2, spent)
    assert found == pytest.approx(448_675, rel=0.02)


@pytest.mark.parametrize(("rows", "context"), [(1, 1000), (8, 1000), (32, 1000), (128, 1000), (256, 1000), (4, 32000)])
def test_estimated_steps_are_near_measured_ones(rows, context):
    estimated = PeakTimings(shape("meta-llama/Llama-3.1-8B-Instruct"), GPUS["h100"], 2)
    measured = MeasuredTimings(StepTimes.read("h100-8b-bf16"))
    assert estimated.decode_ms(ONE, rows, context, 0) == pytest.approx(
        measured.decode_ms(ONE, rows, context, 0), rel=0.15
    )


@pytest.mark.parametrize("tokens", [512, 2048, 4096, 8192])
def test_estimated_prompts_are_near_measured_ones(tokens):
    estimated = PeakTimings(shape("meta-llama/Llama-3.1-8B-Instruct"), GPUS["h100"], 2)
    measured = MeasuredTimings(StepTimes.read("h100-8b-bf16"))
    assert estimated.prefill_ms(ONE, tokens) == pytest.approx(measured.prefill_ms(ONE, tokens), rel=0.16)
