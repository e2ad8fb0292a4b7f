"""The table of engine keys."""

from __future__ import annotations

import pytest

from bireme.config import CacheTransceiverConfig, EngineConfig, KvCacheConfig, MockerConfig, WorkerEntry
from bireme.engines.config import TABLES, all_keys, check_engine_config
from bireme.errors import ConfigError


@pytest.mark.parametrize("engine", TABLES)
def test_every_key_has_a_rule_on_every_engine(engine):
    assert {key for key, _ in all_keys(EngineConfig())} == set(TABLES[engine])


@pytest.mark.parametrize("engine", TABLES)
def test_defaults_pass_without_a_word(engine):
    assert check_engine_config(WorkerEntry(engine=engine)) == ()


def test_tensor_parallelism_is_refused_on_torch_with_a_remedy():
    entry = WorkerEntry(engine="torch", engine_config=EngineConfig(tensor_parallel_size=8))
    with pytest.raises(ConfigError, match="tensor_parallel_size: 8 on engine torch: one GPU per engine; set 1"):
        check_engine_config(entry)


def test_harmless_keys_are_named_once_in_one_line(caplog):
    caplog.set_level("INFO", "bireme.engines")
    config = EngineConfig(attn_backend="FLASHINFER", disable_overlap_scheduler=True, mocker=MockerConfig(step_ms=9))
    check_engine_config(WorkerEntry(engine="torch", engine_config=config))
    assert [record.getMessage() for record in caplog.records] == [
        "engine_config_ignored engine=torch keys=attn_backend,disable_overlap_scheduler,mocker.step_ms"
    ]


def test_a_refused_key_may_have_its_accepted_values():
    for dtype in ("auto", "bfloat16"):
        check_engine_config(WorkerEntry(engine_config=EngineConfig(kv_cache_config=KvCacheConfig(dtype=dtype))))
    with pytest.raises(ConfigError, match="kv_cache_config.dtype: 'fp8' on engine torch"):
        check_engine_config(WorkerEntry(engine_config=EngineConfig(kv_cache_config=KvCacheConfig(dtype="fp8"))))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (EngineConfig(max_batch_size=0), "max_batch_size: 0; 1 or more"),
        (EngineConfig(mocker=MockerConfig(step_ms=float("nan"))), "mocker.step_ms: nan"),
        (EngineConfig(kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=1.5)), "free_gpu_memory_fraction: 1.5"),
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
