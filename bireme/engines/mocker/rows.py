"""The mocker's KV rows: a token's id (K) and its position (V), 4 bytes each, so that an importer can check them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bireme.kv.transfer.base import GroupLayout, KvLayout
from bireme.kv.transfer.memory import HostMemory, TokenRows, as_bytes

LAYOUT = KvLayout("mocker", "int32", (GroupLayout(0, (8,)),))


@dataclass(frozen=True, slots=True)
class MockKvRows:
    """The rows of one prompt, in memory of their own."""

    ids: npt.NDArray[np.int32]  # (tokens,) the prompt's
    keys: npt.NDArray[np.int32]  # (tokens,)
    values: npt.NDArray[np.int32]  # (tokens,)

    @classmethod
    def computed(cls, ids: npt.NDArray[np.int32]) -> MockKvRows:
        return cls(ids, np.ascontiguousarray(ids), np.arange(len(ids), dtype=np.int32))

    @classmethod
    def empty(cls, ids: npt.NDArray[np.int32]) -> MockKvRows:
        return cls(ids, np.full(len(ids), -1, np.int32), np.full(len(ids), -1, np.int32))

    @property
    def rows(self) -> TokenRows:
        return HostMemory([[as_bytes(self.keys), as_bytes(self.values)]]).token_rows()

    def corruption(self, first: int) -> str:
        """Return what an importer of the tokens from `first` on found wrong; "": nothing."""
        is_right = np.array_equal(self.keys[first:], self.ids[first:]) and np.array_equal(
            self.values[first:], np.arange(first, len(self.ids))
        )
        return "" if is_right else f"KV rows {first} to {len(self.ids)} are not those of this prompt"
