"""A closed loop of n streams over any client: each slot sends its next request when the last one has ended.

Nothing is left behind: at the end no new requests start, what runs is taken to its end, and only what then
still hangs is cancelled. (tritonserver 2.51 was seen to crash when a client vanished with busy streams.)
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from benchmarks.load.meter import LoadError, Meter, Trace, clock
from benchmarks.load.workload import Prompt, Workload

RETRY_AFTER_S = 0.2  # after an error: a server that refuses must not be flooded


class Client(Protocol):
    """One way to the engine. All calls on one event loop."""

    async def open(self) -> None: ...

    async def request(self, slot: int, trace: Trace) -> None:
        """Run one request to its end. Raises LoadError, also when `drop` ended it."""

    def drop(self, slot: int) -> None:
        """Leave the slot's request the way a vanishing client would."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadPlan:
    streams: int
    seconds: float
    warmup_s: float = 1.5
    stall_s: float = 30.0  # a request without news for so long has failed
    drop_share: float = 0.0  # of requests, left by the client at a random moment
    stagger: bool = False  # first requests of random length, so that requests don't start and end together
    drain_s: float = 60.0
    seed: int = 1


OnEnd = Callable[[Trace, LoadError | None], None]


class Runner:
    """Owns the slots of one load. `on_end` hears of every request and, where it did not end well, why."""

    def __init__(
        self,
        client: Client,
        workload: Workload,
        plan: LoadPlan,
        meter: Meter | None = None,
        on_end: OnEnd = lambda trace, error: None,
    ) -> None:
        self.client, self.workload, self.plan = client, workload, plan
        self.meter, self._on_end = meter or Meter(), on_end
        self._rng = random.Random(plan.seed)
        self._active: dict[int, Trace] = {}
        self._is_stopping = False
        self._stopped = asyncio.Event()
        self._request_s = 0.5  # running mean, for the moments at which clients drop

    def stop(self) -> None:
        """Start no new requests; `run` takes those under way to their end and returns."""
        self._is_stopping = True
        self._stopped.set()

    async def run(
        self, on_measuring: Callable[[], None] = lambda: None, on_measured: Callable[[], None] = lambda: None
    ) -> Meter:
        """Warm up, measure for the plan's seconds, drain. The callbacks mark the measured time."""
        await self.client.open()
        slots = [asyncio.create_task(self._slot(index)) for index in range(self.plan.streams)]
        watchdog = asyncio.create_task(self._watch())
        try:
            await asyncio.sleep(self.plan.warmup_s)
            self.meter.start()
            on_measuring()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), self.plan.seconds)
            self.meter.stop()
            on_measured()
            self._is_stopping = True
            await self._drain(slots)
        finally:
            self._is_stopping = True
            for task in (*slots, watchdog):
                task.cancel()
            await asyncio.gather(*slots, watchdog, return_exceptions=True)
            await self.client.close()
        return self.meter

    async def _drain(self, slots: list[asyncio.Task[None]]) -> None:
        _, late = await asyncio.wait(slots, timeout=self.plan.drain_s)
        if late:
            self.meter.fail(f"{len(late)} requests had not ended {self.plan.drain_s:.0f} s after the last was sent")
        for task in slots:
            if task.done() and (error := task.exception()):
                raise error

    async def _slot(self, index: int) -> None:
        turn = 0
        while not self._is_stopping:
            prompt = self.workload.prompt(index, turn)
            if self.plan.stagger and turn == 0:
                prompt = self._shorten(prompt)
            await self._one(index, Trace(self.meter, prompt))
            turn += 1

    async def _one(self, index: int, trace: Trace) -> None:
        self._active[index] = trace
        timer = self._maybe_drop_later(index, trace)
        try:
            await self.client.request(index, trace)
            self._request_s += 0.1 * (clock() - trace.sent_at - self._request_s)
            self._on_end(trace, None)
        except LoadError as error:
            self._on_end(trace, error)
            if trace.is_dropped:
                self.meter.dropped += 1
            else:
                self.meter.fail("no news for too long" if trace.is_stalled else str(error))
                await asyncio.sleep(RETRY_AFTER_S)
        finally:
            del self._active[index]
            if timer:
                timer.cancel()

    def _maybe_drop_later(self, index: int, trace: Trace) -> asyncio.TimerHandle | None:
        if self._rng.random() >= self.plan.drop_share:
            return None
        return asyncio.get_running_loop().call_later(self._rng.random() * self._request_s, self._drop, index, trace)

    def _drop(self, index: int, trace: Trace) -> None:
        if self._active.get(index) is trace:
            trace.is_dropped = True
            self.client.drop(index)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            limit = clock() - self.plan.stall_s
            for index, trace in list(self._active.items()):
                if trace.last_at < limit and not trace.is_stalled:
                    trace.is_stalled = True
                    self.client.drop(index)

    def _shorten(self, prompt: Prompt) -> Prompt:
        length = self._rng.randint(1, len(prompt.expected))
        return replace(prompt, expected=prompt.expected[:length], text=None)
