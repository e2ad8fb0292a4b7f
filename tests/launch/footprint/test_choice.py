"""serve.py --model: the context and the KV pool that fit, and values that are asked for."""

from __future__ import annotations

import json

import pytest

from bireme.launch.footprint.choice import choose
from bireme.launch.footprint.launch_footprint import LaunchFootprint
from bireme.launch.footprint.machine_memory import MachineMemory
from bireme.launch.preflight import check_memory
from bireme.launch.quick_recipe import write_recipe
from bireme.recipe_files import load_recipe
from tests.launch.footprint.test_launch_footprint import GIB, LLAMA_8B


@pytest.fixture
def served(tmp_path):
    """Return the recipe that --model makes of an 8B model, and of what is chosen for a machine."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA_8B))

    def make(machine, **settings):
        engine = {"dtype": "bfloat16", "load_format": "dummy"} | settings
        override = json.dumps({"workers": {"decode": {"engine_config": engine}}})
        chosen = choose(load_recipe(write_recipe(tmp_path, str(model)), override), machine)
        recipe = load_recipe(write_recipe(tmp_path, str(model), chosen=chosen.config), override)
        return recipe.workers["decode"].engine_config, chosen.says, recipe

    return make


def test_a_machine_with_room_gets_the_whole_context(served):
    config, says, _ = served(MachineMemory(64 * GIB))
    assert (config.max_seq_len, config.kv_cache_config.max_tokens) == (None, 131_072)
    assert "a context of 131,072 tokens," in says


def test_a_smaller_machine_gets_the_context_that_fits_and_is_told(served):
    machine = MachineMemory(20 * GIB)
    config, says, recipe = served(machine)
    assert 1024 < config.max_seq_len == config.kv_cache_config.max_tokens < 131_072
    assert f"a context of {config.max_seq_len:,} tokens of 131,072, which do not fit" in says
    assert list(LaunchFootprint(recipe, machine, 8).problems()) == []


def test_a_gpu_s_context_is_what_its_pool_holds(served):
    config, says, _ = served(MachineMemory(64 * GIB, gpus=(24 * GIB,)))
    assert config.kv_cache_config.max_tokens is None
    assert 8192 < config.max_seq_len < 131_072 and "of 24,576 MiB" in says


def test_what_is_asked_for_stays(served):
    config, says, _ = served(MachineMemory(20 * GIB), max_seq_len=4096, kv_cache_config={"max_tokens": 8192})
    assert (config.max_seq_len, config.kv_cache_config.max_tokens) == (4096, 8192)
    assert "a context of 4,096 tokens as asked, KV for 8,192" in says


def test_what_is_asked_for_and_does_not_fit_is_named_with_what_would(served):
    machine = MachineMemory(20 * GIB)
    _, _, recipe = served(machine, kv_cache_config={"max_tokens": 1_000_000})
    (found,) = LaunchFootprint(recipe, machine, 8).problems()
    assert found.key == "workers.decode.engine_config.kv_cache_config.max_tokens" and found.value == "1000000"


def test_a_load_in_float32_that_does_not_fit_is_one_in_bfloat16(served):
    config, says, _ = served(MachineMemory(40 * GIB), dtype="float32")
    assert config.dtype == "float32"


def test_what_can_t_be_counted_is_left_as_it_is(tmp_path):
    assert choose(load_recipe(write_recipe(tmp_path, "org/model")), MachineMemory(GIB)) is None


def test_a_launch_of_a_model_that_lies_does_not_start(served, tmp_path):
    _, _, recipe = served(MachineMemory(64 * GIB))
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_8B | {"hidden_size": -4096}))
    (problem,) = check_memory(recipe, 8)
    assert "hidden_size: -4096" in problem
