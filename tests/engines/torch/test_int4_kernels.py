"""Products of 4-bit integers equal plain torch: on a GPU as they are, elsewhere in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.language", reason="triton is not installed: it comes with torch's CUDA builds")
from bireme.engines.torch.kernels import int4_linear, one_row_int4
from bireme.engines.torch.storage import Int4Weight, WeightForm, form_of, packed, rounds_activations, unpacked
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
    values = torch.empty(rows, -(-columns // 128) * 64, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, columns // group, dtype=torch.float16, device=weight.device)
    found = Int4Weight(values, scales, scales.to(torch.uint8), columns)
    round_into(weight, found)
    return found


@pytest.mark.parametrize(("group", "columns"), SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 140])
@pytest.mark.parametrize("how", ["plain", "gated", "added"])
def test_rows_are_multiplied_as_in_plain_torch(randn, group, columns, rows, how):
    is_gated, x = how == "gated", randn(rows, columns)
    weight = stored(randn(144 if is_gated else 72, columns), group)
    bias, add_to = (None if how != "plain" else randn(72)), (randn(rows, 72) if how == "added" else None)
    expected = references.few_rows_linear(x, weight.dequantized(), is_gated, True, add_to)
    expected = expected if bias is None else expected + bias
    found = int4_linear.few_rows_int4(x, weight, is_gated, True, add_to, bias)
    close(found, expected, atol=5e-4, rtol=1e-3)


@pytest.mark.parametrize("tiles", [(16, 32, 2, 2, 3), (8, 128, 4, 2, 2), (16, 128, 8, 2, 1)])
@pytest.mark.parametrize("is_gated", [False, True])
def test_tiles_and_programs_that_share_columns_change_nothing(randn, tiles, is_gated):
    x, weight, bias = randn(19, 640), stored(randn(136, 640), 128), randn(68 if is_gated else 136)
    expected = references.few_rows_linear(x, weight.dequantized(), is_gated, False, None) + (0 if is_gated else bias)
    given = None if is_gated else bias
    found = int4_linear.few_rows_int4(x, weight, is_gated, bias=given, tiles=int4_linear.Int4Tiles(*tiles))
    close(found, expected, atol=5e-4, rtol=1e-3)


@pytest.mark.parametrize(("group", "columns"), [(128, 640), (256, 512), (160, 160)])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # sums of products, and a tensor core's product
def test_one_row_is_multiplied_as_in_plain_torch_with_what_stands_around_it(randn, group, columns, is_gated, dtype):
    x, norm = randn(1, columns).to(dtype), (1 + randn(columns) / 8).to(dtype)
    weight = stored(randn(144 if is_gated else 72, columns) / columns**0.5, group)
    bias, add_to = (None, None) if is_gated else (randn(72).to(dtype), randn(1, 72).to(dtype))
    given = (bias, norm, 1e-5, is_gated, is_gated, add_to)
    expected = references.one_row_linear(x, weight.dequantized(), *given).float()
    found = one_row_int4.one_row_int4(x, weight, *given).float()
    close(found, expected, **({"atol": 2e-5, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 0.03, "rtol": 0.02}))


def test_one_row_takes_groups_of_whole_blocks_or_of_whole_rows():
    def weight(group, columns):
        return stored(torch.ones(16, columns, device=DEVICE), group)

    assert all(one_row_int4.takes(weight(*one)) for one in ((128, 384), (256, 512), (384, 384), (160, 160)))
    assert not any(one_row_int4.takes(weight(*one)) for one in ((32, 256), (64, 256), (384, 768), (160, 320)))


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


def test_a_thread_of_a_tensor_core_finds_its_inputs_in_sixteen_bytes():
    values = torch.zeros(1, 300, dtype=torch.uint8)
    values[0, [2, 3, 10, 18, 34]] = torch.arange(1, 6, dtype=torch.uint8)  # all of the second of four threads
    words = packed(values).view(torch.int16)[0, 8:16].tolist()
    assert words == [1 | 5 << 4, 2, 3, 0, 4, 0, 0, 0]
    assert packed(values).shape == (1, 192) and torch.equal(unpacked(packed(values))[:, :300], values)
