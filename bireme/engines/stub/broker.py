"""The process between several stubs of one worker and their engine: `python -m bireme.engines.stub.broker`.

It supervises the engine as a lone stub would, and hands frames on unread. The first stub starts it, but it is no
stub's: it lives as long as tritonserver and a stub do, so that a stub that dies or is replaced takes its own requests
along and no others. Dead stubs are noticed by their pidfd; the engine then aborts what they had under way.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from bireme.config import Recipe
from bireme.discovery import run_folder
from bireme.engines.stub.broker_wire import (
    ATTACH,
    DETACH,
    FRAME,
    MAX_SLOT,
    NEWS,
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
    Told,
    lock_path,
    recipe_digest,
    slot_of,
    socket_path,
    take_lock,
)
from bireme.engines.stub.engine_series import EngineSeries
from bireme.engines.stub.environment import given_recipe
from bireme.engines.stub.life import Life
from bireme.engines.stub.process_log import start_log
from bireme.engines.stub.supervisor import Supervisor
from bireme.errors import BiremeError, EngineLostError, UnavailableError, to_message
from bireme.messages import U32, Commands, Drop, Hello, Pong, encode, frame
from bireme.metrics import Registry, encode_delta
from bireme.own_process import end_process, freeze_gc, reuse_memory
from bireme.stop_signals import on_stop_signal

logger = logging.getLogger("bireme.engine")
TURN_S = 0.25
ABANDONED_S = 5.0  # without a stub for so long it ends: a reload brings new ones sooner
FIRST_STUB_S = 30.0
_MESSAGES_A_TURN = 256
_LINGER_MS = 1000


@dataclass(slots=True)
class _Stub:
    """An attached stub."""

    slot: int
    address: bytes  # of its receiving socket
    pid: int
    pidfd: int
    consumers: set[int] = field(default_factory=set)  # that the engine may have requests of


class EngineBroker:
    """Run once, on the main thread, which owns the stubs' socket; the engine's side runs on the supervisor's thread."""

    def __init__(self, recipe: Recipe, worker: str, run_dir: Path, lock: int, server: int) -> None:
        """`lock`: what `take_lock` returned; `server`: the process to end with, 0: none."""
        self._worker, self._run_dir, self._lock = worker, run_dir, lock
        self._digest = recipe_digest(recipe)
        self._metrics = Registry(worker)
        self._series = EngineSeries(self._metrics)
        self._supervisor = Supervisor(recipe, worker, run_dir, self, self._metrics, logger)
        self._stubs: dict[int, _Stub] = {}  # by slot, oldest first
        self._num_slots = 0
        self._outbox: deque[tuple[int, bytes, bytes]] = deque()  # slot or 0 for all, kind, what to send
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ready: tuple[Life, News] | None = None
        self._state = ""
        self._is_over = threading.Event()
        self._has_failed = False
        self._server = os.pidfd_open(server) if server else -1
        self._lonely_since = time.monotonic() + FIRST_STUB_S - ABANDONED_S

    def run(self) -> None:
        context = zmq.Context()
        self._poller = zmq.Poller()
        self._bind(context)
        self._poller.register(self._wakeup, zmq.POLLIN)
        if self._server >= 0:
            self._poller.register(self._server, zmq.POLLIN)
        on_stop_signal(lambda number: self._is_over.set())
        threading.Thread(target=self._start, name="engine-start", daemon=True).start()
        looked_at = 0.0
        while not self._is_over.is_set():
            ready = dict(self._poller.poll(int(TURN_S * 1000)))
            if self._wakeup in ready:
                os.eventfd_read(self._wakeup)
            self._flush()
            if self._socket in ready:
                self._receive()
            self._end_dead(ready)
            if self._server in ready:
                break
            if time.monotonic() - looked_at >= TURN_S:
                looked_at = time.monotonic()
                self._look()
        self._supervisor.stop()
        self._flush()
        self._socket.close(_LINGER_MS)
        context.term()

    # On the supervisor's thread.

    def on_ready(self, life: Life, hello: Hello) -> None:
        news = Ready(hello, life.pid)
        self._ready = (life, news)
        self._tell(0, news)

    def on_frame(self, consumer: int, data: bytes) -> None:
        self._post(slot_of(consumer), FRAME, data)

    def on_pong(self, pong: Pong) -> None:
        self._series.take(pong.metrics)

    def on_end(self, life: Life, error: EngineLostError) -> None:
        was_ready, self._ready = self._ready, None
        self._series.end()
        if was_ready is not None:
            self._tell(0, Ended(to_message(error)))

    def on_down(self, reason: str) -> None:
        """Stubs are told the state as any other."""

    def _start(self) -> None:
        try:
            self._supervisor.start()
        except BiremeError as error:
            self._has_failed = True
            self._tell(0, NotStarted(to_message(error)))

    def _tell(self, slot: int, news: News) -> None:
        self._post(slot, NEWS, encode(news))

    def _post(self, slot: int, kind: bytes, data: bytes) -> None:
        self._outbox.append((slot, kind, data))
        os.eventfd_write(self._wakeup, 1)

    # On the main thread.

    def _bind(self, context: Any) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.bind(f"ipc://{socket_path(self._run_dir, self._worker)}")
        self._poller.register(self._socket, zmq.POLLIN)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _flush(self) -> None:
        while self._outbox:
            slot, kind, data = self._outbox.popleft()
            for stub in self._stubs.values() if slot == 0 else filter(None, (self._stubs.get(slot),)):
                self._socket.send_multipart([stub.address, kind, data])

    def _receive(self) -> None:
        for _ in range(_MESSAGES_A_TURN):
            try:
                address, kind, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(address, kind, parts[0])
            except Exception:
                logger.exception("broker_message_failed worker=%s kind=%r", self._worker, kind)

    def _take(self, address: bytes, kind: bytes, data: bytes) -> None:
        if kind == FRAME:
            self._command(data)
        elif kind == TELL:
            target, own = U32.unpack_from(data, 0)[0], U32.unpack_from(data, 4)[0]
            news = encode(Told(own, data[8:]))
            for slot in [target] if target else self._stubs.keys() - {own}:
                self._post(slot, NEWS, news)
        elif kind == ATTACH:
            self._attach(address, msgspec.msgpack.decode(data, type=Attach))
        elif kind == DETACH and (stub := self._stubs.get(U32.unpack(data)[0])) is not None:
            self._forget(stub)

    def _command(self, data: bytes) -> None:
        consumer = U32.unpack_from(data)[0]
        stub, ready = self._stubs.get(slot_of(consumer)), self._ready
        if stub is None or ready is None:
            return  # its reader has gone; or a life that has ended, whose requests the stubs have failed
        stub.consumers.add(consumer)
        with contextlib.suppress(UnavailableError):  # its end comes next
            ready[0].send(data)

    def _attach(self, address: bytes, attach: Attach) -> None:
        if attach.recipe != self._digest:
            text = (
                f"{self._worker}: its engine runs with another recipe, for stubs that were loaded before; unload the"
                f" model, load it again when their streams have ended (stub_gone in the log) and {ABANDONED_S:g} s more"
            )
            self._socket.send_multipart([address, NEWS, encode(NotStarted(to_message(UnavailableError(text))))])
            return
        if self._num_slots == MAX_SLOT:  # none is given out twice: the next broker begins anew
            logger.warning("broker_out_of_slots worker=%s stubs=%d", self._worker, MAX_SLOT)
            self._is_over.set()
            return
        try:
            pidfd = os.pidfd_open(attach.pid)
        except ProcessLookupError:
            return
        self._num_slots += 1
        stub = _Stub(self._num_slots, address, attach.pid, pidfd)
        self._flush()  # what the others are still to hear is older than what this one is told
        news: list[News] = [Attached(stub.slot, os.getpid()), State(self._state)]
        ready = self._ready
        news += [ready[1]] if ready else []  # it may come a second time with the outbox
        for one in news:
            self._socket.send_multipart([address, NEWS, encode(one)])
        self._stubs[stub.slot] = stub
        self._poller.register(pidfd, zmq.POLLIN)
        self._tell_peers()
        logger.info("stub_attached worker=%s slot=%d pid=%d", self._worker, stub.slot, stub.pid)

    def _forget(self, stub: _Stub) -> None:
        del self._stubs[stub.slot]
        self._poller.unregister(stub.pidfd)
        os.close(stub.pidfd)
        if (ready := self._ready) is not None:
            for consumer in stub.consumers:
                with contextlib.suppress(UnavailableError):
                    ready[0].send(frame(consumer, encode(Commands(ready[0].number, [Drop()]))))
        self._tell_peers()
        self._lonely_since = time.monotonic()
        logger.info("stub_gone worker=%s slot=%d pid=%d", self._worker, stub.slot, stub.pid)

    def _tell_peers(self) -> None:
        self._tell(0, Peers(list(self._stubs)))

    def _end_dead(self, ready: dict[Any, int]) -> None:
        for stub in [stub for stub in self._stubs.values() if stub.pidfd in ready]:
            self._forget(stub)

    def _look(self) -> None:
        """Pass on metrics and the supervisor's state; end without stubs; heal a run folder that was cleaned."""
        if self._state != self._supervisor.state:
            self._state = self._supervisor.state
            self._tell(0, State(self._state))
        if self._stubs:
            self._tell(next(iter(self._stubs)), Counted(encode_delta(self._metrics.take_delta())))
        is_lonely = not self._stubs and time.monotonic() - self._lonely_since > ABANDONED_S
        if is_lonely or self._has_failed:
            self._is_over.set()
            return
        with contextlib.suppress(OSError):  # the next look tries again
            self._heal()

    def _heal(self) -> None:
        path = lock_path(self._run_dir, self._worker)
        if path.exists() and Path(socket_path(self._run_dir, self._worker)).exists():
            return
        if path.exists():
            is_ours = path.stat().st_ino == os.fstat(self._lock).st_ino
            lock = self._lock if is_ours else None
        else:
            lock = take_lock(self._run_dir, self._worker)
        if lock is None:  # another broker was started meanwhile
            self._is_over.set()
            return
        self._lock = lock
        logger.warning("broker_socket_restored worker=%s folder=%s", self._worker, self._run_dir)
        # One name more: to unbind the former one would break the connections that came by it.
        self._socket.bind(f"ipc://{socket_path(self._run_dir, self._worker)}")
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bireme.engines.stub.broker", description="Shares one engine among stubs.")
    parser.add_argument("--worker", required=True, help="the Triton model's name: decode, decode_1, ...")
    parser.add_argument("--lock", type=int, required=True, help="descriptor of the lock that it holds")
    parser.add_argument("--server", type=int, default=0, help="process id to end with; 0: none")
    options = parser.parse_args(arguments)
    start_log(f"{options.worker} broker")
    recipe, _ = given_recipe(options.worker)
    os.set_inheritable(options.lock, False)
    broker = EngineBroker(recipe, options.worker, run_folder.locate(), options.lock, options.server)
    freeze_gc(collect_less=True)
    reuse_memory()
    broker.run()
    return 0


if __name__ == "__main__":
    end_process(main())
