"""ResidentDecode's and MixedSteps' contract on a CPU: steps are started ahead there, and tokens chosen before anybody
asks.
"""

from __future__ import annotations

import math
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
from bireme.logits.sampler import NOTHING_LEFT


@dataclass
class Flight:
    logits: torch.Tensor  # until the next step is started
    tokens: list[int]
    owner: HostResident
    batch: list[Request]
    ahead: int

    def choose_again(self, edited: torch.Tensor, late: Sequence[tuple[int, int, Row]]) -> None:
        for logits_V, (slot, at, row) in zip(edited, late, strict=True):
            one = self.batch[at]
            assert (one.slot, one.num_output) == (slot, row.num_output)
            is_usable = float(logits_V.max()) > -math.inf
            self.tokens[at] = _drawn(logits_V, row, 0) if is_usable else NOTHING_LEFT
            self.owner.last[one.key] = max(0, self.tokens[at])
        self.owner.num_chosen_again += self.ahead

    def ids_of(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.tokens)[rows].clamp(min=0)

    def send(self) -> None:
        pass

    def read(self) -> list[int]:
        return list(self.tokens)


class HostResident:
    """Computes as the engine's own steps do. A row draws by its parameters alone, as on a GPU: without its guide."""

    most_rows = 64

    def __init__(self, parts: Parts) -> None:
        self.num_ahead = 0  # steps that were started before the tokens of the one before were read
        self.num_joined = 0  # of these, those with a prompt
        self.num_gone_on = 0  # parts of prompts that were started before the part before had been read
        self._parts = parts
        self.num_chosen_again = 0  # of them, those with rows whose tokens were chosen from edited logits
        self.num_verified = 0  # steps with drafts
        self.last: dict[Any, int] = {}
        self._flight: Flight | None = None

    @classmethod
    def put_into(cls, parts: Parts) -> HostResident:
        """Have it start an engine's steps, those with prompts as well."""
        parts.forward.resident = parts.forward.mixed = own = cls(parts)  # type: ignore[assignment]
        if parts.speculation is not None:
            parts.forward.verifying = own  # type: ignore[assignment]
        return own

    def takes(self, plan: SchedulerOutput) -> bool:
        return not plan.drafts and not any(sequence.wants_prompt_logprobs for sequence, _ in plan.chunks)

    def start(self, plan: SchedulerOutput, row_of: Callable[[Request], Row], ahead: int = 0) -> Flight:
        if self._flight is not None:
            self._flight.logits.fill_(float("nan"))
        self.num_ahead += ahead
        self.num_joined += bool(ahead and plan.chunks)
        computed = [sequence.computed for sequence in plan.decodes]
        for sequence in plan.decodes if ahead else ():
            sequence.tokens.append(self.last[sequence.key])
            sequence.computed = len(sequence.tokens) - 1
        begins = [(sequence, sequence.computed, plan.begin_of(sequence)) for sequence, _ in plan.chunks]
        self.num_gone_on += sum(begin > before for _, before, begin in begins)
        under_way, plan.ahead = plan.ahead, {}
        for sequence, _, begin in begins:
            sequence.computed = begin
        logits = self._parts.forward.run(plan).logits.clone()
        for sequence, before, _ in begins:
            sequence.computed = before
        plan.ahead = under_way
        batch = plan.sampled
        for sequence, before in zip(plan.decodes if ahead else (), computed, strict=False):
            sequence.tokens.pop()
            sequence.computed = before
        num_ahead = len(plan.decodes) if ahead else 0
        tokens = [_drawn(logits[at], row_of(one), ahead=at < num_ahead) for at, one in enumerate(batch)]
        self.last = dict(zip((sequence.key for sequence in batch), tokens, strict=True))
        self.num_verified += bool(plan.drafts)
        drafted = [(one, depth) for one, ids in plan.drafts.items() for depth in range(1, len(ids) + 1)]
        rows = logits[len(batch) :]
        tokens += [_drawn(row, row_of(one), depth) for row, (one, depth) in zip(rows, drafted, strict=False)]
        self._flight = Flight(logits, tokens, self, batch, ahead)
        return self._flight

    def make_next_graph(self) -> bool:
        return False


def _drawn(logits_V: torch.Tensor, row: Row, ahead: int) -> int:
    if not row.temperature:
        return int(logits_V.argmax())
    return filters.draw_row(logits_V.float().numpy().copy(), row, draw_key(row.seed, row.num_output + ahead))
