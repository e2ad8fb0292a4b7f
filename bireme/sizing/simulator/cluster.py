"""Simulated workers behind real routers: bireme's WorkerRouter and KvIndex, told by events and loads that come late.

Whether prefill or decode computes a prompt, who is busy and who serves whom is the router's. Workers join and leave at
virtual times: one that is added is ready after `start_s`, one that is taken away drains first. Deterministic: time is
virtual, all that is random has a seed.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

from bireme.config import MockerConfig, RouterConfig, RoutingMode
from bireme.discovery.records import WorkerRecord
from bireme.errors import ConfigError, ResourceExhaustedError, UnavailableError
from bireme.kv.following.index import KvIndex
from bireme.kv.kernels.arrays import Floats, Hashes
from bireme.kv.routing.placement import Placement, RoutingRequest
from bireme.kv.routing.router import WorkerRouter
from bireme.kv.wire.event_wire import WorkerLoad
from bireme.messages import Capacity
from bireme.serving_options import ServingOptions
from bireme.sizing.simulator.outcome import Outcome, StageUse
from bireme.sizing.simulator.scaling import IntervalFigures, Scaler, StageLoad
from bireme.sizing.simulator.trace import SimulatedRequest, endless_hits
from bireme.sizing.simulator.worker import RunNote, SimulatedEngine, SimulatedEvent, SimulatedRun, SimulatedWorker
from bireme.sizing.step_times import StepTimes

StageName = Literal["prefill", "decode"]
AsleepRule = Literal["wait", "refuse"]
STAGES: tuple[StageName, ...] = ("prefill", "decode")
_MODEL = MockerConfig(step_ms=10.0, step_ms_per_request=0.05, prefill_ms=2.0, prefill_ms_per_token=0.1)
_DEFAULT = SimulatedEngine(StepTimes.of_mocker(_MODEL))
_MANY = 1 << 30
_LONGEST_SLEEP_S = 86_400.0  # that a request waits for workers


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    num_prefill: int = 0  # workers; 0: decode computes all prompts
    num_decode: int = 8
    prefill: SimulatedEngine = _DEFAULT
    decode: SimulatedEngine = _DEFAULT
    num_routers: int = 1  # requests come to any of them
    router: RouterConfig = RouterConfig()
    enforce_disaggregation: bool = False
    lag_s: float = 0.005  # until routers know of an event or a load
    hop_s: float = 0.0  # to a worker and back, beside its work
    start_s: float = 30.0  # until a worker that is added is ready
    interval_s: float = 60.0  # between two decisions of the scaler
    ttft_s: float = 5.0  # the SLO
    itl_s: float = 0.05
    asleep: AsleepRule = "wait"  # what becomes of requests while there is no worker
    seed: int = 1


class VirtualClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class SimulatedHoldings:
    """What one router knows of its workers' blocks."""

    def __init__(self, config: RouterConfig, clock: VirtualClock) -> None:
        self._config = config
        self.index = KvIndex(clock=clock)
        self._slots: dict[str, int] = {}

    def match(self, hashes: Hashes, targets: Sequence[tuple[str, int]]) -> Floats:
        depths: Floats = self.index.match(hashes)[:, [self._slots[name] for name, _ in targets]].astype(float)
        return depths

    def predict(self, target: tuple[str, int], hashes: Hashes) -> None:
        self.index.predicted(self._slots[target[0]], hashes, self._config.predicted_ttl_s)

    def follow(self, workers: Mapping[str, WorkerRecord]) -> None:
        for gone in self._slots.keys() - workers.keys():
            self.index.remove_worker(self._slots.pop(gone))
        for name in workers:
            if name not in self._slots:
                self._slots[name] = self.index.add_worker(name)

    @property
    def problem(self) -> str:
        return ""

    def close(self) -> None:
        pass

    def apply(self, event: SimulatedEvent) -> None:
        slot = self._slots.get(event.worker)
        if slot is None:  # it has left since
            return
        if event.is_stored:
            self.index.stored(slot, event.parent, event.hashes)
        else:
            self.index.removed(slot, event.hashes)


@dataclass(slots=True, eq=False)
class SimulatedMember:
    """A worker with its place in the cluster."""

    worker: SimulatedWorker
    stage: StageName
    record: WorkerRecord
    began_s: float
    is_ready: bool = False
    ended_s: float | None = None
    wake_at: float = float("inf")  # of the wake-up that counts
    num_requests: int = 0

    @property
    def is_draining(self) -> bool:
        return self.record.is_draining


@dataclass(slots=True, eq=False)
class Service:
    """A request that has been placed."""

    request: SimulatedRequest
    router: WorkerRouter
    placement: Placement
    prompt: tuple[SimulatedMember, SimulatedRun] | None = None  # on prefill, until decode has its KV
    num_cached: int = 0
    first_token_s: float = 0.0
    end_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.request.arrival_s

    @property
    def itl_s(self) -> float:
        return (self.end_s - self.first_token_s) / max(self.request.num_output - 1, 1)


@dataclass(slots=True)
class Tally:
    """Since the last interval began."""

    num_arrived: int = 0
    num_refused: int = 0
    num_prompts: int = 0  # computed
    prompt_tokens: int = 0  # of these
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)


def simulate(
    requests: Sequence[SimulatedRequest],
    mode: RoutingMode,
    settings: ClusterSettings,
    progress: Callable[[int], None] = lambda done: None,
    scaler: Scaler | None = None,
) -> Outcome:
    """Run all requests through one mode. `progress` is told how many have come."""
    outcome = Cluster(mode, settings, scaler).run(requests, progress)
    outcome.num_endless_tokens = sum(endless_hits(requests, settings.decode.tokens_per_block))
    return outcome


class Cluster:
    def __init__(self, mode: RoutingMode, settings: ClusterSettings, scaler: Scaler | None = None) -> None:
        self._settings, self._scaler = settings, scaler
        self._clock = VirtualClock()
        self._due: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._order = itertools.count()
        self._names = {stage: itertools.count() for stage in STAGES}
        self._members: dict[str, SimulatedMember] = {}  # those that have not left
        self._gone: list[SimulatedMember] = []
        self._loads: dict[str, WorkerLoad] = {}
        self._events: deque[SimulatedEvent] = deque()  # on their way to the routers
        self._prompt: Hashes = np.zeros(0, np.uint64)  # of the request that is being placed
        self._holdings = [SimulatedHoldings(settings.router, self._clock) for _ in range(settings.num_routers)]
        self._routers = [self._router(mode, number) for number in range(settings.num_routers)]
        self._draw = random.Random(settings.seed)
        self._services: dict[SimulatedRun, Service] = {}
        self._held: list[SimulatedRequest] = []  # until there is a worker
        self._num_left = 0  # requests that have not come, or not ended
        self._tally = Tally()
        self._outcome = Outcome(mode)
        for stage in STAGES:
            for _ in range(settings.num_prefill if stage == "prefill" else settings.num_decode):
                self._add(stage, 0.0).is_ready = True
        self._show_workers()

    def _router(self, mode: RoutingMode, number: int) -> WorkerRouter:
        settings, holdings = self._settings, self._holdings[number]
        return WorkerRouter(
            settings.router,
            mode,
            enforce_disaggregation=settings.enforce_disaggregation,
            holdings=holdings,
            hash_prompt=lambda request, size: self._prompt,
            loads=self._loads,
            followers=[holdings],
            clock=self._clock,
            draw=random.Random(f"{settings.seed}/{number}"),
        )

    def run(self, requests: Sequence[SimulatedRequest], progress: Callable[[int], None]) -> Outcome:
        """Let all requests come and end."""
        self._num_left = len(requests)
        if self._scaler is not None:
            self._at(self._settings.interval_s, self._decide)
        due, clock = self._due, self._clock
        for number, request in enumerate(requests):
            while due and due[0][0] <= request.arrival_s:
                clock.now, _, action = heapq.heappop(due)
                action()
            clock.now = request.arrival_s
            self._arrive(request)
            progress(number + 1)
        while self._num_left:
            clock.now, _, action = heapq.heappop(due)
            action()
        return self._conclude(requests[0].arrival_s if requests else 0.0)

    def _at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time, next(self._order), action))

    # What requests do

    def _arrive(self, request: SimulatedRequest) -> None:
        self._deliver()
        self._tally.num_arrived += 1
        if not any(member.is_ready and member.stage == "decode" for member in self._members.values()):
            if self._settings.asleep == "wait" and self._scaler is not None:
                self._held.append(request)
            else:
                self._refuse()
            return
        self._place(request)

    def _refuse(self) -> None:
        self._outcome.num_refused += 1
        self._tally.num_refused += 1
        self._num_left -= 1

    def _place(self, request: SimulatedRequest) -> None:
        router = self._draw.choice(self._routers) if len(self._routers) > 1 else self._routers[0]
        self._prompt = request.blocks
        tokens = np.broadcast_to(np.int32(0), (request.num_prompt,))  # only its length is looked at
        options = ServingOptions(priority=request.priority, session_id=request.session_id)
        try:
            placement = router.place(RoutingRequest(tokens, options))
        except (ResourceExhaustedError, UnavailableError):
            self._refuse()
            return
        self._outcome.num_predicted_tokens += placement.cached_tokens or 0
        service = Service(request, router, placement)
        if placement.prefill is not None:
            self._outcome.num_transferred += 1
            self._send(service, placement.prefill, SimulatedRun(request, "prompt"))
        else:
            self._send(service, placement.decode, SimulatedRun(request))

    def _send(self, service: Service, name: str, run: SimulatedRun) -> None:
        """A worker that drains takes what was placed there before."""
        member = self._members[name]
        member.num_requests += 1
        self._services[run] = service
        if run.task == "prompt":
            service.prompt = member, run
        if self._settings.hop_s:
            self._at(self._clock.now + self._settings.hop_s, lambda: self._submit(member, run))
        else:
            self._submit(member, run)

    def _submit(self, member: SimulatedMember, run: SimulatedRun) -> None:
        self._advance(member)
        member.worker.submit(run, self._clock.now)
        self._advance(member)

    def _advance(self, member: SimulatedMember) -> None:
        """Let a worker go on until now, tell what happened there, and come back when something else has."""
        worker = member.worker
        worker.advance(self._clock.now)
        if worker.events:
            self._events.extend(worker.events)
            worker.events.clear()
        notes, worker.notes = worker.notes, []
        for note in notes:
            self._note(member, note)
        if (next_at := worker.next_at) != member.wake_at:
            member.wake_at = next_at
            if next_at < float("inf"):
                self._at(next_at, lambda: self._wake(member, next_at))

    def _wake(self, member: SimulatedMember, at: float) -> None:
        if member.wake_at == at:
            member.wake_at = float("inf")
            self._advance(member)

    def _note(self, member: SimulatedMember, note: RunNote) -> None:
        service = self._services[note.run]
        match note.what:
            case "first_token":
                self._first_token(member, note.run, service, note.at)
            case "end":
                self._ended(note.run, service, note.at)
            case "fetched":
                self._at(note.at, lambda: self._release(service))

    def _first_token(self, member: SimulatedMember, run: SimulatedRun, service: Service, at: float) -> None:
        if run.task != "answer":
            self._deliver_loads_of(service.placement)
            service.router.prefilled(service.placement)
            service.num_cached = run.num_cached
            self._tally.num_prompts += 1
            self._tally.prompt_tokens += run.request.num_prompt
            self._tally.cached_tokens += run.num_cached
        if run.task != "prompt" or run.request.num_output == 1:
            service.first_token_s = at
            self._tally.ttft_s.append(service.ttft_s)
        if run.task != "prompt":
            return
        del self._services[run]
        if run.request.num_output == 1:
            self._release(service)
            self._ended(None, service, at)
        else:
            self._send(service, service.placement.decode, SimulatedRun(run.request, "answer"))

    def _release(self, service: Service) -> None:
        """Decode has the prompt's KV."""
        assert service.prompt is not None
        member, run = service.prompt
        service.prompt = None
        self._advance(member)
        member.worker.release(run, self._clock.now)
        self._advance(member)
        self._leave_if_done(member)

    def _ended(self, run: SimulatedRun | None, service: Service, at: float) -> None:
        if run is not None:
            del self._services[run]
        self._deliver_loads_of(service.placement)
        service.router.finished(service.placement)
        service.end_s = at
        self._num_left -= 1
        outcome, request, settings = self._outcome, service.request, self._settings
        outcome.requests.append(request)
        outcome.ttft_s.append(service.ttft_s)
        outcome.itl_s.append(service.itl_s)
        outcome.num_prompt_tokens += request.num_prompt
        outcome.num_cached_tokens += service.num_cached
        outcome.num_output_tokens += request.num_output
        outcome.num_good += service.ttft_s <= settings.ttft_s and service.itl_s <= settings.itl_s
        outcome.duration_s = max(outcome.duration_s, at)
        self._tally.output_tokens += request.num_output
        self._tally.itl_s.append(service.itl_s)
        self._leave_if_done(self._members[service.placement.decode])

    def _deliver(self) -> None:
        """Give the routers what has been on its way for long enough."""
        known = self._clock.now - self._settings.lag_s
        events = self._events
        while events and events[0].at <= known:
            event = events.popleft()
            for holdings in self._holdings:
                holdings.apply(event)
        for name, member in self._members.items():
            if (loads := member.worker.loads) and loads[0][0] <= known:
                self._deliver_load(name, known)

    def _deliver_load(self, name: str, known: float) -> None:
        loads = self._members[name].worker.loads
        if loads and loads[0][0] <= known:
            while loads and loads[0][0] <= known:
                load = loads.popleft()[1]
            self._loads[name] = load

    def _deliver_loads_of(self, placement: Placement) -> None:
        known = self._clock.now - self._settings.lag_s
        for name in (placement.prefill, placement.decode):
            if name in self._members:
                self._deliver_load(name, known)

    # Which workers there are

    def _add(self, stage: StageName, now: float) -> SimulatedMember:
        settings = self._settings
        engine = settings.prefill if stage == "prefill" else settings.decode
        name = f"{stage}_{next(self._names[stage])}"
        capacity = Capacity(
            max_seq_len=_MANY,
            max_batch_size=engine.max_batch_size,
            max_num_tokens=engine.max_num_tokens,
            max_queue_size=_MANY,
            tokens_per_block=engine.tokens_per_block,
            num_blocks=engine.num_blocks,
            vocab_size=1 << 17,
        )
        record = WorkerRecord(worker=name, life=1, tokens_per_block=engine.tokens_per_block, capacity=capacity)
        member = SimulatedMember(SimulatedWorker(name, engine), stage, record, now)
        self._members[name] = member
        return member

    def _show_workers(self) -> None:
        view = {name: member.record for name, member in self._members.items() if member.is_ready}
        for router in self._routers:
            router.set_workers(view)

    def _decide(self) -> None:
        assert self._scaler is not None
        now, interval_s = self._clock.now, self._settings.interval_s
        tally, self._tally = self._tally, Tally()
        figures = IntervalFigures(
            now, interval_s, tally.num_arrived, tally.num_refused, len(tally.itl_s), tally.num_prompts,
            tally.prompt_tokens, tally.cached_tokens, tally.output_tokens, tuple(tally.ttft_s), tuple(tally.itl_s),
            self._load_of("prefill"), self._load_of("decode"),
            sum(one > self._settings.ttft_s for one in tally.ttft_s),
            sum(one > self._settings.itl_s for one in tally.itl_s),
        )  # fmt: skip
        num_prefill, num_decode = self._scaler.on_interval(figures)
        self._resize("prefill", max(num_prefill, 0))
        self._resize("decode", max(num_decode, 0))
        if self._held and now - self._held[0].arrival_s > _LONGEST_SLEEP_S:
            raise ConfigError(f"no worker for {len(self._held)} requests: whoever decides lets all sleep for a day")
        self._at(now + interval_s, self._decide)

    def _load_of(self, stage: StageName) -> StageLoad:
        members = self._serving(stage)
        workers = [member.worker for member in members if member.is_ready]
        held = self._held if stage == "prefill" else []
        return StageLoad(
            len(workers), len(members) - len(workers),
            sum(worker.num_runs - worker.num_waiting for worker in workers),
            len(held) + sum(worker.num_waiting for worker in workers),
            sum(one.num_prompt for one in held) + sum(worker.num_waiting_tokens for worker in workers),
            tuple(worker.kv_usage for worker in workers),
            tuple(worker.num_waiting_tokens for worker in workers),
        )  # fmt: skip

    def _serving(self, stage: StageName) -> list[SimulatedMember]:
        return [one for one in self._members.values() if one.stage == stage and not one.is_draining]

    def _resize(self, stage: StageName, count: int) -> None:
        """Those that start go first, then those with the least to do."""
        serving = self._serving(stage)
        for _ in range(count - len(serving)):
            member = self._add(stage, self._clock.now)
            self._at(self._clock.now + self._settings.start_s, lambda one=member: self._become_ready(one))  # type: ignore[misc]
        serving.sort(key=lambda one: (one.is_ready, one.worker.num_runs))
        for member in serving[: max(len(serving) - count, 0)]:
            member.record = msgspec.structs.replace(member.record, state="draining")
            self._leave_if_done(member)
        if count != len(serving):
            self._show_workers()

    def _become_ready(self, member: SimulatedMember) -> None:
        if member.ended_s is None:
            member.is_ready = True
            self._show_workers()
            if member.stage == "decode":
                held, self._held = self._held, []
                for request in held:
                    self._place(request)

    def _leave_if_done(self, member: SimulatedMember) -> None:
        if not member.is_draining or member.worker.num_runs or member.ended_s is not None:
            return
        name = member.worker.name
        for service in self._services.values():  # placed, and on its way
            if service.placement.decode == name or (service.prompt is not None and service.prompt[0] is member):
                return
        member.ended_s = self._clock.now
        self._gone.append(self._members.pop(name))
        self._loads.pop(name, None)
        self._show_workers()

    def _conclude(self, begin_s: float) -> Outcome:
        outcome, end_s = self._outcome, self._outcome.duration_s
        outcome.duration_s -= begin_s
        for member in [*self._gone, *self._members.values()]:
            use: StageUse = outcome.prefill if member.stage == "prefill" else outcome.decode
            use.work_s.append(member.worker.work_s)
            use.busy_s.append(member.worker.busy_s)
            use.up_s.append((end_s if member.ended_s is None else member.ended_s) - max(member.began_s, begin_s))
            use.num_requests.append(member.num_requests)
        return outcome
