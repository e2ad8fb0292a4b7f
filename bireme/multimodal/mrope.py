"""Rotary positions in three dimensions (time, height, width), as in the Qwen-VL family.

Text moves all three on together; a picture spreads over its grid from where it stands, and the text after it goes on
from the picture's largest position. Equal to transformers' get_rope_index for pictures, which tests check.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bireme.multimodal.wire import OpenedItem

Positions = npt.NDArray[np.int64]


def rope_positions(num_tokens: int, items: Sequence[OpenedItem], merge_size: int) -> Positions:
    """Return (3, num_tokens). `items` in the order of positions, each with a grid."""
    result = np.empty((3, num_tokens), np.int64)
    at, position = 0, 0
    for item in items:
        text = item.position - at
        result[:, at : item.position] = position + np.arange(text)
        position += text
        at = item.position + item.num_tokens
        grid = _grid(item, merge_size)
        result[:, item.position : at] = position + grid
        position += int(grid.max()) + 1
    result[:, at:] = position + np.arange(num_tokens - at)
    return result


def _grid(item: OpenedItem, merge_size: int) -> Positions:
    """Return (3, num_tokens of the picture), from 0."""
    assert item.grid is not None
    time, height, width = item.grid[0], item.grid[1] // merge_size, item.grid[2] // merge_size
    return np.indices((time, height, width)).reshape(3, -1)
