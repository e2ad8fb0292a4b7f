"""Which keys each engine honors, and what values make sense."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from bireme.config import CacheTransceiverConfig, EngineConfig, KvCacheConfig, MockerConfig, WorkerEntry
from bireme.engines.config import check_engine_config, rules_of
from bireme.errors import ConfigError
from bireme.recipe_files import make_recipe
from bireme.settings import Engines, SpeculativeConfig

ENGINES = get_args(next(field.type for field in msgspec.structs.fields(WorkerEntry) if field.name == "engine"))


def rules_beside(kind):
    """Return what stands beside the keys of a settings class and of its blocks."""
    for field in msgspec.structs.fields(kind):
        yield from (part for part in get_args(field.type) if isinstance(part, Engines))
        if isinstance(field.default, msgspec.Struct):
            yield from rules_beside(type(field.default))


def test_the_rules_beside_keys_name_engines_that_there_are():
    assert {name for engines in rules_beside(EngineConfig) for name in engines.rules} <= set(ENGINES)


def test_a_key_that_says_nothing_is_honored_by_every_engine():
    assert {rules_of(engine)["max_batch_size"].kind for engine in ENGINES} == {"honored"}


def test_a_rule_beside_a_block_holds_for_all_its_keys():
    kinds = {key: rule.kind for key, rule in rules_of("torch").items() if key.startswith("mocker.")}
    assert kinds == dict.fromkeys((f"mocker.{name}" for name in MockerConfig.__struct_fields__), "harmless")


@pytest.mark.parametrize("engine", ENGINES)
def test_defaults_pass_without_a_word(engine):
    assert check_engine_config(WorkerEntry(engine=engine)) == ()


def test_tensor_parallelism_is_refused_on_torch_with_a_remedy():
    entry = WorkerEntry(engine="torch", engine_config=EngineConfig(tensor_parallel_size=8))
    with pytest.raises(ConfigError, match="tensor_parallel_size: 8 on engine torch: one GPU per engine; set 1"):
        check_engine_config(entry)


def test_harmless_keys_are_named_once_in_one_line(caplog):
    caplog.set_level("INFO", "bireme.engines")
    config = EngineConfig(attn_backend="FLASHINFER", mocker=MockerConfig(step_ms=9))
    check_engine_config(WorkerEntry(engine="torch", engine_config=config))
    assert [record.getMessage() for record in caplog.records] == [
        "engine_config_ignored engine=torch keys=attn_backend,mocker.step_ms"
    ]


def test_a_refused_key_may_have_its_accepted_values():
    for dtype in ("auto", "bfloat16", "fp8"):
        check_engine_config(WorkerEntry(engine_config=EngineConfig(kv_cache_config=KvCacheConfig(dtype=dtype))))
    with pytest.raises(ConfigError, match="kv_cache_config.dtype: 'nvfp4' on engine torch"):
        check_engine_config(WorkerEntry(engine_config=EngineConfig(kv_cache_config=KvCacheConfig(dtype="nvfp4"))))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (EngineConfig(max_batch_size=0), "max_batch_size: 0; 1 or more"),
        (EngineConfig(mocker=MockerConfig(step_ms=float("nan"))), "mocker.step_ms: nan"),
        (
            EngineConfig(kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=1.0)),
            "kv_cache_config.free_gpu_memory_fraction: 1.0; less than 1",
        ),
        (EngineConfig(max_seq_len=1), "max_seq_len: 1; 2 or more"),
        (EngineConfig(max_input_len=100, max_seq_len=100), "max_input_len: 100; max_seq_len 100"),
        (
            EngineConfig(cache_transceiver_config=CacheTransceiverConfig(kv_transfer_timeout_ms=0)),
            "kv_transfer_timeout_ms: 0; 1 or more",
        ),
    ],
)
def test_values_out_of_range_are_refused(config, text):
    with pytest.raises(ConfigError) as refusal:
        check_engine_config(WorkerEntry(engine="mocker", engine_config=config))
    assert text in str(refusal.value)


@pytest.mark.parametrize("kind", ["MTP", "PARD", "Medusa", "Lookahead", "AUTO"])
def test_a_kind_of_draft_that_torch_lacks_is_refused_by_name_before_its_own_keys_are(tmp_path, kind):
    block = {"decoding_type": kind, "num_nextn_predict_layers": 1, "eagle3_one_model": True}
    tree = {"workers": {"decode": {"engine_config": {"speculative_config": block}}}}
    with pytest.raises(ConfigError, match=rf"decode.*decoding_type: '{kind}' on engine torch: .*NGram, .*trtllm"):
        make_recipe(tree, tmp_path)


def test_a_schedule_of_drafts_may_come_from_json_whose_keys_are_strings(tmp_path):
    block = {"decoding_type": "NGram", "max_draft_len": 4, "draft_len_schedule": {"1": 4, "8": 2}}
    tree = {"model": "x", "workers": {"decode": {"engine_config": {"speculative_config": block}}}}
    recipe = make_recipe(tree, tmp_path)
    assert recipe.workers["decode"].engine_config.speculative_config.draft_len_schedule == {1: 4, 8: 2}


EAGLE = {"decoding_type": "Eagle3", "max_draft_len": 4, "speculative_model": "a", "eagle3_one_model": True}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"max_draft_len": 4}, "decoding_type: missing; set NGram"),
        ({"decoding_type": "NGram"}, "max_draft_len: missing"),
        ({"decoding_type": "DraftTarget", "max_draft_len": 4}, "speculative_model: missing; DraftTarget drafts with"),
        ({"decoding_type": "Draft_Target", "speculative_model": "a"}, "max_draft_len: missing"),
        ({"decoding_type": "Eagle3", "max_draft_len": 4}, "speculative_model: missing; Eagle3 drafts with"),
        ({**EAGLE, "eagle_choices": [[0], [1]]}, "eagle_choices: .*one chain here, no tree"),
        ({**EAGLE, "use_dynamic_tree": True}, "use_dynamic_tree: True .*no tree"),
        ({**EAGLE, "posterior_threshold": 0.1}, "posterior_threshold: 0.1 .*what the model draws"),
        ({"decoding_type": "NGram", "max_draft_len": 0}, "max_draft_len: 0; 1 or more"),
        ({"decoding_type": "NGram", "max_draft_len": 4, "is_public_pool": True}, "is_public_pool: True .*own tokens"),
        ({"decoding_type": "NGram", "max_draft_len": 4, "draft_len_schedule": {2: 4}}, "begins with 1: 4"),
        ({"decoding_type": "NGram", "max_draft_len": 4, "draft_len_schedule": {1: 4, 8: 5}}, "5 is more than"),
        (
            {"decoding_type": "Synthetic", "max_draft_len": 4, "acceptance_rate": 0.5},
            "'Synthetic' .*load_format: dummy",
        ),
        (
            {"decoding_type": "NGram", "max_draft_len": 4, "acceptance_rate": 0.5},
            "acceptance_rate: 0.5; .*Synthetic's",
        ),
        (
            {"decoding_type": "NGram", "max_draft_len": 4, "speculative_model": "a"},
            "speculative_model: 'a'; NGram drafts without",
        ),
    ],
)
def test_settings_of_drafts_that_make_no_sense_are_refused(block, text):
    config = EngineConfig(speculative_config=SpeculativeConfig(**block))
    with pytest.raises(ConfigError, match=f"speculative_config.*{text}"):
        check_engine_config(WorkerEntry(engine="torch", engine_config=config))
