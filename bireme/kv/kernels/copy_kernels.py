"""Copies of many pieces of memory in one call: compiled by numba where it is installed, else plain Python."""

from __future__ import annotations

import ctypes

from bireme.kv.kernels.compiling import IS_COMPILED, Counts, compiled

if IS_COMPILED:
    from numba import types

    # ctypes' own functions are addresses of this process, which numba keeps no compiled code of.
    _memcpy = types.ExternalFunction("memcpy", types.voidptr(types.intp, types.intp, types.intp))
else:

    def _memcpy(target: int, source: int, num_bytes: int) -> None:
        ctypes.memmove(int(target), int(source), int(num_bytes))


@compiled("void(int64[:, ::1])")
def copy_pieces(pieces: Counts) -> None:
    """Copy (pieces, 3): target's address, source's address, bytes. Nothing overlaps."""
    for number in range(pieces.shape[0]):
        _memcpy(pieces[number, 0], pieces[number, 1], pieces[number, 2])
