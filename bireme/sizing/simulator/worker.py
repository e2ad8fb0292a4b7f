"""A worker in virtual time: an engine's rules of scheduling and its pool of blocks, without threads, bytes or waiting.

As the engines do: a step has a token budget, decodes first, then prompts in the order of their admission. Requests are
admitted by rank (priority, then arrival) with all their blocks, and the first that does not fit stops the queue. One
whose beginning is being computed waits for it. The least recently used of the blocks that nobody uses go first. Not
here: preemption, and the share of best-effort requests (priority 0), which run as all others.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from bireme.errors import ConfigError
from bireme.kv.wire.event_wire import WorkerLoad
from bireme.sizing.simulator.trace import TOKENS_PER_BLOCK, SimulatedRequest, cachable
from bireme.sizing.step_times import StepTimes

SimulatedTask = Literal["all", "prompt", "answer"]  # of a request: answers of "prompt" go on elsewhere
_LATE = 1e-9  # seconds by which sums of the same steps may differ


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """What a stage's workers can do."""

    times: StepTimes
    num_blocks: int = 16_384
    tokens_per_block: int = TOKENS_PER_BLOCK  # the trace's
    max_num_tokens: int = 8192  # in a step
    max_batch_size: int = 256


@dataclass(slots=True, eq=False)
class SimulatedRun:
    """A request's part on one worker, and what became of it there."""

    request: SimulatedRequest
    task: SimulatedTask = "all"
    came_s: float = 0.0
    num_cached: int = 0  # prompt tokens, when it was admitted
    left: int = 0  # prompt tokens to compute
    num_blocks: int = 0  # its own, not shared
    shared: list[int] = field(default_factory=list)
    first_token_s: float = math.inf
    end_s: float = math.inf


class SimulatedEvent(NamedTuple):
    at: float
    worker: str
    is_stored: bool
    parent: int | None
    hashes: list[int]


class RunNote(NamedTuple):
    """Something that others must know. A first token is the prompt's end, "fetched" that its KV has arrived."""

    at: float
    what: Literal["first_token", "end", "fetched"]
    run: SimulatedRun


class SimulatedWorker:
    def __init__(self, name: str, engine: SimulatedEngine) -> None:
        self.name, self._engine, self._times = name, engine, engine.times
        self._size = engine.tokens_per_block
        self._lead_s = engine.times.table.plan_ahead_ms / 1e3
        self._decode_ms: list[float] = [0.0]  # by rows, without their context
        self._waiting: list[tuple[tuple[float, int], SimulatedRun]] = []  # by rank
        self._prefilling: list[SimulatedRun] = []
        self._fetching: list[tuple[float, int, SimulatedRun]] = []  # a heap of (when its KV is there, order, run)
        self._decoding: list[tuple[int, int, SimulatedRun]] = []  # a heap of (last step, order, run)
        self._order = itertools.count()
        self._used: dict[int, int] = {}  # references, by hash
        self._cached: OrderedDict[int, None] = OrderedDict()  # unused, oldest first
        self._computing: Counter[int] = Counter()
        self._num_private = 0
        self._num_waiting_tokens = 0  # of prompts, running ones among them
        self._context = 0  # tokens that the next decode step reads
        self._step = 0
        self._at = 0.0  # the end of the last step
        self._underway: tuple[float, list[SimulatedRun]] | None = None  # end of the present step, whose prompts it ends
        self._may_admit = False  # something has changed that the present step does not know
        self.busy_s = self.work_s = 0.0  # of the latter: what tokens have added to the least that steps take
        self.num_computed = 0  # prompt tokens
        self.num_runs = 0  # that have come, and not ended or been released
        self.events: list[SimulatedEvent] = []  # taken by the cluster, as are
        self.notes: list[RunNote] = []
        self.loads: deque[tuple[float, WorkerLoad]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        return self._num_waiting_tokens

    @property
    def kv_usage(self) -> float:
        return (self._num_private + len(self._used)) / self._engine.num_blocks

    @property
    def next_at(self) -> float:
        """When it has something to tell next, unless something comes; `advance` to then is in time."""
        if self._underway is None:
            return self._fetching[0][0] if self._fetching else math.inf
        end, ended = self._underway
        if ended or self._prefilling or self._may_admit or not self._decoding:
            return end
        num_rows = len(self._decoding)
        later = self._steps_s(self._decoding[0][0] - self._step, num_rows) - self._steps_s(1, num_rows)
        return max(end, min(end + later, self._fetching[0][0] if self._fetching else math.inf))

    def submit(self, run: SimulatedRun, now: float) -> None:
        """`advance` to now comes first."""
        run.came_s, run.left = now, run.request.num_prompt
        bisect.insort(self._waiting, ((-run.request.priority, next(self._order)), run), key=lambda one: one[0])
        self._num_waiting_tokens += 0 if run.task == "answer" else run.left
        self.num_runs += 1
        self._wake(now)
        self._tell(now)

    def release(self, run: SimulatedRun, now: float) -> None:
        """Free the blocks of a prompt that was computed here for another worker, which has them now."""
        self._free(run)
        self._wake(now)
        self._tell(now)

    def _wake(self, now: float) -> None:
        self._may_admit = True
        if self._underway is None:
            self._at = now

    def advance(self, until: float) -> None:
        """Do all steps that end by then. One that has begun goes on."""
        while True:
            if self._underway is not None:
                end, ended = self._underway
                if end > until + _LATE:
                    return
                self._underway = None
                self._finish_step(end, ended)
                self._land_and_admit(end - self._lead_s)
            else:
                self._land_and_admit(self._at)
            if self._prefilling:
                self._begin_prefill_step()
            elif self._decoding:
                self._decode(until)
            elif self._may_admit and self._waiting:
                continue  # it came after the plan of a step that there is not
            elif self._fetching and self._fetching[0][0] <= until + _LATE:
                self._at = self._fetching[0][0]
            else:
                self._check_waiting()
                return

    def _check_waiting(self) -> None:
        """Nothing runs: what waits, waits for blocks of others, or for ever."""
        if self._waiting and self.num_runs == len(self._waiting):
            raise ConfigError(
                f"a prompt of {self._waiting[0][1].request.num_prompt} tokens and its answer need more than the"
                f" worker's {self._engine.num_blocks} blocks; set more"
            )

    def _decode(self, until: float) -> None:
        """Do the steps in which nothing happens, and begin the next."""
        num_rows = len(self._decoding)
        limit = min(until, self._fetching[0][0]) if self._fetching else until
        most = 0 if self._may_admit else self._decoding[0][0] - self._step - 1  # the last one ends a request
        done = self._steps_within(limit - self._at, most, num_rows)
        done_s = self._steps_s(done, num_rows)
        self._step += done
        self._context += done * num_rows
        step_s = self._steps_s(1, num_rows)
        self._at += done_s
        self._count(done_s + step_s, done + 1)
        self._underway = (self._at + step_s, [])

    def _count(self, seconds: float, num_steps: int) -> None:
        self.busy_s += seconds
        self.work_s += seconds - num_steps * self._times.least_ms / 1e3

    def _row_ms(self, num_rows: int) -> float:
        while len(self._decode_ms) <= num_rows:
            self._decode_ms.append(self._times.step_ms(len(self._decode_ms)))
        return self._decode_ms[num_rows]

    def _steps_s(self, count: int, num_rows: int) -> float:
        """Return how long so many decode steps take: each reads as many tokens more as it has rows."""
        context = count * self._context + num_rows * count * (count - 1) / 2
        return (count * self._row_ms(num_rows) + context * self._times.ms_per_context_token) / 1e3

    def _steps_within(self, seconds: float, most: int, num_rows: int) -> int:
        if seconds <= 0 or most <= 0:
            return 0
        if self._steps_s(most, num_rows) <= seconds:
            return most
        growth = num_rows * self._times.ms_per_context_token / 2e3
        first = self._steps_s(1, num_rows) - growth
        done = 2 * seconds / (first + math.sqrt(first * first + 4 * growth * seconds)) if first + growth > 0 else most
        return min(int(done), most)

    def _begin_prefill_step(self) -> None:
        num_rows = len(self._decoding)
        budget, ended = self._engine.max_num_tokens - num_rows, list[SimulatedRun]()
        tokens = prompts = read = products = 0
        for run in self._prefilling:
            if budget <= 0:
                break
            computed = run.request.num_prompt - run.left
            prompts += computed == run.num_cached
            chunk = min(run.left, budget)
            budget -= chunk
            run.left -= chunk
            tokens += chunk
            read += computed
            products += chunk * computed
            if not run.left:
                ended.append(run)
        self.num_computed += tokens
        self._num_waiting_tokens -= tokens
        ms = self._times.step_ms(num_rows, tokens, self._context + read, prompts, products)
        self._count(ms / 1e3, 1)
        self._underway = (self._at + ms / 1e3, ended)

    def _finish_step(self, end: float, ended: list[SimulatedRun]) -> None:
        self._at = end
        self._step += 1
        self._context += len(self._decoding)
        while self._decoding and self._decoding[0][0] <= self._step:
            run = heapq.heappop(self._decoding)[2]
            self._context -= run.request.num_prompt + run.request.num_output - 1
            self._end(run)
        for run in ended:
            self._prefilling.remove(run)
            run.first_token_s = end
            self.notes.append(RunNote(end, "first_token", run))
            self._publish(run)
            if run.task == "all":
                self._go_on(run)
        if ended:
            self._tell(end)

    def _go_on(self, run: SimulatedRun) -> None:
        """Its first token is there."""
        if run.request.num_output == 1:
            self._end(run)
            return
        self._context += run.request.num_prompt
        heapq.heappush(self._decoding, (self._step + run.request.num_output - 1, next(self._order), run))

    def _end(self, run: SimulatedRun) -> None:
        run.end_s = self._at
        self.notes.append(RunNote(self._at, "end", run))
        self._free(run)
        self._may_admit = True
        self._tell(self._at)

    def _free(self, run: SimulatedRun) -> None:
        self.num_runs -= 1
        used, cached = self._used, self._cached
        for one in reversed(run.shared):
            if (left := used[one] - 1) > 0:
                used[one] = left
            else:
                del used[one]
                cached[one] = None
        self._num_private -= run.num_blocks
        self._evict()

    def _land_and_admit(self, known: float) -> None:
        """Plan the step that begins now, by what had come when it was planned."""
        while self._fetching and self._fetching[0][0] <= self._at + _LATE:
            run = heapq.heappop(self._fetching)[2]
            self._publish(run)
            self._go_on(run)
        if self._may_admit:
            self._may_admit = False
            self._admit(known)

    def _admit(self, known: float) -> None:
        at = 0
        while at < len(self._waiting) and self._num_running < self._engine.max_batch_size:
            run = self._waiting[at][1]
            if run.came_s > known + _LATE:
                self._may_admit = True
                at += 1
                continue
            blocks, max_hits = run.request.blocks.tolist(), cachable(run.request, self._size)
            hits = self._num_held(blocks, max_hits)
            if run.task != "answer" and hits < max_hits and blocks[hits] in self._computing:
                at += 1
                continue
            if not self._take(run, blocks, hits):
                return
            self._waiting.pop(at)
            self._begin(run, blocks[hits:])

    @property
    def _num_running(self) -> int:
        return len(self._prefilling) + len(self._fetching) + len(self._decoding)

    def _num_held(self, blocks: list[int], limit: int) -> int:
        """Of a block that is held all before it are held, too: a request's last ones are the first to go."""
        used, cached = self._used, self._cached
        return bisect.bisect_left(blocks, True, 0, limit, key=lambda one: one not in used and one not in cached)

    def _take(self, run: SimulatedRun, blocks: list[int], hits: int) -> bool:
        """Take all blocks that it will need, or none."""
        num_tokens = run.request.num_prompt + (0 if run.task == "prompt" else run.request.num_output)
        needed = -(-num_tokens // self._size) - hits
        cached = self._cached
        revived = sum(one in cached for one in blocks[:hits])
        if self._num_private + len(self._used) + revived + needed > self._engine.num_blocks:
            return False
        run.shared = blocks[:hits]
        self._use(run.shared)
        self._num_private += needed
        run.num_blocks, run.num_cached = needed, hits * self._size
        self._evict()
        return True

    def _begin(self, run: SimulatedRun, missing: list[int]) -> None:
        if run.task != "answer":
            self._computing.update(missing)
            self._num_waiting_tokens -= run.num_cached
            run.left -= run.num_cached
            self._prefilling.append(run)
            return
        run.first_token_s = self._at  # that prefill has made
        self.notes.append(RunNote(self._at, "first_token", run))
        arrives = self._at + self._times.table.transfer.seconds(run.left - run.num_cached)
        self.notes.append(RunNote(arrives, "fetched", run))
        heapq.heappush(self._fetching, (arrives, next(self._order), run))

    def _use(self, blocks: list[int]) -> None:
        used, cached = self._used, self._cached
        for one in blocks:
            if one in used:
                used[one] += 1
            else:
                used[one] = 1
                cached.pop(one, None)

    def _publish(self, run: SimulatedRun) -> None:
        """Offer computed blocks to others; one that another request published first is shared."""
        blocks, first = run.request.blocks.tolist(), len(run.shared)
        if run.task != "answer":
            for one in blocks[first:]:
                self._computing[one] -= 1
                if not self._computing[one]:
                    del self._computing[one]
            self._may_admit = True  # who waits for them
        new = [one for one in blocks[first:] if one not in self._used and one not in self._cached]
        self._use(blocks[first:])
        self._num_private -= len(blocks) - first
        run.num_blocks -= len(blocks) - first
        run.shared = blocks
        if new:
            parent = blocks[blocks.index(new[0]) - 1] if new[0] != blocks[0] else None
            self.events.append(SimulatedEvent(self._at, self.name, True, parent, new))

    def _evict(self) -> None:
        gone = []
        while self._num_private + len(self._used) + len(self._cached) > self._engine.num_blocks:
            gone.append(self._cached.popitem(last=False)[0])
        if gone:
            self.events.append(SimulatedEvent(self._at, self.name, False, None, gone))

    def _tell(self, now: float) -> None:
        used, num_blocks = self._num_private + len(self._used), self._engine.num_blocks
        waiting = len(self._waiting), self._num_waiting_tokens
        self.loads.append((now, WorkerLoad(self._num_running, *waiting, used, num_blocks, self._step)))
