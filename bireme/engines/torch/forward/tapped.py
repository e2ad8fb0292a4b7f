"""What some layers of a model gave for each row of a step: a head that drafts with it reads that (`eagle_head.py`).

Steps of CUDA graphs write it where it was when they were made. Decode steps, with drafts or without, put a row to its
sequence's place (`TappedPlaces`): it is there until the sequence has gone on by so many places, whatever other steps
were started. Steps with prompts' tokens have it row by row, until the next one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bireme.engines.torch.weights.eagle_bytes import FIXED_ROWS


class TappedPlaces:
    """The layers' outputs of each sequence's last places, in cells by its slot and place."""

    def __init__(
        self, num_layers: int, num_slots: int, num_places: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`width`: of a layer's output. A slot more is of rows that fill up a step."""
        self.num_places = num_places
        self.rows = torch.zeros((num_slots + 1) * num_places, num_layers * width, dtype=dtype, device=device)
        self.parts = list(self.rows.split(width, 1))
        self.nothing = num_slots * num_places + 1  # a cell that nobody writes: rows that fill up are at place 0

    def cells(self, slots: Any, places: Any) -> Any:
        """Return the cells of these places, arrays or tensors (n,) of integers."""
        return slots * self.num_places + places % self.num_places

    def put(self, layer: int, cells: Tensor, rows: Tensor) -> None:
        """rows (n, width): outputs of the layer of that number, from 0; cells (n,) int64."""
        self.parts[layer].index_copy_(0, cells, rows)

    def slices(self, slot: int, first: int, count: int) -> list[slice]:
        """Return the cells of so many places, at most `num_places`, in their order."""
        begin, at = slot * self.num_places, first % self.num_places
        end = min(at + count, self.num_places)
        found = [slice(begin + at, begin + end)]
        return [*found, slice(begin, begin + at + count - end)] if at + count > end else found


class TappedRows:
    """Of the step that was computed last. On a CPU nothing is copied: rows are kept as the layers made them."""

    def __init__(self, layers: Sequence[int]) -> None:
        """`layers`: counted from 0, in the order in which their outputs are wanted."""
        self.layers = tuple(layers)
        self.number_of = {layer: number for number, layer in enumerate(layers)}
        self.places: TappedPlaces | None = None
        self._fixed: Tensor | None = None  # (layers, FIXED_ROWS, b)
        self._rows: dict[int, Tensor] = {}

    def hold(
        self, num_slots: int, num_places: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> TappedPlaces:
        """Allocate what steps of graphs write, before any is made."""
        self.places = TappedPlaces(len(self.layers), num_slots, num_places, width, dtype, device)
        self._fixed = torch.zeros(len(self.layers), FIXED_ROWS, width, dtype=dtype, device=device)
        return self.places

    def keep(self, layer: int, rows: Tensor, is_changed: bool = False) -> None:
        """rows (T, b): the layer's output, before any norm that follows. `is_changed`: by what comes next."""
        if self._fixed is not None and len(rows) <= FIXED_ROWS:
            self._fixed[self.number_of[layer], : len(rows)].copy_(rows)
        else:
            self._rows[layer] = rows.clone() if is_changed else rows

    def parts(self, num_rows: int) -> list[Tensor]:
        """Return the layers' outputs, (T, b) each, of the last step that kept them: it had T rows."""
        if self._fixed is not None and num_rows <= FIXED_ROWS:
            return list(self._fixed[:, :num_rows].unbind())
        return [self._rows[layer] for layer in self.layers]

    def rows(self, num_rows: int) -> Tensor:
        """Return the same side by side, (T, layers * b)."""
        return torch.cat(self.parts(num_rows), -1)
