"""Copies between rows and a file in memory: one system call for up to 1,024 pieces, without the GIL.

Rows that the CPU can't address pass through memory of their owner.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

import numpy as np

from bireme.kv.transfer.chunks import Chunk
from bireme.kv.transfer.memory import Pieces, TokenRows

_IOV_MAX = 1024  # pieces a call takes
_LIBC = ctypes.CDLL(None, use_errno=True)  # a call through it leaves the GIL to others
for _call in (_LIBC.pwritev, _LIBC.preadv):
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    _call.restype = ctypes.c_ssize_t


def store_rows(descriptor: int, rows: TokenRows, chunk: Chunk, at: int) -> None:
    """Copy a chunk's rows to a file, from `at` on. Raises OSError."""
    if rows.is_addressable(chunk.group):
        _copy(_LIBC.pwritev, descriptor, rows.pieces(chunk.group, chunk.first, chunk.last), at)
        return
    data = rows.read(chunk.group, chunk.first, chunk.last)
    _copy(_LIBC.pwritev, descriptor, _piece_of(data), at)


def load_rows(descriptor: int, rows: TokenRows, chunk: Chunk, at: int) -> None:
    """Copy from a file, from `at` on, to a chunk's rows. Raises OSError."""
    if rows.is_addressable(chunk.group):
        _copy(_LIBC.preadv, descriptor, rows.pieces(chunk.group, chunk.first, chunk.last), at)
        return
    room = rows.room(chunk.group, chunk.first, chunk.last)
    _copy(_LIBC.preadv, descriptor, _piece_of(room), at)
    rows.write(chunk.group, chunk.first, chunk.last, room)


def _piece_of(data: memoryview) -> Pieces:
    """Return memory as one piece, which must not outlive it."""
    array = np.frombuffer(data, np.uint8)
    return Pieces(np.array([array.ctypes.data], np.uint64), np.array([array.nbytes], np.uint64))


def _copy(call: Any, descriptor: int, pieces: Pieces, at: int) -> None:
    table = np.stack([pieces.addresses, pieces.lengths], axis=1)  # struct iovec[]
    for begin in range(0, len(table), _IOV_MAX):
        part = np.ascontiguousarray(table[begin : begin + _IOV_MAX])
        wanted = int(part[:, 1].sum())
        copied = call(descriptor, part.ctypes.data, len(part), at)
        if copied != wanted:
            number = ctypes.get_errno() if copied < 0 else errno.EIO
            raise OSError(number, f"{copied} of {wanted} bytes copied: {os.strerror(number)}")
        at += wanted
