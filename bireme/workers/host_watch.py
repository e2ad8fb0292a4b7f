"""Whether another server's host still answers, asked with TCP handshakes while something waits for that server.

The kernel answers them, also for a process that stands still: silence is the host's, or the network's.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import logging
import select
import socket
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("bireme.workers")

PAUSE_S = 0.5  # between two looks
TRY_S = 0.25  # after which another handshake is begun: a packet may get lost
MAX_TRIES = 5
LOST_S = 5.0  # of silence
# What a handshake that nobody answered has come to so far, or in the end; other errors say nothing of the host.
_SILENCE = (
    errno.EINPROGRESS,
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.EHOSTDOWN,
    errno.ENETUNREACH,
    errno.ENETDOWN,
)


class HostState(enum.Enum):
    ANSWERS = "answers"
    SILENT = "silent"  # for MAX_TRIES: nothing new is sent there, and who waits for a first sign goes elsewhere
    LOST = "lost"  # for LOST_S: connections to it are given up


class HostWatch:
    """One task, until `stop`. Used on one loop."""

    def __init__(self, address: str, is_awaited: Callable[[], bool], on_change: Callable[[HostState], None]) -> None:
        """`is_awaited`: whether something waits for news from there."""
        self._address, self._is_awaited, self._on_change = address, is_awaited, on_change
        self._state, self._silent_since = HostState.ANSWERS, 0.0
        self._found: list[tuple[Any, ...]] = []  # what getaddrinfo returned
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"watch-{address}")

    def stop(self) -> None:
        self._task.cancel()
        if self._state is not HostState.ANSWERS:
            self._on_change(HostState.ANSWERS)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PAUSE_S)
            if self._state is not HostState.ANSWERS or self._is_awaited():
                try:
                    await self._look()
                except Exception:  # of one look: the next one must still be able to tell that the host is back
                    logger.exception("host_not_looked_at server=%s", self._address)

    async def _look(self) -> None:
        began = time.monotonic()
        if not self._found or self._state is not HostState.ANSWERS:
            await self._resolve()
        if not self._found or await self._answers():  # a name that nobody knows says nothing of the host
            self._enter(HostState.ANSWERS)
        elif self._state is HostState.ANSWERS:
            self._silent_since = began
            self._enter(HostState.SILENT)
        elif time.monotonic() - self._silent_since > LOST_S:
            self._enter(HostState.LOST)

    def _enter(self, state: HostState) -> None:
        if state is self._state:
            return
        self._state = state
        level = logging.INFO if state is HostState.ANSWERS else logging.WARNING
        silent_s = time.monotonic() - self._silent_since
        logger.log(level, "host_%s server=%s silent_s=%.1f", state.value, self._address, silent_s)
        self._on_change(state)

    async def _resolve(self) -> None:
        """What was found before stays where it can't be looked up."""
        host, _, port = self._address.rpartition(":")
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            asked = asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            async with asyncio.timeout(TRY_S * MAX_TRIES):
                self._found = list(await asked)

    async def _answers(self) -> bool:
        """Whether one of several handshakes is answered, says the kernel: a loop may be late."""
        tries: list[_Handshake] = []
        try:
            for number in range(MAX_TRIES):
                tries.append(_Handshake(self._found[number % len(self._found)]))
                await asyncio.sleep(TRY_S)
                if any(one.is_answered() for one in tries):
                    return True
            return False
        except OSError:  # no descriptor is left: that says nothing of the host
            return True
        finally:
            for one in tries:
                one.close()


class _Handshake:
    def __init__(self, found: tuple[Any, ...]) -> None:
        """`found`: of getaddrinfo. Raises OSError."""
        family, kind, protocol, _, address = found
        self._socket = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
        self._error = self._socket.connect_ex(address)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLOUT)

    def is_answered(self) -> bool:
        if self._error == errno.EINPROGRESS and self._poll.poll(0):
            self._error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return self._error not in _SILENCE

    def close(self) -> None:
        self._socket.close()
