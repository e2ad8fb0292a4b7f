"""Where the rows of tokens lie: pieces of memory, what is not held, arrays as memory."""

from __future__ import annotations

import numpy as np
import pytest

from bireme.errors import RequestError
from bireme.kv.transfer.memory import NOT_HELD, HostMemory, TokenRows


def memory_of(num_rows=100, widths=(4, 8)):
    dice = np.random.default_rng(0)
    return HostMemory([[dice.integers(0, 255, (num_rows, width), np.uint8) for width in widths]])


def test_rows_that_follow_each_other_are_one_piece_of_each_tensor():
    memory = memory_of()
    pieces = TokenRows(memory, (np.array([7, 8, 9, 40, 41, 3]),)).pieces(0, 0, 6)
    keys, values = (region.address for region in memory.regions[0])
    assert pieces.addresses.tolist() == [keys + 28, keys + 160, keys + 12, values + 56, values + 320, values + 24]
    assert pieces.lengths.tolist() == [12, 8, 4, 24, 16, 8]


def test_a_part_of_the_tokens_has_a_part_of_the_pieces():
    pieces = TokenRows(memory_of(widths=(4,)), (np.array([7, 8, 9, 40, 41, 3]),)).pieces(0, 2, 4)
    assert pieces.lengths.tolist() == [4, 4]


@pytest.mark.parametrize("rows", [[5, NOT_HELD, 6], [5, 6, 100], [5, 6]])
def test_rows_that_are_not_held_or_not_there_are_never_addressed(rows):
    tokens = TokenRows(memory_of(), (np.array(rows),))
    for touch in (lambda: tokens.pieces(0, 0, 3), lambda: tokens.read(0, 0, 3)):
        with pytest.raises(RequestError, match="rows of tokens 0 to 3 of group 0 are not held"):
            touch()


def test_what_is_read_of_one_memory_is_written_to_another():
    source, target = memory_of(), HostMemory([[np.zeros((100, width), np.uint8) for width in (4, 8)]])
    rows = np.array([3, 4, 90])
    target.write(0, rows[::-1].copy(), source.read(0, rows))
    for mine, theirs in zip(source.arrays[0], target.arrays[0], strict=True):
        assert (theirs[rows[::-1]] == mine[rows]).all()
