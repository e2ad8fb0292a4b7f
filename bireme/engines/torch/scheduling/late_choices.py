"""Tokens whose choice needs what the host alone knows: masks of guides, penalties, bias, bans, log probabilities.

A step chooses every row's token on the GPU by its sampling parameters, so it can be started before the tokens of the
one before are known. Once they are, these rows' logits are edited behind the step and their tokens chosen again, all on
the GPU; by then the step itself is running. Nobody waits for that here, and the next step can be started as ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bireme.engines.base import RequestKey
from bireme.engines.torch.step import Sequence, SequenceStatus
from bireme.errors import BiremeError
from bireme.logits.logprobs import Measured, measure
from bireme.logits.rows import Row
from bireme.logits.sampler import Sampled, Sampler
from bireme.logits.sending import send

if TYPE_CHECKING:  # Triton's language: CUDA builds alone
    from bireme.engines.torch.forward.flight import Flight


@dataclass(slots=True)
class LateChoice:
    """What a step has beside its tokens."""

    errors: dict[int, BiremeError] = field(default_factory=dict)  # row -> why it can have no token
    measured: Measured | None = None
    num_top: dict[int, int] = field(default_factory=dict)  # row -> k, in the order of `measured`


class LateChoices:
    """Used by the engine's thread."""

    def __init__(self, sampler: Sampler[RequestKey]) -> None:
        self._sampler = sampler

    def needs_host(self, batch: list[Sequence]) -> bool:
        """Return whether these rows' tokens can be chosen only when their logits are there: own processors do it."""
        rows = self._sampler.late
        return bool(rows) and any(rows[one.key].processors for one in batch if one.key in rows)

    def choose(self, flight: Flight, batch: list[Sequence]) -> LateChoice:
        """Have tokens chosen again, and measured, of a step whose logits are still there.

        The tokens before its own have been accepted. This waits for nothing, but for the step where a row has
        processors of its own: the step's time is not theirs.
        """
        choice = LateChoice()
        rows = self._late_rows(batch)
        if not rows:
            return choice
        if any(row.processors for row in rows.values()):
            flight.read()
        if edited := {at: batch[at] for at, row in rows.items() if row.is_edited}:
            self._edit(flight, edited, choice)
        choice.num_top = {at: row.num_top for at, row in rows.items() if row.num_top is not None}
        if choice.num_top:
            places = send(np.array(list(choice.num_top)), flight.logits.device)
            logits = flight.logits[:, : self._sampler.vocab_size].index_select(0, places)
            choice.measured = measure(logits, flight.ids_of(places), max(choice.num_top.values())).to_host()
        flight.send()
        return choice

    def _late_rows(self, batch: list[Sequence]) -> dict[int, Row]:
        rows = self._sampler.late
        if not rows:
            return {}
        known = {at: rows[one.key] for at, one in enumerate(batch) if one.key in rows}
        running = SequenceStatus.RUNNING
        return {at: row for at, row in known.items() if batch[at].state is running and not row.is_simple}

    def _edit(self, flight: Flight, rows: dict[int, Sequence], choice: LateChoice) -> None:
        places = send(np.array(list(rows)), flight.logits.device)
        edited = flight.logits[:, : self._sampler.vocab_size].index_select(0, places).float()
        errors, numbers = self._sampler.edit(edited, [one.key for one in rows.values()]), list(rows)
        choice.errors = {numbers[index]: error for index, error in errors.items()}
        flight.choose_again(edited, [(one.slot, at, self._sampler.row(one.key)) for at, one in rows.items()])

    def draw(self, flight: Flight, batch: list[Sequence], rows: list[int]) -> Sampled:
        """Have the sampler take these rows' tokens, of a step that has been read and whose logits are still there.

        Rows whose choice needs the host are chosen now, by what their sequences are.
        """
        found = flight.read()
        sampled = Sampled([found[row] for row in rows], [None] * len(rows))
        late, known = [], self._sampler.late
        for at, sequence in enumerate(batch):
            if known and (row := known.get(sequence.key)) is not None and not row.is_simple:
                late.append(at)
                continue
            try:
                self._sampler.accept(sequence.key, sampled.tokens[at])
            except BiremeError as error:
                sampled.errors[at] = error
        if late:
            places = send(np.array([rows[at] for at in late]), flight.logits.device)
            chosen = self._sampler.sample(flight.logits.index_select(0, places), [batch[at].key for at in late])
            for number, at in enumerate(late):
                sampled.tokens[at], sampled.logprobs[at] = chosen.tokens[number], chosen.logprobs[number]
            sampled.errors |= {late[number]: error for number, error in chosen.errors.items()}
        return sampled

    def accept(self, flight: Flight, batch: list[Sequence], choice: LateChoice, places: list[int]) -> Sampled:
        """Wait for the tokens of these places in the batch, of requests that go on, and have the sampler take them."""
        found = flight.read()
        sampled = Sampled([found[at] for at in places], [None] * len(places))
        for number, at in enumerate(places):
            if (why := choice.errors.get(at)) is not None:
                sampled.errors[number] = why
                continue
            try:
                self._sampler.accept(batch[at].key, found[at])
            except BiremeError as error:
                sampled.errors[number] = error
        if choice.measured is not None:
            entries = zip(choice.num_top.items(), choice.measured.read(), strict=True)
            found_at = {at: entry[: 1 + count] for (at, count), entry in entries}
            sampled.logprobs = [found_at.get(at) for at in places]
        return sampled
