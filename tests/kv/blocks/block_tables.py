"""Tables of requests that compute in chunks and go, in any order: what state machines over blocks have in common."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bireme.kv.blocks.block_manager import BlockManager, BlockTable


class BlockTables(RuleBasedStateMachine):
    def __init__(self, blocks: BlockManager) -> None:
        super().__init__()
        self.blocks = blocks
        self.live: list[tuple[BlockTable, list[int], int]] = []  # each with its tokens, and how many are computed

    def write(self, table: BlockTable, tokens: list[int], start: int, end: int) -> None:
        """Take note of what is computed into a table's blocks."""

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 100), chunk=st.integers(1, 7))
    def compute(self, pick: int, chunk: int) -> None:
        at = pick % len(self.live)
        table, tokens, computed = self.live[at]
        end = min(len(tokens), computed + chunk)
        assert self.blocks.can_grow(table, end, computed), "a reservation that does not hold"
        self.blocks.grow(table, end, computed)
        self.write(table, tokens, computed, end)
        self.blocks.commit(table, tokens, end)
        self.blocks.slide(table, end)
        self.live[at] = (table, tokens, end)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 100))
    def leave(self, pick: int) -> None:
        self.blocks.release(self.live.pop(pick % len(self.live))[0])

    @invariant()
    def promises_can_be_kept(self) -> None:
        assert all(self.blocks._room(group) >= 0 for group in range(2))
