"""A worker in virtual time: the mocker's timing model and its pool of blocks, without threads, bytes or waiting.

As in bireme/engines/mocker: a step takes `step_ms + step_ms_per_request * decoding + prefill`; prompts are computed
within the step's token budget, oldest first; blocks are taken at admission for the whole request; one whose beginning
is being computed waits for it; the least recently used of the blocks that nobody uses go first.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

from benchmarks.simulation.trace import TOKENS_PER_BLOCK, SimulatedRequest, cachable
from bireme.config import MockerConfig
from bireme.kv.wire.event_wire import WorkerLoad


@dataclass(slots=True, eq=False)
class SimulatedRun:
    """A request on its worker, and what became of it."""

    request: SimulatedRequest
    num_cached: int = 0  # prompt tokens, when it was admitted
    left: int = 0  # prompt tokens to compute
    num_blocks: int = 0  # its own, not shared
    shared: list[int] = field(default_factory=list)
    first_token_s: float = math.inf
    end_s: float = math.inf


@dataclass(frozen=True, slots=True)
class SimulatedEvent:
    at: float
    worker: int
    is_stored: bool
    parent: int | None
    hashes: list[int]


class SimulatedWorker:
    def __init__(
        self, number: int, model: MockerConfig, num_blocks: int, max_num_tokens: int, max_batch: int,
        tokens_per_block: int = TOKENS_PER_BLOCK,
    ) -> None:  # fmt: skip
        self._number, self._model, self._num_blocks, self._size = number, model, num_blocks, tokens_per_block
        self._max_num_tokens, self._max_batch = max_num_tokens, max_batch
        self._waiting: list[SimulatedRun] = []
        self._prefilling: list[SimulatedRun] = []
        self._decoding: list[tuple[int, int, SimulatedRun]] = []  # a heap of (last step, order, run)
        self._order = itertools.count()
        self._used: dict[int, int] = {}  # references, by hash
        self._cached: OrderedDict[int, None] = OrderedDict()  # unused, oldest first
        self._computing: Counter[int] = Counter()
        self._num_private = 0
        self._step = 0
        self._at = 0.0  # the end of the last step
        self._underway: tuple[float, list[SimulatedRun]] | None = None  # end of the present step, whose prompts it ends
        self.busy_s = 0.0
        self._num_generated = 0
        self.num_computed = 0  # prompt tokens
        self.events: list[SimulatedEvent] = []  # taken by the cluster
        self.notes: list[tuple[float, int, SimulatedRun]] = []  # first tokens (0) and ends (1), likewise
        self.loads: deque[tuple[float, WorkerLoad]] = deque()

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._prefilling or self._decoding or self._underway)

    @property
    def work_s(self) -> float:
        """What the tokens have added to the steps' time."""
        model = self._model
        prefill_ms = self.num_computed * model.prefill_ms_per_token
        return (prefill_ms + self._num_generated * model.step_ms_per_request) / 1e3

    def submit(self, run: SimulatedRun, now: float) -> None:
        if self.is_idle:
            self._at = now
        run.left = run.request.num_prompt
        self._waiting.append(run)
        self._tell(now)

    def advance(self, until: float) -> None:
        """Do all steps that end by then. One that has begun goes on."""
        while not self.is_idle:
            if self._underway is not None:
                end, ended = self._underway
                if end > until:
                    return
                self._underway = None
                self._finish_step(end, ended)
                continue
            self._admit()
            if self._prefilling:
                self._begin_prefill_step()
                continue
            if not self._decoding:
                raise RuntimeError(
                    f"a prompt of {self._waiting[0].request.num_prompt} tokens and its answer need more than the"
                    f" worker's {self._num_blocks} blocks; set more"
                )
            step_s = self._step_s()
            planned = self._decoding[0][0] - self._step
            done = int(min(planned - 1, max(0.0, until - self._at) / step_s))  # the last one ends a request
            self._step += done
            self._at += done * step_s
            self.busy_s += (done + 1) * step_s
            self._underway = (self._at + step_s, [])

    def _step_s(self) -> float:
        return (self._model.step_ms + self._model.step_ms_per_request * len(self._decoding)) / 1e3

    def _begin_prefill_step(self) -> None:
        budget, seconds, ended = self._max_num_tokens - len(self._decoding), self._step_s(), list[SimulatedRun]()
        for run in self._prefilling:
            if budget <= 0:
                break
            if run.left == run.request.num_prompt - run.num_cached:
                seconds += self._model.prefill_ms / 1e3
            chunk = min(run.left, budget)
            budget -= chunk
            run.left -= chunk
            self.num_computed += chunk
            seconds += chunk * self._model.prefill_ms_per_token / 1e3
            if not run.left:
                ended.append(run)
        self.busy_s += seconds
        self._underway = (self._at + seconds, ended)

    def _finish_step(self, end: float, ended: list[SimulatedRun]) -> None:
        self._at = end
        self._step += 1
        while self._decoding and self._decoding[0][0] <= self._step:
            self._end(heapq.heappop(self._decoding)[2])
        for run in ended:
            self._prefilling.remove(run)
            run.first_token_s = end
            self.notes.append((end, 0, run))
            self._publish(run)
            if run.request.num_output > 1:
                last = self._step + run.request.num_output - 1
                heapq.heappush(self._decoding, (last, next(self._order), run))
            else:
                self._end(run)
        self._tell(end)

    def _end(self, run: SimulatedRun) -> None:
        run.end_s = self._at
        self._num_generated += run.request.num_output
        self.notes.append((self._at, 1, run))
        for one in reversed(run.shared):
            self._used[one] -= 1
            if not self._used[one]:
                del self._used[one]
                self._cached[one] = None
        self._num_private -= run.num_blocks
        self._evict()

    def _admit(self) -> None:
        at = 0
        while at < len(self._waiting) and len(self._prefilling) + len(self._decoding) < self._max_batch:
            run = self._waiting[at]
            blocks, hits = run.request.blocks.tolist(), 0
            max_hits = cachable(run.request, self._size)
            while hits < max_hits and (blocks[hits] in self._used or blocks[hits] in self._cached):
                hits += 1
            if hits < max_hits and blocks[hits] in self._computing:
                at += 1
                continue
            needed = -(-(run.request.num_prompt + run.request.num_output) // self._size) - hits
            revived = sum(one in self._cached for one in blocks[:hits])
            if self._num_private + len(self._used) + revived + needed > self._num_blocks:
                return
            self._waiting.pop(at)
            run.shared = blocks[:hits]
            self._use(run.shared)
            self._computing.update(blocks[hits:])
            self._num_private += needed
            run.num_blocks, run.num_cached = needed, hits * self._size
            run.left = run.request.num_prompt - run.num_cached
            self._prefilling.append(run)
            self._evict()

    def _use(self, blocks: list[int]) -> None:
        for one in blocks:
            self._cached.pop(one, None)
            self._used[one] = self._used.get(one, 0) + 1

    def _publish(self, run: SimulatedRun) -> None:
        """Offer computed blocks to others; one that another request published first is shared."""
        blocks = run.request.blocks.tolist()
        first = len(run.shared)
        self._computing -= Counter(blocks[first:])
        new = [one for one in blocks[first:] if one not in self._used and one not in self._cached]
        self._use(blocks[first:])
        self._num_private -= len(blocks) - first
        run.num_blocks -= len(blocks) - first
        run.shared = blocks
        if new:
            parent = blocks[blocks.index(new[0]) - 1] if new[0] != blocks[0] else None
            self.events.append(SimulatedEvent(self._at, self._number, True, parent, new))

    def _evict(self) -> None:
        gone = []
        while self._num_private + len(self._used) + len(self._cached) > self._num_blocks:
            gone.append(self._cached.popitem(last=False)[0])
        if gone:
            self.events.append(SimulatedEvent(self._at, self._number, False, None, gone))

    def _tell(self, now: float) -> None:
        waiting = sum(run.left for run in self._waiting) + sum(run.left for run in self._prefilling)
        running = len(self._prefilling) + len(self._decoding)
        used = self._num_private + len(self._used)
        load = WorkerLoad(running, len(self._waiting), waiting, used, self._num_blocks, self._step)
        self.loads.append((now, load))
