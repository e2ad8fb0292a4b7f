"""Triton's interpreter without what it does again and again: tests of kernels spend half of their time there on it.

What kernels compute stays as it is. Nothing happens where the interpreter does not run, and a release of Triton whose
interpreter lacks one of these functions fails here by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any


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
        interpreter._get_np_dtype = _quick_dtype(interpreter)
        interpreter.InterpretedFunction.__call__ = _quick_call(interpreter)
        _share_shapes(interpreter.tl.core)


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
    """The names of each part of the language that the interpreter replaces, found when it is first seen."""

    def __init__(self, interpreter: Any) -> None:
        self._interpreter = interpreter
        self._names: dict[Any, list[str]] = {}

    def patch(self, part: Any, builder: Any, scope: Any) -> None:
        is_builtin = self._interpreter.tl.core.is_builtin
        if part not in self._names:
            self._names[part] = [name for name in dir(part) if is_builtin(getattr(part, name, None))]
        for name in self._names[part]:
            member = getattr(part, name)
            if is_builtin(member):  # and not replaced already
                self._interpreter._patch_attr(part, name, member, builder, scope)


def _share_shapes(core: Any) -> None:
    """Blocks and tensors of a shape have one tuple of it, which nobody writes to."""
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[Any, Any] = {}
    shapes: dict[Any, Any] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        if sizes not in blocks:
            make_block(self, element_ty, shape)
            blocks[sizes] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = blocks[sizes]
        self.name = f"<{text}, {element_ty.name}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes:
            make_tensor(self, handle, type)
            shapes[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[sizes]

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
