"""How settings, model and memory become limits and pool sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bireme.config import EngineConfig, KvCacheConfig, SchedulerConfig
from bireme.engines.torch.geometry import LayerGeometry, group_layers
from bireme.engines.torch.pools.sizes import GpuMemory, gpu_pool_bytes, pool_sizes
from bireme.engines.torch.weights.limits import narrow_windows, resolve_limits
from bireme.errors import ConfigError

MODEL = SimpleNamespace(max_position_embeddings=4096, vocab_size=32000, rope_parameters={"rope_type": "default"})


def layers(*windows):
    return [LayerGeometry(2, 64, 64, window, torch.bfloat16, ()) for window in windows]


def sizes(config, *windows):
    return pool_sizes(config, resolve_limits(config, MODEL), group_layers(layers(*windows)))


def test_defaults_come_from_the_model():
    limits = resolve_limits(EngineConfig(), MODEL)
    assert (limits.max_seq_len, limits.max_input_len, limits.max_batch_size) == (4096, 4095, 64)


def test_a_small_step_makes_a_small_default_batch():
    assert resolve_limits(EngineConfig(max_num_tokens=16), MODEL).max_batch_size == 16


def test_layers_are_grouped_by_window_all_seeing_first():
    groups = group_layers(layers(512, 512, 0, 1024))
    assert [(group.window, group.layers) for group in groups] == [(0, (2,)), (1024, (3,)), (512, (0, 1))]
    assert groups[2].row_bytes == (512, 512)


def test_max_tokens_sets_the_pool():
    assert sizes(EngineConfig(kv_cache_config=KvCacheConfig(max_tokens=1000)), 0, 0) == [31]


def test_a_window_takes_no_more_than_a_batch_can_hold():
    config = EngineConfig(max_batch_size=2, max_num_tokens=128)
    full, windowed = sizes(config, 0, 64)
    assert windowed == 2 * ((64 + 128 - 2) // 32 + 2 + 2 * (63 // 32 + 2)) and full > windowed


def test_without_max_tokens_the_pools_fill_a_gibibyte_or_the_largest_batch():
    assert sizes(EngineConfig(max_batch_size=1), 0) == [128]
    many = sizes(EngineConfig(), *[0] * 32)[0]
    assert 0.95 * (1 << 30) < many * 32 * 32 * 512 <= 1 << 30


def test_a_pool_on_a_gpu_takes_its_fraction_of_what_weights_and_the_largest_step_leave():
    assert gpu_pool_bytes(GpuMemory(total=140, free=120, weights=15, peak=20), 0.9) == 90


def test_engines_on_one_gpu_get_equal_parts_whoever_starts_first():
    first = gpu_pool_bytes(GpuMemory(total=140, free=120, weights=15, peak=2), 0.9, [0.9])
    second = gpu_pool_bytes(GpuMemory(total=140, free=64, weights=15, peak=2), 0.9, [0.9])
    assert first == second == 63 - 15 - 2


def test_engines_on_one_gpu_share_it_as_their_fractions_say():
    memory = GpuMemory(total=100, free=90, weights=10, peak=0)
    assert (gpu_pool_bytes(memory, 0.25, [0.5]), gpu_pool_bytes(memory, 0.5, [0.25])) == (15, 40)


def test_a_pool_takes_no_more_than_is_free():
    assert gpu_pool_bytes(GpuMemory(total=100, free=20, weights=10, peak=5), 0.5, [0.4]) == 15


def test_windows_are_narrowed_by_a_list_that_repeats():
    narrowed = narrow_windows(layers(0, 0, 512, 512), (256, 4096), 4096)
    assert [layer.window for layer in narrowed] == [256, 0, 256, 512]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (EngineConfig(max_seq_len=8192), "max_seq_len: 8192; the model was made for 4096"),
        (EngineConfig(max_batch_size=0), "max_batch_size: 0; at least 1"),
        (EngineConfig(scheduler_config=SchedulerConfig(max_queue_size=0)), "max_queue_size: 0"),
        (EngineConfig(kv_cache_config=KvCacheConfig(tokens_per_block=0)), "tokens_per_block: 0"),
    ],
)
def test_settings_out_of_range_name_key_and_value(config, text):
    with pytest.raises(ConfigError, match=text):
        resolve_limits(config, MODEL)


def test_a_model_without_a_length_needs_one():
    nameless: Any = SimpleNamespace(vocab_size=100)
    with pytest.raises(ConfigError, match="max_seq_len: not set"):
        resolve_limits(EngineConfig(), nameless)
    assert resolve_limits(EngineConfig(max_seq_len=100), nameless).max_seq_len == 100
