"""ResidentDecode's contract on a CPU, so that steps are started ahead there: tokens are chosen before anybody asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bireme.engines.torch.scheduling.parts import Parts
from bireme.engines.torch.step import SchedulerOutput
from bireme.engines.torch.step import Sequence as Request
from bireme.logits import filters
from bireme.logits.random import draw_key
from bireme.logits.rows import Row


@dataclass
class Flight:
    logits: torch.Tensor  # until the next step is started
    tokens: list[int]


class HostResident:
    """Computes as the engine's own steps do. A row draws by its parameters alone, as on a GPU: without its guide."""

    most_rows = 16

    def __init__(self, parts: Parts) -> None:
        self.num_ahead = 0  # steps that were started before the tokens of the one before were read
        self._parts = parts
        self._flight: Flight | None = None
        self._last: dict[Any, int] = {}

    def start(self, batch: Sequence[Request], row_of: Callable[[Request], Row], ahead: int = 0) -> Flight:
        if self._flight is not None:
            self._flight.logits.fill_(float("nan"))
        self.num_ahead += ahead
        for sequence in batch if ahead else ():
            sequence.tokens.append(self._last[sequence.key])
            sequence.computed += 1
        logits = self._parts.forward.run(SchedulerOutput(decodes=list(batch))).logits.clone()
        for sequence in batch if ahead else ():
            sequence.tokens.pop()
            sequence.computed -= 1
        tokens = [_drawn(logits[at], row_of(sequence), ahead) for at, sequence in enumerate(batch)]
        self._last = dict(zip((sequence.key for sequence in batch), tokens, strict=True))
        self._flight = Flight(logits, tokens)
        return self._flight

    def tokens(self, flight: Flight) -> list[int]:
        return list(flight.tokens)

    def make_next_graph(self) -> bool:
        return False


def _drawn(logits_V: torch.Tensor, row: Row, ahead: int) -> int:
    if not row.temperature:
        return int(logits_V.argmax())
    return filters.draw_row(logits_V.float().numpy().copy(), row, draw_key(row.seed, row.num_output + ahead))
