"""Compiles functions over numpy arrays with numba, where it is installed; elsewhere they run as plain Python.

Import this, or a module of compiled functions, only where they are used: numba takes half a second and 100 MB.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import inspect
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

try:
    import numba
except ImportError:
    numba = None

Words = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]
Scalar = Any  # compiled code has numbers of 64 bits, uncompiled numpy's or Python's
Function = TypeVar("Function", bound=Callable[..., Any])
IS_COMPILED = numba is not None and not numba.config.DISABLE_JIT
_PARTS = ("*_kernels.py", "*_columns.py")

logger = logging.getLogger("bireme.kv")


def compiled(signature: str = "") -> Callable[[Function], Function]:
    """Compile at once for this signature, or with what calls it; the result is kept on disk. Holds no GIL.

    It may use functions of this kind and constants from modules of its folder whose names end in _kernels or _columns.
    Of processes that start at once one compiles, and the others read what it has kept.
    """

    def wrap(function: Function) -> Function:
        if not IS_COMPILED:
            return np.errstate(over="ignore")(function) if signature else function
        source = Path(inspect.getfile(function))
        function.__qualname__ += f"_{_digest(source.parent)}"
        options = {"nogil": True, "error_model": "numpy", "forceinline": not signature}
        with _alone(source) if signature else contextlib.nullcontext():
            began = time.monotonic()
            try:
                made = numba.njit(signature or None, cache=True, **options)(function)
                if signature and made.stats.cache_misses:
                    logger.info("compiled function=%s s=%.1f", function.__name__, time.monotonic() - began)
                return made
            except RuntimeError as error:  # neither the package's folder nor the home can be written
                if signature:
                    logger.warning("compiled_code_not_kept function=%s error=%s", function.__name__, error)
                return numba.njit(signature or None, **options)(function)

    return wrap


@functools.cache
def _digest(folder: Path) -> str:
    """Return what stands for all that a compiled function may consist of: numba looks at its own file's age alone."""
    files = sorted(path for part in _PARTS for path in folder.glob(part))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]


@contextlib.contextmanager
def _alone(source: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # such as a file system over a network, which locks what can be written
            fcntl.flock(stack.enter_context(source.open("rb")), fcntl.LOCK_EX)
        yield
