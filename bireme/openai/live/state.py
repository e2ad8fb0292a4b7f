"""What the live page shows: the state of every model's workers as a frontend's processes know it, put together.

Counters only grow while the same processes answer: whoever watches takes the difference of two states, and misses
nothing by missing some.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Literal

import msgspec

from bireme.discovery.plan_notes import PlanNote
from bireme.pipelines.faults import SAME_S, SEEN_BY_ALL, Fault

MAX_FAULTS = 100  # that are shown

LiveWorkerState = Literal[
    "ready", "draining", "asleep",
    "down",  # its engine is not there: it starts, or starts again
    "skipped",  # a request was lost there, or its host is silent: it gets new ones where no other can take them
    "unknown",  # its record is out of this process's reach: it gets requests, and tells nothing
]  # fmt: skip


class LiveWorker(msgspec.Struct):
    """A worker. None: it has not reported in the last seconds, or this deployment's router does not follow load."""

    id: str
    stage: str
    server: str  # host:port of its tritonserver; "": the frontend's own
    state: LiveWorkerState
    reason: str  # of a state that is not ready
    life: int  # of its engine, which began then: Unix time, ms; another number is another engine; 0: not known
    generation: int  # of its launch
    weight: float  # that its generation's launch carries
    running: int | None  # requests in the batch
    waiting: int | None  # requests in its queue
    waiting_tokens: int | None  # prompt tokens that are still to be computed
    kv_blocks_used: int | None
    kv_blocks: int | None
    steps: int | None  # engine steps done
    sent: int  # requests of this frontend that are there now
    nextn: int = 0  # tokens of a draft at the most; 0: it drafts nothing, or its engine is not there


class LiveFlow(msgspec.Struct):
    """What was sent one way since somebody has watched."""

    prefill: str  # "": decode computed the prompt
    decode: str
    requests: int
    prompt_tokens: int
    cached_tokens: int  # of the prompt tokens, that the worker was expected to hold


class LiveModel(msgspec.Struct):
    name: str
    routing: str  # router.mode
    follows_load: bool  # False: this mode of routing needs no reports, so there are none to show
    problem: str  # why what is known of workers is old; "": it is not
    requests: int  # under way
    max_requests: int  # limits.max_concurrent_requests, of all processes
    workers: list[LiveWorker]
    flows: list[LiveFlow]


class LiveCounters(msgspec.Struct):
    """Since the processes began."""

    requests: dict[str, int]  # ended, by outcome
    prompt_tokens: int  # prompt tokens of ended requests whose placement knew what workers hold
    cached_tokens: int  # of these, that were found in KV caches


class LiveProcesses(msgspec.Struct):
    """The frontend's own processes, which share its port."""

    count: int
    answered: int  # whose part is in this state


class LiveState(msgspec.Struct):
    """One look. A process's part of it has the same form."""

    at: float  # Unix time, s
    interval_s: float  # until the next
    processes: LiveProcesses
    counters: LiveCounters
    models: list[LiveModel]
    faults: list[Fault]  # of the last hour, the newest first
    plans: list[PlanNote] = []  # of a planner, the newest first
    object: Literal["bireme.live"] = "bireme.live"


def merged(own: LiveState, others: Sequence[LiveState], num_processes: int) -> LiveState:
    """Return the state of all processes: what each has sent and seen is added, what workers tell is the same for all.

    The own part is used up.
    """
    for other in others:
        _add_counters(own.counters, other.counters)
        theirs = {model.name: model for model in other.models}
        for model in own.models:
            if model.name in theirs:
                _add_model(model, theirs[model.name])
    own.faults = _joined([own, *others])
    own.processes = LiveProcesses(num_processes, 1 + len(others))
    return own


def _add_counters(own: LiveCounters, other: LiveCounters) -> None:
    for outcome, count in other.requests.items():
        own.requests[outcome] = own.requests.get(outcome, 0) + count
    own.prompt_tokens += other.prompt_tokens
    own.cached_tokens += other.cached_tokens


def _add_model(own: LiveModel, other: LiveModel) -> None:
    own.requests += other.requests
    own.max_requests += other.max_requests
    own.problem = own.problem or other.problem
    sent = {worker.id: worker.sent for worker in other.workers}
    for worker in own.workers:
        worker.sent += sent.get(worker.id, 0)
    ways = {(flow.prefill, flow.decode): flow for flow in own.flows}
    for flow in other.flows:
        if (mine := ways.get((flow.prefill, flow.decode))) is None:
            own.flows.append(flow)
            continue
        mine.requests += flow.requests
        mine.prompt_tokens += flow.prompt_tokens
        mine.cached_tokens += flow.cached_tokens


def _joined(states: Iterable[LiveState]) -> list[Fault]:
    """Return the newest faults of all processes; alike ones of a minute are one, and what all have seen counts once."""
    joined: list[Fault] = []
    newest: dict[tuple[str, str, str], Fault] = {}
    for fault in sorted((fault for state in states for fault in state.faults), key=attrgetter("at")):
        key = fault.kind, fault.model, fault.worker
        before = newest.get(key)
        if before is None or fault.at - before.at > SAME_S:
            joined.append(fault)
            newest[key] = fault
            continue
        is_same = fault.kind in SEEN_BY_ALL
        before.count = max(before.count, fault.count) if is_same else before.count + fault.count
        if fault.last_at > before.last_at:
            before.last_at, before.reason = fault.last_at, fault.reason
    return sorted(joined, key=attrgetter("last_at"), reverse=True)[:MAX_FAULTS]
