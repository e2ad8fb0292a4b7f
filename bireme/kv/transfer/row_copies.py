"""Copies between rows and memory in which they lie in the order of their chunk, without the GIL.

numpy copies items of one size from and to many places at the speed of memory while they are small. Rows that the CPU
can't address pass through memory of their owner.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from bireme.kv.transfer.chunks import Chunk
from bireme.kv.transfer.memory import Bytes, Region, RowCopy, Rows, StagedMemory, TokenRows

_MAX_ITEM_BYTES = 256  # of 16 to 1,536 bytes the fastest in both directions


class EndedCopy:
    """A copy that had ended when it was begun."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None: ...


def begin_store(rows: TokenRows, chunk: Chunk, target: Bytes) -> RowCopy:
    """Copy a chunk's rows to memory of their size; or begin to, where their owner can."""
    memory = rows.memory
    if not rows.is_addressable(chunk.group) and isinstance(memory, StagedMemory):
        return memory.begin_read(chunk.group, rows.pick(chunk.group, chunk.first, chunk.last), target, rows.ready)
    store_rows(rows, chunk, target)
    return EndedCopy()


def begin_load(rows: TokenRows, chunk: Chunk, source: Bytes) -> RowCopy:
    """Copy from memory of their size to a chunk's rows; or begin to, where their owner can."""
    memory = rows.memory
    if not rows.is_addressable(chunk.group) and isinstance(memory, StagedMemory):
        return memory.begin_write(chunk.group, rows.pick(chunk.group, chunk.first, chunk.last), source, rows.ready)
    load_rows(rows, chunk, source)
    return EndedCopy()


def store_rows(rows: TokenRows, chunk: Chunk, target: Bytes) -> None:
    """Copy a chunk's rows to memory of their size."""
    if not rows.is_addressable(chunk.group):
        target[:] = np.frombuffer(rows.read(chunk.group, chunk.first, chunk.last), np.uint8)
        return
    places, at = _Places(rows.pick(chunk.group, chunk.first, chunk.last)), 0
    for region in rows.memory.regions[chunk.group]:
        items, end = _items_of(region), at + places.num_rows * region.row_bytes
        np.take(items, places.of(region), out=target[at:end].view(items.dtype), mode="clip")
        at = end


def load_rows(rows: TokenRows, chunk: Chunk, source: Bytes) -> None:
    """Copy from memory of their size to a chunk's rows."""
    if not rows.is_addressable(chunk.group):
        room = rows.room(chunk.group, chunk.first, chunk.last)
        np.frombuffer(room, np.uint8)[:] = source
        rows.write(chunk.group, chunk.first, chunk.last, room)
        return
    places, at = _Places(rows.pick(chunk.group, chunk.first, chunk.last)), 0
    for region in rows.memory.regions[chunk.group]:
        items, end = _items_of(region), at + places.num_rows * region.row_bytes
        items[places.of(region)] = source[at:end].view(items.dtype)
        at = end


class _Places:
    """In which items of a region rows lie."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._found: dict[int, Rows] = {}  # by items a row

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def of(self, region: Region) -> Rows:
        count = region.row_bytes // _item_bytes(region.row_bytes)
        if count not in self._found:
            self._found[count] = (self._rows[:, None] * count + np.arange(count)).reshape(-1)
        return self._found[count]


def _item_bytes(row_bytes: int) -> int:
    return math.gcd(row_bytes, _MAX_ITEM_BYTES)


@functools.lru_cache(maxsize=4096)
def _items_of(region: Region) -> Any:
    """Return a region as items of parts of rows. It holds no reference to the memory: that is the caller's."""
    return np.asarray(_Memory(region.address, region.num_bytes)).view(f"V{_item_bytes(region.row_bytes)}")


class _Memory:
    def __init__(self, address: int, num_bytes: int) -> None:
        self.__array_interface__ = {
            "version": 3, "shape": (num_bytes,), "typestr": "|u1", "data": (address, False)
        }  # fmt: skip
