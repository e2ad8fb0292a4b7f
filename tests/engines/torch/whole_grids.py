"""Triton's interpreter runs the programs of a grid at once: an operation is one call of numpy for all of them.

What a tensor holds has a first axis more than its type: of one value a program, or of one that all share. Programs that
come to different values where Python wants one, an `if` or the ends of a `range`, part there: each group begins anew,
and until where they parted it finds again what its loads and atomics found, and stores nothing a second time. So the
programs of a launch follow each other in an order that a GPU may choose as well, and each does what it does alone.
"""

from __future__ import annotations

import functools
import inspect
import operator
import threading
from collections import deque
from typing import Any

import numpy as np

_MOST_AT_ONCE = 64  # programs: what they hold stays in a core's cache


class Parted(BaseException):
    """Programs that ran together have different values (one a program): no error that a kernel's caller may see."""

    def __init__(self, values: Any) -> None:
        self.values = values


class Together:
    """The programs that run, and what memory has told them: `places` has their numbers in the grid (programs, 3)."""

    def __init__(self) -> None:
        self.places: Any = np.zeros((1, 3), np.int32)
        self.takes_tensors = False  # a tensor is asked whether it is there, and not for its value
        self._found: list[Any] = []  # by each access so far, None for a store
        self._at = 0

    def run(self, function: Any, arguments: dict[str, Any], grid: tuple[int, ...]) -> None:
        """Run a kernel's programs."""
        places = np.stack(np.unravel_index(np.arange(np.prod(grid, dtype=np.int64)), grid), axis=1).astype(np.int32)
        waiting = deque((places[at : at + _MOST_AT_ONCE], []) for at in range(0, len(places), _MOST_AT_ONCE))
        while waiting:
            self.places, self._found = waiting.popleft()
            self._at, self.takes_tensors = 0, False
            try:
                function(**arguments)
            except Parted as parted:
                waiting.extendleft(reversed(self._part(parted.values)))

    def _part(self, values: Any) -> list[tuple[Any, list[Any]]]:
        """Return groups of one value each, in the order of their first programs."""
        kinds, firsts = np.unique(values, return_index=True)
        groups = []
        for kind in kinds[np.argsort(firsts)]:
            own = values == kind
            kept = [found[own] if found is not None and len(found) > 1 else found for found in self._found]
            groups.append((self.places[own], kept))
        return groups

    def one(self, values: Any) -> Any:
        """Return the value that all have."""
        if len(values) > 1 and (values != values[0]).any():
            raise Parted(values)
        return values[0].item()

    def found(self, access: Any, *arguments: Any) -> Any:
        """Return what an access finds, or has found before the programs parted. None: it stored something."""
        if self._at == len(self._found):
            self._found.append(access(*arguments))
        self._at += 1
        return self._found[self._at - 1]

    def each(self, *data: Any) -> list[Any]:
        """Return arrays with all axes, and a value for each program."""
        return np.broadcast_arrays(*data, np.empty((len(self.places), *[1] * (data[0].ndim - 1)), bool))[:-1]


def run_whole_grids(interpreter: Any) -> None:
    """Have the interpreter run grids as this module says."""
    together = Together()
    _Builder(interpreter, together).install()
    patch_tensor, patch_core = interpreter._patch_lang_tensor, interpreter._patch_lang_core

    def patch_tensors(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__bool__", lambda self: _truth(together, self))
        scope.set_attr(tensor, "__index__", lambda self: int(together.one(self.handle.data.reshape(-1))))
        scope.set_attr(tensor, "T", property(lambda self: self.trans()))

    def patch_language(language: Any, scope: Any) -> None:
        patch_core(language, scope)
        for module in (interpreter.tl, interpreter.tl.core):
            scope.set_attr(module, "reduce", _Reductions(interpreter).reduce)
            scope.set_attr(module, "associative_scan", _Reductions(interpreter).scan)

    interpreter._patch_lang_tensor, interpreter._patch_lang_core = patch_tensors, patch_language
    launches = _Launches(interpreter, together)

    def run(self: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        if not warmup:
            launches.run(self, given, named, grid)

    interpreter.InterpretedFunction.run = run
    semantic = type(interpreter.interpreter_semantic)
    for name in ("load", "store"):
        setattr(semantic, name, _with_tensors(together, getattr(semantic, name)))


def _truth(together: Together, tensor: Any) -> bool:
    """A scalar's value; the interpreter takes any block for true."""
    if together.takes_tensors or (tensor.type.is_block() and tensor.type.numel != 1):
        return True
    return bool(together.one(tensor.handle.data.reshape(-1).astype(bool)))


def _with_tensors(together: Together, function: Any) -> Any:
    """`if mask and ...` looks there for whether there is a mask."""

    def call(*args: Any, **kwargs: Any) -> Any:
        together.takes_tensors = True
        try:
            return function(*args, **kwargs)
        finally:
            together.takes_tensors = False

    return call


class _Launches:
    """Launches of kernels: what a kernel's arguments are called is looked up once, and so are types of tensors."""

    def __init__(self, interpreter: Any, together: Together) -> None:
        self._own, self._together = interpreter, together
        self._signatures: dict[Any, tuple[list[str], dict[str, Any], frozenset[str]]] = {}
        self._kinds: dict[Any, Any] = {}
        self._number = functools.lru_cache(4096, typed=True)(interpreter._implicit_cvt)
        self._one_at_a_time = threading.RLock()  # engines of one process have a thread each, and there is one grid

    def run(self, kernel: Any, given: tuple[Any, ...], named: dict[str, Any], grid: Any) -> None:
        """Run a kernel, whose tensors are on the CPU. `named` may have what is for a compiler alone."""
        function = kernel.rewrite()
        with self._one_at_a_time:
            names, defaults, constants = self._signature(kernel, function)
            known = {name: value for name, value in named.items() if name in names}
            given_by_name = dict(zip(names, given, strict=False))
            arguments = defaults | given_by_name | known
            if len(given) > len(names) or given_by_name.keys() & known.keys() or len(arguments) < len(names):
                raise TypeError(f"{function.__name__} has arguments {names}: {len(given)} and {[*known]} were given")
            for hook in kernel.pre_run_hooks:
                hook(*given, **known)
            for name, value in arguments.items():
                if name not in constants:
                    arguments[name] = self._tensor(value)
            grid = grid(arguments) if callable(grid) else grid
            self._own.interpreter_builder.grid_dim = (*grid, 1, 1)[:3]
            try:
                self._together.run(function, arguments, self._own.interpreter_builder.grid_dim)
            except Exception as error:
                raise self._own.InterpreterError(repr(error)) from error

    def _signature(self, kernel: Any, function: Any) -> tuple[list[str], dict[str, Any], frozenset[str]]:
        if function not in self._signatures:
            executor = self._own.GridExecutor(function, kernel.arg_names, None)
            parameters = inspect.signature(function).parameters
            defaults = {
                name: one.default for name, one in parameters.items() if one.default is not inspect.Parameter.empty
            }
            self._signatures[function] = [*parameters], defaults, frozenset(executor.constexprs)
            self._own._patch_lang(function)  # for good: nothing else here is written in the language
        return self._signatures[function]

    def _tensor(self, value: Any) -> Any:
        if isinstance(value, int):
            return self._number(value)
        if not hasattr(value, "data_ptr"):
            return self._own._implicit_cvt(value)
        assert getattr(value, "is_cpu", True), "the interpreter reads this process's memory"
        key = type(value), value.dtype
        if key not in self._kinds:
            self._kinds[key] = self._own._implicit_cvt(value).type
        kind = self._kinds[key]
        handle = self._own.TensorHandle(np.array([value.data_ptr()], np.uint64), kind)
        return self._own.tl.tensor(handle, kind)


class _Builder:
    """What the interpreter's builder does with shapes and memory, where data has an axis more."""

    def __init__(self, interpreter: Any, together: Together) -> None:
        self._own, self._together = interpreter, together
        self._memory = interpreter._interpreter
        self._handle = interpreter.TensorHandle

    def install(self) -> None:
        """Replace the builder's functions by those of their names here; what has no form here fails by name."""
        builder = type(self._own.interpreter_builder)
        for name in [name for name in dir(self) if name.startswith("create_")]:
            function = getattr(self, name)
            assert hasattr(builder, name), name
            setattr(builder, name, lambda _, *args, function=function: function(*args))
        for name in _WITHOUT_A_FORM:
            setattr(builder, name, lambda _, *args, name=name: _refuse(name))

    def create_get_program_id(self, axis: int) -> Any:
        return self._handle(self._together.places[:, axis], self._own.tl.int32)

    # -- memory

    def create_load(self, pointers: Any, policy: Any, is_volatile: bool) -> Any:
        return self._load(pointers, np.ones_like(pointers.data, dtype=bool), None)

    def create_masked_load(self, pointers: Any, mask: Any, other: Any, policy: Any, is_volatile: bool) -> Any:
        return self._load(pointers, mask.data, other)

    def _load(self, pointers: Any, mask: Any, other: Any) -> Any:
        kind = pointers.get_element_ty()
        dtype = self._own._get_np_dtype(kind)
        if other is None:
            at, mask = np.broadcast_arrays(pointers.data, mask)
            others = np.zeros_like(at, dtype=dtype)
        else:
            at, mask, others = np.broadcast_arrays(pointers.data, mask, other.data)
        return self._handle(self._together.found(self._memory.load, at, mask, others, dtype), kind)

    def create_store(self, pointers: Any, value: Any, policy: Any) -> Any:
        return self._store(pointers.data, value.data, np.ones_like(pointers.data, dtype=bool))

    def create_masked_store(self, pointers: Any, value: Any, mask: Any, policy: Any) -> Any:
        return self._store(pointers.data, value.data, mask.data)

    def _store(self, *data: Any) -> Any:
        return self._together.found(self._memory.store, *np.broadcast_arrays(*data))

    def create_atomic_rmw(self, what: Any, pointers: Any, value: Any, mask: Any, order: Any, scope: Any) -> Any:
        builder = self._own.InterpreterBuilder
        what, order = builder.ir_rmw_op_to_interpreter_rmw_op[what], builder.ir_sem_to_interpreter_sem[order]
        data = self._together.each(pointers.data, value.data, mask.data)
        found = self._together.found(lambda: self._memory.atomic_rmw(what, *map(np.ascontiguousarray, data), order))
        return self._handle(found, value.dtype.scalar)

    # -- shapes

    def create_make_range(self, kind: Any, start: int, stop: int) -> Any:
        return self._handle(np.arange(start, stop, dtype=np.int32)[None], self._own.tl.int32)

    def create_splat(self, kind: Any, value: Any) -> Any:
        shape = [operator.index(size) for size in kind.shape]
        data = value.data.reshape(-1, *[1] * len(shape)).astype(self._own._get_np_dtype(value.dtype), copy=False)
        return self._handle(np.broadcast_to(data, (len(data), *shape)), value.dtype.scalar)

    def create_unsplat(self, value: Any) -> Any:
        return self._handle(value.data.reshape(len(value.data), -1)[:, 0], value.dtype.scalar)

    def create_reshape(self, value: Any, shape: Any, may_reorder: bool) -> Any:
        return self._handle(value.data.reshape(len(value.data), *map(operator.index, shape)), value.dtype.scalar)

    def create_trans(self, value: Any, order: Any) -> Any:
        return self._handle(np.transpose(value.data, [0, *(1 + operator.index(axis) for axis in order)]), value.dtype)

    def create_expand_dims(self, value: Any, axis: int) -> Any:
        return self._handle(np.expand_dims(value.data, axis + 1), value.dtype.scalar)

    def create_broadcast(self, value: Any, shape: Any) -> Any:
        shape = (len(value.data), *map(operator.index, shape))
        return self._handle(np.broadcast_to(value.data, shape), value.dtype.scalar)

    def create_join(self, left: Any, right: Any) -> Any:
        return self._handle(np.stack(np.broadcast_arrays(left.data, right.data), axis=-1), left.dtype.scalar)


_WITHOUT_A_FORM = (
    "create_cat",
    "create_gather",
    "create_histogram",
    "create_dot_scaled",
    "create_atomic_cas",
    "create_atomic_load",
    "create_atomic_store",
    "create_atomic_poll",
    "create_make_tensor_descriptor",
)


def _refuse(name: str) -> Any:
    raise NotImplementedError(f"{name}: no kernel had it yet, and whole grids have no form of it (whole_grids.py)")


class _Reductions:
    """Reductions and scans by the functions of numpy that the interpreter has them by."""

    def __init__(self, interpreter: Any) -> None:
        self._own, standard = interpreter, interpreter.tl.standard
        self._values = {
            standard._sum_combine: np.add.reduce,
            standard._elementwise_max: np.fmax.reduce,
            standard._elementwise_min: np.fmin.reduce,
        }
        self._places = {
            standard._argmax_combine_tie_break_left: (np.fmax.reduce, np.nanargmax),
            standard._argmax_combine_tie_break_fast: (np.fmax.reduce, np.nanargmax),
            standard._argmin_combine_tie_break_left: (np.fmin.reduce, np.nanargmin),
            standard._argmin_combine_tie_break_fast: (np.fmin.reduce, np.nanargmin),
        }

    def reduce(self, value: Any, axis: Any, combine: Any, keep_dims: Any = False, **others: Any) -> Any:
        values = value[0] if isinstance(value, tuple | self._own.tl.tuple) else value
        data, rank, keeps = values.handle.data, len(values.type.shape), bool(keep_dims)
        if axis is None:
            data, place = data.reshape(len(data), -1), 1
        else:
            place = operator.index(axis) % rank + 1
        if combine in self._places:
            of_values, of_places = self._places[combine]
            found, at = of_values(data, axis=place, keepdims=keeps), of_places(data, axis=place, keepdims=keeps)
            kinds = (values.dtype, self._own.tl.int32)
            return tuple(self._tensor(one, kind) for one, kind in zip((found, at), kinds, strict=True))
        if combine not in self._values:
            _refuse(f"a reduction by {combine}")
        found = self._values[combine](data, axis=place, keepdims=keeps)
        if axis is None and keeps:
            found = found.reshape(-1, *[1] * rank)
        return self._tensor(found, values.dtype)

    def scan(self, value: Any, axis: Any, combine: Any, reverse: Any = False, **others: Any) -> Any:
        if combine is not self._own.tl.standard._sum_combine:
            _refuse(f"a scan by {combine}")
        place = operator.index(axis) % len(value.type.shape) + 1
        data = np.flip(value.handle.data, place) if reverse else value.handle.data
        found = np.cumsum(data, axis=place)
        return self._tensor(np.flip(found, place) if reverse else found, value.dtype)

    def _tensor(self, data: Any, kind: Any) -> Any:
        data = data.astype(self._own._get_np_dtype(kind), copy=False)
        shape = list(data.shape[1:])
        own = self._own.tl.block_type(kind, shape) if shape else kind
        return self._own.tl.core.tensor(self._own.TensorHandle(data, kind.scalar), own)
