"""transformers, imported without what the engine never uses: that was a third of the CPU that its start took.

It marks functions for torch.compile and prepares for torch.distributed, each nearly as large as torch itself, and for
accelerate, and it reads the source of all its models to learn their names, twice. Its losses, which only training has,
import most of scipy. Here it is imported unless somebody has done so before; for transformers there is then neither
torch.distributed nor accelerate, and for its losses no scipy. Where torchvision is installed all is as ever:
transformers imports it, and it imports parts of the compiler. TensorRT-LLM's processes have an older transformers, and
import it as it is.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_COMPILER = "torch._dynamo"


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Have functions marked for torch.compile without importing it; who calls for more than marks gets the real one."""
    if _COMPILER in sys.modules:
        yield
        return
    sys.modules[_COMPILER] = stand_in = _Marks(_COMPILER)
    try:
        yield
    finally:
        if sys.modules.get(_COMPILER) is stand_in:
            del sys.modules[_COMPILER]


class _Marks(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = [f"{torch.__path__[0]}/_dynamo"]  # single submodules can be imported
        self.disable = self.allow_in_graph = self.assume_constant_result = _mark

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
        return getattr(importlib.import_module(_COMPILER), name)


def _mark(function: Callable[..., Any] | None = None, *arguments: Any, **options: Any) -> Any:
    return function or _mark


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextlib.contextmanager
def without_symbols() -> Iterator[None]:
    """Have a model made whose tensors have no memory yet without the import of sympy, with which torch would check what
    it draws or counts there. Embeddings draw no weights, since a checkpoint's come, and what is counted is small and
    has memory.
    """
    count = torch.arange
    with (
        _replaced(torch.nn.Embedding, "reset_parameters", lambda embedding: None),
        _replaced(torch, "arange", lambda *ends, **options: count(*ends, **{"device": "cpu", **options})),
    ):
        yield


def _folder(path: str | Path) -> Path:
    return Path(path).parent if str(path).endswith(".py") else Path(path)


def import_transformers() -> None:
    """Import what loads any model, for engines that then run it; call it before anything of transformers is used."""
    if "transformers" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return
    import torch.distributed
    import transformers
    import transformers.utils.import_utils as import_utils

    read_names = import_utils.create_import_structure_from_path  # keeps what it has read, by path
    with (
        _replaced(torch.distributed, "is_available", lambda: False),
        _replaced(transformers.utils, "is_accelerate_available", lambda *version: False),
        _replaced(transformers.utils, "is_scipy_available", lambda: False),
        _replaced(import_utils, "create_import_structure_from_path", lambda path: read_names(_folder(path))),
        without_compiler(),
    ):
        import transformers.generation.utils
        import transformers.masking_utils
        import transformers.modeling_utils
        import transformers.models.auto.modeling_auto
