"""The engine process's two sockets to its supervisor, and the one thread that owns them.

Other threads only append to a queue and, when this one sleeps, wake it. No frame, however malformed, ends the process;
a thread that can't go on does, since an engine that can't answer is of no use and its supervisor starts another.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import zmq

from bireme.coalescing import ENGINE_PAUSE_S
from bireme.inbox import Inbox
from bireme.messages import CONTROL, Hello, Pong, encode, frame

logger = logging.getLogger("bireme.engine")
EXIT_SOFTWARE = 70  # EX_SOFTWARE of sysexits.h
_FRAMES_A_TURN = 64  # commands taken before the engine's output goes out again
_LINGER_MS = 1000  # the last frames of an orderly end get this long to reach the stub

Outgoing = bytes | Callable[[], Iterable[bytes]]  # a frame, or what makes frames on the IO thread; must not raise


class IoThread:
    """`start`, then `post` and `send` from any thread; `close`. `take` gets each incoming frame, on the thread."""

    def __init__(self, endpoint: str, life: int, take: Callable[[bytes], None]) -> None:
        self._endpoint, self._life, self._take = endpoint, life, take
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._outbox = Inbox[Outgoing](lambda: os.eventfd_write(self._wakeup, 1))
        self._is_closing = False
        self._sent_at = 0.0
        self._thread = threading.Thread(target=self._run, name="engine-io", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, item: Outgoing) -> None:
        """Send it in its turn; never blocks."""
        self._outbox.put(item)

    def send(self, message: Hello | Pong) -> None:
        self.post(frame(CONTROL, encode(message)))

    def close(self) -> None:
        self._is_closing = True
        self.post(lambda: ())  # so that it looks
        self._thread.join(_LINGER_MS / 1000 + 1)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            logger.exception("io_failed life=%d", self._life)
            os._exit(EXIT_SOFTWARE)

    def _serve(self) -> None:
        context = zmq.Context()
        commands = _connect(context, zmq.PULL, self._endpoint + ".c")
        steps = _connect(context, zmq.PUSH, self._endpoint + ".s")
        poller = zmq.Poller()
        poller.register(commands, zmq.POLLIN)
        poller.register(self._wakeup, zmq.POLLIN)
        while not (self._is_closing and not self._outbox):
            ready = dict(poller.poll())
            if self._wakeup in ready:
                os.eventfd_read(self._wakeup)  # before the items are read: later ones wake it again
                if self._flush(steps):
                    self._throttle()
            if commands in ready:
                self._receive(commands)
        commands.close(0)
        steps.close(_LINGER_MS)
        context.term()

    def _flush(self, steps: Any) -> bool:
        """Return whether something was there: what came during the last flush has gone with it."""
        num_frames = 0
        for item in self._outbox.drain():
            for data in (item,) if isinstance(item, bytes) else item():
                steps.send(data)
                num_frames += 1
        return num_frames > 0

    def _throttle(self) -> None:
        """Let output that comes fast pile up: sending each step alone costs the readers more than its tokens."""
        now = time.monotonic()
        if now - self._sent_at < 2 * ENGINE_PAUSE_S and not self._is_closing:
            time.sleep(ENGINE_PAUSE_S)
            now = time.monotonic()
        self._sent_at = now

    def _receive(self, commands: Any) -> None:
        for _ in range(_FRAMES_A_TURN):
            try:
                data = commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(data)
            except Exception:
                logger.exception("command_failed bytes=%d", len(data))


def _connect(context: Any, kind: int, endpoint: str) -> Any:
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.linger = 0
    socket.connect(endpoint)
    return socket
