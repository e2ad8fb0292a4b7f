"""Memory of an importer to which exporters write rows: a bounded array that transfers share.

Room is taken first-fit and given back once; who waits for it waits in line above this.
"""

from __future__ import annotations

import numpy as np

from bireme.errors import RequestError
from bireme.kv.transfer.chunks import Chunk
from bireme.kv.transfer.memory import TokenRows, zero_pages
from bireme.kv.transfer.row_copies import load_rows

_ALIGNMENT = 4096  # transfers share no page


class Staging:
    """Used by the control thread; `load` by the copier."""

    def __init__(self, num_bytes: int) -> None:
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._map = zero_pages(size)  # of what UCX writes here the kernel looks up each page: huge ones are few
        self._array = np.frombuffer(self._map, np.uint8)
        self._taken: list[range] = []  # in order

    @property
    def address(self) -> int:
        return int(self._array.ctypes.data)

    @property
    def num_bytes(self) -> int:
        return len(self._array)

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

    def load(self, rows: TokenRows, chunk: Chunk, begin: int) -> None:
        """Copy a chunk that lies at `begin` to its rows."""
        load_rows(rows, chunk, self._array[begin : begin + chunk.end - chunk.begin])

    def close(self) -> None:
        """Give the memory back; nothing may be registered of it, or use it, any more."""
        del self._array
        self._map.close()
