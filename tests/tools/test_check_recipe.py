"""tools/check_recipe.py: every recipe is good, and every planted mistake is found at its line, with its remedy."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import yaml

from bireme.config import CHECKOUT
from bireme.engines.trtllm import contract
from bireme.engines.trtllm.pair_rules import check_worker
from bireme.launch.recipe_check import check_folder
from bireme.recipe_files import load_recipe
from tools import check_recipe

RECIPES = sorted(path.parent for path in (CHECKOUT / "recipes").glob("*/recipe.yaml"))
OF_TENSORRT_LLM = [folder for folder in RECIPES if "engine: trtllm" in (folder / "recipe.yaml").read_text()]

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

PLANTED = yaml.safe_load(Path(__file__).with_name("planted_mistakes.yaml").read_text())


def write(folder, files):
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.mark.parametrize("folder", RECIPES, ids=lambda folder: folder.name)
def test_every_recipe_of_the_repository_is_good(folder):
    assert list(map(str, check_folder(folder))) == []


@pytest.mark.parametrize("release", contract.PROFILES)
@pytest.mark.parametrize("folder", OF_TENSORRT_LLM, ids=lambda folder: folder.name)
def test_every_recipe_of_tensorrt_llm_is_good_for_each_release(folder, release):
    recipe = load_recipe(folder, "")
    workers = {stage: entry for stage, entry in recipe.workers.items() if entry.engine == "trtllm"}
    if {entry.engine_version for entry in workers.values()}.isdisjoint(("", release)):
        pytest.skip("a recipe for another release")
    for stage, entry in workers.items():
        entry = msgspec.structs.replace(entry, engine_version=release)
        assert check_worker(entry, stage, recipe.model, is_disaggregated="prefill" in recipe.workers) == []


@pytest.mark.parametrize("release", ["1.3", "1.4"])
@pytest.mark.parametrize("name", ["deepseek-r1-disagg", "gemma3-vswa-disagg", "gpt-oss-120b", "llama4-eagle-disagg"])
def test_ucx_put_back_is_told_where_late_releases_obey_the_model(name, release):
    ucx = {"cache_transceiver_config": {"backend": "UCX"}}
    recipe = load_recipe(CHECKOUT / "recipes" / name, json.dumps({"workers": {"decode": {"engine_config": ucx}}}))
    decode = recipe.workers["decode"]
    for version, expected in (("1.2", []), (release, ["cache_transceiver_config.backend"])):
        entry = msgspec.structs.replace(decode, engine_version=version)
        assert [one.key for one in check_worker(entry, "decode", recipe.model, is_disaggregated=True)] == expected


@pytest.mark.parametrize("folder", OF_TENSORRT_LLM, ids=lambda folder: folder.name)
def test_every_recipe_of_tensorrt_llm_has_a_readme_with_its_values_and_their_source(folder):
    text = (folder / "README.md").read_text()
    assert all(word in text for word in ("Hardware:", "| value | why | from |", "A: ", "Pitfalls:"))


def test_the_recipe_that_the_mistakes_are_planted_in_is_good(tmp_path):
    assert check_folder(write(tmp_path, FILES)) == []


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted["name"])
def test_a_planted_mistake_is_found_with_file_line_key_value_and_remedy(planted, tmp_path):
    file, was = planted["file"], planted["was"]
    assert FILES[file].count(was) == 1
    found = check_folder(write(tmp_path, FILES | {file: FILES[file].replace(was, planted["becomes"])}))
    assert any(matches(one, planted, tmp_path) for one in found), list(map(str, found))


def matches(finding, planted, folder):
    file = planted.get("at", planted["file"])
    where = (finding.file, finding.line) == (f"{folder / file}.yaml", planted["line"])
    is_it = finding.key.endswith(planted.get("key", "")) and planted.get("value", "") in finding.value
    return where and is_it and planted["says"] in str(finding)


def test_no_two_planted_mistakes_are_the_same():
    assert len({(planted["file"], planted["becomes"]) for planted in PLANTED}) == len(PLANTED) >= 20


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


def test_a_gpu_that_is_named_is_what_a_recipe_is_held_against(tmp_path, capsys):
    config = {"kv_cache_config": {"dtype": "fp8"}, "quant_config": {"quant_algo": "FP8"}}
    decode = {"engine": "torch", "engine_config": config}
    model = str(CHECKOUT / "models" / "tiny-chat")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"model": model, "workers": {"decode": decode}}))
    assert check_recipe.main([str(tmp_path), "--gpu", "24@8.6"]) == check_recipe.BAD
    said = capsys.readouterr().out
    assert "quant_algo: FP8; GPUs before compute capability 8.9" in said
    assert "kv_cache_config.dtype: fp8; GPUs before compute capability 8.9" in said
    assert check_recipe.main([str(tmp_path), "--gpu", "h100"]) == check_recipe.GOOD


def test_a_worker_on_a_gpu_that_is_not_named_is_told_and_not_taken_for_one_on_a_cpu(tmp_path, capsys):
    decode = {"engine": "torch", "devices": [1], "engine_config": {"quant_config": {"quant_algo": "FP8"}}}
    model = str(CHECKOUT / "models" / "tiny-chat")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"model": model, "workers": {"decode": decode}}))
    assert check_recipe.main([str(tmp_path), "--gpu", "h100"]) == check_recipe.GOOD
    assert "workers.decode.devices: 1; there is no GPU 1 among 1" in capsys.readouterr().out
    assert check_recipe.main([str(tmp_path), "--gpu", "h100", "--gpu", "h100"]) == check_recipe.GOOD
    assert "there is no GPU" not in capsys.readouterr().out


def test_workers_that_nothing_is_held_against_are_told_where_a_gpu_is_named(capsys):
    check_recipe.main([str(CHECKOUT / "recipes" / "qwen3"), "--gpu", "1@1.0"])
    assert "decode: 1 engine on GPU 0: not counted: no text engine of torch" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["h101", "24", "0@8.0", "24@8", "-1@8.0"])
def test_a_gpu_that_is_not_one_is_refused_by_what_can_stand_there(text, capsys):
    with pytest.raises(SystemExit):
        check_recipe.main([f"--gpu={text}"])
    assert "one of h100, h200, b200, gb200, or GiB@CAPABILITY" in capsys.readouterr().err
