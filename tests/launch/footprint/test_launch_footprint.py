"""What a launch takes of a machine, and what is refused, or warned of, where that is too much."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bireme.config import CHECKOUT
from bireme.engines.torch.geometry import MOST_GATHERED_BYTES
from bireme.launch.footprint.config_fields import ConfigFields
from bireme.launch.footprint.decoder_shape import read_shape
from bireme.launch.footprint.launch_footprint import ENGINE_PROCESS_BYTES, LaunchFootprint
from bireme.launch.footprint.machine_memory import MachineMemory, read_machine
from bireme.launch.footprint.step_bytes import StepWidths, packed_step
from bireme.recipe_files import load_recipe
from tests.engines.torch import tiny_models

GIB = 1 << 30
SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_8B = SHAPE | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


@pytest.fixture
def recipe(tmp_path):
    """Make a recipe of an 8B model without weights."""
    model = tmp_path / "model"
    model.mkdir()

    def make(changes=None, engine=None, **settings):
        (model / "config.json").write_text(json.dumps(LLAMA_8B | (changes or {})))
        config = {"dtype": "bfloat16", "load_format": "dummy"} | (engine or {})
        tree = {"model": str(model), "workers": {"decode": {"engine": "torch", "engine_config": config} | settings}}
        (tmp_path / "recipe.yaml").write_text(json.dumps(tree))
        return load_recipe(str(tmp_path))

    return make


def problems(recipe, machine):
    return list(LaunchFootprint(recipe, machine, 4).problems())


def test_an_8b_model_takes_its_parameters_and_a_pool_of_a_gib_on_a_cpu(recipe):
    footprint = LaunchFootprint(recipe(), MachineMemory(64 * GIB), 4)
    engine = footprint.workers[0].engine
    tables = 131072 * 128 * 4
    assert engine.weights - tables == pytest.approx(2 * 8_030_261_248, rel=1e-3)
    assert engine.bytes_per_token == 2 * 8 * 128 * 2 * 32
    assert engine.pool_tokens == GIB // engine.bytes_per_token // 32 * 32
    assert problems(recipe(), MachineMemory(64 * GIB)) == []


def test_projections_that_are_rounded_to_8_bits_take_a_byte_each_on_a_gpu(recipe):
    machine = MachineMemory(64 * GIB, gpus=(80 * GIB,))
    plain, rounded = (
        LaunchFootprint(recipe(engine={"quant_config": {"quant_algo": algo}}), machine, 4).workers[0].engine.weights
        for algo in (None, "FP8_PER_CHANNEL_PER_TOKEN")
    )
    assert plain - rounded == 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)


def test_projections_that_are_left_plain_count_as_before(recipe):
    machine = MachineMemory(64 * GIB, gpus=(80 * GIB,))
    algo, patterns = "FP8_PER_CHANNEL_PER_TOKEN", ["*self_attn*", "lm_head"]
    plain, rounded = (
        LaunchFootprint(recipe(engine={"quant_config": asked}), machine, 4).workers[0].engine.weights
        for asked in ({}, {"quant_algo": algo, "exclude_modules": patterns})
    )
    assert plain - rounded == 32 * 3 * 4096 * 14336


@pytest.mark.parametrize(
    ("changes", "asked", "said"),
    [
        ({}, {"exclude_modules": ["*mlp*"]}, r"*mlp*; without quant_config.quant_algo no weight is rounded"),
        ({}, {"quant_algo": "FP8", "exclude_modules": ["*attn", "*mpl*"]}, "*mpl*; no module of the model's layers is"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            {"quant_algo": "FP8", "exclude_modules": ["*mlp*"]},
            "*mlp*",
        ),
    ],
)
def test_modules_that_cannot_be_left_plain_are_refused_before_the_start(recipe, changes, asked, said):
    (found,) = problems(recipe(changes, {"quant_config": asked}), MachineMemory(64 * GIB, gpus=(80 * GIB,)))
    assert found.is_error
    assert str(found).startswith(f"workers.decode.engine_config.quant_config.exclude_modules: {said}")


def test_a_model_that_is_still_to_be_made_is_no_problem_of_the_memory_of_an_engine_without_weights(tmp_path):
    tree = {"model": "models/tiny-none", "workers": {"decode": {"engine": "mocker"}}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(tree))
    assert not problems(load_recipe(str(tmp_path)), MachineMemory(64 * GIB))


@pytest.mark.parametrize("left_out", [[], ["model.layers.*.self_attn*", "lm_head"]])
def test_quantization_in_modelopts_own_file_counts_as_that_in_config_json(recipe, left_out):
    told, machine = {"quant_algo": "FP8", "exclude_modules": left_out}, MachineMemory(64 * GIB, gpus=(80 * GIB,))
    plain = LaunchFootprint(recipe(), machine, 4).workers[0].engine.weights
    folder = recipe().worker_model_path("decode")
    Path(folder, "hf_quant_config.json").write_text(json.dumps({"quantization": told}))
    worker = LaunchFootprint(recipe(), machine, 4).workers[0]
    attention = 0 if left_out else 4096 * (4096 + 2 * 1024 + 4096)
    assert plain - worker.engine.weights == 32 * (attention + 3 * 4096 * 14336) and not worker.is_sure


def test_kv_in_8_bits_takes_a_byte_a_value_and_twice_the_tokens_on_a_gpu(recipe):
    machine = MachineMemory(64 * GIB, gpus=(80 * GIB,))
    plain, eights = (
        LaunchFootprint(recipe(engine={"kv_cache_config": {"dtype": dtype}}), machine, 4) for dtype in ("auto", "fp8")
    )
    one, other = plain.workers[0].engine, eights.workers[0].engine
    assert one.bytes_per_token == 2 * other.bytes_per_token == 2 * 2 * 8 * 128 * 32
    assert other.pool_tokens == pytest.approx(2 * one.pool_tokens, rel=1e-3) and other.weights == one.weights
    assert "tokens in fp8; 65,536 B/token in all" in next(eights.lines())


def test_weights_beyond_all_memory_are_refused_with_what_is_there(recipe):
    (found,) = problems(recipe(), MachineMemory(8 * GIB))
    assert found.is_error and found.key == "workers.decode.engine_config.dtype"
    assert "8,192 MiB are available" in str(found)


def test_replicas_that_do_not_fit_are_told_how_many_would(recipe):
    (found,) = problems(recipe(replicas=3), MachineMemory(40 * GIB))
    assert (found.is_error, found.key, found.value) == (True, "workers.decode.replicas", "3")
    assert found.remedy == "set 2, or memory_service.enabled: true"


def test_a_pool_that_does_not_fit_is_a_warning_with_the_tokens_that_would(recipe):
    (found,) = problems(recipe(engine={"kv_cache_config": {"max_tokens": 200_000}}), MachineMemory(22 * GIB))
    assert not found.is_error and found.key.endswith("kv_cache_config.max_tokens") and found.value == "200000"
    tokens = int(found.remedy.split()[1])
    fits = recipe(engine={"kv_cache_config": {"max_tokens": tokens}})
    assert problems(fits, MachineMemory(22 * GIB)) == []


def test_swap_turns_a_refusal_into_a_warning(recipe):
    (found,) = problems(recipe(), MachineMemory(8 * GIB, swap=16 * GIB))
    assert not found.is_error


def test_a_pool_on_a_gpu_is_what_weights_and_steps_leave(recipe):
    footprint = LaunchFootprint(recipe(), MachineMemory(64 * GIB, gpus=(80 * GIB,)), 4)
    engine = footprint.workers[0].engine
    assert 0.8 * 80 * GIB < engine.total < 0.95 * 80 * GIB
    assert footprint.host_bytes < 2 * GIB
    assert list(footprint.problems()) == []


def test_a_gpu_that_is_too_small_is_refused_by_its_size(recipe):
    (found,) = problems(recipe(), MachineMemory(64 * GIB, gpus=(12 * GIB,)))
    assert found.is_error and "which has 12,288 MiB" in str(found)


def test_engines_on_one_gpu_share_it(recipe):
    machine = MachineMemory(64 * GIB, gpus=(80 * GIB,))
    alone = LaunchFootprint(recipe(), machine, 4).workers[0].engine
    shared = LaunchFootprint(recipe(replicas=2), machine, 4).workers[0].engine
    assert 2 * shared.total <= 0.91 * 80 * GIB < 2 * alone.total


def test_with_the_memory_service_weights_count_once(recipe):
    made = recipe(replicas=3)
    with_service = load_recipe(made.folder, '{"memory_service": {"enabled": true}}')
    own, shared = (LaunchFootprint(each, MachineMemory(99 * GIB), 4).host_bytes for each in (made, with_service))
    assert own - shared == pytest.approx(2 * 16 * GIB, rel=0.1)


@pytest.mark.parametrize("changes", [{"hidden_size": -1}, {"num_hidden_layers": 1 << 40}, {"rope_scaling": "long"}])
def test_a_config_that_lies_is_refused_before_anything_starts(recipe, changes):
    (found,) = problems(recipe(changes), MachineMemory(64 * GIB))
    assert found.is_error and next(iter(changes)) in str(found)


def test_a_setting_beyond_the_model_is_refused_by_the_engine_s_own_rule(recipe):
    (found,) = problems(recipe(engine={"max_seq_len": 1 << 20}), MachineMemory(64 * GIB))
    assert found.is_error and "max_seq_len: 1048576" in str(found)


def test_a_folder_of_several_gguf_files_is_refused_by_their_names(recipe, tmp_path):
    made = recipe()
    for name in ("a", "b"):
        (tmp_path / "model" / f"{name}.gguf").write_bytes(b"")
    (found,) = problems(made, MachineMemory(64 * GIB))
    assert "a.gguf and b.gguf" in str(found)


def test_a_gguf_file_or_a_quantized_checkpoint_is_never_refused_for_its_weights(recipe):
    made = recipe({"quantization_config": {"quant_method": "fp8"}})
    (found,) = problems(made, MachineMemory(8 * GIB))
    assert not found.is_error


def test_a_quantized_checkpoint_takes_what_it_does_once_it_is_dequantized(recipe):
    plain, quantized = (
        LaunchFootprint(recipe(changes), MachineMemory(64 * GIB), 4).workers[0].engine.weights
        for changes in ({}, {"quantization_config": {"quant_method": "fp8"}})
    )
    assert quantized == plain


KV_ALONE = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}


def test_a_checkpoint_that_quantizes_kv_alone_is_counted_as_the_plain_one_that_it_is(recipe, tmp_path):
    (found,) = problems(recipe({"quantization_config": KV_ALONE}), MachineMemory(8 * GIB))
    assert found.is_error
    plain, told = (recipe(changes, {"load_format": "auto"}) for changes in ({}, {"quantization_config": KV_ALONE}))
    files = tmp_path / "model"
    tiny_models.save(files, "llama")
    tree = json.loads((files / "config.json").read_text())
    counted = []
    for made, own in ((plain, {}), (told, {"quantization_config": KV_ALONE})):
        (files / "config.json").write_text(json.dumps(tree | {"dtype": "float32"} | own))
        counted.append(LaunchFootprint(made, MachineMemory(8 * GIB), 4).workers[0].engine)
    assert counted[0] == counted[1]


def test_8_bit_floats_are_no_saving_and_refused_as_kv_on_a_gpu_that_does_not_convert_them(recipe):
    made = recipe({"quantization_config": {"quant_method": "fp8"}}, {"kv_cache_config": {"dtype": "fp8"}})
    older, newer = (
        MachineMemory(64 * GIB, gpus=(80 * GIB,), capabilities=(generation,)) for generation in ((8, 6), (8, 9))
    )
    assert problems(made, newer) == [] and "compute capability 8.9" in str(problems(made, older)[0])
    weights = [LaunchFootprint(made, machine, 4).workers[0].engine.weights for machine in (older, newer)]
    assert weights[0] == LaunchFootprint(recipe(), newer, 4).workers[0].engine.weights > 1.7 * weights[1]


def test_kv_in_8_bits_is_refused_by_name_where_engines_are_on_a_cpu(recipe):
    made = recipe(engine={"kv_cache_config": {"dtype": "fp8"}})
    (found,) = problems(made, MachineMemory(64 * GIB))
    assert found.is_error and found.key == "workers.decode.engine_config.kv_cache_config.dtype"
    assert str(found).endswith(
        ": fp8; a CPU, or a GPU without triton, does not attend to 8-bit floats; set auto, or take a GPU of compute"
        " capability 8.9 or more"
    )
    assert problems(made, MachineMemory(64 * GIB, gpus=(80 * GIB,))) == []


@pytest.mark.parametrize("changes", [{"hidden_size": None}, {"architectures": ["T5ForConditionalGeneration"]}])
def test_what_can_t_be_counted_is_said_and_refuses_nothing(recipe, changes):
    made, machine = recipe(changes), MachineMemory(64 * GIB)
    assert problems(made, machine) == []
    assert "not counted" in next(LaunchFootprint(made, machine, 4).lines())


def test_lines_name_each_part(recipe):
    worker, host = LaunchFootprint(recipe(), MachineMemory(64 * GIB), 4).lines()
    assert all(part in worker for part in ("weights 15,", "KV pool 1,0", "131,072 B/token", "largest step", "process"))
    assert "65,536 MiB available" in host


def test_this_machine_has_memory_and_an_engine_s_process_fits():
    machine = read_machine()
    assert machine.available > ENGINE_PROCESS_BYTES


def test_a_size_is_told_without_torch():
    code = (
        "import sys; from bireme.launch.footprint import launch_footprint as footprint;"
        "from bireme.recipe_files import load_recipe;"
        "machine = footprint.MachineMemory(1 << 40);"
        "assert footprint.LaunchFootprint(load_recipe('recipes/tiny'), machine, 4).workers[0].engine;"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr


def test_a_draft_model_counts_with_its_weights_and_keys_and_values_but_not_in_prefill(recipe, tmp_path):
    made = recipe()
    folder = made.worker_model_path("decode")
    kind = {"decoding_type": "Draft_Target", "max_draft_len": 3, "speculative_model": folder}
    alone = LaunchFootprint(made, MachineMemory(99 * GIB), 4).workers[0].engine
    drafting = (
        LaunchFootprint(recipe(engine={"speculative_config": kind}), MachineMemory(99 * GIB), 4).workers[0].engine
    )
    assert (drafting.weights, drafting.bytes_per_token) == (2 * alone.weights, 2 * alone.bytes_per_token)
    assert drafting.num_blocks[0] == alone.num_blocks[0] // 2
    missing = recipe(engine={"speculative_config": kind | {"speculative_model": "no/where"}})
    assert "no/where, which drafts, is not here" in next(LaunchFootprint(missing, MachineMemory(99 * GIB), 4).lines())


def test_rows_of_drafts_have_logits(recipe):
    config = {"max_seq_len": 2048, "max_num_tokens": 512}
    alone, drafting = (
        LaunchFootprint(recipe(engine=config | more), MachineMemory(99 * GIB), 4).workers[0].engine
        for more in ({}, {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3}})
    )
    assert drafting.step - alone.step >= 64 * 128_256 * 10  # four times as many rows, of which attention has some


def test_a_head_counts_with_its_file_and_one_layer_of_keys_and_values(recipe):
    head = CHECKOUT / "models" / "tiny-chat" / "eagle3"
    kind = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": str(head)}
    machine = MachineMemory(99 * GIB)
    alone, drafting = (
        LaunchFootprint(recipe(engine=config), machine, 4).workers[0].engine
        for config in ({}, {"speculative_config": kind})
    )
    assert drafting.weights - alone.weights == (head / "model.safetensors").stat().st_size
    assert drafting.step - alone.step >= 3 * 2048 * 64 * 2  # the rows that the head reads, held beside a step
    of_a_token = 2 * 2 * 32 * {"bfloat16": 2, "float32": 4}[alone.dtype]  # keys and values of two heads
    assert drafting.bytes_per_token - alone.bytes_per_token == of_a_token
    without, on_gpu = (
        LaunchFootprint(recipe(engine=config), gpu(9, 0), 4).workers[0].engine
        for config in ({}, {"speculative_config": kind})
    )
    assert on_gpu.step - without.step >= (2048 + 768) * 3 * 64 * 2  # what steps that are graphs keep as well


def test_without_kernels_decode_rows_have_their_keys_and_values_copied_beside_a_step():
    fields = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 256}
    fields |= {"intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8}
    shape, on = read_shape(ConfigFields(fields)), StepWidths(8, 2048, 8, 2)
    each = 2048 * 2 * 256 * 2
    assert packed_step(shape, on, False) - packed_step(shape, on, True) == MOST_GATHERED_BYTES - each - 8 * 2048 * 3


def gpu(*capability):
    return MachineMemory(64 * GIB, gpus=(80 * GIB,), capabilities=(capability,))


AMPERE = "GPUs before compute capability 8.9 have no 8-bit floats, and this one has 8.6"
TURING = "GPUs before compute capability 8.0 have no bfloat16, and this one has 7.5"
FP8 = {"quant_config": {"quant_algo": "FP8"}}
AWQ = {"quant_config": {"quant_algo": "W4A16_AWQ"}, "dtype": "float16"}
IN_FP8 = {"quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize(
    ("changes", "engine", "machine", "said"),
    [
        ({}, FP8, gpu(8, 6), f"FP8; {AMPERE}; remove it, or take a newer GPU"),
        (
            IN_FP8,
            FP8,
            gpu(8, 6),
            f"FP8; the checkpoint is so, and can't stay: {AMPERE}; remove it, or set NO_QUANT, to",
        ),
        ({}, AWQ, gpu(7, 5), f"W4A16_AWQ; {TURING}; remove it, or take a newer GPU"),
        ({}, FP8, MachineMemory(64 * GIB), "FP8; a CPU, or a GPU without triton, has no products of weights in few"),
    ],
)
def test_weights_in_a_form_that_a_machine_does_not_multiply_with_are_refused(recipe, changes, engine, machine, said):
    (found,) = problems(recipe(changes, engine), machine)
    assert found.is_error and str(found).startswith(f"workers.decode.engine_config.quant_config.quant_algo: {said}")


@pytest.mark.parametrize(("changes", "engine"), [({}, FP8), (IN_FP8, FP8), ({}, AWQ), ({}, {})])
def test_a_gpu_that_has_the_instructions_takes_weights_in_few_bits(recipe, changes, engine):
    assert problems(recipe(changes, engine), gpu(8, 9)) == []


def test_bfloat16_is_refused_on_a_gpu_without_it_and_auto_becomes_float32(recipe):
    (found,) = problems(recipe(), gpu(7, 5))
    assert str(found) == (
        f"workers.decode.engine_config.dtype: bfloat16; {TURING}; set auto or float32, or take a newer GPU"
    )
    engine = LaunchFootprint(recipe(engine={"dtype": "auto"}), gpu(7, 5), 4).workers[0].engine
    assert engine.dtype == "float32"
