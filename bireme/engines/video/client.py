"""A video stub's engine: a bounded queue, and one piece of work at a time in the engine process.

The queue is here, not in the engine: a dying process loses only the current work (EngineLostError, which may be tried
again), and what waits goes on with the next one. Sinks are called from any thread, quickly.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from bireme.config import Recipe
from bireme.discovery import run_folder
from bireme.engines.stub.life import Life
from bireme.engines.stub.supervisor import Supervisor
from bireme.errors import (
    BiremeError,
    ConfigError,
    DeadlineExceededError,
    EngineLostError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
    from_message,
)
from bireme.messages import Hello, Pong, frame
from bireme.metrics import MetricDelta, Registry, decode_delta
from bireme.video import wire


class WorkSink(Protocol):
    """Of one piece of work; exactly one of `made` and `failed` ends it. Must not raise."""

    def queued(self, position: int) -> None:
        """`position` pieces of work go first."""

    def stepped(self, event: wire.Stepped) -> None: ...

    def made(self, event: wire.Made) -> None: ...

    def failed(self, error: BiremeError) -> None: ...


@dataclass(slots=True)
class _Work:
    number: int
    generation: wire.DiffusionRequest
    sink: WorkSink
    queued_at: float = field(default_factory=time.monotonic)


class VideoClient:
    """One worker's engine. `start`, then `submit` and `abort`; `stop` ends it for good."""

    def __init__(
        self,
        recipe: Recipe,
        worker: str,
        metrics: Registry,
        logger: logging.Logger,
        run_dir: Path | None = None,
    ) -> None:
        if recipe.entry(worker) is None:
            raise ConfigError(f"{worker} is not in recipe {recipe.name}")
        self._worker, self._metrics = worker, metrics
        self._config = recipe.video
        patient = msgspec.structs.replace(recipe.supervisor, stall_timeout_s=recipe.video.step_timeout_s)
        patient_recipe = msgspec.structs.replace(recipe, supervisor=patient)
        self._supervisor = Supervisor(
            patient_recipe,
            worker,
            run_dir or run_folder.locate(),
            self,
            metrics,
            logger,
            stall_key="video.step_timeout_s",
        )
        self._lock = threading.Lock()  # guards what follows
        self._life: Life | None = None
        self._facts: wire.PipelineFacts | None = None
        self._running: _Work | None = None
        self._waiting: deque[_Work] = deque()
        self._is_down = False
        self._numbers = itertools.count(1)

    @property
    def is_ready(self) -> bool:
        return self._life is not None

    @property
    def state(self) -> str:
        return "ready" if self._life else self._supervisor.state

    @property
    def facts(self) -> wire.PipelineFacts:
        """Known while its process is restarted, too. Raises UnavailableError."""
        if self._facts is None:
            raise UnavailableError(self._supervisor.state)
        return self._facts

    @property
    def pid(self) -> int:
        """The engine's process id; 0: none is ready."""
        life = self._life
        return life.pid if life else 0

    def start(self) -> None:
        """Wait until it is ready. Raises ConfigError or UnavailableError."""
        self._supervisor.start()

    def stop(self) -> None:
        """All work ends with UNAVAILABLE. May be called again."""
        self._supervisor.stop()
        self._fail_all(UnavailableError(f"{self._worker} is stopping; try again"))

    def submit(self, generation: wire.DiffusionRequest, sink: WorkSink) -> int:
        """Return its number. Raises ResourceExhaustedError, UnavailableError."""
        with self._lock:
            if self._is_down:
                raise UnavailableError(self._supervisor.state)
            limit = self._config.max_queue_size
            if len(self._waiting) + (self._running is not None) > limit:  # also while no engine takes any
                raise ResourceExhaustedError(
                    f"{self._worker}: {len(self._waiting)} requests wait; video.max_queue_size is {limit}, try later"
                )
            work = _Work(next(self._numbers), generation, sink)
            self._waiting.append(work)
        self._advance()
        return work.number

    def abort(self, number: int) -> None:
        """At once where it waits, after the current step where it runs."""
        self._leave_queue(number, RequestCancelledError("the request was aborted"))
        with self._lock:
            if self._running is not None and self._running.number == number and self._life is not None:
                self._send(self._life, wire.AbortDiffusion(self._life.number, number))

    def expire(self, number: int) -> None:
        """Does nothing to a running one."""
        limit = self._config.max_queue_time_s
        self._leave_queue(
            number, DeadlineExceededError(f"not begun in {limit:g} s (video.max_queue_time_s); try later")
        )

    # Called by the supervisor, on its thread

    def on_ready(self, life: Life, hello: Hello) -> None:
        facts = wire.decode_facts(hello.facts)
        with self._lock:
            self._life, self._facts = life, facts
        self._advance()

    def on_frame(self, consumer: int, data: bytes) -> None:
        if consumer != wire.VIDEO:
            return
        event = wire.decode_event(memoryview(data)[4:])
        work = self._running
        if work is None or work.number != event.number:
            return
        if isinstance(event, wire.Stepped):
            work.sink.stepped(event)
            return
        with self._lock:
            self._running = None
        if isinstance(event, wire.Made):
            work.sink.made(event)
        else:
            work.sink.failed(from_message(event.error))
        self._advance()

    def on_pong(self, pong: Pong) -> None:
        if pong.metrics:
            delta = decode_delta(pong.metrics)
            self._metrics.merge(MetricDelta(delta.counters, [], delta.histograms))

    def on_end(self, life: Life, error: EngineLostError) -> None:
        with self._lock:
            work, self._running, self._life = self._running, None, None
        if work is not None:
            work.sink.failed(error)
        self._show_queue()

    def on_down(self, reason: str) -> None:
        with self._lock:
            self._is_down = True
        self._fail_all(UnavailableError(reason))

    # The queue

    def _advance(self) -> None:
        with self._lock:
            if self._running is None and self._life is not None and self._waiting:
                work = self._running = self._waiting.popleft()
                self._metrics.observe("bireme_queue_seconds", time.monotonic() - work.queued_at)
                self._send(self._life, wire.SubmitDiffusion(self._life.number, work.number, work.generation))
        self._show_queue()

    def _show_queue(self) -> None:
        with self._lock:
            waiting, ahead = list(self._waiting), int(self._running is not None)
        self._metrics.set("bireme_requests_running", ahead)
        self._metrics.set("bireme_requests_waiting", len(waiting))
        for position, work in enumerate(waiting, ahead):
            work.sink.queued(position)

    def _leave_queue(self, number: int, error: BiremeError) -> None:
        with self._lock:
            work = next((work for work in self._waiting if work.number == number), None)
            if work is None:
                return
            self._waiting.remove(work)
        work.sink.failed(error)
        self._show_queue()

    def _fail_all(self, error: BiremeError) -> None:
        with self._lock:
            works = [*self._waiting, *([self._running] if self._running else [])]
            self._waiting.clear()
            self._running = None
        for work in works:
            work.sink.failed(error)
        self._show_queue()

    def _send(self, life: Life, command: wire.Command) -> None:
        try:
            life.send(frame(wire.VIDEO, wire.encode(command)))
        except UnavailableError:
            pass  # the life is ending: `on_end` follows
