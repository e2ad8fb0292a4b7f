"""Compiles functions over numpy arrays with numba, where it is installed; elsewhere they run as plain Python.

Import this, or a module of compiled functions, only where they are used: numba takes half a second and 100 MB.
"""

from __future__ import annotations

from collections.abc import Callable
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


def compiled(signature: str = "") -> Callable[[Function], Function]:
    """Compile at once for this signature, or with what calls it; the result is kept on disk. Holds no GIL."""

    def wrap(function: Function) -> Function:
        if not IS_COMPILED:
            return np.errstate(over="ignore")(function) if signature else function
        return numba.njit(signature or None, cache=True, nogil=True, error_model="numpy", forceinline=not signature)(
            function
        )

    return wrap
