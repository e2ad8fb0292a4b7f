"""The recipes hold the published values, as the contract quotes them; what is not published is in their READMEs."""

from __future__ import annotations

import pytest

from bireme.config import CHECKOUT
from bireme.engines.trtllm.config import prepared
from bireme.engines.trtllm.contract import contract
from bireme.recipe_files import load_recipe

QUOTED = contract()["example_engine_configs"]
RENAMED = {
    "free_gpu_memory_fraction": ("kv_cache_config", "free_gpu_memory_fraction"),
    "kv_dtype": ("kv_cache_config", "dtype"),
    "moe_backend": ("moe_config", "backend"),
    "cache_transceiver_backend": ("cache_transceiver_config", "backend"),
    "cuda_graph_max_batch_size": ("cuda_graph_config", "max_batch_size"),
}
_BACKEND = ("cache_transceiver_config", "backend")
_ONE_MODEL = ("speculative_config", "eagle3_one_model")
# example -> recipe, worker, keys that the example has and this recipe has otherwise (its README says why)
PAIRS = {
    "gemma3_vswa": ("gemma3-vswa-disagg", "prefill", ("prefill_disable_overlap_scheduler", _BACKEND)),
    "llama4_eagle_decode": ("llama4-eagle-disagg", "decode", (_BACKEND, _ONE_MODEL)),
    "deepseek_r1_wide_ep_decode": ("deepseek-r1-wide-ep", "decode", ("load_balancer", "max_num_tokens", "moe_backend")),
    "qwen3_prefill": ("qwen3-disagg", "prefill", ("free_gpu_memory_fraction",)),
}


def arguments(recipe, worker):
    return prepared(load_recipe(CHECKOUT / "recipes" / recipe, "").workers[worker].engine_config.llm_args)


def leaves(tree, path=()):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        elif key != "rule":
            yield (RENAMED[key] if not path and key in RENAMED else (*path, key)), value


def at(tree, path):
    for key in path:
        tree = tree[key]
    return tree


@pytest.mark.parametrize("example", PAIRS)
def test_a_recipe_has_the_values_that_were_quoted(example):
    recipe, worker, otherwise = PAIRS[example]
    found = arguments(recipe, worker)
    for path, value in leaves({key: value for key, value in QUOTED[example].items() if key not in otherwise}):
        assert path in otherwise or at(found, path) == value, ".".join(path)


def test_llama_4_s_prefill_drafts_as_its_decode_does():
    prefill, decode = (arguments("llama4-eagle-disagg", stage) for stage in ("prefill", "decode"))
    assert prefill["speculative_config"] == decode["speculative_config"]
    assert [prefill[key] for key in ("max_batch_size", "max_num_tokens", "max_seq_len")] == [1, 8192, 8192]


def test_deepseek_r1_s_slots_are_spread_over_its_ranks():
    found = arguments("deepseek-r1-wide-ep", "decode")
    assert found["moe_config"]["load_balancer"] == {"num_slots": 288, "layer_updates_per_iter": 2}
    assert 288 % found["moe_expert_parallel_size"] == 0


def test_the_readme_s_multi_token_prediction_over_deepseek_r1_disagg_is_the_published_one():
    from bireme.launch.override import add_settings

    drafts = "{decoding_type: MTP, num_nextn_predict_layers: 1}"
    decode = "workers.decode.engine_config"
    settings = [f"{decode}.speculative_config={drafts}", f"{decode}.max_num_tokens=512", f"{decode}.max_seq_len=8704"]
    override = add_settings("", settings)
    found = prepared(load_recipe("recipes/deepseek-r1-disagg", override).workers["decode"].engine_config.llm_args)
    for path, value in leaves(QUOTED["deepseek_r1_mtp_decode"]):
        assert at(found, path) == value, ".".join(path)


@pytest.mark.parametrize("recipe", sorted(path.parent.name for path in (CHECKOUT / "recipes").glob("*/recipe.yaml")))
def test_remote_code_runs_only_where_the_readme_says_so(recipe):
    for entry in load_recipe(CHECKOUT / "recipes" / recipe, "").workers.values():
        if entry.engine_config.llm_args.get("trust_remote_code"):
            assert "trust_remote_code: true" in (CHECKOUT / "recipes" / recipe / "README.md").read_text()
