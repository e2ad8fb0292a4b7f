"""Triton's interpreter without what it does again and again: tests of kernels spend half of their time there on it.

What kernels compute stays as it is. Nothing happens where the interpreter does not run, and a release of Triton whose
interpreter lacks one of these functions fails here by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any

from tests.engines.torch.quick_operators import quick_operators
from tests.engines.torch.whole_grids import run_whole_grids


def make_quick() -> None:
    """Look the language through once and not at each call of a function, nor check sums for what nobody asserts."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    with contextlib.suppress(ModuleNotFoundError):  # an environment without Triton has no kernels
        from triton.runtime import interpreter

        builder = interpreter.interpreter_builder
        assert not builder.options.debug, "the sums are checked for assertions, which only `debug` makes"
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
        interpreter._patch_builtin = _Builtins(interpreter).patch
        _skip_what_changes_nothing(interpreter.tl.core, type(interpreter.interpreter_semantic))
        interpreter._get_np_dtype = _quick_dtype(interpreter)
        interpreter.InterpretedFunction.__call__ = _quick_call(interpreter)
        _share_shapes(interpreter.tl.core)
        _round_as_gpus_do(interpreter)
        run_whole_grids(interpreter)


def _quick_dtype(interpreter: Any) -> Any:
    """The table of numpy's types is made once, and not at each question."""
    find, known = interpreter._get_np_dtype, {}

    def get(kind: Any) -> Any:
        scalar = kind.element_ty if kind.is_block() else kind
        if scalar.name not in known:
            known[scalar.name] = find(scalar)
        return known[scalar.name]

    return get


class _Builtins:
    """The names of each part of the language that the interpreter replaces, and by what, found at its first sight."""

    def __init__(self, interpreter: Any) -> None:
        self._interpreter = interpreter
        self._names: dict[Any, list[str]] = {}
        self._made: dict[Any, Any] = {}
        self._operators = quick_operators(interpreter)

    def patch(self, part: Any, builder: Any, scope: Any) -> None:
        is_builtin = self._interpreter.tl.core.is_builtin
        if part not in self._names:
            self._names[part] = [name for name in dir(part) if is_builtin(getattr(part, name, None))]
        for name in self._names[part]:
            member = getattr(part, name)
            if is_builtin(member):  # and not replaced already
                scope.set_attr(part, name, self._interpreted(part, name, member))

    def _interpreted(self, part: Any, name: str, member: Any) -> Any:
        """As the interpreter does it, in one call and not three; operators of tensors in one of numpy."""
        if member not in self._made:
            # What is wrapped checks that it is interpreted, and calls the function; a tensor's methods wrap nothing.
            function, semantic = getattr(member, "__wrapped__", member), self._interpreter.interpreter_semantic

            def made(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
                return function(*args, **kwargs, _semantic=semantic)

            is_operator = part is self._interpreter.tl.core.tensor and name in self._operators
            self._made[member] = self._operators[name](made) if is_operator else made
        return self._made[member]


def _skip_what_changes_nothing(core: Any, semantic: Any) -> None:
    """A value of the type that is asked for needs no cast, nor two of one shape to be brought to one.

    Types and shapes are compared by what they hold only where they are not the same object, and what an operation of
    two types computes in is found once.
    """
    is_type, is_shape, true = core.dtype.__eq__, core.tuple.__eq__, core.constexpr(True)
    cast, broadcast, promote = semantic.cast, semantic.broadcast_impl_value, semantic.computation_type_impl
    promoted: dict[Any, Any] = {}

    def quick_cast(self: Any, value: Any, to: Any, *rounding: Any, **named: Any) -> Any:
        return value if value.dtype is to else cast(self, value, to, *rounding, **named)

    def quick_broadcast(self: Any, left: Any, right: Any) -> Any:
        is_block = left.type.is_block()
        if is_block is right.type.is_block() and (not is_block or left.type.shape is right.type.shape):
            return left, right
        return broadcast(self, left, right)

    def quick_promote(self: Any, left: Any, is_left: bool, right: Any, is_right: bool, is_division: bool) -> Any:
        key = left.name, is_left, right.name, is_right, is_division
        if key not in promoted:
            promoted[key] = promote(self, left, is_left, right, is_right, is_division)
        return promoted[key]

    core.dtype.__eq__ = lambda self, other: self is other or is_type(self, other)
    core.tuple.__eq__ = lambda self, other: true if self is other else is_shape(self, other)
    semantic.cast, semantic.broadcast_impl_value, semantic.computation_type_impl = (
        quick_cast,
        quick_broadcast,
        quick_promote,
    )


def _share_shapes(core: Any) -> None:
    """Blocks and tensors of a shape have one tuple of it, which nobody writes to."""
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[Any, Any] = {}  # by the tuple's own address, too: those that are shared stay
    shapes: dict[int, Any] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        shared = blocks.get(id(shape))
        if shared is None or shared[0] is not shape:
            sizes = tuple(getattr(size, "value", size) for size in shape)
            if sizes not in blocks:
                make_block(self, element_ty, shape)
                blocks[sizes] = blocks[id(self.shape)] = self.shape, self.numel, str(self.shape)
            shared = blocks[sizes]
        self.element_ty = element_ty
        self.shape, self.numel, text = shared
        self.name = f"<{text}, {element_ty.name}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        at = id(type.shape) if type.is_block() else 0
        if at not in shapes:
            make_tensor(self, handle, type)
            shapes[at] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[at]

    core.block_type.__init__ = block
    core.tensor.__init__ = tensor


def _quick_call(interpreter: Any) -> Any:
    """A function that a kernel calls finds the language as the interpreter has left it, once it was called before."""
    seen: set[Any] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in seen:
            interpreter._patch_lang(self.fn)
            seen.add(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    return call


def _round_as_gpus_do(interpreter: Any) -> None:
    """The interpreter's own conversion to 8-bit floats loses the carry of a rounding to the next power of two."""
    import numpy as np
    import torch

    convert, tl = interpreter._convert_float, interpreter.tl

    def rounded(values: Any, from_type: Any, to_type: Any, mode: Any) -> Any:
        if (from_type, to_type) != (tl.float32, tl.float8e4nv):
            return convert(values, from_type, to_type, mode)
        floats = torch.from_numpy(np.ascontiguousarray(values).view(np.float32)).clamp(-448, 448)
        return floats.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(values.shape)

    interpreter._convert_float = rounded
