"""Copies between pieces of memory and a file in memory: one system call for up to 1,024 pieces, without the GIL."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

import numpy as np

from bireme.kv.transfer.memory import Pieces

_IOV_MAX = 1024  # pieces a call takes
_LIBC = ctypes.CDLL(None, use_errno=True)  # a call through it leaves the GIL to others
for _call in (_LIBC.pwritev, _LIBC.preadv):
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    _call.restype = ctypes.c_ssize_t


def store_pieces(descriptor: int, pieces: Pieces, at: int) -> None:
    """Copy pieces to a file, one after another from `at` on. Raises OSError."""
    _copy(_LIBC.pwritev, descriptor, pieces, at)


def load_pieces(descriptor: int, pieces: Pieces, at: int) -> None:
    """Copy from a file, from `at` on, to pieces. Raises OSError."""
    _copy(_LIBC.preadv, descriptor, pieces, at)


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
