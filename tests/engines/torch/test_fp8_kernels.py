"""Products of 8-bit floats equal plain torch: on a GPU as they are, elsewhere in Triton's interpreter."""

from __future__ import annotations

import functools

import pytest
import torch

pytest.importorskip("triton.language", reason="triton is not installed: it comes with torch's CUDA builds")
from bireme.engines.torch.kernels import one_row_fp8, rounded_linear, row_wise
from bireme.engines.torch.storage import BLOCK, Fp8Weight, WeightForm, form_of, restored, rounded, rounds_activations
from bireme.engines.torch.weights.stored_linear import round_into as _round
from tests.engines.torch import kernel_references as references

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = [WeightForm.FP8_CHANNEL, WeightForm.FP8_BLOCKS]
close = torch.testing.assert_close


@pytest.fixture
def randn():
    rng = torch.Generator(DEVICE).manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=rng, device=DEVICE)


def stored(weight, form, is_one=False):
    """Return the weight in this form."""
    rows, columns = weight.shape
    shape = (-(-rows // BLOCK), -(-columns // BLOCK)) if form is WeightForm.FP8_BLOCKS else (rows,)
    found = Fp8Weight(weight.to(torch.float8_e4m3fn), torch.empty(shape, device=weight.device))
    _round(weight, found, is_one)
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("is_gated", "is_gelu"), [(False, False), (True, False), (True, True)])
def test_a_row_as_it_is_is_multiplied_as_in_plain_torch(randn, form, is_gated, is_gelu):
    x, norm, bias = randn(1, 160), randn(160), None if is_gated else randn(144)
    weight = stored(randn(512 if is_gated else 144, 160), form)
    add_to = None if is_gated else randn(1, 144)
    whole = weight.dequantized()
    expected = references.one_row_linear(x, whole, bias, norm, 1e-5, is_gated, is_gelu, add_to)
    found = one_row_fp8.one_row_fp8(x, weight, bias, norm, 1e-5, is_gated, is_gelu, add_to)
    close(found, expected, atol=2e-4, rtol=1e-4)
    exact = x.bfloat16(), norm.bfloat16()  # read as words
    expected = references.one_row_linear(exact[0].float(), whole, bias, exact[1].float(), 1e-5, is_gated, is_gelu)
    found = one_row_fp8.one_row_fp8(exact[0], weight, bias, exact[1], 1e-5, is_gated, is_gelu)
    close(found.float(), expected, atol=0.05, rtol=0.01)


def test_a_channel_s_scale_loses_less_than_that_of_its_largest_value_and_cuts_nothing_off(randn):
    weight = torch.cat([randn(60, 576), torch.zeros(1, 576, device=DEVICE)])
    found = stored(weight, WeightForm.FP8_CHANNEL)
    largest = weight.abs().amax(1).clamp(min=1e-9) / 448
    plain = Fp8Weight((weight / largest[:, None]).to(torch.float8_e4m3fn), largest)
    lost, before = ((one.dequantized() - weight).square().sum(1) for one in (found, plain))
    assert torch.all(lost <= 1.0001 * before) and lost.sum() < 0.93 * before.sum()
    assert torch.all(found.scales[:60] >= 0.9999 * largest[:60])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [17, 70])
def test_rounded_rows_are_multiplied_as_in_plain_torch(randn, form, rows):
    weight, bias = stored(randn(272, 288), form), randn(272)
    values, scales = rounded(randn(rows, 288), form)
    expected = restored(values, scales) @ weight.dequantized().t() + bias
    if form is WeightForm.FP8_BLOCKS:
        scales = scales.t().contiguous().t()
    most = 0.05 if DEVICE == "cuda" else 2e-3  # Hopper sums products of 8-bit floats with 14 bits
    close(rounded_linear.ours(values, scales, weight, torch.float32, bias), expected, atol=most, rtol=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [17, 100, 2048])
def test_torchs_product_of_rounded_rows_is_ours(randn, form, rows):
    weight, bias = stored(randn(512, 1024), form), randn(512).bfloat16()
    values, scales = row_wise.rounded_rows(randn(rows, 1024).bfloat16(), form)
    given = (values, scales, weight, torch.bfloat16, bias)
    if form is WeightForm.FP8_BLOCKS and not rounded_linear._is_torchs(values, weight, torch.bfloat16):
        pytest.skip("torch has no product with blocks on this GPU, or not of so many rows")
    close(rounded_linear.torchs(*given), rounded_linear.ours(*given), atol=0.5, rtol=0.01)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("blocks", [1, 3, 4])
def test_rows_of_blocks_that_cublas_would_take_for_padded_ones_are_multiplied_right(randn, blocks):
    weight = stored(randn(512, 128 * blocks), WeightForm.FP8_BLOCKS)
    values, scales = row_wise.rounded_rows(randn(40, 128 * blocks).bfloat16(), WeightForm.FP8_BLOCKS)
    given = (values, scales, weight, torch.bfloat16)
    close(rounded_linear.rounded_linear(*given), rounded_linear.ours(*given), atol=0.5, rtol=0.01)


@pytest.mark.parametrize(
    ("form", "error", "is_raised"),
    [
        (WeightForm.FP8_BLOCKS, RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED"), False),
        (WeightForm.FP8_BLOCKS, torch.OutOfMemoryError("no room"), True),
        (WeightForm.FP8_CHANNEL, RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED"), True),
    ],
)
def test_a_product_with_blocks_that_torch_lacks_is_our_kernels_and_said_once(
    randn, monkeypatch, caplog, form, error, is_raised
):
    def lacks(*args):
        raise error

    monkeypatch.setattr(rounded_linear, "_is_torchs", lambda *args: True)
    monkeypatch.setattr(rounded_linear, "torchs", lacks)
    monkeypatch.setattr(rounded_linear, "_warn", functools.cache(rounded_linear._warn.__wrapped__))
    weight, (values, scales) = stored(randn(128, 256), form), rounded(randn(20, 256), form)
    given = (values, scales.t().contiguous().t(), weight, torch.float32)
    if is_raised:
        with pytest.raises(type(error)):
            rounded_linear.rounded_linear(*given)
        return
    found = [rounded_linear.rounded_linear(*given) for _ in range(2)]
    assert torch.equal(found[0], rounded_linear.ours(*given)) and torch.equal(*found)
    assert [line.getMessage().split()[0] for line in caplog.records] == ["torch_product_off"]


@pytest.mark.parametrize("form", FORMS)
def test_norms_and_gates_round_what_they_make(randn, form):
    x, norm, more = randn(5, 288), randn(288), randn(5, 288)
    x[3] = 0
    for own, added in ((None, None), (norm, None), (norm, more)):
        before = x.clone()
        whole = x if added is None else x + added
        whole = whole if own is None else references.rms_norm(whole, own, 1e-6)
        found = row_wise.rounded_rows(x, form, own, 1e-6, added)
        assert_rounded(found, whole, form)
        close(x, before if added is None else before + added)
    assert_rounded(row_wise.rounded_gate(40 * x, form), references.gate(40 * x), form)
    assert_rounded(row_wise.rounded_gate(x, form, True), references.gate(x, True), form)


def assert_rounded(found, whole, form):
    """Another rounding of what is rounded moves a few values by one step, an eighth of theirs at most."""
    values, scales = rounded(whole, form)
    close(found[1], scales)
    close(restored(*found), restored(values, scales), rtol=0.13, atol=1e-6)
    assert (found[0].float() != values.float()).float().mean() < 0.01


@pytest.mark.parametrize(("form", "is_one"), [(WeightForm.FP8_CHANNEL, True), *((form, False) for form in FORMS)])
def test_a_weight_is_within_half_a_step_of_its_8_bit_floats(randn, form, is_one):
    weight = randn(200, 300)
    weight[5] *= 100
    found = stored(weight, form, is_one)
    assert found.form is form and form_of(weight) is WeightForm.PLAIN and len(found) == 200
    step = 448 * 2**-4 * (found.scales.max() if is_one or form is WeightForm.FP8_BLOCKS else found.scales[:, None])
    assert ((found.dequantized() - weight).abs() <= torch.maximum(weight.abs() / 16, step / 2**13)).all()
    assert len(found.scales.unique()) == (1 if is_one else found.scales.numel())


def test_one_row_is_taken_as_it_is_and_more_are_rounded():
    assert [rounds_activations(WeightForm.FP8_BLOCKS, rows) for rows in (1, 2)] == [False, True]
    assert not rounds_activations(WeightForm.PLAIN, 99)
