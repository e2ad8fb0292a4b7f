"""What of CUDA's driver other processes' memory needs and torch does not offer: handles of allocations.

The driver's library is wherever a GPU is; functions as in its documentation, section Memory Management.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1
_Address = ctypes.c_uint64


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaError(RuntimeError):
    """A call of the driver that failed."""


class CudaDriver:
    """Of one GPU, by torch's number. Any thread may use it; torch has begun to use the GPU."""

    def __init__(self, index: int, library: str = "libcuda.so.1") -> None:
        """Raises CudaError when there is no driver, or no such GPU."""
        self._library = _load(library)
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)  # torch's; it ends with the process

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Return address and size of the allocation in which an address lies."""
        begin, size = _Address(), ctypes.c_size_t()
        with self._current():
            self._call("cuMemGetAddressRange_v2", ctypes.byref(begin), ctypes.byref(size), _Address(address))
        return begin.value, size.value

    def export_allocation(self, address: int) -> bytes:
        """Return the handle of an allocation, for other processes of this host."""
        handle = _Handle()
        with self._current():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), _Address(address))
        return bytes(handle.reserved)

    def map_allocation(self, handle: bytes) -> int:
        """Return where another process's allocation lies here. It may be another GPU's, if this one reaches it."""
        if len(handle) != HANDLE_BYTES:
            raise CudaError(f"{len(handle)} bytes are no handle of a GPU's memory; its owner has another kind")
        address = _Address()
        with self._current():
            flags = ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), flags)
        return address.value

    def unmap_allocation(self, address: int) -> None:
        with self._current():
            self._call("cuIpcCloseMemHandle", _Address(address))

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or str(code).encode()).decode()}")


@functools.cache
def _load(name: str) -> Any:
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise CudaError(f"CUDA's driver can't be loaded: {error}") from error
    if code := library.cuInit(0):
        raise CudaError(f"cuInit: error {code}")
    return library
