"""What some layers of a model gave for each row of a step: a head that drafts with it reads that (`eagle_head.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class TappedRows:
    """Of the step that was computed last. Rows are kept as the layers made them: on a CPU nothing is copied."""

    def __init__(self, layers: Sequence[int]) -> None:
        """`layers`: counted from 0, in the order in which their outputs are wanted."""
        self.layers = tuple(layers)
        self._rows: dict[int, Tensor] = {}

    def keep(self, layer: int, rows: Tensor) -> None:
        """rows (T, b): the layer's output, before any norm that follows; nobody may change them."""
        self._rows[layer] = rows

    def parts(self) -> list[Tensor]:
        """Return the layers' outputs, (T, b) each."""
        return [self._rows[layer] for layer in self.layers]

    def rows(self, wanted: Tensor | None = None) -> Tensor:
        """Return the layers' outputs side by side, (T, layers * b), of all rows of the step or of those `wanted`."""
        parts = self.parts()
        return torch.cat(parts if wanted is None else [part[wanted] for part in parts], -1)
