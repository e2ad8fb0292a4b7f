import collections

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bireme.logits import filters
from bireme.logits.random import BLOCK, draw_key, least_of_blocks, noise_of_ids
from bireme.logits.rows import Row
from bireme.messages import SamplingParams

torch.set_num_threads(1)
SIZES = [10, 3000, 40 * BLOCK, 40 * BLOCK + 17]
FILTERS = [{}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.9, "min_p": 0.02}]


def logits(seed, spread, size=3000):
    values = np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)
    return np.round(values * 8) / np.float32(8) if seed % 2 else values  # with ties, as in bf16


def row_of(**params):
    return Row(SamplingParams(seed=1, **params), [], [], [], 10**6)


def kept(values, row):
    """Return the scaled logits, and which tokens the filters keep, one filter after the other over a sorted row."""
    scaled = (values - values.max()) * (np.float32(1) / np.float32(row.temperature))
    keeps = scaled >= np.sort(scaled)[::-1][(row.top_k or len(scaled)) - 1]
    if row.top_p < 1:
        order = np.argsort(-scaled, kind="stable")
        weights = (np.exp(scaled, dtype=np.float64) * keeps)[order]
        count = max(1, int((weights.cumsum() - weights < row.top_p * weights.sum()).sum()))
        keeps &= scaled >= scaled[order[count - 1]]
    return scaled, keeps & (scaled >= (np.log(row.min_p) if row.min_p else -np.inf))


def noise(key, size):
    ids = np.arange(size, dtype=np.uint32)
    return noise_of_ids(key, ids, least_of_blocks(key, ids // BLOCK))


@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from(SIZES),
    spread=st.sampled_from([0.0, 0.1, 1.0, 3.0, 30.0]),
    temperature=st.sampled_from([1e-6, 0.8, 1.0, 30.0]),
    top_k=st.sampled_from([0, 2, 7, 500, 3000]),
    top_p=st.sampled_from([0.01, 0.4, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.9, 1.0]),
)
def test_the_largest_logit_with_noise_of_those_kept_is_drawn(seed, size, spread, temperature, top_k, top_p, min_p):
    row = Row(SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=1), [], [], [], size)
    values, key = logits(seed, spread, size), draw_key(seed, 3)
    scaled, keeps = kept(values, row)
    scores = np.where(keeps, scaled + noise(key, size), -np.inf)
    token = filters.draw_row(values.copy(), row, key)
    assert scores[token] >= scores.max() - 1e-5 and 0 <= token < size
    assert keeps[token] or top_p < 1  # sums in another order may end a nucleus a token later


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("size", [40, 700])
def test_draws_follow_the_distribution_with_each_filter(params, size):
    values, row, draws = logits(2, 1.5, size), row_of(temperature=0.9, **params), 1000
    scaled, keeps = kept(values, row)
    weights = np.exp(scaled, dtype=np.float64) * keeps
    expected = weights / weights.sum() * draws
    tokens = [filters.draw_row(values.copy(), row, draw_key(at // 100, at % 100)) for at in range(draws)]
    counts = np.bincount(tokens, minlength=size)
    assert not counts[~keeps].any()
    common = expected > 5
    rare = expected[~common].sum()
    chi_square = ((counts - expected)[common] ** 2 / expected[common]).sum()
    chi_square += (counts[~common].sum() - rare) ** 2 / rare if rare > 5 else 0
    freedom = int(common.sum())
    assert chi_square < freedom + 3.3 * np.sqrt(2 * freedom) + 6  # about 0.1%


TEMPERATURES, ROUNDINGS = (0.7, 1.0), {1e-5: 0.002, 2.0**-8: 0.06}  # and what part of the draws each may change


@pytest.fixture(scope="module")
def changed():
    """Return how many of 1000 draws each rounding changes, of logits like those of a model with 50,000 tokens."""
    rng, found = np.random.default_rng(0), collections.Counter()
    rows = {temperature: row_of(temperature=temperature) for temperature in TEMPERATURES}
    for at in range(1000):
        values = rng.normal(0, 2.2, 49_152).astype(np.float32)
        values[rng.integers(0, 49_152, 40)] += rng.exponential(4, 40).astype(np.float32) + 6
        moved, key = np.abs(values) * rng.uniform(-0.5, 0.5, values.size), draw_key(1, at)
        rounded = {rounding: (values + rounding * moved).astype(np.float32) for rounding in ROUNDINGS}
        for temperature, row in rows.items():
            token = filters.draw_row(values.copy(), row, key)
            for rounding, other in rounded.items():
                found[temperature, rounding] += token != filters.draw_row(other.copy(), row, key)
    return found


@pytest.mark.parametrize(("rounding", "most"), ROUNDINGS.items())
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_rounding_changes_few_draws(changed, rounding, most, temperature):
    assert changed[temperature, rounding] <= 1000 * most


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("top_k", [1, 7, 500, 3000])
@pytest.mark.parametrize("top_p", [0.0, 0.4, 0.9, 0.999])
def test_a_row_alone_has_the_nucleus_that_it_has_in_a_batch(seed, spread, top_k, top_p):
    values = logits(seed, spread)
    values -= values.max()
    batched = filters.nucleus_of_batch(torch.from_numpy(values)[None], torch.tensor([[top_k]]), torch.tensor([[top_p]]))
    assert filters.nucleus_of_row(values, top_k, top_p) == pytest.approx(batched.item(), rel=1e-5, abs=1e-5)


def test_a_nucleus_is_the_smallest_set_that_reaches_p():
    values = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))
    for top_p, smallest in ((0.4, 0.5), (0.6, 0.25), (0.8, 0.125), (0.99, 0.125)):
        assert np.exp(filters.nucleus_of_row(values, 4, top_p)) == pytest.approx(smallest)


@pytest.mark.parametrize("params", [*FILTERS, {"top_k": 3, "min_p": 1.0}], ids=str)
def test_a_token_without_a_chance_is_never_drawn(params):
    values = np.full(3 * BLOCK + 5, -np.inf, dtype=np.float32)
    values[[1, BLOCK + 9, 3 * BLOCK + 4]] = 0.0
    for at in range(200):
        assert values[filters.draw_row(values.copy(), row_of(temperature=1.0, **params), draw_key(at, 0))] == 0
