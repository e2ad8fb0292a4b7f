"""Quick operators find what the interpreter's own do: the same numbers, types and shapes."""

from __future__ import annotations

import functools
import itertools
import warnings

import numpy as np
import pytest
import torch

pytest.importorskip("triton.language", reason="triton is not installed: it comes with torch's CUDA builds")
import triton.language as tl
from triton.runtime import interpreter

from tests.engines.torch.quick_operators import NAMES, quick_operators

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted")
core, semantic = tl.core, interpreter.interpreter_semantic
NUMBERS = (0, 3, -2, 255, 256, 2**31, -(2**40), 2**70, 0.0, -1.5, 1e39, 1e-40, float("inf"), True)
SHAPES = ((), (1,), (4,), (4, 1), (2, 4), (1, 2, 1))


def operand(name, shape):
    """Return a tensor with values at the ends of its type and between."""
    kind = getattr(core, name)
    dtype = np.bool_ if kind is core.int1 else interpreter._get_np_dtype(kind)
    values = np.resize(np.array([0, 1, -7, 3, 100, 2], np.int64), (1, *shape)).astype(dtype)
    return core.tensor(interpreter.TensorHandle(values, kind), core.block_type(kind, list(shape)) if shape else kind)


def outcome(function, left, right):
    """Return everything of a result, or what is raised."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = function(left, right)
    except Exception as error:
        return type(error)
    data = np.asarray(found.handle.data)
    return data.dtype, data.shape, data.tobytes(), found.handle.dtype.name, str(found.type), found.type.is_block()


@pytest.fixture
def interpreted():
    """The language is as a kernel finds it; by name, what its own operators do and the names of those that ran."""
    own = {name: getattr(core.tensor, name) for name in (*NAMES, "__getitem__")}
    calls = []

    def slow(name, left, right):
        calls.append(name)
        return getattr(own[name], "__wrapped__", own[name])(left, right, _semantic=semantic)

    scope = interpreter._patch_lang(outcome)
    yield slow, calls
    scope.restore()


@pytest.mark.parametrize("name", NAMES)
def test_operators_find_what_the_interpreter_s_do(interpreted, name):
    slow, calls = functools.partial(interpreted[0], name), interpreted[1]
    quick = quick_operators(interpreter)[name](slow)
    kinds = ("float32", "float16", "int1", "uint8", "int32", "int64")
    num_quick = 0
    for kind, shape in itertools.product(kinds, SHAPES):
        left = operand(kind, shape)
        rights = [*NUMBERS, *map(core.constexpr, (2, 0.5))]
        rights += [operand(other, of) for other, of in itertools.product((kind, "int32"), SHAPES)]
        for right in rights:
            expected = outcome(slow, left, right)
            calls.clear()
            assert outcome(quick, left, right) == expected, (kind, shape, right)
            num_quick += not calls
    assert num_quick > 50


@pytest.mark.parametrize("axes", [(None,), (slice(None), None), (None, slice(None)), None, (slice(None),) * 3, (0,)])
@pytest.mark.parametrize("shape", SHAPES)
def test_axes_are_added_as_the_interpreter_adds_them(interpreted, axes, shape):
    slow = functools.partial(interpreted[0], "__getitem__")
    quick = quick_operators(interpreter)["__getitem__"](slow)
    assert outcome(quick, operand("float32", shape), axes) == outcome(slow, operand("float32", shape), axes)


def test_pointers_go_on_by_elements(interpreted):
    slow = functools.partial(interpreted[0], "__add__")
    quick = quick_operators(interpreter)["__add__"](slow)
    for element, kind, of, by in itertools.product(("bfloat16", "int1"), ("int32", "uint8", "int64"), SHAPES, SHAPES):
        pointer = core.pointer_type(getattr(core, element))
        values = interpreter.TensorHandle(np.full((1, *of), 2**40, np.uint64), pointer)
        left = core.tensor(values, core.block_type(pointer, list(of)) if of else pointer)
        assert outcome(quick, left, operand(kind, by)) == outcome(slow, left, operand(kind, by))
