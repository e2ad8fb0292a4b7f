"""The mocker's KV rows: a token's id (K) and its position (V), 4 bytes each, so that an importer can check them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bireme.kv.transfer.base import GroupLayout, KvLayout

LAYOUT = KvLayout("mocker", "int32", (GroupLayout(0, (8,)),))


@dataclass(slots=True)
class MockKvRows:
    """The rows of one prompt; `read` and `write` run on the transfer's thread."""

    ids: npt.NDArray[np.int32]
    corruption: str = ""  # what an importer found wrong

    def read(self, group: int, first: int, last: int, data: memoryview) -> None:
        rows = np.frombuffer(data, "<i4").reshape(2, last - first)  # (id | position, tokens)
        rows[0], rows[1] = self.ids[first:last], np.arange(first, last)

    def write(self, group: int, first: int, last: int, data: memoryview) -> None:
        rows = np.frombuffer(data, "<i4").reshape(2, last - first)  # (id | position, tokens)
        if not (np.array_equal(rows[0], self.ids[first:last]) and np.array_equal(rows[1], np.arange(first, last))):
            self.corruption = f"KV rows {first} to {last} are not those of this prompt"
