"""The engine process's side of the sockets: one IO thread that answers pings, also during a step.

Commands for the engine go into a queue that its thread reads; an abort takes effect at once, by number. No frame,
however malformed, ends the process.
"""

from __future__ import annotations

import logging
import queue
import time

import msgspec

from bireme.engines.child.io_thread import IoThread
from bireme.messages import STUB, VERSION, Hello, Ping, Pong, decode_commands, frame, split
from bireme.metrics import Registry, encode_delta
from bireme.video import wire

logger = logging.getLogger("bireme.engine")


class EngineLink:
    """`start` first; then `ready` or `fail`; `next` gives the work; `close`."""

    def __init__(self, endpoint: str, life: int, metrics: Registry) -> None:
        self._life, self._metrics = life, metrics
        self._works: queue.SimpleQueue[wire.SubmitDiffusion | None] = queue.SimpleQueue()
        self._aborted = 0  # number of the work that is to end
        self._step = 0  # steps done in this life
        self._step_began_at = 0.0  # time.monotonic(); 0: nothing runs
        self._io = IoThread(endpoint, life, self.take)

    def start(self) -> None:
        self._io.start()

    def ready(self, facts: wire.PipelineFacts) -> None:
        self._io.send(Hello(VERSION, self._life, facts=wire.encode(facts)))

    def fail(self, error: str) -> None:
        self._io.send(Hello(VERSION, self._life, error=error))

    def next(self) -> wire.SubmitDiffusion | None:
        """Wait for work; None: the process is to end."""
        return self._works.get()

    def interrupt(self) -> None:
        """Have `next` return None."""
        self._works.put(None)

    def is_aborted(self, number: int) -> bool:
        return number == self._aborted

    def began(self) -> None:
        self._step_began_at = time.monotonic()

    def stepped(self) -> None:
        self._step += 1
        self.began()

    def ended(self) -> None:
        self._step_began_at = 0.0

    def send(self, event: wire.Event) -> None:
        """Thread-safe; never blocks."""
        self._io.post(frame(wire.VIDEO, wire.encode(event)))

    def close(self) -> None:
        self._io.close()

    def take(self, data: bytes) -> None:
        try:
            consumer, payload = split(data)
            if consumer == wire.VIDEO:
                self._handle(wire.decode_command(payload))
            elif consumer == STUB:
                for command in decode_commands(payload).commands:
                    if isinstance(command, Ping):
                        self._pong(command.number)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            logger.warning("command_malformed bytes=%d reason=%s", len(data), error)

    def _handle(self, command: wire.Command) -> None:
        if command.life != self._life:
            return  # meant for another life: its stub has been told that this work is lost
        if isinstance(command, wire.SubmitDiffusion):
            self._works.put(command)
        else:
            self._aborted = command.number

    def _pong(self, number: int) -> None:
        began = self._step_began_at
        age_ms = max(0.0, time.monotonic() - began) * 1e3 if began else 0.0
        delta = encode_delta(self._metrics.take_delta())
        self._io.send(Pong(number, self._life, self._step, age_ms, 0, int(bool(began)), delta))
