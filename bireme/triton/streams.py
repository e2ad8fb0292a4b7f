"""The responses of one request: they wait here until a sender thread takes them.

Whatever happens, exactly one final flag goes out, and nothing is asked of Triton after it. `send`, `finish` and
`cancel` come from any thread and never block; `flush` runs on the stream's own sender thread; `poll` on the cancel
poller's. is_cancelled() during or after the final flag crashes Triton (SIGSEGV of the whole server), hence the gate
around both.

The buffer's limit covers what the senders can't hand over. A client that never reads is not seen here: Triton's own
frontends take every response and keep it in the server's memory without a limit (2.51).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from bireme.errors import BiremeError, RequestCancelledError, ResourceExhaustedError
from bireme.types import Cancelled, Response, size_of

logger = logging.getLogger("bireme.triton")


class Outlet(Protocol):
    """Triton's side of one request. Every method is a blocking round trip to the server."""

    def send(self, response: Response, is_final: bool) -> None:
        """Send one response. What it raises, it raises before anything went out."""

    def fail(self, error: BaseException) -> None:
        """Send `CODE: text` with the final flag."""

    def close(self) -> None:
        """Send the bare final flag."""

    def is_cancelled(self) -> bool: ...


class Stream:
    __slots__ = (
        "_buffer", "_buffered_bytes", "_enqueue", "_error", "_gate", "_has_begun", "_is_closed",
        "_is_decoupled", "_is_dirty", "_is_ended", "_lock", "_max_buffer_bytes", "_on_close", "_outlet",
        "cancelled", "is_urgent", "num_sent",
    )  # fmt: skip

    def __init__(
        self,
        outlet: Outlet,
        enqueue: Callable[[Stream], None],
        *,
        is_decoupled: bool,
        max_buffer_bytes: int,
        on_close: Callable[[Stream], None] = lambda stream: None,
    ) -> None:
        self.cancelled = Cancelled()
        self.num_sent = 0  # responses that reached Triton
        self._outlet = outlet
        self._enqueue = enqueue  # puts the stream into its sender's queue
        self._is_decoupled = is_decoupled
        self._max_buffer_bytes = max_buffer_bytes
        self._on_close = on_close
        self._lock = threading.Lock()  # buffer and flags
        self._gate = threading.Lock()  # is_cancelled() and the final flag
        self._buffer: list[Response] = []
        self._buffered_bytes = 0
        self._error: BaseException | None = None
        self._is_dirty = False  # its sender knows that there is something to flush
        self.is_urgent = False  # it goes before streams between their first and last response
        self._has_begun = False  # its first response is taken
        self._is_ended = False  # the stage's side: nothing more is taken
        self._is_closed = False  # Triton's side: the final flag is out

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def send(self, response: Response) -> None:
        """Take one response. Ignored after the end and after a cancellation; above the limit the request ends."""
        is_last = not self._is_decoupled or bool(getattr(response, "is_last", False))
        is_urgent = is_last or bool(getattr(response, "is_urgent", False))
        size = size_of(response)
        with self._lock:
            if self._is_ended or self.cancelled:
                return
            overflows = bool(self._buffer) and self._buffered_bytes + size > self._max_buffer_bytes
            if not overflows:
                self._buffer.append(response)
                self._buffered_bytes += size
                self._is_ended = is_last
                wakes = self._mark(is_urgent or not self._has_begun)
        if overflows:
            self._refuse_slow_reader(size)
        elif wakes:
            self._enqueue(self)

    def finish(self, error: BaseException | None = None) -> None:
        """End the request: the buffer goes out, then the final flag, with `error` if there is one."""
        with self._lock:
            if self._is_ended:
                if error is not None and not self.cancelled:
                    logger.warning("late_error error=%r", error)
                return
            self._is_ended = True
            self._error = error
            wakes = self._mark(is_urgent=True)
        if wakes:
            self._enqueue(self)

    def cancel(self) -> None:
        """The client is gone: drop the buffer and tell the stage, which ends the request."""
        with self._lock:
            self._buffer, self._buffered_bytes = [], 0
        self.cancelled.set()

    def poll(self) -> bool:
        """Ask Triton whether the client is gone. Return False when there is nothing left to ask."""
        with self._gate:
            if self._is_closed:
                return False
            is_cancelled = self._outlet.is_cancelled()
        if is_cancelled:
            self.cancel()
        return not is_cancelled

    def flush(self) -> None:
        """Send the merged buffer, and the final flag when the request has ended. Raises nothing."""
        with self._lock:
            responses, self._buffer, self._buffered_bytes = self._buffer, [], 0
            is_ended, error = self._is_ended, self._error
            self._is_dirty = self.is_urgent = False
            self._has_begun = True
        if self._is_closed:
            return
        try:
            self._write([] if self.cancelled else _merge(responses), is_ended, error)
        except BaseException as failure:  # a tensor that Triton refuses: the client must still get its end
            logger.exception("send_failed")
            self._break(failure)
        if self._is_closed:
            self._on_close(self)

    def _mark(self, is_urgent: bool) -> bool:
        """Note that there is something to flush. Return whether the sender must be told (again)."""
        wakes = not self._is_dirty or (is_urgent and not self.is_urgent)
        self._is_dirty = True
        self.is_urgent = self.is_urgent or is_urgent
        return wakes

    def _write(self, merged: list[Response], is_ended: bool, error: BaseException | None) -> None:
        last = merged.pop() if is_ended and error is None and merged else None
        for response in merged:
            self._outlet.send(response, False)
            self.num_sent += 1
        if not is_ended:
            return
        with self._gate:
            if last is not None:
                self._outlet.send(last, True)
                self.num_sent += 1
            elif error is not None or not self._is_decoupled:
                self._outlet.fail(error or self._missing_answer())
            else:
                self._outlet.close()
            self._is_closed = True

    def _missing_answer(self) -> BiremeError:
        if self.cancelled:
            return RequestCancelledError("the client is gone")
        return BiremeError("the model ended the request without an answer")

    def _break(self, failure: BaseException) -> None:
        with self._lock:
            self._is_ended = True
            self._buffer, self._buffered_bytes = [], 0
        with self._gate:
            self._is_closed = True
            try:
                self._outlet.fail(failure)
            except BaseException:
                logger.exception("final_flag_failed")
        self.cancelled.set()

    def _refuse_slow_reader(self, size: int) -> None:
        error = ResourceExhaustedError(
            f"slow reader: {self._buffered_bytes + size} bytes of responses wait to be sent; the limit is"
            f" {self._max_buffer_bytes} (limits.max_stream_buffer_bytes); read faster or ask for less"
        )
        with self._lock:
            self._buffer, self._buffered_bytes = [], 0
        self.finish(error)
        self.cancelled.set()


def _merge(responses: list[Response]) -> list[Response]:
    """Merge neighboring responses where they can be merged; the order stays."""
    merged: list[Response] = []
    for response in responses:
        both = merged[-1].merge(response) if merged else None
        if both is None:
            merged.append(response)
        else:
            merged[-1] = both
    return merged
