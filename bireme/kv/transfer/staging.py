"""Host memory of this process between rows and what is sent: two bounded arrays that transfers share.

Exporters write to an importer's `Staging`: its room is taken first-fit and given back once, and who waits for it waits
in line above this. What an exporter's agent can't read where it lies it sends from a `SendRing`. Both are page-locked
where the rows' owner copies them.
"""

from __future__ import annotations

import numpy as np

from bireme.errors import RequestError
from bireme.kv.transfer.chunks import Chunk
from bireme.kv.transfer.memory import Bytes, RowCopy, RowMemory, StagedMemory, TokenRows, zero_pages
from bireme.kv.transfer.row_copies import begin_load

_ALIGNMENT = 4096  # transfers share no page
NUM_SLOTS = 4  # of a ring: a transfer sends one while the next two are filled, and another has one


class HostArea:
    """Memory in huge pages where there are any; of what UCX writes or reads the kernel looks up each page."""

    def __init__(self, num_bytes: int, owner: RowMemory | None) -> None:
        """`owner`: of most rows that pass through it."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._map = zero_pages(size)
        self.array: Bytes = np.frombuffer(self._map, np.uint8)
        self._owner = owner if isinstance(owner, StagedMemory) else None
        if self._owner is not None:
            self._owner.page_lock(self.array)

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)

    @property
    def num_bytes(self) -> int:
        return len(self.array)

    def close(self) -> None:
        """Give the memory back; nothing may be registered of it, or use it, any more."""
        if self._owner is not None:
            self._owner.page_unlock(self.array)
        del self.array
        self._map.close()


class Staging(HostArea):
    """Used by the control thread; `load` by the copier."""

    def __init__(self, num_bytes: int, owner: RowMemory | None = None) -> None:
        super().__init__(num_bytes, owner)
        self._taken: list[range] = []  # in order

    @property
    def used_bytes(self) -> int:
        return sum(len(room) for room in self._taken)

    def take(self, num_bytes: int) -> range | None:
        """Return offsets; None: no room now. Raises RequestError when there never will be."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if size > self.num_bytes:
            raise RequestError(
                f"KV transfer of {num_bytes} bytes; decode's buffer holds {self.num_bytes}: raise"
                " cache_transceiver_config.max_tokens_in_buffer or send a shorter prompt"
            )
        begin = 0
        for index, room in enumerate([*self._taken, range(self.num_bytes, self.num_bytes)]):
            if room.start - begin >= size:
                self._taken.insert(index, range(begin, begin + size))
                return self._taken[index]
            begin = room.stop
        return None

    def give(self, room: range) -> None:
        self._taken.remove(room)

    def load(self, rows: TokenRows, chunk: Chunk, begin: int) -> RowCopy:
        """Copy a chunk that lies at `begin` to its rows; or begin to."""
        return begin_load(rows, chunk, self.array[begin : begin + chunk.end - chunk.begin])


class SendRing(HostArea):
    """Slots of one size. Used by the copier."""

    def __init__(self, slot_bytes: int, owner: RowMemory | None = None) -> None:
        slot_bytes = -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT
        super().__init__(NUM_SLOTS * slot_bytes, owner)
        self._free = [self.array[begin : begin + slot_bytes] for begin in range(0, NUM_SLOTS * slot_bytes, slot_bytes)]

    @property
    def used_bytes(self) -> int:
        return self.num_bytes - sum(len(slot) for slot in self._free)

    def take(self) -> Bytes | None:
        """Return a slot; None: all are in use."""
        return self._free.pop() if self._free else None

    def give(self, slot: Bytes) -> None:
        self._free.append(slot)

    def close(self) -> None:
        self._free.clear()
        super().close()
