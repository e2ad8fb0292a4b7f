"""Products with experts that stay MXFP4 equal those with what they stand for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.language", reason="triton is not installed: it comes with torch's CUDA builds")
from bireme.engines.torch.geometry import ClampedGate
from bireme.engines.torch.kernels import experts, mxfp4_experts
from bireme.engines.torch.storage import Mxfp4Weight
from tests.engines.torch import kernel_references as references

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLAMP = ClampedGate(limit=2.0, alpha=1.702)
EXPERTS, TOP, SIZE, INNER = 6, 2, 96, 64  # sizes that fill no tile
close = torch.testing.assert_close


@pytest.fixture
def rng():
    return torch.Generator(DEVICE).manual_seed(0)


@pytest.fixture
def randn(rng):
    return lambda *shape: torch.randn(*shape, generator=rng, device=DEVICE)


@pytest.fixture
def weights(rng):
    """Return gate and up, and down: the first row's exponents are the smallest that there are."""

    def make(rows, columns):
        draw = torch.randint(0, 256, (EXPERTS, rows, columns // 2), generator=rng, device=DEVICE)
        exponents = torch.randint(122, 127, (EXPERTS, rows, columns // 32), generator=rng, device=DEVICE)
        exponents[:, 0] = 0
        return Mxfp4Weight(draw.to(torch.uint8), exponents.to(torch.uint8))

    return make(2 * INNER, SIZE), make(SIZE, INNER)


def plain(weight):
    return torch.stack([weight.expert(index) for index in range(len(weight))])


@pytest.mark.parametrize("rows", [3, 40, 100])  # a pair a tile, small tiles, large ones
def test_products_of_pairs_equal_those_of_plain_weights(randn, weights, rows):
    x, biases = randn(rows, SIZE), (randn(EXPERTS, 2 * INNER), randn(EXPERTS, SIZE))
    chosen, _ = experts.choose_experts(randn(rows, EXPERTS), TOP, True)
    tiles, of = experts.group_pairs(chosen, EXPERTS), chosen.view(-1)
    gated = mxfp4_experts.mxfp4_linear(mxfp4_experts.even_first(x), weights[0], tiles, True, biases[0], CLAMP)
    expected = references.experts_linear(x, plain(weights[0]), of, True, False, biases[0], CLAMP)
    close(gated, mxfp4_experts.even_first(expected), atol=1e-4, rtol=1e-4)
    found = mxfp4_experts.mxfp4_linear(gated, weights[1], tiles, bias=biases[1])
    close(found, references.experts_linear(expected, plain(weights[1]), of, bias=biases[1]), atol=1e-3, rtol=1e-4)


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter has no products of bfloat16")
def test_in_bfloat16_products_differ_by_its_rounding(randn, weights):
    x = randn(40, SIZE).bfloat16()
    chosen, _ = experts.choose_experts(randn(40, EXPERTS), TOP, True)
    tiles = experts.group_pairs(chosen, EXPERTS)
    found = mxfp4_experts.mxfp4_linear(mxfp4_experts.even_first(x), weights[0], tiles).float()
    expected = references.experts_linear(x, plain(weights[0]), chosen.view(-1)).float()
    assert float((found - expected).norm() / expected.norm()) < 0.003


def test_the_experts_of_one_row_equal_plain_ones(randn, weights):
    x, norm, biases = randn(1, SIZE), randn(SIZE), (randn(EXPERTS, 2 * INNER), randn(EXPERTS, SIZE))
    chosen, shares = experts.choose_experts(randn(1, EXPERTS), TOP, True)
    own = (*map(plain, weights), False, *biases, CLAMP)
    expected = references.add_row_experts(x, norm, 1e-5, chosen, shares, *own)
    mxfp4_experts.add_row_mxfp4(x, norm, 1e-5, chosen, shares, *weights, *biases, CLAMP)
    close(x, expected, atol=1e-3, rtol=1e-4)


def test_all_values_and_powers_come_out_exact():
    """Each byte once, in rows of one group, and every exponent but the one that is no number."""
    values = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(1, 16, 16)
    one = torch.eye(32, device=DEVICE)
    for exponent in (0, 1, 100, 127, 128, 250):
        weight = Mxfp4Weight(values, torch.full((1, 16, 1), exponent, dtype=torch.uint8, device=DEVICE))
        chosen = torch.zeros(32, 1, dtype=torch.int32, device=DEVICE)
        found = mxfp4_experts.mxfp4_linear(mxfp4_experts.even_first(one), weight, experts.group_pairs(chosen, 1))
        assert torch.equal(found.t(), weight.expert(0))
