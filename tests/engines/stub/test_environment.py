"""The python and the environment of an engine process."""

from __future__ import annotations

import msgspec
import pytest

from bireme.config import CHECKOUT, EngineConfig, KvCacheConfig, Recipe, WorkerEntry
from bireme.engines.stub.environment import (
    RECIPE_VARIABLE,
    devices_of,
    engine_environment,
    find_python,
    gpu_neighbors,
    num_threads,
    usable_cores,
)
from bireme.errors import ConfigError


def recipe_of(**entry):
    return Recipe(model="none", name="r", workers={"decode": WorkerEntry(**entry)})


def test_a_named_python_wins():
    assert find_python({"BIREME_ENGINE_PYTHON": "/bin/sh"}) == "/bin/sh"


def test_a_named_python_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="BIREME_ENGINE_PYTHON: /no/python is not an executable"):
        find_python({"BIREME_ENGINE_PYTHON": "/no/python"})


def test_a_worker_s_own_python_wins_and_its_programs_come_first(tmp_path):
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.symlink_to("/bin/sh")
    recipe = recipe_of(env={"BIREME_ENGINE_PYTHON": str(python)})
    result = engine_environment(recipe, "decode", tmp_path, {"BIREME_ENGINE_PYTHON": "/bin/sh", "PATH": "/usr/bin"})
    assert find_python(result) == str(python)
    assert result["PATH"] == f"{python.parent}:/usr/bin"


@pytest.mark.parametrize(("before", "expected"), [("/opt/mpi/lib", "/opt/mpi/lib"), ("", None)])
def test_tritonserver_s_libraries_are_not_the_engine_s(before, expected, tmp_path):
    base = {"BIREME_LIBRARY_PATH": before, "LD_LIBRARY_PATH": "/run/lib:/site/nvidia_pytriton.libs"}
    result = engine_environment(recipe_of(), "decode", tmp_path, base)
    assert result.get("LD_LIBRARY_PATH") == expected and "BIREME_LIBRARY_PATH" not in result


def test_threads_are_shared_among_the_recipes_engines():
    recipe = recipe_of(replicas=2)
    assert num_threads(recipe, recipe.workers["decode"]) == max(1, usable_cores() // 2)
    assert num_threads(recipe, WorkerEntry(num_threads=7)) == 7


@pytest.mark.parametrize(
    ("devices", "replicas", "expected"),
    [((0, 1), 2, [(0,), (1,)]), ((0, 1, 2, 3), 2, [(0, 1), (2, 3)]), ((5,), 2, [(5,), (5,)])],
)
def test_replicas_get_their_part_of_the_devices(devices, replicas, expected):
    entry = WorkerEntry(devices=devices, replicas=replicas)
    assert [devices_of(entry, name) for name in ("decode", "decode_1")] == expected


def fraction(value, **entry):
    config = EngineConfig(kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=value))
    return WorkerEntry(engine_config=config, **entry)


def test_engines_without_devices_are_all_on_the_first_gpu():
    recipe = Recipe(model="none", name="r", workers={"prefill": fraction(0.3), "decode": fraction(0.5, replicas=2)})
    assert gpu_neighbors(recipe, "prefill") == (0.5, 0.5)
    assert gpu_neighbors(recipe, "decode_1") == (0.3, 0.5)


def test_engines_on_other_gpus_are_no_neighbors():
    workers = {"prefill": fraction(0.3, devices=(0,)), "decode": fraction(0.5, devices=(0, 1), replicas=2)}
    recipe = Recipe(model="none", name="r", workers=workers)
    assert [gpu_neighbors(recipe, name) for name in ("prefill", "decode", "decode_1")] == [(0.5,), (0.3,), ()]


def test_the_environment_has_threads_devices_and_the_recipe(tmp_path):
    recipe = recipe_of(num_threads=3, devices=(4,), env={"MY_SETTING": "1"})
    result = engine_environment(recipe, "decode", tmp_path, {"PYTHONHOME": "/x", "PYTHONPATH": "/lib"})
    assert (result["OMP_NUM_THREADS"], result["OMP_WAIT_POLICY"]) == ("3", "PASSIVE")
    assert 0 < int(result["GOMP_SPINCOUNT"]) < 10_000  # a neighbor's cores are not held for long
    assert (result["CUDA_VISIBLE_DEVICES"], result["MY_SETTING"]) == ("4", "1")
    assert (result["ONEDNN_PRIMITIVE_CACHE_CAPACITY"], result["LRU_CACHE_CAPACITY"]) == ("128", "128")
    assert "PYTHONHOME" not in result
    assert result["PYTHONPATH"] == f"{CHECKOUT}:/lib"
    assert result["BIREME_RUN_DIR"] == str(tmp_path)
    assert msgspec.json.decode(result[RECIPE_VARIABLE], type=Recipe) == recipe


def test_the_operator_s_number_of_kept_products_wins(tmp_path):
    names = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"
    result = engine_environment(recipe_of(env={names[1]: "9"}), "decode", tmp_path, {names[0]: "1024"})
    assert [result[name] for name in names] == ["1024", "9"]
