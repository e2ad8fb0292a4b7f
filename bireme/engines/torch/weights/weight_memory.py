"""Memory that several processes map, for weights: a sealed memfd on a host, exported physical memory on a GPU.

Both are a descriptor to others, and read-only from the moment they are filled. A mapping lasts as long as the process,
and the memory as long as a descriptor or a mapping of it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import warnings
from typing import Any, Protocol

import torch
from torch import Tensor

from bireme.errors import UnavailableError

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1: writable mappings that exist may go on
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


class WeightMemory(Protocol):
    """Of one device. All raise UnavailableError, OSError or RuntimeError where the system refuses."""

    def create(self, num_bytes: int) -> tuple[int, Tensor]:
        """Return the descriptor of new memory, and the memory as bytes that may be written until `seal`."""

    def seal(self, descriptor: int, written: Tensor) -> Tensor:
        """Return the bytes for reading; nobody writes them from now on."""

    def map(self, descriptor: int, num_bytes: int) -> Tensor:
        """Return what another process has filled, as bytes for reading."""


def weight_memory(device: torch.device) -> WeightMemory:
    if device.type != "cuda":
        return SealedMemory()
    torch.zeros((), device=device)  # makes the context in which addresses are mapped
    return ExportedMemory(device)


class SealedMemory:
    def create(self, num_bytes: int) -> tuple[int, Tensor]:
        descriptor = create_sealable(num_bytes)
        return descriptor, torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)

    def seal(self, descriptor: int, written: Tensor) -> Tensor:
        seal(descriptor)
        return self.map(descriptor, len(written))

    def map(self, descriptor: int, num_bytes: int) -> Tensor:
        if os.fstat(descriptor).st_size < num_bytes:
            raise UnavailableError(f"the shared memory has {os.fstat(descriptor).st_size} bytes; {num_bytes} were told")
        memory = mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that tensors know no read-only: nobody writes weights
            return torch.frombuffer(memory, dtype=torch.uint8)


def create_sealable(num_bytes: int) -> int:
    descriptor = os.memfd_create("bireme-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)  # a lack of memory shows here, not as SIGBUS
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def seal(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_meta_data", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    )


class _AccessDescription(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_PINNED, _POSIX_DESCRIPTOR, _DEVICE = 1, 1, 1  # of CUmemAllocationType, CUmemAllocationHandleType, CUmemLocationType
_READ, _READ_WRITE = 1, 3  # of CUmemAccess_flags
_HANDLE = ctypes.c_ulonglong
_SIGNATURES: dict[str, tuple[Any, ...]] = {  # of the driver's functions, all of which return a CUresult
    "cuInit": (ctypes.c_uint,),
    "cuMemGetAllocationGranularity": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
    "cuMemCreate": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_ulonglong),
    "cuMemRelease": (_HANDLE,),
    "cuMemExportToShareableHandle": (ctypes.c_void_p, _HANDLE, ctypes.c_int, ctypes.c_ulonglong),
    "cuMemImportFromShareableHandle": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
    "cuMemAddressReserve": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_ulonglong, ctypes.c_ulonglong),
    "cuMemAddressFree": (ctypes.c_ulonglong, ctypes.c_size_t),
    "cuMemMap": (ctypes.c_ulonglong, ctypes.c_size_t, ctypes.c_size_t, _HANDLE, ctypes.c_ulonglong),
    "cuMemSetAccess": (ctypes.c_ulonglong, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t),
}


class ExportedMemory:
    """Physical memory by the driver's virtual memory management: it has no address until a process maps it."""

    def __init__(self, device: torch.device, library: str = "libcuda.so.1") -> None:
        """Raises UnavailableError without the driver."""
        self._number = device.index or 0
        try:
            driver = ctypes.CDLL(library)
            self._functions = {name: getattr(driver, name) for name in _SIGNATURES}
        except (OSError, AttributeError) as error:
            raise UnavailableError(f"CUDA's driver has no virtual memory management here: {error}") from error
        for name, arguments in _SIGNATURES.items():
            self._functions[name].argtypes = arguments
        self._call("cuInit", 0)
        location = _Location(_DEVICE, self._number)
        self._properties = _AllocationProperties(_PINNED, _POSIX_DESCRIPTOR, location)
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0)
        self._granularity = granularity.value

    def create(self, num_bytes: int) -> tuple[int, Tensor]:
        handle, descriptor = _HANDLE(), ctypes.c_int(-1)
        size = self._rounded(num_bytes)
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), 0)
        try:
            self._call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _POSIX_DESCRIPTOR, 0)
            address = self._map(handle, size)
            self._allow(address, size, _READ_WRITE)
        except UnavailableError:
            if descriptor.value >= 0:
                os.close(descriptor.value)
            raise
        finally:
            self._call("cuMemRelease", handle)  # the mapping and the descriptor keep the memory
        return descriptor.value, self._tensor(address, num_bytes)

    def seal(self, descriptor: int, written: Tensor) -> Tensor:
        torch.cuda.synchronize()  # copies into it have ended
        self._allow_reading(written.data_ptr(), self._rounded(len(written)))
        return written

    def map(self, descriptor: int, num_bytes: int) -> Tensor:
        handle = _HANDLE()
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), descriptor, _POSIX_DESCRIPTOR)
        try:
            size = self._rounded(num_bytes)
            address = self._map(handle, size)
            self._allow_reading(address, size)
        finally:
            self._call("cuMemRelease", handle)
        return self._tensor(address, num_bytes)

    def _map(self, handle: Any, size: int) -> int:
        address = ctypes.c_ulonglong()
        self._call("cuMemAddressReserve", ctypes.byref(address), size, self._granularity, 0, 0)
        try:
            self._call("cuMemMap", address, size, 0, handle, 0)
        except UnavailableError:
            self._functions["cuMemAddressFree"](address, size)
            raise
        return address.value

    def _allow_reading(self, address: int, size: int) -> None:
        try:
            self._allow(address, size, _READ)
        except UnavailableError:  # a driver that knows only both: no engine writes weights anyway
            self._allow(address, size, _READ_WRITE)

    def _allow(self, address: int, size: int, access: int) -> None:
        description = _AccessDescription(_Location(_DEVICE, self._number), access)
        self._call("cuMemSetAccess", address, size, ctypes.byref(description), 1)

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._granularity) * self._granularity

    def _tensor(self, address: int, num_bytes: int) -> Tensor:
        return torch.as_tensor(_Bytes(address, num_bytes), device=f"cuda:{self._number}")

    def _call(self, name: str, *arguments: Any) -> None:
        if code := self._functions[name](*arguments):
            raise UnavailableError(f"{name} of CUDA's driver returned {code}")


class _Bytes:
    """Memory at an address, as CUDA's array interface has it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip
