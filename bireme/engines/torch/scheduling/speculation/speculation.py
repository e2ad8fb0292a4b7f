"""Puts drafts into a step's plan, and learns from what became of them.

A step with drafts is several steps of one token whose forward pass is one. Each token of a draft is a decode row more,
at the next position of its sequence. Tokens are then drawn position by position, each from its own row as without
drafts: by its seed and position, with penalties, guide and processors as they stand after the token before. Where the
token that was drawn is the draft's, the next row is what the next step would have computed, and the sequence goes on
there; the rest is void. So nothing is ever taken back: only what was drawn reaches blocks, guides and clients, and rows
of keys that are void are written anew before anything reads them.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from bireme.engines.torch.scheduling.speculation.drafter import Drafter, drafting_of
from bireme.engines.torch.scheduling.speculation.eagle import EagleDrafter, StepPlace, places_of
from bireme.engines.torch.scheduling.speculation.lengths import DraftLengths, MeasuredLengths, PromptsAlone
from bireme.engines.torch.scheduling.speculation.ngram import NgramDrafter
from bireme.engines.torch.scheduling.speculation.synthetic import SyntheticDrafter
from bireme.engines.torch.scheduling.step_costs import StepCosts, StepWork
from bireme.engines.torch.step import Draft, DraftOffer, SchedulerOutput, Sequence, Trial
from bireme.kv.blocks.block_manager import BlockManager
from bireme.metrics import Registry
from bireme.settings import NGRAM, SYNTHETIC, SpeculativeConfig

logger = logging.getLogger("bireme.engines.torch")

_NGRAM_SIZE = 3  # where the settings name none
_IN_A_ROW = 64  # steps with drafts on a CPU, after which some go without: else nobody knows what those take
_WITHOUT = 2
_FIRST_IN_A_ROW = 8


@dataclass(slots=True)
class Speculation:
    """Used by the engine's thread."""

    drafter: Drafter
    lengths: DraftLengths
    config: SpeculativeConfig
    manager: BlockManager
    metrics: Registry
    verifying: StepCosts | None = None  # of steps with drafts; None: they cost what others of as many rows do
    by_cpu: StepCosts | None = None  # of steps on a CPU, in the engine's thread's own time; None: on a GPU
    is_on: bool = True
    observed_s: float = 0.0  # that the step which follows waits for
    _num_in_a_row: int = _IN_A_ROW - _FIRST_IN_A_ROW
    _paying_s: float = 0.0  # on a CPU, that paying took
    _bill: tuple[SchedulerOutput, Collection[Sequence], float, float] | None = None
    _looks: list[tuple[Sequence, bool]] = field(default_factory=list)  # for drafts, and whether there was one
    _began_s: float = 0.0  # of that time, when the step began; what drafts take does not count

    def begin(self) -> None:
        """Called at the beginning of each step, before it is planned."""
        if self.by_cpu is not None:
            self._began_s = time.thread_time()

    def landed(self, work: StepWork) -> None:
        """Called when the tokens of a step on a CPU have been delivered. Other programs take its time, not its CPU."""
        if self.by_cpu is not None:
            self.by_cpu.landed([work], time.thread_time() - self._began_s)

    def draft(self, plan: SchedulerOutput, room: int) -> None:
        """Add drafts of at most `room` tokens to a step that is planned, in what is left of its tokens and blocks."""
        plan.drafting_s, self.observed_s = self.observed_s, 0.0
        try:
            if room > 0 and (due := self._due(plan)):
                began, began_s = time.monotonic(), time.thread_time()
                (self._look_up if self.drafter.costs is None else self._compute)(plan, due, room)
                plan.drafting_s += time.monotonic() - began
                self._began_s += time.thread_time() - began_s
                self._num_in_a_row = self._num_in_a_row + 1 if plan.drafts else 0
        except Exception:  # requests need no drafts
            self._turn_off()

    def _due(self, plan: SchedulerOutput) -> dict[Sequence, int]:
        """Return who may draft before the step, with the most tokens."""
        longest = self.longest(len(plan.decodes)) if self.is_on else 0
        if not longest or self._goes_without():
            return {}
        return {one: count for one in self.lengths.due(plan) if (count := min(longest, self._room(one))) > 0}

    def _goes_without(self) -> bool:
        """Return whether a step on a CPU has no drafts whatever they gain; on a GPU other steps are measured before."""
        if self.by_cpu is None or self._num_in_a_row < _IN_A_ROW:
            return False
        self._num_in_a_row += 1
        if self._num_in_a_row == _IN_A_ROW + _WITHOUT:
            self._num_in_a_row = 0
        return True

    def _look_up(self, plan: SchedulerOutput, due: dict[Sequence, int], room: int) -> None:
        """What is found says how much of it is hoped for."""
        began_s = time.thread_time()
        found = self.drafter.propose(due, 0)
        self._looks += ((sequence, sequence in found) for sequence in due)
        offers = {one: DraftOffer(len(draft.tokens), draft.kind) for one, draft in found.items()}
        chosen = self.lengths.choose(plan, offers) if offers else {}
        for sequence, count in self._make_rooms(plan, chosen, room).items():
            self._add(plan, sequence, found[sequence], count)
        self._pay(plan, due, time.thread_time() - began_s)

    def _compute(self, plan: SchedulerOutput, due: dict[Sequence, int], room: int) -> None:
        """What is hoped for says how much is computed, in passes of as many tokens as the step has left."""
        budget, costs = plan.budget, self.drafter.costs
        assert costs is not None
        began_s = costs.now()
        costs.begin()
        chosen = self.lengths.choose(plan, {one: DraftOffer(count) for one, count in due.items()})
        rooms = self._make_rooms(plan, chosen, room)
        if not rooms:
            self._pay(plan, due, costs.now() - began_s)
            return
        for sequence, draft in self.drafter.propose(rooms, budget).items():
            self._add(plan, sequence, draft, len(draft.tokens))
        self._pay(plan, rooms, max(0.0, costs.now() - began_s - costs.catch_up_s), costs.catch_up_s)

    def _pay(self, plan: SchedulerOutput, due: Collection[Sequence], seconds: float, once_s: float = 0.0) -> None:
        self._bill = plan, due, seconds, once_s

    def pay(self) -> None:
        """Pay for what was done before a step that has been started, and with the next drafts for the paying.

        Called before that step's tokens are taken.
        """
        bill, self._bill = self._bill, None
        looks, self._looks = self._looks, []
        try:
            for sequence, has_found in looks:
                drafting_of(sequence).looked(has_found)
            if bill is not None:
                plan, due, seconds, once_s = bill
                began_s = time.thread_time()
                self.lengths.paid(plan, due, seconds + self._paying_s, once_s)
                if self.by_cpu is not None:
                    self._paying_s = time.thread_time() - began_s
                    self._began_s += self._paying_s
        except Exception:
            self._turn_off()

    def _add(self, plan: SchedulerOutput, sequence: Sequence, draft: Draft, count: int) -> None:
        plan.drafts[sequence] = draft.tokens[:count]
        plan.budget -= count
        drafting = drafting_of(sequence)
        drafting.kind, drafting.num_right = draft.kind, draft.num_right

    def _room(self, sequence: Sequence) -> int:
        return min(_room(sequence), self.drafter.room(sequence))

    def longest(self, num_decodes: int) -> int:
        """Return the most tokens of a draft in a step of so many sequences; 0: none is to be looked for."""
        config = self.config
        if config.max_concurrency is not None and num_decodes > config.max_concurrency:
            return 0
        if not (schedule := config.draft_len_schedule):
            return config.max_draft_len or 0
        sizes = sorted(schedule)
        return schedule[sizes[max(0, bisect_right(sizes, num_decodes) - 1)]]

    def _make_rooms(self, plan: SchedulerOutput, wanted: dict[Sequence, int], room: int) -> dict[Sequence, int]:
        """Hold blocks for drafts of so many tokens, as far as there is room; return of how many, at least one."""
        found, room, manager = {}, min(room, plan.budget), self.manager
        size = manager.tokens_per_block
        for sequence, most in wanted.items():
            table, computed, count = sequence.table, sequence.computed, min(most, room)
            held = len(table.blocks[0]) * size - computed - 1
            if count > held:
                if manager.can_grow(table, computed + 1 + count, computed):
                    manager.grow(table, computed + 1 + count, computed)
                else:
                    count = held
            if count > 0:
                found[sequence] = count
                room -= count
        return found

    def work_of(self, plan: SchedulerOutput) -> StepWork:
        """Return a step's work as `verifying` has it."""
        return StepWork.of(plan, is_read_once=self.verifying is not None)

    def places_of(self, plan: SchedulerOutput, ahead: int = 0) -> list[StepPlace]:
        """Return what `observe` is told of a step that begins; nothing where nobody wants to see it."""
        return places_of(plan, ahead) if self._sees() else []

    def _sees(self) -> bool:
        return self.is_on and isinstance(self.drafter, EagleDrafter) and self.lengths.is_open

    def observe(self, plan: SchedulerOutput, places: list[StepPlace], is_in_places: bool = False) -> None:
        """Have a drafter that reads what the model makes of its tokens see a step, once those are delivered.

        `is_in_places`: see EagleDrafter.
        """
        if not places or not self.is_on or not isinstance(self.drafter, EagleDrafter):
            return
        try:
            began = time.monotonic()
            if seconds := self.drafter.observe(plan, places, is_in_places, self.lengths.pays):
                self.lengths.paid(plan, (), 0.0, seconds)
            self.observed_s = time.monotonic() - began
        except Exception:
            self._turn_off()

    def _turn_off(self) -> None:
        self.is_on = False
        logger.exception("drafts_off reason=the drafter failed: requests are served without drafts from here on")

    def waits_for(self, plan: SchedulerOutput) -> bool:
        """Return whether the step after this one should wait for its tokens: a draft may follow them, and pay, or rows
        of prompts are to be seen before another step overwrites them.
        """
        return self.is_hopeful(plan) or bool(plan.chunks and self._sees())

    def is_hopeful(self, plan: SchedulerOutput) -> bool:
        """Return whether a draft may follow a step's tokens, and pay."""
        longest = self.longest(len(plan.decodes)) if self.is_on else 0
        most = {one: min(longest, self._room(one) - 1) for one in plan.decodes}
        return any(count > 0 for count in most.values()) and self.lengths.is_hopeful(plan, most)

    def learn(self, trials: Collection[Trial]) -> None:
        """Count and learn what a step made of its drafts."""
        self.metrics.add("bireme_draft_tokens_total", sum(one.num_tried for one in trials))
        self.metrics.add("bireme_accepted_draft_tokens_total", sum(one.num_accepted for one in trials))
        for length, times in Counter(one.num_accepted for one in trials).items():
            self.metrics.observe("bireme_accepted_draft_length", length, times=times)
        lengths = self.lengths
        for sequence, kind, num_tried, num_accepted, is_cut in trials:
            lengths.gained(sequence, num_accepted)
            if not is_cut:
                lengths.learn(sequence, kind, num_tried, num_accepted)


def open_speculation(
    config: SpeculativeConfig | None,
    drafter: Drafter | None,
    manager: BlockManager,
    metrics: Registry,
    costs: StepCosts,
    is_on_gpu: bool,
    max_stream_gap_s: float,
    is_prefill: bool = False,
) -> Speculation | None:
    """Return it; None: there are no drafts. `is_on_gpu`: steps with drafts take another path there than others.

    `drafter`: one with a model, where the settings name it and this engine has it. `is_prefill`: it sees prompts for
    engines that draft, and drafts nothing.
    """
    if config is None or not config.decoding_type:
        return None
    drafter = drafter or (None if is_prefill else _drafter(config))
    if drafter is None:
        return None
    if is_prefill:
        return Speculation(drafter, PromptsAlone(), config, manager, metrics)
    verifying, by_cpu = (StepCosts(), None) if is_on_gpu else (None, StepCosts())
    lengths = MeasuredLengths(
        by_cpu or costs, verifying or by_cpu or costs, drafter.num_kinds, max_stream_gap_s, drafter.costs
    )
    metrics.start("bireme_draft_tokens_total", "bireme_accepted_draft_tokens_total")
    return Speculation(drafter, lengths, config, manager, metrics, verifying, by_cpu)


def _drafter(config: SpeculativeConfig) -> Drafter | None:
    """Return what drafts without a model; None: nothing, which an engine is that makes first tokens alone."""
    if config.decoding_type == SYNTHETIC:
        return SyntheticDrafter(config.acceptance_rate or 0.0)
    if config.decoding_type != NGRAM:
        return None
    return NgramDrafter(config.max_matching_ngram_size or _NGRAM_SIZE, config.is_keep_all and config.is_use_oldest)


def _room(sequence: Sequence) -> int:
    """Return how many tokens of a draft it could take and still have one of its own behind them."""
    if sequence.is_canary or not sequence.first_token_at:
        return 0
    return sequence.max_tokens - len(sequence.tokens) + sequence.num_prompt - 1
