"""What a decode step has to read at least, by which engine_gpu.py judges it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.engine_gpu import step_bytes

SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
ATTENTION = 2 * 8 * 4 * (2 * 2 + 2 * 1)  # weights of two layers
A_TOKEN = 2 * 2 * 4  # keys and values of two layers


def test_a_step_reads_the_weights_and_what_its_rows_see():
    config = SimpleNamespace(**SIZES, vocab_size=10, intermediate_size=16)
    weights = ATTENTION + 2 * 3 * 8 * 16 + 10 * 8
    assert step_bytes(config, [100, 7]) == 2 * (weights + 107 * A_TOKEN)


def test_layers_with_a_window_read_no_more_than_that():
    config = SimpleNamespace(**SIZES, vocab_size=10, intermediate_size=16, sliding_window=50)
    whole = step_bytes(config, [100, 7])
    config.layer_types = ["sliding_attention", "full_attention"]
    assert whole - step_bytes(config, [100, 7]) == 2 * 50 * A_TOKEN / 2


@pytest.mark.parametrize(("rows", "expected"), [(1, 2.0), (2, 3.0), (1000, 4.0)])
def test_of_a_mixture_a_step_reads_the_experts_that_its_rows_choose(rows, expected):
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = SimpleNamespace(**SIZES, vocab_size=10, **mixture)
    rest = ATTENTION + 2 * 8 * 4 + 10 * 8
    assert step_bytes(config, [0] * rows) == pytest.approx(2 * (rest + 2 * 3 * 8 * 16 * expected))
