"""The engine process's side of the sockets: one IO thread that answers pings, also while a step is under way.

Commands for the engine go into a queue that its thread reads; an abort takes effect at once, by number. No frame,
however malformed, ends the process.
"""

from __future__ import annotations

import collections
import logging
import os
import queue
import threading
import time
from typing import Any

import msgspec
import zmq

from bireme.messages import (
    CONTROL,
    STUB,
    VERSION,
    Hello,
    Ping,
    Pong,
    decode_commands,
    encode,
    frame,
    split,
)
from bireme.metrics import Registry, encode_delta
from bireme.video import wire

logger = logging.getLogger("bireme.engine")
EXIT_SOFTWARE = 70  # EX_SOFTWARE of sysexits.h
_LINGER_MS = 1000


class EngineLink:
    """`start` first; then `ready` or `fail`; `next` gives the work; `close`."""

    def __init__(self, endpoint: str, life: int, metrics: Registry) -> None:
        self._endpoint, self._life, self._metrics = endpoint, life, metrics
        self._outbox: collections.deque[bytes] = collections.deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closing = False
        self._works: queue.SimpleQueue[wire.Generate | None] = queue.SimpleQueue()
        self._aborted = 0  # number of the work that is to end
        self._step = 0  # steps done in this life
        self._step_began_at = 0.0  # time.monotonic(); 0: nothing runs
        self._thread = threading.Thread(target=self._run, name="engine-io", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ready(self, facts: wire.PipelineFacts) -> None:
        self._post(CONTROL, encode(Hello(VERSION, self._life, facts=wire.encode(facts))))

    def fail(self, error: str) -> None:
        self._post(CONTROL, encode(Hello(VERSION, self._life, error=error)))

    def next(self) -> wire.Generate | None:
        """Wait for work; None: the process is to end."""
        return self._works.get()

    def interrupt(self) -> None:
        """Have `next` return None."""
        self._works.put(None)

    def is_aborted(self, number: int) -> bool:
        return number == self._aborted

    def began(self) -> None:
        """Work, or its next step, begins."""
        self._step_began_at = time.monotonic()

    def stepped(self) -> None:
        self._step += 1
        self.began()

    def rested(self) -> None:
        """The work has ended."""
        self._step_began_at = 0.0

    def tell(self, event: wire.Event) -> None:
        """Thread-safe; never blocks."""
        self._post(wire.VIDEO, wire.encode(event))

    def close(self) -> None:
        """Send what is queued and end the thread."""
        self._is_closing = True
        os.eventfd_write(self._bell, 1)
        self._thread.join(_LINGER_MS / 1000 + 1)

    def _post(self, consumer: int, payload: bytes) -> None:
        self._outbox.append(frame(consumer, payload))
        os.eventfd_write(self._bell, 1)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            logger.exception("io_failed life=%d", self._life)
            os._exit(EXIT_SOFTWARE)  # a mute engine is of no use, and its supervisor starts another

    def _serve(self) -> None:
        context = zmq.Context()
        commands = _connect(context, zmq.PULL, self._endpoint + ".c")
        events = _connect(context, zmq.PUSH, self._endpoint + ".s")
        poller = zmq.Poller()
        poller.register(commands, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        while not (self._is_closing and not self._outbox):
            ready = dict(poller.poll())
            if self._bell in ready:
                os.eventfd_read(self._bell)
            while self._outbox:
                events.send(self._outbox.popleft())
            if commands in ready:
                self._take(commands.recv())
        commands.close(0)
        events.close(_LINGER_MS)
        context.term()

    def _take(self, data: bytes) -> None:
        try:
            consumer, payload = split(data)
            if consumer == wire.VIDEO:
                self._obey(wire.decode_command(payload))
            elif consumer == STUB:
                for command in decode_commands(payload).commands:
                    if isinstance(command, Ping):
                        self._pong(command.number)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            logger.warning("command_malformed bytes=%d reason=%s", len(data), error)
        except Exception:
            logger.exception("command_failed bytes=%d", len(data))

    def _obey(self, command: wire.Command) -> None:
        if command.life != self._life:
            return  # meant for another life: its stub has been told that this work is lost
        if isinstance(command, wire.Generate):
            self._works.put(command)
        else:
            self._aborted = command.number

    def _pong(self, number: int) -> None:
        began = self._step_began_at
        age_ms = max(0.0, time.monotonic() - began) * 1e3 if began else 0.0
        delta = encode_delta(self._metrics.take_delta())
        pong = Pong(number, self._life, self._step, age_ms, 0, int(bool(began)), delta)
        self._outbox.append(frame(CONTROL, encode(pong)))
        os.eventfd_write(self._bell, 1)


def _connect(context: Any, kind: int, endpoint: str) -> Any:
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.linger = 0
    socket.connect(endpoint)
    return socket
