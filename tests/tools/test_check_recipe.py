"""tools/check_recipe.py: every recipe is good, and every planted mistake is found at its line, with its remedy."""

from __future__ import annotations

import json
from pathlib import Path

import check_recipe
import pytest

from bireme.config import CHECKOUT
from bireme.launch.recipe_check import Finding, check_folder

RECIPES = sorted(path.parent for path in (CHECKOUT / "recipes").glob("*/recipe.yaml"))

RECIPE = """\
model: org/model
workers:
  prefill: {engine: trtllm, engine_config: prefill.yaml, devices: [0, 1]}
  decode:
    engine: trtllm
    engine_config: decode.yaml
    devices: [2, 3]
"""
PREFILL = """\
tensor_parallel_size: 2
max_num_tokens: 8192
max_seq_len: 8192
disable_overlap_scheduler: true
kv_cache_config:
  free_gpu_memory_fraction: 0.5
  dtype: fp8
cache_transceiver_config:
  backend: UCX
  max_tokens_in_buffer: 8192
"""
DECODE = """\
tensor_parallel_size: 2
max_batch_size: 64
max_num_tokens: 256
max_seq_len: 8448
kv_cache_config:
  free_gpu_memory_fraction: 0.8
  dtype: fp8
cuda_graph_config:
  batch_sizes: [1, 2, 64]
moe_config:
  backend: CUTLASS
cache_transceiver_config:
  backend: UCX
  max_tokens_in_buffer: 8448
"""
FILES = {"recipe": RECIPE, "prefill": PREFILL, "decode": DECODE}

# file, what stands there, what is planted, line of the finding, key (its end), value, part of reason or remedy
MISTAKES: dict[str, tuple[str, str, str, int, str, str, str]] = {
    "a key with a typo": ("decode", "max_batch_size:", "max_batch_sise:", 2, "max_batch_sise", "64", "max_batch_size?"),
    "a block with a typo": ("decode", "moe_config:", "moe_confg:", 10, "moe_confg", "", "did you mean moe_config?"),
    "a typo in a block that bireme reads, too": (
        "prefill", "free_gpu_memory_fraction: 0.5", "free_gpu_memory_fracton: 0.5",
        6, "kv_cache_config.free_gpu_memory_fracton", "0.5", "did you mean free_gpu_memory_fraction?",
    ),
    "a block's key at the top": (
        "prefill", "max_num_tokens: 8192", "event_buffer_max_size: 9\nmax_num_tokens: 8192",
        2, "event_buffer_max_size", "9", "did you mean kv_cache_config.event_buffer_max_size?",
    ),
    "an enum's value in another case": (
        "decode", "CUTLASS", "cutlass", 11, "moe_config.backend", "'cutlass'", "did you mean CUTLASS?",
    ),
    "a transceiver that bireme has and TensorRT-LLM has not": (
        "decode", "backend: UCX", "backend: SHM", 13, "cache_transceiver_config.backend", "'SHM'", "DEFAULT, UCX",
    ),
    "a number in quotes": (
        "decode", "max_num_tokens: 256", "max_num_tokens: '256'", 3, "max_num_tokens", "'256'", "int",
    ),
    "a number in quotes that only TensorRT-LLM reads": (
        "decode", "tensor_parallel_size: 2", "tensor_parallel_size: 2\nstream_interval: '10'",
        2, "stream_interval", "'10'", "remove the quotes",
    ),
    "a number that YAML takes for a string": (
        "decode", "batch_sizes: [1, 2, 64]", "batch_sizes: [1, 2, 64]\nbatch_wait_max_tokens_ratio: 1e-1",
        10, "batch_wait_max_tokens_ratio", "'1e-1'", "write 0.1",
    ),
    "a fraction above one": (
        "decode", "tensor_parallel_size: 2", "tensor_parallel_size: 2\nbatch_wait_max_tokens_ratio: 1.5",
        2, "batch_wait_max_tokens_ratio", "1.5", "from 0 to 1",
    ),
    "a mapping where a number belongs": (
        "decode", "max_seq_len: 8448", "max_seq_len: 8448\nstream_interval: {a: 1}",
        5, "stream_interval", "{'a': 1}", "a whole number, 1 or more",
    ),
    "a negative window": (
        "decode", "dtype: fp8", "dtype: fp8\n  max_attention_window: [512, -1]",
        8, "kv_cache_config.max_attention_window", "[512, -1]", "1 or more",
    ),
    "a key of an older release": (
        "decode", "moe_config:", "use_cuda_graph: true\nmoe_config:", 10, "use_cuda_graph", "true", "cuda_graph_config",
    ),
    "a key of a newer release": (
        "decode", "max_seq_len: 8448", "max_seq_len: 8448\nmodel_kwargs: {}", 5, "model_kwargs", "{}", "engine_version",
    ),
    "a key that only a newer release has lost": (
        "decode", "dtype: fp8", "dtype: fp8\n  onboard_blocks: true", 8, "onboard_blocks", "true", "1.3 has removed it",
    ),
    "a model of its own": (
        "decode", "max_batch_size:", "model: x\nmax_batch_size:", 2, "model", "'x'", "in recipe.yaml",
    ),
    "an alias that contradicts the key": (
        "decode", "max_batch_size:", "kv_cache_free_gpu_memory_fraction: 0.3\nmax_batch_size:",
        2, "kv_cache_free_gpu_memory_fraction", "0.3", "keep one of the two",
    ),
    "drafts without a kind": (
        "decode", "moe_config:", "speculative_config: {max_draft_len: 3}\nmoe_config:",
        10, "speculative_config.decoding_type", "", "Eagle, MTP",
    ),
    "a kind of drafts that does not exist": (
        "decode", "moe_config:", "speculative_config: {decoding_type: Eagel}\nmoe_config:",
        10, "speculative_config.decoding_type", "'Eagel'", "did you mean Eagle?",
    ),
    "Eagle without its model": (
        "decode", "moe_config:", "speculative_config: {decoding_type: Eagle, max_draft_len: 3}\nmoe_config:",
        10, "speculative_config.speculative_model", "", "name it",
    ),
    "drafts that don't fit a step": (
        "decode", "moe_config:", "speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 4}\nmoe_config:",
        3, "max_num_tokens", "256", "set 320 or more",
    ),
    "a block that lacks what 1.2 needs": (
        "decode", "moe_config:", "scheduler_config: {dynamic_batch_config: {}}\nmoe_config:",
        10, "dynamic_batch_config.enable_batch_size_tuning", "", "1.2 needs it",
    ),
    "experts that don't divide the ranks": (
        "decode", "moe_config:", "moe_expert_parallel_size: 3\nmoe_config:",
        10, "moe_expert_parallel_size", "3", "a divisor of 2",
    ),
    "expert slots that don't divide the ranks": (
        "decode", "backend: CUTLASS", "backend: CUTLASS\n  load_balancer: {num_slots: 9}\nmoe_expert_parallel_size: 2",
        12, "load_balancer.num_slots", "9", "a multiple of 2",
    ),
    "graphs said twice": (
        "decode", "cuda_graph_config:", "cuda_graph_config:\n  max_batch_size: 32",
        9, "cuda_graph_config.max_batch_size", "32", "keep one of the two",
    ),
    "events without reuse": (
        "decode", "dtype: fp8", "dtype: fp8\n  event_buffer_max_size: 9\n  enable_block_reuse: false",
        8, "kv_cache_config.event_buffer_max_size", "9", "set enable_block_reuse: true",
    ),
    "beams in disaggregation": (
        "decode", "max_batch_size:", "max_beam_width: 4\nmax_batch_size:", 2, "max_beam_width", "4", "set 1",
    ),
    "an overlapping prefill": (
        "prefill", "disable_overlap_scheduler: true", "disable_overlap_scheduler: false",
        4, "disable_overlap_scheduler", "false", "set true",
    ),
    "no transceiver": (
        "decode", "  backend: UCX\n", "", 12, "cache_transceiver_config.backend", "", "DEFAULT",
    ),
    "a buffer smaller than the prompts": (
        "prefill", "max_tokens_in_buffer: 8192", "max_tokens_in_buffer: 4096",
        10, "max_tokens_in_buffer", "4096", "8192",
    ),
    "two transceivers": (
        "decode", "backend: UCX", "backend: NIXL",
        13, "cache_transceiver_config.backend", "'NIXL'", "set UCX on both sides",
    ),
    "two types of KV": ("decode", "dtype: fp8", "dtype: auto", 7, "kv_cache_config.dtype", "", "set fp8 on both sides"),
    "two sizes of blocks": (
        "decode", "dtype: fp8", "dtype: fp8\n  tokens_per_block: 64",
        8, "kv_cache_config.tokens_per_block", "64", "set 32 on both sides",
    ),
    "too few GPUs": ("recipe", "devices: [2, 3]", "devices: [2]", 7, "decode.devices", "[2]", "name 2"),
    "an engine that does not exist": (
        "recipe", "engine: trtllm\n", "engine: trtlm\n", 5, "decode.engine", "'trtlm'", "torch, trtllm, mocker",
    ),
    "a stage with a typo": ("recipe", "  decode:\n", "  decod:\n", 4, "workers.decod", "", "did you mean decode?"),
    "a release that is not known": (
        "recipe", "    devices:", "    engine_version: '2.0'\n    devices:", 7, "engine_version", "'2.0'", "1.2, 1.3",
    ),
    "a file that is not there": ("recipe", "decode.yaml", "decod.yaml", 1, "", "", "decod.yaml does not exist"),
    "a key written twice": (
        "decode", "max_seq_len: 8448", "max_seq_len: 8448\nmax_batch_size: 4",
        5, "max_batch_size", "", "first in line 2",
    ),
    "a tab": ("decode", "  backend: UCX", "\tbackend: UCX", 13, "", "", "not valid YAML"),
    "a parser that does not exist": (
        "recipe", "model: org/model", "model: org/model\nchat: {tool_parser: hermez}",
        2, "chat.tool_parser", "", "hermes",
    ),
    "a sampling default that does not exist": (
        "recipe", "model: org/model", "model: org/model\nsampling: {temprature: 0}", 2, "sampling", "", "temperature",
    ),
}  # fmt: skip


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.mark.parametrize("folder", RECIPES, ids=lambda folder: folder.name)
def test_every_recipe_of_the_repository_is_good(folder):
    assert list(map(str, check_folder(folder))) == []


@pytest.mark.parametrize("folder", RECIPES, ids=lambda folder: folder.name)
def test_every_recipe_of_tensorrt_llm_has_a_readme_with_its_values_and_their_source(folder):
    engines = (folder / "recipe.yaml").read_text()
    if "trtllm" in engines:
        text = (folder / "README.md").read_text()
        assert all(word in text for word in ("Hardware:", "| value | why | from |", "A: ", "Pitfalls:"))


def test_the_recipe_that_the_mistakes_are_planted_in_is_good(tmp_path):
    assert check_folder(write(tmp_path, FILES)) == []


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found_with_file_line_key_value_and_remedy(name, tmp_path):
    file, old, new, line, key, value, text = MISTAKES[name]
    assert FILES[file].count(old) == 1
    found = check_folder(write(tmp_path, FILES | {file: FILES[file].replace(old, new)}))
    assert any(matches(one, (tmp_path / file, line), key, value, text) for one in found), list(map(str, found))


def matches(finding: Finding, place: tuple[Path, int], key: str, value: str, text: str) -> bool:
    where = (finding.file, finding.line) == (f"{place[0]}.yaml", place[1])
    return where and finding.key.endswith(key) and value in finding.value and text in str(finding)


def test_all_mistakes_of_a_recipe_are_told_in_one_run(tmp_path):
    decode = DECODE.replace("CUTLASS", "CUTLAS").replace("max_seq_len: 8448", "max_seq_len: many\nmax_sequence: 3")
    found = check_folder(write(tmp_path, FILES | {"decode": decode, "recipe": RECIPE.replace("[2, 3]", "[2, 3, 4]")}))
    keys = {finding.key.removeprefix("workers.decode.") for finding in found}
    assert {
        "engine_config.max_seq_len",
        "engine_config.max_sequence",
        "engine_config.moe_config.backend",
        "devices",
    } <= keys


def test_mistakes_in_engine_args_and_in_the_balancer_s_file_are_found_where_they_stand(tmp_path):
    recipe = RECIPE.replace("    devices", "    engine_args: {max_batch_sise: 3}\n    devices")
    decode = DECODE.replace("backend: CUTLASS", "load_balancer: eplb.yaml\nmoe_expert_parallel_size: 2")
    balancer = "layer_updates_per_iter: 2\nnum_slots: nine\n"
    found = check_folder(write(tmp_path, FILES | {"recipe": recipe, "decode": decode, "eplb": balancer}))
    assert [(Path(one.file).name, one.line, one.key) for one in found] == [
        ("eplb.yaml", 2, "workers.decode.engine_config.moe_config.load_balancer.num_slots"),
        ("recipe.yaml", 7, "workers.decode.engine_args.max_batch_sise"),
    ]


def test_keys_that_the_torch_engine_refuses_are_found_too(tmp_path):
    text = "model: org/model\nworkers:\n  decode:\n    engine_config:\n      tensor_parallel_size: 8\n"
    (finding,) = check_folder(write(tmp_path, {"recipe": text}))
    assert str(finding).endswith(
        "recipe.yaml:5: error: workers.decode.engine_config.tensor_parallel_size: 8; engine torch: one GPU per engine;"
        " set 1 and use `replicas`, or engine: trtllm"
    )


def test_a_good_recipe_ends_with_code_0(tmp_path, capsys):
    assert check_recipe.main([str(write(tmp_path, FILES))]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: good\n"


def test_an_error_ends_with_code_1_and_a_warning_only_when_asked(tmp_path):
    folder = write(tmp_path, FILES | {"decode": DECODE.replace("[1, 2, 64]", "[1, 2, 128]")})
    assert check_recipe.main([str(folder)]) == 0
    assert check_recipe.main([str(folder), "--warnings-are-errors"]) == 1
    write(tmp_path, {"decode": DECODE.replace("8448", "x")})
    assert check_recipe.main([str(folder)]) == 1


def test_a_folder_without_a_recipe_ends_with_code_2(tmp_path, capsys):
    assert check_recipe.main([str(tmp_path)]) == 2
    assert "no recipe.yaml there" in capsys.readouterr().err


def test_json_ends_the_output_as_one_document(tmp_path, capsys):
    check_recipe.main([str(write(tmp_path, FILES | {"decode": DECODE.replace("CUTLASS", "CUTLAS")})), "--json"])
    (findings,) = json.loads(capsys.readouterr().out.splitlines()[-1]).values()
    assert findings[0]["line"] == 11 and findings[0]["severity"] == "error" and "CUTLASS?" in findings[0]["remedy"]
