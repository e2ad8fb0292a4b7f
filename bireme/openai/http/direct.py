"""Shortcuts through uvicorn, for what ASGI does with a task, a message and a task switch each.

A reply begins and ends through ASGI, and so does everything uncertain: another server, a uvicorn whose internals have
changed, a client that reads too slowly. Each shortcut saves at least a twentieth of the frontend's CPU for some kind of
answer (docs/measurements.md); one that saves less does not belong here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

DirectWrite = Callable[[bytes], bool]  # never of nothing; false: not written, send it through ASGI
_USED = (
    "chunked_encoding", "disconnected", "flow", "message_event", "more_body", "response_complete", "transport",
    "waiting_for_100_continue",
)  # fmt: skip


def cycle_of(method: Any) -> RequestResponseCycle | None:
    """Return uvicorn's object of a request, which owns ASGI's `receive` and `send`; None elsewhere."""
    cycle = getattr(method, "__self__", None)
    if isinstance(cycle, RequestResponseCycle) and all(hasattr(cycle, name) for name in _USED):
        return cycle
    return None


def direct_write(cycle: RequestResponseCycle | None) -> DirectWrite | None:
    """Return a writer for chunks of the begun reply, where that is possible."""
    if cycle is None or not cycle.chunked_encoding:
        return None
    flow, transport = cycle.flow, cycle.transport

    def write(data: bytes) -> bool:
        if flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    return write


class AtOnce:
    """ASGI messages sent within go out in one write: a reply's head and first part cost one system call, not two."""

    __slots__ = ("_cycle", "_held", "_transport")

    def __init__(self, cycle: RequestResponseCycle | None) -> None:
        self._cycle = cycle

    def __enter__(self) -> None:
        if self._cycle is not None:
            self._transport = self._cycle.transport
            self._held = _Held(self._transport)
            self._cycle.transport = self._held  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        if self._cycle is not None:
            self._cycle.transport = self._transport
            self._held.release()


class _Held:
    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._parts: list[bytes] = []
        self._is_closed = False

    def write(self, data: bytes) -> None:
        self._parts.append(data)

    def close(self) -> None:
        self._is_closed = True

    def is_closing(self) -> bool:
        return self._is_closed or self._transport.is_closing()

    def release(self) -> None:
        if self._parts:
            self._transport.write(b"".join(self._parts))
        if self._is_closed:
            self._transport.close()


def is_body_coming(cycle: RequestResponseCycle | None) -> bool:
    """Return whether the client still sends its body; one that waits for our word (Expect) does not."""
    if cycle is None or cycle.disconnected or cycle.waiting_for_100_continue:
        return False
    return bool(cycle.more_body)


def drop(cycle: RequestResponseCycle | None) -> None:
    """End the connection without a wait for what its client has not read."""
    if cycle is not None:
        cycle.disconnected = True
        cycle.transport.abort()


class Watch:
    def __init__(self, cycle: RequestResponseCycle | None, receive: Any, callback: Callable[[], object]) -> None:
        """After the whole body was received."""
        self.is_gone = False
        self._callback: Callable[[], object] | None = callback
        self._task: asyncio.Future[Any] | None = None
        self._notice: _Notice | None = None
        if cycle is None or cycle.disconnected:
            self._task = asyncio.ensure_future(receive())
            self._task.add_done_callback(self._end)
        else:
            self._notice = cycle.message_event = _Notice(cycle, self._tell)

    def cancel(self) -> None:
        """Also forget all, so that an ended request is freed at once, not with the next collection."""
        self._callback = None
        if self._task is not None:
            self._task.cancel()
        if self._notice is not None:
            self._notice.forget()

    def _end(self, task: asyncio.Future[Any]) -> None:
        if not task.cancelled():
            self._tell()

    def _tell(self) -> None:
        if self._callback is not None:
            self.is_gone = True
            self._callback()


class _Notice(asyncio.Event):
    """Replaces uvicorn's event of a lost connection or complete reply."""

    def __init__(self, cycle: Any, tell: Callable[[], None]) -> None:
        super().__init__()
        self._cycle: Any = cycle
        self._tell: Callable[[], None] | None = tell

    def set(self) -> None:
        super().set()
        if self._tell is not None and self._cycle.disconnected:
            self._tell()

    def forget(self) -> None:
        self._cycle = self._tell = None
