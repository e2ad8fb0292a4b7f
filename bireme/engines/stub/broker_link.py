"""A stub's connection to the broker that shares one engine among several stubs: what a Supervisor is to a lone stub.

One thread attaches, starts a broker where none runs, reads, and calls the owner back. When the broker ends, its engine
has ended with it: the owner is told so, and the next broker is started, or awaited if another stub has been quicker.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from bireme.child_process import Backoff, ChildProcess
from bireme.config import Recipe
from bireme.discovery import run_folder
from bireme.engines.stub.broker_wire import (
    ATTACH,
    DETACH,
    FRAME,
    SLOT_BITS,
    TELL,
    Attach,
    Attached,
    Counted,
    Ended,
    News,
    NotStarted,
    Peers,
    Ready,
    State,
    decode_news,
    recipe_digest,
    socket_path,
    take_lock,
)
from bireme.engines.stub.engine_series import EngineSeries
from bireme.engines.stub.environment import RECIPE_VARIABLE, child_environment, find_python
from bireme.errors import BiremeError, ConfigError, EngineLostError, UnavailableError, from_message
from bireme.messages import U32, Hello, encode
from bireme.metrics import Registry

_LOOK_S = 0.2
_LINGER_MS = 500
_MESSAGES_A_TURN = 256
_BROKER_START_S = 30.0  # beyond the engine's own limit


class RemoteLife:
    """One life of the engine behind the broker; to its owner what a Life is."""

    def __init__(self, link: BrokerLink, number: int, pid: int) -> None:
        self.number, self.pid = number, pid
        self.consumer = link.slot << SLOT_BITS  # this stub; its subscriptions have the numbers above it
        self._link = link

    def send(self, data: bytes) -> None:
        """Queue a command frame; from any thread. Raises UnavailableError after the broker's end."""
        self._link.send(FRAME, data)


class LinkOwner(Protocol):
    """Called on the link's thread."""

    def on_ready(self, life: RemoteLife, hello: Hello) -> None: ...

    def on_frame(self, consumer: int, data: bytes) -> None: ...

    def on_end(self, life: RemoteLife, error: EngineLostError) -> None: ...

    def on_told(self, slot: int, text: bytes) -> None:
        """Take what another stub says."""


class BrokerLink:
    """`start` once, `stop` once; `send` and `tell` from any thread."""

    def __init__(
        self, recipe: Recipe, worker: str, run_dir: Path, owner: LinkOwner, metrics: Registry, logger: logging.Logger
    ) -> None:
        if not hasattr(os, "pidfd_open"):
            raise ConfigError(f"workers.{worker}.instances: more than one stub needs Linux 5.3; remove the key")
        self._recipe, self._worker, self._run_dir = recipe, worker, run_dir
        self._owner, self._logger = owner, logger
        self._series = EngineSeries(metrics)  # where the broker has this stub publish it
        self._path = socket_path(run_dir, worker)
        self._server = os.getppid()  # a stub's is tritonserver: a broker ends with it
        self.slot = 0  # 0: not attached
        self.peers: frozenset[int] = frozenset()  # the slots of the other stubs
        self._broker_pid = 0
        self._broker: ChildProcess | None = None  # where this process has started it
        self._life: RemoteLife | None = None
        self._failure: BiremeError | None = None
        self._state = f"{worker} has not been started"
        self._stopping = threading.Event()
        self._has_started = threading.Event()  # ready for the first time, or failed
        self._backoff = Backoff(0.1, 5.0)
        self._send_lock = threading.Lock()
        self._sender: Any = None
        self._thread = threading.Thread(target=self._run, name=f"engine-{worker}", daemon=True)

    @property
    def state(self) -> str:
        """Why no life is ready, for the text of a refusal."""
        return self._state

    def start(self) -> None:
        """Wait until a life is ready. Raises ConfigError or UnavailableError with the reason why none is."""
        self._thread.start()
        if not self._has_started.wait(self._recipe.supervisor.start_timeout_s + _BROKER_START_S):
            raise UnavailableError(f"{self._state}; the log above has what its broker and its engine say")
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Leave the broker, which ends soon without stubs. May be called again."""
        self._stopping.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_LINGER_MS / 1000 + 2)

    def send(self, kind: bytes, data: bytes) -> None:
        """Raises UnavailableError without a broker."""
        with self._send_lock:
            if self._sender is None:
                raise UnavailableError(f"the engine of {self._worker} has ended")
            self._sender.send_multipart([kind, data])

    def tell(self, text: bytes, slot: int = 0) -> None:
        """Say something to another stub, or with 0 to all others. Raises UnavailableError without a broker."""
        self.send(TELL, U32.pack(slot) + U32.pack(self.slot) + text)

    def _run(self) -> None:
        while not self._stopping.is_set() and self._failure is None:
            try:
                self._attach()
            except Exception as error:
                self._logger.exception("broker_link_failed worker=%s", self._worker)
                self._state = f"{self._worker}: {error}"
            self._stopping.wait(self._backoff.next_s())
        self._has_started.set()

    def _attach(self) -> None:
        """Serve one broker to its end, or to this stub's."""
        if (lock := take_lock(self._run_dir, self._worker)) is not None:
            self._start_broker(lock)
        context = zmq.Context()
        receiver, sender = _connect(context, self._path), _connect(context, self._path)
        self._sender, self.slot, self._broker_pid = sender, 0, 0
        try:
            receiver.send_multipart([ATTACH, encode(Attach(os.getpid(), recipe_digest(self._recipe)))])
            self._serve(receiver)
        finally:
            if self.slot:
                self.send(DETACH, U32.pack(self.slot))
            with self._send_lock:
                self._sender = None
            receiver.close(0)
            sender.close(_LINGER_MS)
            context.term()
            is_own_end = self._stopping.is_set()
            self._end_life("it is stopping" if is_own_end else "its broker has ended, and its engine with it")

    def _start_broker(self, lock: int) -> None:
        if self._broker is not None:
            self._broker.reap()
        command = [find_python(), "-m", "bireme.engines.stub.broker", "--worker", self._worker]
        command += ["--lock", str(lock), "--server", str(self._server)]
        own = {"BIREME_RUN_DIR": str(self._run_dir), RECIPE_VARIABLE: msgspec.json.encode(self._recipe).decode()}
        try:
            self._broker = ChildProcess(command, child_environment(1) | own, pass_fds=(lock,))
        finally:
            os.close(lock)  # the child has it, too, and with it the lock
        self._logger.info("broker_started worker=%s pid=%d", self._worker, self._broker.pid)

    def _serve(self, receiver: Any) -> None:
        poller = zmq.Poller()
        poller.register(receiver, zmq.POLLIN)
        pidfd = -1
        try:
            while not self._stopping.is_set() and self._failure is None:
                ready = dict(poller.poll(int(_LOOK_S * 1000)))
                self._read(receiver)  # what a dead broker said last, too
                if pidfd in ready:
                    return
                if pidfd < 0 and self._broker_pid:
                    pidfd = os.pidfd_open(self._broker_pid)
                    poller.register(pidfd, zmq.POLLIN)
                elif pidfd < 0 and not ready and (lock := take_lock(self._run_dir, self._worker)) is not None:
                    os.close(lock)
                    return  # it ended before it answered
        except ProcessLookupError:
            return
        finally:
            if pidfd >= 0:
                os.close(pidfd)

    def _read(self, receiver: Any) -> None:
        for _ in range(_MESSAGES_A_TURN):
            try:
                kind, data = receiver.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if kind == FRAME:
                    self._owner.on_frame(U32.unpack_from(data)[0], data)
                else:
                    self._hear(decode_news(data))
            except Exception:
                self._logger.exception("frame_failed worker=%s bytes=%d", self._worker, len(data))

    def _hear(self, news: News) -> None:
        if isinstance(news, Attached):
            self.slot, self._broker_pid = news.slot, news.broker_pid
            self._backoff.reset()
        elif isinstance(news, Peers):
            self.peers = frozenset(news.slots) - {self.slot}
        elif isinstance(news, Ready):
            if self._life is not None and self._life.number == news.hello.life:
                return
            self._life = RemoteLife(self, news.hello.life, news.pid)
            self._owner.on_ready(self._life, news.hello)
            self._has_started.set()
        elif isinstance(news, Ended):
            self._end_life(from_message(news.error))
        elif isinstance(news, State):
            self._state = news.text
            if run_folder.must_sleep(self._run_dir, self._worker):
                self._has_started.set()
        elif isinstance(news, Counted):
            self._series.take(news.delta)
        elif isinstance(news, NotStarted):
            error = from_message(news.error)
            self._state = str(error)
            if not self._has_started.is_set():
                self._failure = error
        else:
            self._owner.on_told(news.slot, news.text)

    def _end_life(self, error: BiremeError | str) -> None:
        """Have the owner fail what was in flight."""
        if isinstance(error, str):
            self._state = f"{self._worker}: {error}"
            self._series.end()
        life, self._life = self._life, None
        if life is not None:
            self._owner.on_end(life, error if isinstance(error, EngineLostError) else EngineLostError(str(error)))


def _connect(context: Any, path: str) -> Any:
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.linger = 0
    socket.reconnect_ivl = 20
    socket.connect(f"ipc://{path}")
    return socket
