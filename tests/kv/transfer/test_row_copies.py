"""Rows to memory and back: every byte at its place, whatever the width of a row."""

from __future__ import annotations

import numpy as np
import pytest

from bireme.errors import RequestError
from bireme.kv.transfer.chunks import Chunk
from bireme.kv.transfer.memory import HostMemory, TokenRows
from bireme.kv.transfer.row_copies import load_rows, store_rows

PLACES = np.array([5, 6, 7, 31, 0, 1, 12])


def memory_of(widths, seed):
    dice = np.random.default_rng(seed)
    return HostMemory([[dice.integers(0, 256, (32, width), np.uint8) for width in widths]])


@pytest.mark.parametrize("widths", [(1,), (7, 7), (96, 64), (1536, 256, 1536), (250,)])
def test_rows_arrive_where_they_belong_and_nothing_else_changes(widths):
    source, target = memory_of(widths, 1), memory_of(widths, 2)
    wanted = [array.copy() for array in target.arrays[0]]
    for array, from_array in zip(wanted, source.arrays[0], strict=True):
        array[PLACES[2:6][::-1]] = from_array[PLACES[2:6]]
    between = np.zeros(4 * sum(widths) + 3, np.uint8)[3:]  # aligned to nothing
    store_rows(TokenRows(source, (PLACES,)), Chunk(0, 2, 6, 0, len(between)), between)
    load_rows(TokenRows(target, (PLACES[2:6][::-1],)), Chunk(0, 0, 4, 0, len(between)), between)
    for array, expected in zip(target.arrays[0], wanted, strict=True):
        assert (array == expected).all()


@pytest.mark.parametrize("rows", [[0, 32], [0, -1], [0]])
def test_rows_outside_of_the_memory_are_refused(rows):
    memory, between = memory_of((8,), 1), np.zeros(16, np.uint8)
    for copy in (store_rows, load_rows):
        with pytest.raises(RequestError, match="are not held"):
            copy(TokenRows(memory, (np.array(rows),)), Chunk(0, 0, 2, 0, 16), between)
