"""Simulated workers behind real routers: bireme's WorkerRouter and KvIndex, told by events and loads that come late.

Deterministic: time is virtual, all that is random has a seed.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.simulation.trace import TOKENS_PER_BLOCK, SimulatedRequest, endless_hits
from benchmarks.simulation.worker import SimulatedEvent, SimulatedRun, SimulatedWorker
from bireme.config import MockerConfig, RouterConfig, RoutingMode
from bireme.discovery.records import WorkerRecord
from bireme.kv.following.index import KvIndex
from bireme.kv.kernels.arrays import Floats, Hashes
from bireme.kv.routing.placement import Placement, RoutingRequest
from bireme.kv.routing.router import WorkerRouter
from bireme.kv.wire.event_wire import WorkerLoad
from bireme.messages import Capacity


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    num_workers: int = 8
    num_routers: int = 1  # requests come to any of them
    num_blocks: int = 16_384  # of a worker
    tokens_per_block: int = TOKENS_PER_BLOCK  # the trace's
    max_num_tokens: int = 8192  # in a step
    max_batch_size: int = 256
    model: MockerConfig = MockerConfig(step_ms=10.0, step_ms_per_request=0.05, prefill_ms=2.0, prefill_ms_per_token=0.1)
    router: RouterConfig = RouterConfig()
    lag_s: float = 0.005  # until routers know of an event or a load
    ttft_s: float = 5.0  # the SLO
    itl_s: float = 0.05
    seed: int = 1


class VirtualClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class SimulatedHoldings:
    """What one router knows of its workers' blocks."""

    def __init__(self, names: Sequence[str], config: RouterConfig, clock: VirtualClock) -> None:
        self._config = config
        self.index = KvIndex(clock=clock)
        self._slots = {name: self.index.add_worker(name) for name in names}

    def match(self, hashes: Hashes, targets: Sequence[tuple[str, int]]) -> Floats:
        depths: Floats = self.index.match(hashes)[:, [self._slots[name] for name, _ in targets]].astype(float)
        return depths

    def predict(self, target: tuple[str, int], hashes: Hashes) -> None:
        self.index.predicted(self._slots[target[0]], hashes, self._config.predicted_ttl_s)

    def follow(self, workers: Mapping[str, WorkerRecord]) -> None:
        pass

    def close(self) -> None:
        pass

    def apply(self, event: SimulatedEvent) -> None:
        if event.is_stored:
            self.index.stored(event.worker, event.parent, event.hashes)
        else:
            self.index.removed(event.worker, event.hashes)


@dataclass(slots=True)
class Outcome:
    """What one mode did with a trace. Seconds and tokens."""

    mode: str
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)  # a request's mean
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_predicted_tokens: int = 0
    num_endless_tokens: int = 0  # what a cache without end, shared by all, would have
    work_s: list[float] = field(default_factory=list)  # by worker: what its tokens add to its steps
    busy_s: list[float] = field(default_factory=list)
    num_requests: list[int] = field(default_factory=list)
    duration_s: float = 0.0
    num_output_tokens: int = 0
    num_good: int = 0  # within the SLO

    def summary(self) -> dict[str, float | str]:
        return {
            "mode": self.mode,
            "requests": len(self.ttft_s),
            "ttft_p50_ms": float(np.percentile(self.ttft_s, 50)) * 1e3,
            "ttft_p99_ms": float(np.percentile(self.ttft_s, 99)) * 1e3,
            "itl_p50_ms": float(np.percentile(self.itl_s, 50)) * 1e3,
            "itl_p99_ms": float(np.percentile(self.itl_s, 99)) * 1e3,
            "hit_rate": self.num_cached_tokens / self.num_prompt_tokens,
            "hits_of_endless": self.num_cached_tokens / max(self.num_endless_tokens, 1),
            "computed_tokens": self.num_prompt_tokens - self.num_cached_tokens,
            "predicted_over_actual": self.num_predicted_tokens / max(self.num_cached_tokens, 1),
            "load_cov": variation(self.work_s),
            "requests_cov": variation(self.num_requests),
            "busy_share": statistics.fmean(self.busy_s) / self.duration_s,
            "tokens_per_s": self.num_output_tokens / self.duration_s,
            "goodput_per_s": self.num_good / self.duration_s,
            "good_share": self.num_good / len(self.ttft_s),
        }


def variation(values: Sequence[float]) -> float:
    """Return the coefficient of variation: the standard deviation over the mean."""
    return statistics.pstdev(values) / max(statistics.fmean(values), 1e-12)


def simulate(
    requests: Sequence[SimulatedRequest],
    mode: RoutingMode,
    settings: ClusterSettings,
    progress: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Run all requests through one mode. `progress` is told how many have been placed."""
    cluster = Cluster(mode, settings)
    for number, request in enumerate(requests):
        cluster.place(request)
        progress(number + 1)
    return cluster.conclude(endless_hits(list(requests), settings.tokens_per_block))


class Cluster:
    def __init__(self, mode: RoutingMode, settings: ClusterSettings) -> None:
        self._mode, self._settings = mode, settings
        self._clock = VirtualClock()
        names = [f"decode_{number}" for number in range(settings.num_workers)]
        self._numbers = {name: number for number, name in enumerate(names)}
        self._workers = [
            SimulatedWorker(
                number,
                settings.model,
                settings.num_blocks,
                settings.max_num_tokens,
                settings.max_batch_size,
                settings.tokens_per_block,
            )  # fmt: skip
            for number in range(settings.num_workers)
        ]
        self._loads: dict[str, WorkerLoad] = {}
        self._events: deque[SimulatedEvent] = deque()  # on their way to the routers
        self._prompt: Hashes = np.zeros(0, np.uint64)  # of the request that is being placed
        self._holdings = [SimulatedHoldings(names, settings.router, self._clock) for _ in range(settings.num_routers)]
        self._routers = [self._router(number, names) for number in range(settings.num_routers)]
        self._draw = random.Random(settings.seed)
        self._placed: dict[SimulatedRun, tuple[WorkerRouter, Placement]] = {}
        self._runs: list[SimulatedRun] = []
        self._outcome = Outcome(mode, num_requests=[0] * settings.num_workers)

    def _router(self, number: int, names: Sequence[str]) -> WorkerRouter:
        settings = self._settings
        router = WorkerRouter(
            settings.router,
            self._mode,
            holdings=self._holdings[number],
            hash_prompt=lambda request, size: self._prompt,
            loads=self._loads,
            clock=self._clock,
            draw=random.Random(f"{settings.seed}/{number}"),
        )
        capacity = Capacity(
            max_seq_len=1 << 30,
            max_batch_size=settings.max_batch_size,
            max_num_tokens=settings.max_num_tokens,
            max_queue_size=1 << 30,
            tokens_per_block=settings.tokens_per_block,
            num_blocks=settings.num_blocks,
            vocab_size=1 << 17,
        )
        router.set_workers(
            {
                name: WorkerRecord(worker=name, life=1, tokens_per_block=settings.tokens_per_block, capacity=capacity)
                for name in names
            }
        )
        return router

    def place(self, request: SimulatedRequest) -> None:
        now = request.arrival_s
        self._advance(now)
        self._deliver(now)
        self._clock.now = now
        router = self._draw.choice(self._routers)
        self._prompt = request.blocks
        tokens = np.broadcast_to(np.int32(0), (request.num_prompt,))  # only its length is looked at
        placement = router.place(RoutingRequest(tokens))
        number = self._numbers[placement.decode]
        run = SimulatedRun(request)
        self._placed[run] = (router, placement)
        self._runs.append(run)
        self._outcome.num_requests[number] += 1
        self._outcome.num_predicted_tokens += placement.cached_tokens or 0
        self._workers[number].submit(run, now)

    def _advance(self, until: float) -> None:
        """Let the workers go on, and tell the routers of first tokens and ends in the order of time."""
        notes: list[tuple[float, int, SimulatedRun]] = []
        events: list[SimulatedEvent] = []
        for worker in self._workers:
            worker.advance(until)
            notes += worker.notes
            events += worker.events
            worker.notes, worker.events = [], []
        self._events.extend(sorted(events, key=lambda one: one.at))
        for at, is_end, run in sorted(notes, key=lambda one: one[:2]):
            self._deliver(at)
            self._clock.now = at
            router, placement = self._placed[run]
            if is_end:
                router.finished(placement)
                del self._placed[run]
            else:
                router.prefilled(placement)

    def _deliver(self, now: float) -> None:
        """Give the routers what has been on its way for long enough."""
        known = now - self._settings.lag_s
        while self._events and self._events[0].at <= known:
            event = self._events.popleft()
            for holdings in self._holdings:
                holdings.apply(event)
        for name, worker in zip(self._numbers, self._workers, strict=True):
            while worker.loads and worker.loads[0][0] <= known:
                self._loads[name] = worker.loads.popleft()[1]

    def conclude(self, endless: list[int]) -> Outcome:
        """Let all requests end."""
        self._advance(float("inf"))
        outcome, settings = self._outcome, self._settings
        for run in self._runs:
            request = run.request
            ttft = run.first_token_s - request.arrival_s
            itl = (run.end_s - run.first_token_s) / max(request.num_output - 1, 1)
            outcome.ttft_s.append(ttft)
            outcome.itl_s.append(itl)
            outcome.num_prompt_tokens += request.num_prompt
            outcome.num_cached_tokens += run.num_cached
            outcome.num_output_tokens += request.num_output
            outcome.num_good += ttft <= settings.ttft_s and itl <= settings.itl_s
        outcome.num_endless_tokens = sum(endless)
        outcome.work_s = [worker.work_s for worker in self._workers]
        outcome.busy_s = [worker.busy_s for worker in self._workers]
        outcome.duration_s = max(run.end_s for run in self._runs) - self._runs[0].request.arrival_s
        return outcome
