"""Products of 4-bit integers equal plain torch: on a GPU as they are, elsewhere in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.language", reason="triton is not installed: it comes with torch's CUDA builds")
from bireme.engines.torch.kernels import int4_linear
from bireme.engines.torch.storage import Int4Weight, WeightForm, form_of, packed, rounds_activations
from bireme.engines.torch.weights.stored_linear import round_into
from tests.engines.torch import kernel_references as references

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(128, 384), (32, 288), (160, 160)]  # groups and inputs: in planes, finer than these, of whole rows
close = torch.testing.assert_close


@pytest.fixture
def randn():
    rng = torch.Generator(DEVICE).manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=rng, device=DEVICE)


def stored(weight, group):
    """Return the weight rounded to 4 bits."""
    rows, columns = weight.shape
    values = torch.empty(rows, -(-columns // 256) * 128, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, columns // group, dtype=torch.float16, device=weight.device)
    found = Int4Weight(values, scales, scales.to(torch.uint8), columns)
    round_into(weight, found)
    return found


@pytest.mark.parametrize(("group", "columns"), SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 140])
@pytest.mark.parametrize("how", ["plain", "gated", "added"])
def test_rows_are_multiplied_as_in_plain_torch(randn, group, columns, rows, how):
    is_gated, x, norm = how == "gated", randn(rows, columns), randn(columns)
    weight = stored(randn(144 if is_gated else 72, columns), group)
    bias, add_to = (None if how != "plain" else randn(72)), (randn(rows, 72) if how == "added" else None)
    whole = weight.dequantized()
    if rows == 1:
        expected = references.one_row_linear(x, whole, bias, norm, 1e-5, is_gated, True, add_to)
        found = int4_linear.one_row_int4(x, weight, bias, norm, 1e-5, is_gated, True, add_to)
    else:
        expected = references.few_rows_linear(x, whole, is_gated, True, add_to)
        expected = expected if bias is None else expected + bias
        found = int4_linear.few_rows_int4(x, weight, is_gated, True, add_to, bias)
    close(found, expected, atol=5e-4, rtol=1e-3)


def test_a_row_of_bfloat16_is_read_as_words_and_summed_in_float32(randn):
    x, norm, weight = randn(1, 384).bfloat16(), randn(384), stored(randn(72, 384), 128)
    normed = torch.nn.functional.rms_norm(x.float(), (384,), norm, 1e-5)
    found = int4_linear.one_row_int4(x, weight, norm=norm, eps=1e-5)
    close(found.float(), normed @ weight.dequantized().t(), atol=0.05, rtol=0.01)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the interpreter has no bfloat16 products")
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("rows", [2, 9, 33, 200])
def test_rows_of_bfloat16_are_multiplied_with_values_that_are_exact(randn, group, rows):
    x, weight = randn(rows, 1024).bfloat16(), stored(randn(512, 1024), group)
    close(int4_linear.few_rows_int4(x, weight).float(), x.float() @ weight.dequantized().t(), atol=0.5, rtol=0.01)


@pytest.mark.parametrize(("group", "columns"), SHAPES)
def test_a_weight_is_made_plain_and_is_within_half_a_step_of_what_was_rounded(randn, group, columns):
    weight = randn(70, columns)
    found = stored(weight, group)
    close(int4_linear.plain_weight(found, torch.float32), found.dequantized(), atol=1e-6, rtol=1e-6)
    assert form_of(found) is WeightForm.INT4_GROUPS and found.shape == weight.shape and found.group == group
    error = (found.dequantized() - weight).abs().view(70, -1, group)
    assert (error <= 0.51 * found.scales[..., None].float() + 1e-3).all()
    assert not rounds_activations(found.form, 999)


def test_a_byte_has_one_value_of_each_plane():
    values = torch.arange(512).view(1, -1) % 16
    values[0, 128] = 7
    found = packed(values.to(torch.uint8))
    assert found.shape == (1, 256) and found[0, :2].tolist() == [0 | 7 << 4, 1 | 1 << 4]
    assert packed(values[:, :300].to(torch.uint8)).shape == (1, 256)
