"""A stub's engine: submit requests and open buses; the process is kept alive behind it.

    stub's threads      submit, abort, open_bus, send_commands, close_bus: quick, from any thread
    supervisor's thread deliver: sinks and bus pushes are called here, in order, with no lock held

A request belongs to exactly one life of the engine (one run of its process): when that ends, its sink gets `finish`
with UNAVAILABLE at once. Each bus gets an encoded Step(lost=True) and ends with the life it was opened in.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from bireme.config import Recipe
from bireme.discovery import run_folder
from bireme.engines.stub.life import Life
from bireme.engines.stub.supervisor import Supervisor
from bireme.errors import ConfigError, EngineLostError, EngineStalledError, UnavailableError, to_message
from bireme.messages import (
    STUB,
    Abort,
    Capacity,
    Command,
    Commands,
    Drain,
    Drop,
    Finish,
    Hello,
    Pong,
    Release,
    Sink,
    StartRequest,
    Step,
    Usage,
    decode_step,
    deliver,
    encode,
    frame,
    start_command,
)
from bireme.metrics import Labels, MetricDelta, Registry, decode_delta

Push = Callable[[bytes], None]  # an encoded Step; called on the supervisor's thread, quick, must not raise


class _Session:
    __slots__ = ("buses", "capacity", "life", "sinks")

    def __init__(self, life: Life, capacity: Capacity) -> None:
        self.life = life
        self.capacity = capacity
        self.sinks: dict[int, Sink] = {}
        self.buses: dict[int, Push] = {}


class EngineClient:
    """One worker's engine. `start`, then use; `stop` ends it for good."""

    def __init__(
        self,
        recipe: Recipe,
        worker_name: str,
        metrics: Registry,
        logger: logging.Logger,
        run_dir: Path | None = None,
    ) -> None:
        if recipe.entry(worker_name) is None:
            raise ConfigError(f"{worker_name} is not in recipe {recipe.name}")
        self._worker = worker_name
        self.metrics = metrics
        self._logger = logger
        self._supervisor = Supervisor(recipe, worker_name, run_dir or run_folder.locate(), self, metrics, logger)
        self._lock = threading.Lock()  # guards the session's change, and registering with sending
        self._session: _Session | None = None
        self._numbers = itertools.count(1)
        self._consumers = itertools.count(STUB + 1)
        self._gauges: set[tuple[str, Labels]] = set()
        self._pong: Pong | None = None
        self._pong_at = 0.0
        self._is_draining = False

    @property
    def is_ready(self) -> bool:
        return self._session is not None

    @property
    def state(self) -> str:
        return "ready" if self._session else self._supervisor.state

    @property
    def life(self) -> int:
        """0: none is ready."""
        session = self._session
        return session.life.number if session else 0

    @property
    def capacity(self) -> Capacity:
        """Raises UnavailableError."""
        return self._require().capacity

    @property
    def pid(self) -> int:
        """Raises UnavailableError."""
        return self._require().life.pid

    @property
    def pong(self) -> Pong | None:
        """Of the present life; None before the first."""
        return self._pong

    def start(self) -> None:
        """Wait until it is ready. Raises ConfigError or UnavailableError."""
        self._supervisor.start()

    def submit(self, request: StartRequest, sink: Sink) -> int:
        """Return its number. Raises UnavailableError; `sink` gets all else."""
        with self._lock:
            session = self._admit()
            number = next(self._numbers)
            session.sinks[number] = sink
            try:
                self._send(session, STUB, start_command(number, request))
            except UnavailableError:
                del session.sinks[number]
                raise
        return number

    def release(self, handles: tuple[str, ...]) -> None:
        """Raises UnavailableError."""
        with self._lock:
            self._send(self._require(), STUB, Release(handles))

    def abort(self, number: int) -> None:
        """Its sink still gets its finish. After the end of a context_only one: free its lease."""
        with self._lock:
            if self._session is not None:
                self._try_send(self._session, STUB, Abort(number))

    def open_bus(self, push: Push) -> int:
        """Return a new consumer, whose steps go to `push`, at the end of its life `lost`. Raises UnavailableError."""
        with self._lock:
            session = self._admit()
            consumer = next(self._consumers)
            session.buses[consumer] = push
            return consumer

    def send_commands(self, consumer: int, payload: bytes | memoryview) -> None:
        """Pass on an encoded Commands, unread. Raises UnavailableError when the bus has ended with its life."""
        session = self._session
        if session is None or consumer not in session.buses:
            raise UnavailableError(f"this subscription has ended with its engine life; {self._ended_state()}")
        session.life.send(frame(consumer, payload))

    def close_bus(self, consumer: int) -> None:
        """Its requests are aborted. Harmless when it has ended."""
        with self._lock:
            if self._session is not None and self._session.buses.pop(consumer, None) is not None:
                self._try_send(self._session, consumer, Drop())

    def drain(self, timeout_s: float = 0.0) -> bool:
        """Return whether the engine became idle within the time."""
        with self._lock:
            self._is_draining = True
            if self._session is not None:
                self._try_send(self._session, STUB, Drain())
        began = time.monotonic()
        while not self._is_idle(began):
            if time.monotonic() >= began + timeout_s:
                return False
            time.sleep(0.01)
        return True

    def stop(self) -> None:
        """Open requests end with UNAVAILABLE. May be called again."""
        self._supervisor.stop()

    def on_ready(self, life: Life, hello: Hello) -> None:
        assert hello.capacity is not None
        with self._lock:
            self._session = _Session(life, hello.capacity)
            if self._is_draining:
                self._try_send(self._session, STUB, Drain())

    def on_frame(self, consumer: int, data: bytes) -> None:
        session = self._session
        if session is None:
            return
        if consumer == STUB:
            deliver(decode_step(memoryview(data)[4:]), session.sinks, self._sink_failed)
            return
        push = session.buses.get(consumer)
        if push is not None:
            self._push(push, data[4:])

    def on_pong(self, pong: Pong) -> None:
        self._pong, self._pong_at = pong, time.monotonic()
        if pong.metrics:
            delta = decode_delta(pong.metrics)
            self._gauges |= {(name, tuple(labels)) for name, labels, _ in delta.gauges}
            self.metrics.merge(delta)

    def on_end(self, life: Life, error: EngineLostError) -> None:
        with self._lock:
            session, self._session = self._session, None
            self._pong = None
        self.metrics.merge(MetricDelta([], [(name, labels, 0.0) for name, labels in self._gauges], []))
        if session is None:
            return
        text = to_message(error)
        finished = {number: Finish("error", Usage(), text) for number in session.sinks}
        deliver(Step(life.number, 0, finished=finished), session.sinks, self._sink_failed)
        lost = encode(Step(life.number, 0, lost=True, has_stalled=isinstance(error, EngineStalledError)))
        for push in list(session.buses.values()):
            self._push(push, lost)

    def on_down(self, reason: str) -> None:
        """No request waits here for another life."""

    def _sink_failed(self, number: int, error: Exception) -> None:
        """Its request ends, the others go on."""
        self._logger.error("sink_failed worker=%s request=%d", self._worker, number, exc_info=error)
        session = self._session
        if session is not None and session.sinks.pop(number, None) is not None:
            self._try_send(session, STUB, Abort(number))

    def _push(self, push: Push, payload: bytes) -> None:
        try:
            push(payload)
        except Exception:
            self._logger.exception("bus_push_failed worker=%s", self._worker)

    def _require(self) -> _Session:
        session = self._session
        if session is None:
            raise UnavailableError(self._ended_state())
        return session

    def _admit(self) -> _Session:
        if self._is_draining:
            raise UnavailableError(f"{self._worker} is draining and takes no new requests")
        return self._require()

    def _ended_state(self) -> str:
        return self._supervisor.state if self._session is None else "subscribe again"

    def _is_idle(self, since: float) -> bool:
        """By a report newer than `since`."""
        session, pong = self._session, self._pong
        if session is None:
            return True
        if session.sinks or pong is None or self._pong_at <= since:
            return False
        return not pong.num_waiting + pong.num_running

    def _send(self, session: _Session, consumer: int, command: Command) -> None:
        session.life.send(frame(consumer, encode(Commands(session.life.number, [command]))))

    def _try_send(self, session: _Session, consumer: int, command: Command) -> None:
        try:
            self._send(session, consumer, command)
        except (UnavailableError, msgspec.MsgspecError):
            pass  # the life is ending, and the command's request with it
