"""A step that was started: its tokens are on their way, and some rows' can be chosen again from edited logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bireme.engines.torch.forward.decode_state import DecodeState
from bireme.engines.torch.kernels.draw import UNUSABLE, start_draw
from bireme.logits.rows import Row
from bireme.logits.sampler import NOTHING_LEFT
from bireme.logits.sending import send


@dataclass(slots=True)
class Flight:
    """All but `read` is over when the next step is started, and waits for nothing."""

    state: DecodeState
    logits: Tensor  # (count, vocabulary)
    tokens: Tensor  # (count,) in host memory, once `done`
    done: torch.cuda.Event | None = None

    @classmethod
    def depart(cls, state: DecodeState, heard: Tensor) -> Flight:
        """Have the tokens of a step that was started come to `heard` (count,), which is page-locked."""
        flight = cls(state, state.logits[: len(heard)], heard)
        flight.send()
        return flight

    def send(self) -> None:
        """Have the tokens come, after all that the GPU has been given so far."""
        self.tokens.copy_(self.state.tokens[: len(self.tokens)], non_blocking=True)
        if self.state.tokens.is_cuda:
            self.done = torch.cuda.Event()
            self.done.record()

    def choose_again(self, edited: Tensor, late: Sequence[tuple[int, int, Row]]) -> None:
        """Choose the tokens of H rows from these logits (H, vocabulary); NOTHING_LEFT where only these are not finite.

        `late`: slot, number in the step and row of each.
        """
        state = self.state
        told = send(np.array([(slot, at) for slot, at, _ in late]), edited.device)
        before = state.tokens.index_select(0, told[:, 1])
        chosen = start_draw(edited, [row for _, _, row in late])
        is_own = (chosen == UNUSABLE) & (before != UNUSABLE)
        state.tokens.index_copy_(0, told[:, 1], chosen.masked_fill(is_own, NOTHING_LEFT))
        state.last.index_copy_(0, told[:, 0], chosen)

    def ids_of(self, rows: Tensor) -> Tensor:
        """Return the tokens of these rows on the device, int64; 0 for one that has none."""
        return self.state.tokens.index_select(0, rows).long().clamp_(min=0)

    def read(self) -> list[int]:
        """Wait for the step and return its tokens; UNUSABLE for a row whose logits are not finite."""
        if self.done is not None:
            self.done.synchronize()
        found: list[int] = self.tokens.tolist()
        return found
