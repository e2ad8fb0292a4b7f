"""Memory that holds rows, as a transfer sees it: regions, and where the rows of a request's tokens lie in them.

A row is one token's bytes in one tensor of a layer. A transfer addresses DRAM by itself; rows of other kinds it has
the memory's owner copy, unless its backend can address those too.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from bireme.errors import RequestError

NOT_HELD = -1  # row of a token that slid out of its group's window
Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]  # one after the other
Bytes2D = npt.NDArray[np.uint8]  # (rows, bytes of a row), contiguous


class MemoryKind(enum.Enum):
    DRAM = "DRAM"
    VRAM = "VRAM"


@dataclass(frozen=True, slots=True)
class Region:
    """Rows that follow each other in memory: one tensor."""

    address: int
    row_bytes: int
    num_rows: int
    kind: MemoryKind = MemoryKind.DRAM
    device: int = 0  # of VRAM

    @property
    def num_bytes(self) -> int:
        return self.row_bytes * self.num_rows


def zero_pages(num_bytes: int) -> mmap.mmap:
    """Return memory of this process, in huge pages where there are any; a page takes memory when it is touched."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class RowMemory(Protocol):
    """An engine's rows. They stay where they are as long as this object lives."""

    @property
    def regions(self) -> tuple[tuple[Region, ...], ...]:
        """A group of the layout each: its tensors, layer by layer, keys then values; all of one kind."""

    def wait(self, ready: Any) -> None:
        """Wait until rows may be touched that `ready` (TokenRows.ready) is a sign for.

        A GPU's context is the calling thread's from then on, for libraries that address its memory.
        """

    def read(self, group: int, rows: Rows, ready: Any = None) -> memoryview:
        """Return a copy of rows: tensor by tensor in the order of `regions`. Valid until the next call."""

    def room(self, group: int, num_rows: int) -> memoryview:
        """Return memory from which `write` copies best; valid until then."""

    def write(self, group: int, rows: Rows, data: memoryview, ready: Any = None) -> None:
        """Copy `data`, in the order of `read`, into rows."""


class RowCopy(Protocol):
    """A copy that was begun."""

    def is_done(self) -> bool: ...

    def wait(self) -> None:
        """Wait, without spinning, until it has ended."""


@runtime_checkable
class StagedMemory(RowMemory, Protocol):
    """Rows whose owner copies them to and from a transfer's own memory while the transfer does other things.

    Copies end in the order in which they were begun.
    """

    def page_lock(self, memory: Bytes) -> None:
        """Let the owner copy best to and from this memory, until `page_unlock`. Where it can't, copies are slower."""

    def page_unlock(self, memory: Bytes) -> None: ...

    def begin_read(self, group: int, rows: Rows, target: Bytes, ready: Any) -> RowCopy:
        """Begin to copy rows, in the order of `read`."""

    def begin_write(self, group: int, rows: Rows, source: Bytes, ready: Any) -> RowCopy:
        """Begin to copy `source`, in the order of `read`, into rows."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of memory that make up some rows, in the order of RowMemory.read; both arrays (pieces,)."""

    addresses: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Where the rows of a request's tokens lie."""

    memory: RowMemory
    rows: tuple[Rows, ...]  # a group: the row of each token from 0 on, or NOT_HELD
    ready: Any = None  # the memory's own sign that they may be touched; None: now, as always in DRAM

    def is_addressable(self, group: int) -> bool:
        """Return whether the CPU can copy a group's rows by their addresses."""
        return all(region.kind is MemoryKind.DRAM for region in self.memory.regions[group])

    def pieces(self, group: int, first: int, last: int) -> Pieces:
        """Return the memory of tokens [first, last); rows that follow each other are one piece of a tensor.

        Raises RequestError when a token's row is not held.
        """
        begins, counts = runs_of(self.pick(group, first, last)).T
        regions = self.memory.regions[group]
        bases = np.array([region.address for region in regions], np.uint64)[:, None]
        widths = np.array([region.row_bytes for region in regions], np.uint64)[:, None]
        addresses = bases + begins.astype(np.uint64)[None, :] * widths
        lengths = counts.astype(np.uint64)[None, :] * widths
        return Pieces(addresses.reshape(-1), lengths.reshape(-1))

    def read(self, group: int, first: int, last: int) -> memoryview:
        return self.memory.read(group, self.pick(group, first, last), self.ready)

    def room(self, group: int, first: int, last: int) -> memoryview:
        return self.memory.room(group, last - first)

    def write(self, group: int, first: int, last: int, data: memoryview) -> None:
        self.memory.write(group, self.pick(group, first, last), data, self.ready)

    def pick(self, group: int, first: int, last: int) -> Rows:
        """Return rows that may be touched: addresses are computed from them. Raises RequestError."""
        rows = self.rows[group][first:last]
        most = min((region.num_rows for region in self.memory.regions[group]), default=0)
        if len(rows) != last - first or len(rows) == 0 or rows.min() < 0 or rows.max() >= most:
            raise RequestError(f"firsts: KV rows of tokens {first} to {last} of group {group} are not held")
        return rows


class HostMemory:
    """Rows in arrays of this process."""

    def __init__(self, groups: Sequence[Sequence[Bytes2D]]) -> None:
        self.arrays = groups
        self.regions = tuple(tuple(_region_of(array) for array in arrays) for arrays in groups)

    def token_rows(self) -> TokenRows:
        """Return rows of tokens that lie in their order, from row 0 on."""
        return TokenRows(self, tuple(np.arange(len(arrays[0])) for arrays in self.arrays))

    def wait(self, ready: Any) -> None: ...

    def read(self, group: int, rows: Rows, ready: Any = None) -> memoryview:
        whole: Any = np.concatenate([array[rows].reshape(-1) for array in self.arrays[group]])
        return memoryview(whole)

    def room(self, group: int, num_rows: int) -> memoryview:
        return memoryview(bytearray(num_rows * sum(array.shape[1] for array in self.arrays[group])))

    def write(self, group: int, rows: Rows, data: memoryview, ready: Any = None) -> None:
        source, at = np.frombuffer(data, np.uint8), 0
        for array in self.arrays[group]:
            end = at + len(rows) * array.shape[1]
            array[rows] = source[at:end].reshape(len(rows), -1)
            at = end


def runs_of(rows: Rows) -> Rows:
    """Return (runs, 2): the first row of those that follow each other, and their number."""
    begins = np.concatenate(([0], np.flatnonzero(np.diff(rows) != 1) + 1))
    found: Rows = np.stack([rows[begins], np.diff(np.append(begins, len(rows)))], axis=1).astype(np.int64)
    return found


def as_bytes(array: npt.NDArray[Any]) -> Bytes2D:
    """Return a contiguous array's memory as (rows, bytes of a row)."""
    return array.view(np.uint8).reshape(len(array), -1)


def _region_of(array: Bytes2D) -> Region:
    assert array.flags.c_contiguous and array.dtype == np.uint8
    return Region(array.ctypes.data, array.shape[1], array.shape[0])
