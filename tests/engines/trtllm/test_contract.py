"""The contract's settings classes by release, and the check of a YAML against them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bireme.engines.trtllm import contract
from bireme.engines.trtllm.contract import CEILING, FLOOR, all_fields, fields, profile, validate

CLASSES = contract.contract()["config_classes"]
PLAIN = [name for name, entry in CLASSES.items() if "discriminator" not in entry]
MODEL = {"model": "org/model"}


def messages(tree, version=FLOOR, name="LlmArgs"):
    return [str(problem) for problem in validate(MODEL | tree if name == "LlmArgs" else tree, name, version)]


def loose_names(*path):
    """Return the names that a section of facts lists."""
    section = contract.contract()
    for name in path:
        section = section[name]
    return set(section) if isinstance(section, dict) else {re.split(r"[ (]", str(entry))[0] for entry in section}


# the notation and the facts


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("release", contract.PROFILES)
def test_every_class_can_be_read(name, release):
    found = all_fields(name, release)
    assert all(field.name == key for key, field in found.items())


@pytest.mark.parametrize("name", PLAIN)
def test_defaults_fit_their_types(name):
    for release in contract.PROFILES:
        for field in all_fields(name, release).values():
            has_default = field.default not in (None, "factory")
            assert not has_default or field.type.takes(field.default), (name, field.name)


def test_class_names_in_types_are_classes():
    for name in PLAIN:
        for field in all_fields(name, "1.3").values():
            assert not field.type.class_name or field.type.class_name in CLASSES, (name, field.name)


def test_the_arguments_are_those_that_were_read_at_1_2_1():
    own = loose_names("llm", "explicit_ctor_args") - {"**kwargs"}
    assert set(fields("LlmArgs", FLOOR)) == own | loose_names("torch_llm_args", "v1_2_1")


def test_the_arguments_of_1_3_add_and_lose_what_was_read():
    old, new = set(fields("LlmArgs", FLOOR)), set(fields("LlmArgs", CEILING))
    added = loose_names("torch_llm_args", "added_by_1_3_0rc7") | loose_names("torch_llm_args", "added_late_1_3")
    assert new - old == added - {"cp_config"}
    assert old - new == {"fail_fast_on_attention_window_too_large", "decoding_config"}


def test_the_kv_cache_s_fields_are_those_that_were_read():
    assert set(fields("KvCacheConfig", FLOOR)) == loose_names("kv_cache_config", "v1_2_1")
    added, removed = loose_names("kv_cache_config", "added_1_3"), loose_names("kv_cache_config", "removed_1_3")
    assert set(fields("KvCacheConfig", CEILING)) == (loose_names("kv_cache_config", "v1_2_1") | added) - removed


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("CacheTransceiverConfig", "cache_transceiver_config"),
        ("CudaGraphConfig", "cuda_graph_config"),
        ("MoeConfig", "moe_config"),
        ("MoeLoadBalancerConfig", "moe_load_balancer_config"),
        ("AttentionDpConfig", "attention_dp_config"),
        ("TorchCompileConfig", "torch_compile_config"),
        ("KvCacheConnectorConfig", "kv_connector_config"),
        ("LoraConfig", "lora_config"),
        ("PeftCacheConfig", "peft_cache_config"),
    ],
)
def test_blocks_have_the_fields_that_were_read(name, section):
    notes = {"rule", "disable", "added_1_3", "defaults_1_4", "late_1_3", "choices"}
    assert set(fields(name, FLOOR)) == loose_names(section) - notes


def test_every_default_of_the_facts_is_the_field_s():
    for name, entry in contract.contract()["torch_llm_args"]["v1_2_1"].items():
        said, field = entry[1], fields("LlmArgs", FLOOR)[name]
        if said in (None, True, False) or isinstance(said, int | float):
            assert field.default == said, name


# what is refused


def test_the_bare_model_is_enough():
    assert messages({}) == []


def test_a_typo_is_told_with_the_nearest_name():
    assert messages({"max_batchsize": 3}) == [
        "max_batchsize: 3; TensorRT-LLM 1.2 has no such key in LlmArgs; did you mean max_batch_size?"
    ]


def test_a_block_s_field_is_checked_as_deep_as_it_lies():
    (message,) = messages({"scheduler_config": {"dynamic_batch_config": {
        "enable_batch_size_tuning": True, "enable_max_num_tokens_tuning": "no",
        "dynamic_batch_moving_average_window": 128}}})  # fmt: skip
    assert message.startswith("scheduler_config.dynamic_batch_config.enable_max_num_tokens_tuning: 'no';")


def test_1_2_needs_all_of_dynamic_batching_and_1_3_none():
    tree = {"scheduler_config": {"dynamic_batch_config": {}}}
    assert len(messages(tree, FLOOR)) == 3 and messages(tree, CEILING) == []


def test_a_new_key_names_its_release_and_a_removed_one_too():
    assert "new in TensorRT-LLM 1.3" in messages({"model_kwargs": {}}, FLOOR)[0]
    assert "TensorRT-LLM 1.3 has removed it" in messages({"kv_cache_config": {"onboard_blocks": True}}, CEILING)[0]
    assert messages({"model_kwargs": {}}, CEILING) == []


def test_an_enum_s_newer_value_is_refused_in_the_older_release():
    tree = {"moe_config": {"backend": "AUTO"}}
    assert "CUTLASS, CUTEDSL" in messages(tree, FLOOR)[0] and messages(tree, CEILING) == []


def test_the_remedy_of_a_retired_key_is_one_that_the_release_takes():
    tree = {"enable_trtllm_sampler": True}
    assert "set sampler_type: TRTLLMSampler" in messages(tree, FLOOR)[0]
    assert "TRTLLMSampler" not in messages(tree, CEILING)[0]


def test_union_classes_are_chosen_by_their_key():
    drafts = {"decoding_type": "MTP", "num_nextn_predict_layers": 1, "eagle3_one_model": True}
    (message,) = messages({"speculative_config": drafts})
    assert message.startswith("speculative_config.eagle3_one_model: true;") and "MTPDecodingConfig" in message
    assert "missing; it says which kind" in messages({"sparse_attention_config": {}})[0]


@pytest.mark.parametrize(
    ("kind", "releases"),
    [
        ("DraftTarget", {"1.2"}),
        ("Draft_Target", {"1.3", "1.4"}),
        ("Eagle3", {"1.3", "1.4"}),
        ("Eagle", {"1.2", "1.3", "1.4"}),
    ],
)
def test_kinds_of_drafts_come_and_go(kind, releases):
    tree = {"speculative_config": {"decoding_type": kind}}
    taken = {profile(version) for version in contract.VERSIONS.values() if not messages(tree, version)}
    assert taken == releases


def test_the_alias_of_the_draft_model_is_taken():
    drafts = {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model_dir": "org/eagle"}
    assert messages({"speculative_config": drafts}) == []


def test_autodeploy_has_its_own_arguments_beside_the_others():
    tree = MODEL | {"world_size": 4, "transforms": {}, "kv_cache_config": {"tokens_per_block": 64}}
    assert validate(tree, "AutoDeployLlmArgs", FLOOR) == []
    assert messages({"world_size": 4})[0].startswith("world_size: 4; TensorRT-LLM 1.2 has no such key")


@pytest.mark.parametrize(
    ("version", "expected"),
    [("1.1.0", "1.2"), ("1.2.0", "1.2"), ("1.3.0rc29", "1.3"), ("1.4.0rc1", "1.4"), ("1.5.0", "1.4")],
)
def test_a_release_has_the_nearest_profile(version, expected):
    assert profile(version) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*fields("LlmArgs", FLOOR), "typo"]), JSON, max_size=6))
@settings(deadline=None)
def test_any_tree_gets_problems_that_can_be_read_and_stand_in_it(tree):
    for problem in validate(MODEL | tree, "LlmArgs", FLOOR):
        assert problem.path[0] in tree or problem.path[0] in MODEL
        assert problem.key and problem.reason and problem.remedy and str(problem).startswith(problem.key)


@given(st.data())
@settings(deadline=None)
def test_a_tree_of_defaults_is_never_refused(data):
    release = data.draw(st.sampled_from(contract.PROFILES))
    known = [
        one for one in all_fields("LlmArgs", release).values() if one.type.is_writable and one.default != "factory"
    ]
    chosen = data.draw(st.lists(st.sampled_from(known), max_size=8))
    assert (
        validate(MODEL | {one.name: one.default for one in chosen if one.name != "model"}, "LlmArgs", release + ".1")
        == []
    )
