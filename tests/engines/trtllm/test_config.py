"""From an engine YAML to the LLM's arguments."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bireme import llm_args
from bireme.config import EngineConfig, MultimodalConfig
from bireme.engines.trtllm import config
from bireme.engines.trtllm.config import check_arguments, llm_arguments, prepared
from bireme.engines.trtllm.contract import CEILING, FLOOR, validate
from bireme.errors import ConfigError
from bireme.recipe_files import load_recipe


def arguments(stage="decode", version=FLOOR, **yaml):
    return llm_arguments(EngineConfig(llm_args=yaml), "org/model", stage, version)


def refusal(stage="decode", version=FLOOR, **yaml):
    with pytest.raises(ConfigError) as caught:
        arguments(stage, version, **yaml)
    return str(caught.value)


def test_only_what_the_yaml_sets_is_passed_on():
    assert arguments() == {"model": "org/model"}
    assert arguments(max_batch_size=4) == {"model": "org/model", "max_batch_size": 4}


def test_a_null_is_passed_on_where_it_means_something():
    assert arguments(cuda_graph_config=None) == {"model": "org/model", "cuda_graph_config": None}


@pytest.mark.parametrize(("name", "path"), config.ALIASES.items())
def test_an_alias_gets_to_its_place(name, path):
    value = {"kv_cache_free_gpu_memory_fraction": 0.5, "kv_cache_dtype": "fp8"}.get(name, 1)
    found = arguments(**{name: value})
    assert name not in found and config.value_at(found, path) == value


def test_an_alias_joins_the_block_that_is_there():
    found = arguments(kv_cache_free_gpu_memory_fraction=0.5, kv_cache_config={"dtype": "fp8"})
    assert found["kv_cache_config"] == {"dtype": "fp8", "free_gpu_memory_fraction": 0.5}


def test_an_alias_that_contradicts_is_refused_and_one_that_agrees_is_not():
    assert "keep one of the two" in refusal(tp_size=2, tensor_parallel_size=4)
    assert arguments(tp_size=2, tensor_parallel_size=2)["tensor_parallel_size"] == 2


def test_bireme_s_own_keys_are_not_passed_on():
    scheduler = {"max_queue_size": 8, "max_queue_time_s": 1, "capacity_scheduler_policy": "MAX_UTILIZATION"}
    found = arguments(scheduler_config=scheduler, guided_decoding_config={"num_processes": 1}, mocker={"step_ms": 1})
    assert found == {"model": "org/model", "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}}


def test_a_block_of_own_keys_alone_goes_with_them():
    assert arguments(scheduler_config={"max_queue_size": 8}) == {"model": "org/model"}


def test_what_makes_text_is_left_out_with_one_warning_each(caplog):
    assert arguments(num_postprocess_workers=4, reasoning_parser="r1") == {"model": "org/model"}
    assert [record.args[1].key for record in caplog.records] == ["num_postprocess_workers", "reasoning_parser"]


@pytest.mark.parametrize("name", config.FOREIGN)
def test_what_the_recipe_or_the_stage_says_is_refused(name):
    assert refusal(**{name: True}).startswith(f"{name}: true;")


def test_arguments_are_checked_without_the_package_and_without_a_gpu():
    code = (
        "import sys; sys.modules['tensorrt_llm'] = sys.modules['torch'] = None\n"
        "from bireme.engines.trtllm.config import check_arguments\n"
        "print([problem.key for problem in check_arguments({'max_bacth_size': 3, 'max_beam_width': 2}, 'decode')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "['max_bacth_size']", done.stderr


def test_every_error_is_told_at_once():
    lines = refusal(max_batch_size="3", moe_config=3, max_beam_width=2, speculative_config={})
    assert len(lines.splitlines()) == 3


def test_the_yaml_is_not_changed():
    yaml = {"kv_cache_free_gpu_memory_fraction": 0.5, "kv_cache_config": {"dtype": "fp8"}, "mocker": {}}
    prepared(yaml)
    assert yaml == {"kv_cache_free_gpu_memory_fraction": 0.5, "kv_cache_config": {"dtype": "fp8"}, "mocker": {}}


@pytest.mark.parametrize("version", [CEILING, "1.4.0rc2", "1.4.3", "1.5.0rc1"])
def test_what_the_contract_does_not_list_is_left_to_the_installed_package(version, caplog):
    given = {"brand_new": 3, "moe_config": {"backend": "NEWEST"}, "num_serve_frontends": 2}
    found = arguments(version=version, stream_interval=0, **given)
    assert found == {"model": "org/model", "stream_interval": 0, "brand_new": 3, "moe_config": {"backend": "NEWEST"}}
    told = [record.args[1].key for record in caplog.records]
    assert told == ["num_serve_frontends", "stream_interval", "brand_new", "moe_config.backend"]


def test_a_value_of_another_type_is_refused_at_the_start_too():
    assert refusal(version=CEILING, max_batch_size="many").startswith("max_batch_size: 'many';")


def test_keys_that_bireme_and_tensorrt_llm_have_in_one_block_go_each_its_way():
    block = dict.fromkeys(MultimodalConfig.__struct_fields__, 1 << 20) | {"encoder_cache_max_bytes": "512MB"}
    assert arguments(version=CEILING, multimodal_config=block)["multimodal_config"] == {
        "encoder_cache_max_bytes": "512MB"
    }


def test_video_needs_1_3_and_has_its_own_class():
    assert "no VisualGen" in refusal("video_diffusion")
    found = arguments("video_diffusion", CEILING, attention_config={"backend": "VANILLA"})
    assert found["attention_config"] == {"backend": "VANILLA"}
    (problem,) = check_arguments({"attention_config": {"backend": "VANILA"}}, "video_diffusion", CEILING)
    assert "did you mean VANILLA" in problem.remedy and problem.severity == "error"


def test_rules_meet_only_values_of_the_right_type():
    problems = check_arguments({"max_batch_size": "many", "cuda_graph_config": 3, "pp_partition": "x"}, "decode")
    assert {problem.key for problem in problems} == {"max_batch_size", "cuda_graph_config", "pp_partition"}


# the way through the recipe


def test_a_recipe_s_yaml_reaches_the_llm_whole(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "model: org/model\nworkers:\n  decode:\n    engine: trtllm\n    engine_config: decode.yaml\n"
        "    engine_args: {max_batch_size: 8, kv_cache_config: {dtype: fp8}}\n"
    )
    (tmp_path / "decode.yaml").write_text(
        "max_batch_size: 4\nmax_seq_len: 128\nkv_cache_config: {tokens_per_block: 64}\nstream_interval: 10\n"
        "moe_config: {load_balancer: eplb.yaml}\nmoe_expert_parallel_size: 2\ntensor_parallel_size: 2\n"
    )
    (tmp_path / "eplb.yaml").write_text("num_slots: 8\n")
    entry = load_recipe(tmp_path, '{"workers": {"decode": {"engine_config": {"max_batch_size": 16}}}}').workers[
        "decode"
    ]
    found = llm_arguments(entry.engine_config, "org/model", "decode")
    assert found["max_batch_size"] == 16 == entry.engine_config.max_batch_size
    assert found["kv_cache_config"] == {"tokens_per_block": 64, "dtype": "fp8"}
    assert found["moe_config"] == {"load_balancer": {"num_slots": 8}} and found["stream_interval"] == 10
    assert entry.engine_config.max_seq_len == 128 and entry.engine_args == {}


def test_what_bireme_reads_of_a_silent_yaml_is_tensorrt_llm_s_default(tmp_path):
    (tmp_path / "recipe.yaml").write_text("model: org/model\nworkers: {decode: {engine: trtllm}}\n")
    found = load_recipe(tmp_path, "").workers["decode"].engine_config
    assert found.guided_decoding_backend is None and found.enable_chunked_prefill is False and found.llm_args == {}


def test_a_null_counts_as_unset_for_what_bireme_reads():
    known = {"max_batch_size": None, "kv_cache_config": {"dtype": None}}
    found = llm_args.split({"max_batch_size": None, "kv_cache_config": None, "other": 1}, known)
    assert found == llm_args.DEFAULTS | {"llm_args": {"max_batch_size": None, "kv_cache_config": None, "other": 1}}


NAMES = st.sampled_from(["tp_size", "max_batch_size", "kv_cache_config", "scheduler_config", "mocker", "x"])
TREES = st.recursive(
    st.none() | st.integers(-1, 3) | st.text(max_size=3),
    lambda inner: st.dictionaries(NAMES | st.sampled_from(["dtype", "max_queue_size"]), inner, max_size=3),
)


@given(st.dictionaries(NAMES | st.sampled_from([*config.ALIASES, *config.LEFT_OUT]), TREES, max_size=5))
@settings(deadline=None)
def test_what_is_accepted_is_what_the_contract_takes(tree):
    """Whatever the YAML, the arguments either raise with every reason, or fit the class they are made for."""
    try:
        found = arguments(**tree)
    except ConfigError as error:
        assert all("; " in line for line in str(error).splitlines())
    else:
        assert all(problem.is_by_release for problem in validate(found, "LlmArgs", FLOOR))
        assert not set(found) & {*config.ALIASES, *config.LEFT_OUT, "mocker"}
