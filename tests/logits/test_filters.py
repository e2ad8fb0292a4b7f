import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bireme.logits import filters
from bireme.logits.rows import Row
from bireme.messages import SamplingParams

torch.set_num_threads(1)
SIZE = 3000


def logits(seed, spread):
    values = torch.randn(1, SIZE, generator=torch.Generator().manual_seed(seed)) * spread
    return (values * 8).round() / 8 if seed % 2 else values  # with ties, as in bf16


@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.1, 1.0, 3.0, 30.0]),
    top_k=st.sampled_from([0, 2, 7, 500, SIZE]),
    top_p=st.sampled_from([0.01, 0.4, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.9]),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_both_ways_take_the_token_at_that_place_of_the_distribution(seed, spread, top_k, top_p, min_p, uniform):
    row = Row(SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p, seed=1), [], [], [], SIZE)
    values, uniform = logits(seed, spread), float(np.float32(uniform))
    alone = filters.draw_row(values[0].numpy().copy(), row, uniform)
    batched = filters.draw_batch(values.clone(), [row], np.array([uniform]))[0]
    scaled = ((values - values.max()) / 0.8)[0].numpy()
    least = max(filters.nucleus_of_row(scaled, top_k or SIZE, top_p), np.log(min_p) if min_p else -np.inf)
    weights = np.where(scaled >= least, np.exp(scaled, dtype=np.float64), 0.0)
    cumulative = np.concatenate([[0.0], weights.cumsum() / weights.sum()])
    for token in (alone, batched):
        assert weights[token] > 0 or top_p == 1.0
        assert cumulative[token] - 1e-5 <= uniform <= cumulative[token + 1] + 1e-5


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("top_k", [1, 7, 500, SIZE])
@pytest.mark.parametrize("top_p", [0.0, 0.4, 0.9, 0.999])
def test_a_row_alone_has_the_nucleus_that_it_has_in_a_batch(seed, spread, top_k, top_p):
    values = logits(seed, spread)
    values -= values.max()
    batched = filters.nucleus_of_batch(values, torch.tensor([[top_k]]), torch.tensor([[top_p]])).item()
    assert filters.nucleus_of_row(values[0].numpy(), top_k, top_p) == pytest.approx(batched, rel=1e-5, abs=1e-5)


def test_a_nucleus_is_the_smallest_set_that_reaches_p():
    values = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))
    for top_p, smallest in ((0.4, 0.5), (0.6, 0.25), (0.8, 0.125), (0.99, 0.125)):
        assert np.exp(filters.nucleus_of_row(values, 4, top_p)) == pytest.approx(smallest)


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (1.0 - 2.0**-53, 2)])
def test_a_draw_at_the_edge_of_the_distribution_takes_a_possible_token(uniform, token):
    row = Row(SamplingParams(temperature=1.0, seed=1), [], [], [], 4)
    values = np.array([-np.inf, 0.0, -1.0, -np.inf], dtype=np.float32)
    assert filters.draw_row(values.copy(), row, uniform) == token
    assert filters.draw_batch(torch.from_numpy(values)[None], [row], np.array([uniform])) == [token]
