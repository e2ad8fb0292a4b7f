"""Operators of tensors in Triton's interpreter, in one call of numpy where that is what the interpreter comes to.

Of two operands of one plain type, or of one and a number that the type has, the interpreter makes a block of the
number, copies what is broadcast and checks each result: ten calls of Python for one of numpy, which broadcasts as
Triton does. Whatever else there is goes to the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Operator = Callable[[Any, Any], Any]
FLOATS, INTS = ("fp32",), ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
SMALLEST, LARGEST = 2.0**-126, (2 - 2**-23) * 2.0**127  # of the numbers that are float32
_COMPARED = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
NAMES = {
    **dict.fromkeys(("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", *_COMPARED), FLOATS + INTS),
    **dict.fromkeys(("__truediv__", "__rtruediv__"), FLOATS),
    **dict.fromkeys(("__and__", "__or__", "__xor__"), (*INTS, "int1")),
    **dict.fromkeys(("__lshift__", "__rshift__"), INTS),
}


def quick_operators(interpreter: Any) -> dict[str, Callable[[Operator], Operator]]:
    """By name of a tensor's method: what makes the quick one of the interpreter's own, which has the other cases."""
    results = _Results(interpreter)
    found = {name: _quick(interpreter, results, name, kinds) for name, kinds in NAMES.items()}
    found["__add__"] = _with_pointers(interpreter, results, found["__add__"])
    found["__getitem__"] = _quick_axes(interpreter, results)
    return found


class _Results:
    """Tensors of what numpy has computed, whose types are made once."""

    def __init__(self, interpreter: Any) -> None:
        self._core, self._handle = interpreter.tl.core, interpreter.TensorHandle
        self._types: dict[Any, Any] = {}

    def make(self, data: Any, kind: Any, told: Any, is_block: bool) -> Any:
        """`told`: the type that the interpreter keeps beside the data, which is the left operand's."""
        handle = self._handle.__new__(self._handle)
        handle.data, handle.dtype, handle.attr = data, told, {}
        if is_block:
            key = kind.name, data.shape[1:]
            if key not in self._types:
                self._types[key] = self._core.block_type(kind, list(data.shape[1:]))
            kind = self._types[key]
        return self._core.tensor(handle, kind)


def _quick(interpreter: Any, results: _Results, name: str, kinds: tuple[str, ...]) -> Callable[[Operator], Operator]:
    import numpy as np

    core, tensor, constexpr = interpreter.tl.core, interpreter.tl.core.tensor, interpreter.tl.core.constexpr
    is_reflected, is_shift, is_compared = (
        name.startswith("__r") and name != "__rshift__",
        "shift" in name,
        name in _COMPARED,
    )
    plain = f"__{name[3:]}" if is_reflected else name
    ufunc = {
        "__add__": np.add,
        "__sub__": np.subtract,
        "__mul__": np.multiply,
        "__truediv__": np.divide,
        "__lt__": np.less,
        "__le__": np.less_equal,
        "__gt__": np.greater,
        "__ge__": np.greater_equal,
        "__eq__": np.equal,
        "__ne__": np.not_equal,
        "__and__": np.bitwise_and,
        "__or__": np.bitwise_or,
        "__xor__": np.bitwise_xor,
        "__lshift__": np.left_shift,
        "__rshift__": np.right_shift,
    }[plain]
    ranges = {"fp32": (-(2**31), 2**31 - 1)}
    for kind in set(kinds) & set(INTS):
        bits = int(kind.lstrip("uint"))
        ranges[kind] = (0, 2**bits - 1) if kind.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        if is_shift:
            ranges[kind] = 0, bits - 1
    own, int1 = frozenset(kinds), core.int1

    def make(slow: Operator) -> Operator:
        def operate(left: Any, right: Any, _semantic: Any = None) -> Any:
            kind = left.dtype
            told = left.handle.dtype
            data = left.handle.data
            is_block = left.type is not kind
            number = right.value if type(right) is constexpr else right
            if kind.name not in own:
                return slow(left, right)
            if type(right) is tensor:
                if right.dtype is not kind or right.handle.data.dtype is not data.dtype:
                    return slow(left, right)
                if (aligned := _aligned(data, right.handle.data)) is None:
                    return slow(left, right)
                is_block = is_block or right.type is not kind
                data, number = aligned
            elif type(number) is int:
                least, most = ranges.get(kind.name, (1, 0))
                if not least <= number <= most or not data.shape:
                    return slow(left, right)
            elif type(number) is not float or kind.name != "fp32" or not data.shape:
                return slow(left, right)
            elif number and not SMALLEST <= abs(number) <= LARGEST:
                return slow(left, right)
            found = ufunc(number, data) if is_reflected else ufunc(data, number)
            return results.make(found, int1 if is_compared else kind, told.scalar, is_block)

        return operate

    return make


def _aligned(left: Any, right: Any) -> tuple[Any, Any] | None:
    """Return what numpy broadcasts as Triton does, past the first axis (whole_grids.py): a scalar has no other."""
    if left.ndim == right.ndim:
        return left, right
    if right.ndim == 1:
        return left, right.reshape(-1, *[1] * (left.ndim - 1))
    return (left.reshape(-1, *[1] * (right.ndim - 1)), right) if left.ndim == 1 else None


def _with_pointers(
    interpreter: Any, results: _Results, others: Callable[[Operator], Operator]
) -> Callable[[Operator], Operator]:
    """A pointer and an offset make a pointer; `others` has what is no pointer."""
    import numpy as np

    tensor, pointer = interpreter.tl.core.tensor, interpreter.tl.core.pointer_type

    def make(slow: Operator) -> Operator:
        other = others(slow)

        def add(left: Any, right: Any, _semantic: Any = None) -> Any:
            kind = left.dtype
            if type(kind) is not pointer:
                return other(left, right)
            if type(right) is not tensor or right.dtype.name not in INTS:
                return slow(left, right)
            if (aligned := _aligned(left.handle.data, right.handle.data)) is None:
                return slow(left, right)
            width = max(1, kind.element_ty.primitive_bitwidth // 8)
            found = aligned[0] + width * aligned[1].astype(np.uint64)
            is_block = left.type is not kind or right.type is not right.dtype
            return results.make(found, kind, left.handle.dtype, is_block)

        return add

    return make


def _quick_axes(interpreter: Any, results: _Results) -> Callable[[Operator], Operator]:
    """x[:, None] is a view."""
    whole = slice(None)

    def make(slow: Operator) -> Operator:
        def index(block: Any, axes: Any, _semantic: Any = None) -> Any:
            kind, is_block = block.dtype, block.type is not block.dtype
            if not is_block or type(axes) is not tuple or any(axis is not None and axis != whole for axis in axes):
                return slow(block, axes)
            if len(axes) - axes.count(None) != block.handle.data.ndim - 1:
                return slow(block, axes)
            return results.make(block.handle.data[(whole, *axes)], kind, block.handle.dtype.scalar, is_block)

        return index

    return make
