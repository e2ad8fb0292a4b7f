"""Products with weights that stay as a GGUF file has them, for each set of instructions that this CPU has."""

from __future__ import annotations

import functools
import os
import shutil

import numpy as np
import pytest
import torch

from bireme.engines.torch import native
from bireme.engines.torch.forward import quantized_linear
from bireme.engines.torch.forward.decoder_ops import NativeOps, PlainOps
from bireme.engines.torch.forward.quantized_linear import BlockRows, GroupRows, QuantizedLinear
from bireme.engines.torch.native import cpu
from tests.engines.torch import quantized_blocks
from tests.engines.torch.test_packed_decoder import layer

SOURCE = native.SOURCES[1]
TAKEN_AWAY = {
    "avx512_vnni": (),
    "avx2": ("-mno-avx512f",),
    "none": ("-mno-avx512f", "-mno-avx2"),
}
NEEDED = {"avx512_vnni": {"avx512_vnni", "avx512bw"}, "avx2": {"avx2", "fma", "f16c"}, "none": set()}
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 3e-3}
dtypes = pytest.mark.parametrize("dtype", CLOSE)
forms = pytest.mark.parametrize("form", quantized_blocks.FORMS)


@functools.cache
def library_with(instructions):
    if not (os.environ.get("CXX") or any(map(shutil.which, ("g++", "c++", "clang++")))):
        pytest.skip("no C++ compiler")
    if not cpu.flags() >= NEEDED[instructions]:
        pytest.skip(f"this CPU has no {instructions}")
    is_x86 = "sse2" in cpu.flags()
    return native.load((SOURCE,), TAKEN_AWAY[instructions] if is_x86 else ())[0]


@pytest.fixture(params=TAKEN_AWAY)
def library(request):
    return library_with(request.param)


def stored(rows, columns, form, seed=0):
    weight = np.random.default_rng(seed).normal(size=(rows, columns)) * 0.05
    return BlockRows(form, torch.from_numpy(quantized_blocks.quantize(weight, form)))


def rows_of(count, columns, dtype):
    return (3 * torch.randn(count, columns, generator=torch.Generator().manual_seed(count))).to(dtype)


def expected_of(x, *parts):
    weight = np.concatenate([quantized_blocks.dequantize(part.blocks.numpy(), part.form) for part in parts])
    return torch.from_numpy(quantized_blocks.round_rows(x.float().numpy()) @ weight.T)


def assert_close(found, expected, dtype):
    assert float((found.double() - expected).norm() / expected.norm()) < CLOSE[dtype]


@pytest.mark.parametrize("instructions", TAKEN_AWAY)
def test_the_library_says_which_instructions_it_has(instructions):
    assert quantized_linear.instructions(library_with(instructions)) == instructions


@forms
@dtypes
@pytest.mark.parametrize(("width", "depth"), [(64, 1024), (203, 32), (9, 2112)])
def test_products_equal_those_with_what_the_blocks_mean(library, form, dtype, width, depth):
    part = stored(width, depth, form)
    bias, linear = rows_of(1, width, dtype)[0], QuantizedLinear([part], None, library, dtype, 2)
    with_bias = QuantizedLinear([part], bias, library, dtype, 2)
    for count in (1, 2, 5, 12, 13, 40, 200):
        x, add_to = rows_of(count, depth, dtype), rows_of(count, width, dtype)
        expected = expected_of(x, part)
        found = linear(x)
        assert (found.dtype, found.shape) == (dtype, expected.shape)
        assert_close(found, expected, dtype)
        assert_close(with_bias(x, add_to), expected + bias.double() + add_to.double(), dtype)
    assert linear(rows_of(0, depth, dtype)).shape == (0, width)


@forms
def test_extreme_codes_and_rows_are_multiplied_without_overflow(library, form):
    blocks = torch.full((16, quantized_linear.FORMS[form].block_bytes * 3), 255, dtype=torch.uint8)
    if form == "Q8_0":
        blocks[:] = 128  # -128
    blocks.view(16, 3, -1)[..., :2] = torch.tensor([0, 0x3C])  # 1
    if form == "Q4_1":
        blocks.view(16, 3, -1)[..., 2:4] = torch.tensor([0, 0xBC])  # -1
    for sign in (-1, 1):
        x = torch.full((4, 96), 127.0 * sign)
        part = BlockRows(form, blocks)
        assert_close(QuantizedLinear([part], None, library, torch.float32, 1)(x), expected_of(x, part), torch.float32)


@dtypes
def test_parts_of_several_forms_are_one_product(library, dtype):
    parts = [stored(20, 64, "Q4_0"), stored(7, 64, "Q8_0"), stored(5, 64, "Q8_0", seed=1), stored(16, 64, "Q4_1")]
    bias, x, add_to = rows_of(1, 48, dtype)[0], rows_of(3, 64, dtype), rows_of(3, 48, dtype)
    linear = QuantizedLinear(parts, bias, library, dtype, 1)
    assert linear.shape == (48, 64)
    assert_close(linear(x, add_to), expected_of(x, *parts) + bias.double() + add_to.double(), dtype)


@forms
@dtypes
def test_a_row_s_product_does_not_depend_on_the_rows_beside_it(library, form, dtype):
    linear, x = QuantizedLinear([stored(100, 1504, form)], None, library, dtype, 2), rows_of(230, 1504, dtype)
    together = linear(x)
    for count in (1, 2, 5, 8, 33, 193):
        assert linear(x[:count]).equal(together[:count])
        assert linear(x[-count:].contiguous()).equal(together[-count:])


@forms
@dtypes
def test_rows_are_taken_as_the_blocks_mean_them(library, form, dtype):
    part, ids = stored(50, 96, form), torch.tensor([49, 0, 17, 17, 31])
    expected = quantized_blocks.dequantize(part.blocks.numpy(), form)[ids]
    found = QuantizedLinear([part], None, library, dtype, 1).take_rows(ids, dtype)
    assert found.dtype == dtype
    assert_close(found, torch.from_numpy(expected), dtype)


def grouped(rows, columns, size, seed=0):
    """Integers of all codes and zero points, with a scale for so many inputs; and what they mean."""
    given = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 16, (rows, columns), generator=given, dtype=torch.uint8)
    zeros = torch.randint(0, 17, (rows, columns // size), generator=given, dtype=torch.uint8)
    scales = (0.001 + 0.02 * torch.rand(rows, columns // size, generator=given)).half()
    means = (values.view(rows, -1, size).double() - zeros[..., None].double()) * scales[..., None].double()
    return GroupRows(values, scales, zeros), means.view(rows, columns)


@dtypes
@pytest.mark.parametrize(("width", "depth", "size"), [(64, 1024, 128), (203, 192, 32), (9, 2112, 64), (33, 96, 96)])
def test_integers_in_groups_are_multiplied_as_they_mean_whatever_rows_are_beside(library, dtype, width, depth, size):
    part, weight = grouped(width, depth, size)
    linear = QuantizedLinear([part], None, library, dtype, 2)
    assert linear.forms == ["INT4_GROUPS"]
    x, add_to = rows_of(200, depth, dtype), rows_of(200, width, dtype)
    expected = torch.from_numpy(quantized_blocks.round_rows(x.float().numpy())) @ weight.T
    together = linear(x)
    assert_close(together, expected, dtype)
    assert_close(linear(x, add_to), expected + add_to.double(), dtype)
    for count in (1, 2, 5, 12, 13, 40):
        assert linear(x[:count]).equal(together[:count])


def test_integers_of_several_groups_and_blocks_are_one_product(library):
    (first, one), (second, two), (third, three) = grouped(20, 64, 32), grouped(7, 64, 64), grouped(5, 64, 64, 1)
    blocks, x = stored(16, 64, "Q4_0"), rows_of(3, 64, torch.float32)
    linear = QuantizedLinear([first, second, third, blocks], None, library, torch.float32, 1)
    assert linear.forms == ["INT4_GROUPS", "INT4_GROUPS", "Q4_0"]
    rounded = torch.from_numpy(quantized_blocks.round_rows(x.numpy()))
    whole = torch.cat([rounded @ torch.cat([one, two, three]).T, expected_of(x, blocks)], 1)
    assert_close(linear(x), whole, torch.float32)


def test_integers_in_groups_take_half_a_byte_and_four_bytes_a_group_and_odd_groups_are_refused(library):
    linear = QuantizedLinear([grouped(160, 256, 128)[0]], None, library, torch.float32, 1)
    assert linear.num_bytes == 160 * (256 // 2 + 2 * 4)
    with pytest.raises(ValueError, match="groups of 16 inputs are no multiple of 32"):
        quantized_linear.arrange(grouped(16, 64, 16)[0])


def test_a_value_that_is_not_a_number_stays_visible(library):
    linear, x = (
        QuantizedLinear([stored(32, 64, "Q4_1")], None, library, torch.float32, 1),
        rows_of(2, 64, torch.float32),
    )
    x[1, 40] = float("nan")
    found = linear(x)
    assert found[1].isnan().all() and not found[0].isnan().any()


@forms
def test_weights_take_the_bytes_of_the_file(library, form):
    part = stored(160, 256, form)
    assert QuantizedLinear([part], None, library, torch.float32, 1).num_bytes == part.blocks.nbytes


@forms
def test_blocks_that_are_none_are_refused(form):
    short = stored(16, 64, form).blocks[:, :-1]
    with pytest.raises(ValueError, match=rf"{form}: .*\[16, {short.shape[1]}\] is not rows of"):
        quantized_linear.arrange(BlockRows(form, short))
    with pytest.raises(ValueError, match="form 'Q6_K'"):
        quantized_linear.arrange(BlockRows("Q6_K", short))


def test_parts_of_different_depths_are_refused(library):
    with pytest.raises(ValueError, match="not the same number of inputs"):
        QuantizedLinear([stored(16, 64, "Q4_0"), stored(16, 96, "Q4_0")], None, library, torch.float32, 1)


@dtypes
def test_a_decoder_s_operations_have_them_where_they_are_compiled(dtype):
    part, own, x = stored(48, 64, "Q4_0"), [layer(dtype)], rows_of(3, 64, dtype)
    assert PlainOps(own).quantized([part], None) is None
    assert_close(NativeOps(own, native.load()[0]).quantized([part], None)(x), expected_of(x, part), dtype)
    expected = torch.from_numpy(quantized_blocks.round_rows(x.float().numpy()))
    assert_close(quantized_linear.round_rows(x), expected, torch.float32)
