"""The engine without its thread: takes requests, runs one step at a time, returns its output.

A step is schedule, build, forward, sample, accept. Everything here runs on the engine's thread; a failing request ends
with INTERNAL and frees its blocks, the others go on.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from bireme.engines.base import PlainTokens, StepOutput
from bireme.engines.torch.forward.forward import Computed, StepPath
from bireme.engines.torch.scheduling.arrivals import Arrivals
from bireme.engines.torch.scheduling.delivery import TokenDelivery
from bireme.engines.torch.scheduling.late_choices import LateChoice, LateChoices
from bireme.engines.torch.scheduling.pace import StepPace
from bireme.engines.torch.scheduling.parts import Parts
from bireme.engines.torch.scheduling.requests import OpenRequests
from bireme.engines.torch.scheduling.scheduler import Scheduler
from bireme.engines.torch.scheduling.speculation.eagle import StepPlace
from bireme.engines.torch.scheduling.speculation.verification import (
    Draw,
    deliver_verified,
    draft_rows,
    take_drawn,
)
from bireme.engines.torch.scheduling.step_costs import StepWork
from bireme.engines.torch.scheduling.step_ranges import step_range
from bireme.engines.torch.scheduling.step_records import StepRecorder
from bireme.engines.torch.scheduling.tracing import note_chunks
from bireme.engines.torch.step import SchedulerOutput, Sequence, SequenceStatus, Trial
from bireme.errors import BiremeError
from bireme.kv.wire.step_records import ScheduledRequests
from bireme.logits.sampler import Sampled

if TYPE_CHECKING:  # Triton's language: CUDA builds alone
    from bireme.engines.torch.forward.flight import Flight

logger = logging.getLogger("bireme.engines.torch")

_BY_PLACE = (StepPath.RESIDENT, StepPath.VERIFY)  # whose steps put layers' outputs there (`TappedPlaces`)
MAX_FAILED_STEPS = 3  # in a row: then the engine is at fault, not a request


class BrokenEngineError(BiremeError):
    """Every step fails; only a new process can help."""


@dataclass(slots=True)
class _Started:
    """A step whose tokens have not been read."""

    path: StepPath
    plan: SchedulerOutput
    batch: list[Sequence]  # in the order of its rows
    flight: Flight
    began_at: float
    work: StepWork
    scheduled: ScheduledRequests | None  # where steps are recorded
    needs_host: bool = False  # the next step needs what is chosen here
    places: list[StepPlace] = field(default_factory=list)  # what a drafter is told of it
    choice: LateChoice | None = None  # once what its late rows choose from is known


@dataclass(slots=True)
class _Landed:
    """A step whose tokens have been taken, and of which nothing more was said."""

    started: _Started
    now: float  # when they were read
    seconds: float
    num_tokens: int
    trials: list[Trial]


class EngineCore:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.scheduler = Scheduler(
            parts.manager,
            parts.limits,
            costs=parts.costs,
            can_start=lambda plan: parts.forward.resident_for(plan) is not None,
        )
        self.requests = OpenRequests(parts, self.scheduler)
        self._delivery = TokenDelivery(parts, self.scheduler, self.requests)
        self._arrivals = Arrivals(parts, self.scheduler, self.requests, self._delivery)
        self._recorder = StepRecorder(parts.steps, self.scheduler.waiting) if parts.steps is not None else None
        self.num_steps = 0
        self._num_failed_steps = 0
        self._started: _Started | None = None
        self._landed: _Landed | None = None
        self._planned: SchedulerOutput | None = None  # for when the step under way had ended
        self._landed_at = 0.0
        self._pace = StepPace(parts.costs)
        self._sees_ends = parts.forward.modules.device.type != "cuda"  # of steps of which nothing is read
        self._late = LateChoices(parts.sampler)
        self._range = step_range(parts.forward.modules.device)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def num_preparing(self) -> int:
        """Requests that join the queue once their pictures or guide are there."""
        return len(self.requests.preparing)

    @property
    def num_waiting_tokens(self) -> int:
        return self.scheduler.waiting.num_tokens + self.scheduler.num_prefill_tokens

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_blocks_used(self) -> int:
        return self._parts.manager.num_referenced

    @property
    def is_empty(self) -> bool:
        """Nothing waits, runs or is being imported."""
        return not self.requests.running

    @property
    def wakes_at(self) -> float | None:
        """When there is something to do again, if nothing happens before; None: nothing is waited for."""
        return min(filter(None, (self.requests.deadlines.next, self.scheduler.wakes_at)), default=None)

    @property
    def is_told(self) -> bool:
        """Nothing more is to be said of what `take_outputs` returns."""
        return self._landed is None

    @property
    def starts_next_at(self) -> float:
        """When a step is to be started beside the one under way; 0: there is none, or at once."""
        started = self._started
        if started is None or started.needs_host or self.num_waiting:
            return 0.0
        return self._pace.starts_next_at(started.work, started.began_at)

    def begin(self) -> None:
        """Called by the thread that is to make the steps, before it is ready."""
        self._parts.forward.begin()

    def take_outputs(self) -> tuple[list[StepOutput], PlainTokens]:
        """Return what has happened since the last call, and forget it."""
        return self._delivery.take()

    def wait(self) -> None:
        """Wait for the step under way if the next one needs its tokens: who comes until then takes part in that.

        Raises BrokenEngineError.
        """
        started = self._started
        if started is None or not started.needs_host:
            return
        try:
            started.flight.read()
        except Exception as error:
            self._started = None
            self._fail_step(started.plan, error)

    def take_tokens(self) -> None:
        """Take the tokens of the step under way if the next one needs them; requests that end with them end here.

        `step` tells the rest, once the next one is under way. Raises BrokenEngineError.
        """
        started = self._started
        if started is None or not started.needs_host:
            return
        self._started = None
        try:
            self._land(started)
            if started.plan.chunks:  # a first token does not wait for the next step to be planned
                self._tell_landed()
        except Exception as error:
            self._landed = None
            self._fail_step(started.plan, error)

    def step(self) -> bool:
        """Do one step, or start one and read the tokens of the one before; False: nothing can run now.

        Raises BrokenEngineError.
        """
        self.take_tokens()
        began, started = time.monotonic(), self._started
        if self._parts.speculation is not None:
            self._parts.speculation.begin()
        self._arrivals.note_computed()
        plan = self._plan(began) if started is None else started.plan
        if not plan.has_tokens:
            self._tell_landed()
            self._rest()
            self._end_turn()
            return bool(plan.imports or plan.onboards)
        try:
            if started is None:
                self._run(plan, began)
            else:
                self._go_on(started, began)
            self._pay()
            self._tell_landed()
        except Exception as error:
            self._started = None
            self._tell_landed()  # of the step before: that one has not failed
            self._fail_step(plan, error)
        self.num_steps += 1
        self._end_turn()
        return True

    def choose(self) -> None:
        """Choose what the step under way could not: its tokens' predecessors are known, and may be on their way first.

        Raises BrokenEngineError. `step` does it before the next one where nobody has.
        """
        started = self._started
        if started is None or started.choice is not None:
            return
        try:
            self._choose(started)
        except Exception as error:
            self._started = None
            self._fail_step(started.plan, error)

    def _plan(self, now: float) -> SchedulerOutput:
        planned, self._planned = self._planned, None
        if planned is not None:
            planned.keep_running()
            if planned.has_tokens:
                return planned
        with self._range("plan"):
            plan = self.scheduler.schedule()
        if self._parts.speculation is not None and plan.decodes:
            with self._range("draft"):
                self._parts.speculation.draft(plan, self._parts.forward.room_for_drafts(plan))
        self._arrivals.start(plan, now)
        return plan

    def prepare(self) -> bool:
        """Do a piece of what makes later steps quicker, if nothing is under way; False: there is none left."""
        return self.is_empty and self._parts.forward.make_next_graph()

    def _rest(self) -> None:
        self._pace.rest()
        if self._recorder is not None:
            self._recorder.rest()

    def _end_turn(self) -> None:
        self._arrivals.offload()
        self._parts.accounts.levels(self._parts.manager, self.scheduler)

    def _run(self, plan: SchedulerOutput, began: float) -> None:
        self._begin(plan, began)
        if not plan.has_tokens:
            return
        if self._parts.forward.resident_for(plan) is not None:
            self._started = self._start(plan, began)
        elif self._landed is not None:
            self._planned = plan  # what was taken goes out first: it waits for no step, and none of a step may pass it
        else:
            self._pay()
            self._run_whole(plan, began)

    def _run_whole(self, plan: SchedulerOutput, began: float) -> None:
        """Do a step and wait for it."""
        if (computed := self._compute(plan)) is not None:
            places = self._places(plan)  # of those that are left of it
            scheduled = self._recorder.scheduled(plan) if self._recorder is not None else None
            work = self._work(plan)
            with self._range("sample"):
                sampled = self._sample(computed)
            self._advance(plan)
            now, sequences = time.monotonic(), computed.batch.sampled
            if plan.chunks:
                note_chunks(plan, self._parts.prompt_work, self.num_steps, began, now)
            num_tokens = self._deliver(plan, sequences, sampled, now, partial(self._draw, computed))
            ended = time.monotonic() if plan.drafts else now  # their tokens are drawn one after the other
            self._observe(plan, places, work)
            self._delivery.hand_over()
            self._num_failed_steps = 0
            self._parts.accounts.stepped(computed.path, ended - began, num_tokens)
            self._note_time(plan, work, began, ended, is_seen=bool(sequences) or self._sees_ends)
            if self._recorder is not None and scheduled is not None:
                self._recorder.stepped(scheduled, computed.path, began)

    def _note_time(
        self, plan: SchedulerOutput, work: StepWork, began: float, ended: float, is_seen: bool = True
    ) -> None:
        costs = self._parts.speculation.verifying if plan.drafts and self._parts.speculation is not None else None
        self._pace.landed(work, began, ended, is_seen, costs, plan.drafting_s)

    def _deliver(
        self, plan: SchedulerOutput, sequences: list[Sequence], sampled: Sampled, now: float, draw: Draw
    ) -> int:
        """Deliver what was drawn of `sequences`; return how many tokens that is. `draw`: of rows of drafts."""
        if not plan.drafts:
            self._delivery.accept_all(sequences, sampled, now)
            return len(sequences)
        speculation, trials = self._parts.speculation, list[Trial]()
        assert speculation is not None
        if self._recorder is not None:
            self._recorder.jumped()
        with self._range("verify"):
            took = self._delivery, self._computed, draft_rows(plan, len(sequences)), trials
            num_tokens = deliver_verified(plan, sequences, sampled, now, draw, *took)
            speculation.learn(trials)
        return num_tokens

    def _work(self, plan: SchedulerOutput) -> StepWork:
        speculation = self._parts.speculation
        return speculation.work_of(plan) if speculation is not None else StepWork.of(plan)

    def _places(self, plan: SchedulerOutput, ahead: int = 0) -> list[StepPlace]:
        return self._parts.speculation.places_of(plan, ahead) if self._parts.speculation is not None else []

    def _observe(self, plan: SchedulerOutput, places: list[StepPlace], work: StepWork) -> None:
        if self._parts.speculation is not None:
            self._parts.speculation.landed(work)
            self._parts.speculation.observe(plan, places)

    def _observe_started(self, started: _Started) -> None:
        """Rows of prompts are there until the next step is started."""
        if self._parts.speculation is not None and (self._started is None or not started.plan.chunks):
            self._parts.speculation.observe(started.plan, started.places, started.path in _BY_PLACE)

    def _draw(self, computed: Computed, sequences: list[Sequence], rows: list[int]) -> Sampled:
        return self._parts.sampler.sample(computed.logits[rows], [one.key for one in sequences])

    def _begin(self, plan: SchedulerOutput, now: float) -> None:
        """Register new sequences with sampler and accounts; one that can't begin leaves the plan."""
        new = [sequence for sequence in plan.sequences if not sequence.is_sampling]
        for sequence in new:
            if sequence.spans is not None:
                sequence.spans.begin_generation(self._parts.prompt_work)
            try:
                self._delivery.begin(sequence)
                self._parts.accounts.scheduled(sequence, now)
            except Exception as error:
                self.requests.fail(sequence, error)
        if any(sequence.state is SequenceStatus.FINISHED for sequence in new):
            plan.keep_running()

    def _compute(self, plan: SchedulerOutput) -> Computed | None:
        """Return the step's logits. Out of memory ends the request that needs most, and the others' step is done."""
        while plan.has_tokens:
            try:
                with self._range("forward"):
                    return self._parts.forward.run(plan)
            except torch.OutOfMemoryError as error:
                text = str(error).partition(". ")[0]
            # Here, not above: the error's frames held what the failed pass had allocated.
            torch.cuda.empty_cache()
            largest = plan.largest
            logger.error("out_of_memory step=%d request=%s error=%s", self.num_steps, largest.key, text)
            remedy = "lower kv_cache_config.free_gpu_memory_fraction or max_num_tokens, or send less at once"
            self.requests.fail(
                largest, BiremeError(f"out of memory in a step, this request needs most of it: {text}; {remedy}")
            )
            plan.keep_running()
        return None

    def _sample(self, computed: Computed) -> Sampled:
        batch, logits, sampler = computed.batch, computed.logits, self._parts.sampler
        for rows in batch.prompt_rows:
            if rows.next_ids:
                wanted = logits[rows.begin : rows.begin + len(rows.next_ids)]
                count = rows.sequence.sampling.prompt_logprobs or 0
                rows.sequence.prompt_logprobs += sampler.prompt_logprobs(wanted, rows.next_ids, count)
        if batch.sampled:
            keys = [sequence.key for sequence in batch.sampled]
            return sampler.sample(logits[: len(keys)] if len(logits) > len(keys) else logits, keys)
        self._parts.forward.keep_pace()
        self._arrivals.offload()  # these copies wait for the steps before, so that they are made during this one
        self._arrivals.note_computed()  # blocks that the step itself lets out of a window: for its end
        return Sampled([], [])

    def _advance(self, plan: SchedulerOutput) -> None:
        """The KV of the step's tokens is in the pools: offer full blocks, free those that slid out of windows."""
        for sequence in plan.decodes:
            self._computed(sequence, 1)
        for sequence, count in plan.chunks:
            self._computed(sequence, count)

    def _computed(self, sequence: Sequence, count: int) -> None:
        manager = self._parts.manager
        sequence.computed = computed = sequence.computed + count
        manager.commit(sequence.table, sequence.tokens, computed)
        if manager.has_windows:
            manager.slide(sequence.table, computed)

    def _go_on(self, started: _Started, began: float) -> None:
        self._started = None
        if started.choice is None:
            self._choose(started)
        with self._range("plan"):
            following = self.scheduler.follow(started.plan)
        if following is not None:
            self._begin(following, began)
            if self._parts.forward.resident_for(following) is not None:
                self._started = self._start(following, began, ahead=1)
                self._pace.started(time.monotonic() - began)
            else:  # a prompt that joins is for another path: that needs the tokens
                self._planned = following
            # The GPU is busy meanwhile, and copies wait for what it has been given.
            self._arrivals.start(following, began)
            self._arrivals.start(self.scheduler.admit_imports(), began)
        self._land(started)

    def _start(self, plan: SchedulerOutput, began: float, ahead: int = 0) -> _Started:
        chosen, sampler = self._parts.forward.resident_for(plan), self._parts.sampler
        assert chosen is not None
        path, resident = chosen
        with self._range(f"start {path}"):
            flight = resident.start(plan, lambda sequence: sampler.row(sequence.key), ahead)
        work, places = self._work(plan), self._places(plan, ahead)
        scheduled = self._recorder.scheduled(plan, ahead) if self._recorder is not None else None
        batch = plan.sampled
        return _Started(path, plan, batch, flight, began, work, scheduled, self._needs_host(plan, batch), places)

    def _needs_host(self, plan: SchedulerOutput, batch: list[Sequence]) -> bool:
        """Return whether the step after this one can be planned only when its tokens are there."""
        speculation = self._parts.speculation
        return (
            bool(plan.drafts)
            or not self._parts.limits.overlaps
            or self._late.needs_host(batch)
            or any(sequence.request.request_type == "context_only" for sequence in plan.sequences)
            or bool(plan.chunks and any(sequence.is_best_effort for sequence in plan.sequences))
            or (speculation is not None and speculation.waits_for(plan))
        )

    def _choose(self, started: _Started) -> LateChoice:
        with self._range("choose"):
            started.choice = self._late.choose(started.flight, started.batch)
        return started.choice

    def _land(self, started: _Started) -> None:
        """Read the tokens of a step and take them, so that the next one can be planned; see `_tell_landed`."""
        choice = started.choice or self._choose(started)
        plan, batch, flight = started.plan, started.batch, started.flight
        tokens, now = flight.read(), time.monotonic()
        rows = draft_rows(plan, len(batch))
        plan.keep_running()
        for sequence, count in plan.chunks:
            self._computed(sequence, count)
        for later in (self._started.plan if self._started is not None else None, self._planned):
            if later is not None:
                later.ahead.clear()  # what its chunks stand behind has been computed
        if plan.chunks:
            note_chunks(plan, self._parts.prompt_work, self.num_steps, started.began_at, now)
        trials: list[Trial] = []
        with self._range("land"):
            took = now, self._parts.sampler, self._delivery, self._computed, trials
            num_tokens, others = take_drawn(plan, batch, tokens, rows, *took)
            if others:
                num_tokens += self._take_late(started, choice, others, rows, now, trials)
        self._observe_started(started)
        self._delivery.hand_over()
        if self._recorder is not None and plan.drafts:
            self._recorder.jumped()
        self._landed = _Landed(started, now, now - max(started.began_at, self._landed_at), num_tokens, trials)
        self._landed_at = now

    def _take_late(
        self,
        started: _Started,
        choice: LateChoice,
        places: list[int],
        rows: dict[Sequence, int],
        now: float,
        trials: list[Trial],
    ) -> int:
        """Deliver what these places in the batch have drawn, whose choice needs the host; return how many tokens."""
        plan, chosen, prompts = started.plan, [started.batch[at] for at in places], dict(started.plan.chunks)
        sampled = self._late.accept(started.flight, started.batch, choice, places)
        for sequence in chosen:
            if sequence not in prompts:
                self._computed(sequence, 1)
        draw = partial(self._late.draw, started.flight)
        return deliver_verified(plan, chosen, sampled, now, draw, self._delivery, self._computed, rows, trials)

    def _pay(self) -> None:
        if self._parts.speculation is not None:
            self._parts.speculation.pay()

    def _tell_landed(self) -> None:
        """Count the step whose tokens were taken last, and learn from it: to start another nothing of it is needed."""
        landed, self._landed = self._landed, None
        if landed is None:
            return
        self._num_failed_steps, started = 0, landed.started
        if landed.trials:
            assert self._parts.speculation is not None
            self._parts.speculation.learn(landed.trials)
        self._parts.accounts.stepped(started.path, landed.seconds, landed.num_tokens)
        self._note_time(started.plan, started.work, started.began_at, landed.now)
        if self._recorder is not None and started.scheduled is not None:
            self._recorder.stepped(started.scheduled, started.path, started.began_at)

    def _fail_step(self, plan: SchedulerOutput, error: Exception) -> None:
        """End the requests of a step that raised. Raises BrokenEngineError when steps keep failing."""
        self._rest()
        self._num_failed_steps += 1
        members, count = plan.sequences, self._num_failed_steps
        logger.exception("step_failed step=%d requests=%d in_a_row=%d", self.num_steps, len(members), count)
        for sequence in members:
            if sequence.state is not SequenceStatus.FINISHED:
                self.requests.fail(sequence, error)
        if count >= MAX_FAILED_STEPS:
            raise BrokenEngineError(f"{count} steps in a row failed, the last with {error!r}") from error
