"""What every text pipeline shares: workers, router, limits, metrics; and the count of running requests.

A `WorkerView` says which workers there are, while requests run: router and worker clients get its views on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bireme.canary_mark import is_canary
from bireme.config import Recipe
from bireme.discovery.records import WorkerRecord, is_like
from bireme.discovery.view import WorkerView
from bireme.errors import BiremeError, ResourceExhaustedError, drop_frames
from bireme.kv.routing.router import WorkerRouter
from bireme.messages import Capacity, Usage
from bireme.metrics import Registry
from bireme.observability.traces import Traces
from bireme.pipelines.faults import FaultKind, FaultLog
from bireme.pipelines.routing import recipe_workers
from bireme.request import Ids
from bireme.workers.base import WorkerClient

logger = logging.getLogger("bireme.pipeline")


class SequenceAccount(Protocol):
    """What an observer may know of a sequence."""

    first_token_at: float  # time.monotonic(); 0: there is none

    @property
    def prompt(self) -> Ids: ...

    @property
    def cache_salt(self) -> str: ...

    def known_usage(self) -> Usage: ...


class SequenceObserver(Protocol):
    """Follows the sequences of a pipeline for its accounts. On the loop; must be quick and must not raise."""

    def began(self, sequences: Sequence[SequenceAccount]) -> None: ...

    def ended(self, sequences: Sequence[SequenceAccount]) -> None:
        """Called once for what began, however it went."""

    def embedded(self, key: str, num_tokens: int) -> None:
        """Texts of an API key, by its name, were embedded."""


@dataclass(slots=True)
class Services:
    """Shared by all requests of one pipeline; used on one loop."""

    recipe: Recipe
    workers: WorkerClient
    router: WorkerRouter
    metrics: Registry
    num_active: int = 0
    observer: SequenceObserver | None = None
    members: Mapping[str, WorkerRecord] = field(default_factory=dict)  # by worker id, those that drain among them
    num_generations: int = 1  # of the members
    discovery: WorkerView | None = None
    faults: FaultLog | None = None  # None: nobody asks for them
    traces: Traces | None = None  # of requests that begin here; None: nobody reads any
    _background: set[asyncio.Task[None]] = field(default_factory=set)
    _unread: Registry = field(default_factory=Registry)  # of canaries, which are no load

    def __post_init__(self) -> None:
        """Without a discovery the workers are the recipe's."""
        self.members = self.members or recipe_workers(self.recipe)
        self.workers.on_silence = self.router.note_silence
        predicted = (f"bireme_router_{what}_tokens_total" for what in ("prompt", "predicted", "cached", "mispredicted"))
        self.metrics.start("bireme_migrations_total", *predicted)

    def metrics_of(self, cache_salt: str) -> Registry:
        """Return where a sequence is counted."""
        return self._unread if is_canary(cache_salt) else self.metrics

    def follow(self, discovery: WorkerView) -> None:
        """Take the workers from `discovery` until `close`; on the loop that this is used on."""
        loop, own_thread = asyncio.get_running_loop(), threading.get_ident()

        def on_view(view: Mapping[str, WorkerRecord]) -> None:
            if threading.get_ident() == own_thread:
                self.set_workers(view)
                return
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(self.set_workers, view)

        self.discovery = discovery
        discovery.watch(on_view)

    def note_fault(self, kind: FaultKind, worker: str, reason: object) -> None:
        if self.faults is not None:
            self.faults.note(kind, worker, str(reason))

    def set_workers(self, view: Mapping[str, WorkerRecord]) -> None:
        if self.faults is not None:
            _note_changes(self.faults, self.members, view)
        for name in view.keys() ^ self.members.keys():
            if "@" in name:  # those of the own server come with the recipe
                logger.info("%s worker=%s", "worker_joined" if name in view else "worker_left", name)
        self.members, self.num_generations = view, len({one.generation for one in view.values()})
        self.router.set_workers(view)
        self.workers.set_workers({name: one.life for name, one in view.items()})

    def stage_workers(self, stage: str, generation: int | None = None, revision: str = "") -> list[str]:
        """Return the workers of a stage that take requests: of the generation if it has any, and of the revision."""
        found = {name: one for name, one in self.members.items() if one.stage == stage and not one.is_draining}
        if revision:
            found = {name: one for name, one in found.items() if is_like(one.revision, revision)}
        preferred = [name for name, one in found.items() if one.generation == generation]
        return preferred or list(found)

    def revision_of(self, worker: str) -> str:
        """Return that of its model; "": it is not known."""
        return self.members[worker].revision if worker in self.members else ""

    def capacity(self, stage: str = "decode") -> Capacity | None:
        """Return what the stage's first worker takes, once it is known."""
        ours = {name: one for name, one in self.members.items() if one.stage == stage}
        found = (self.workers.capacity(name) or one.capacity for name, one in ours.items())
        return next((capacity for capacity in found if capacity is not None), None)

    def deadline(self, arrived_at: float) -> float:
        """Return the end of a request that has no limit of its own, in time.monotonic(); 0: it has none."""
        timeout_s = self.recipe.pipeline.request_timeout_s
        return arrived_at + timeout_s if timeout_s else 0.0

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a running request. Raises ResourceExhaustedError when there are too many."""
        limit = self.recipe.limits.max_concurrent_requests
        if self.num_active >= limit:
            refusal = f"{self.num_active} requests under way; limits.max_concurrent_requests is {limit}"
            self.note_fault("busy", "", refusal)
            raise ResourceExhaustedError(f"{refusal}, try again later")
        self.num_active += 1
        try:
            yield
        finally:
            self.num_active -= 1

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something in the background, such as freeing a lease; its errors are logged."""
        task = asyncio.get_running_loop().create_task(_quietly(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        if self.discovery is not None:
            self.discovery.stop()
        if self._background:
            await asyncio.wait(list(self._background), timeout=1.0)
        self.router.close()
        await self.workers.close()
        if self.traces is not None:
            await self.traces.close()


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except BiremeError as error:
        logger.info("background_task_failed error=%s", error)
        drop_frames(error)


def _note_changes(faults: FaultLog, before: Mapping[str, WorkerRecord], after: Mapping[str, WorkerRecord]) -> None:
    for name, record in before.items():
        if name not in after:
            faults.note("worker_left", name, "its record is gone: it has stopped, or its server does not answer")
            continue
        life = after[name].life
        if record.life and not life:
            faults.note("engine_lost", name, "its engine has ended")
        elif record.life and life != record.life:
            faults.note("engine_restarted", name, "another engine is in its place")
