"""Threads of a launch that must not end: an error ends one turn, not the thread, and a dead thread is noticed.

    poll = GuardedThreads(console).start("health", self._poll, interval_s=1.0)
    ...
    poll.stop()

An error is logged once a kind, at each tenfold count, and when it is over.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Literal, Protocol

from bireme.child_process import Backoff

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0  # after a turn that failed; doubles with each in a row

Turn = Callable[[], float | None]


class ThreadLog(Protocol):
    """A launch's Console."""

    def event(self, name: str, level: Literal["info", "error"] = "info", **fields: object) -> None: ...


class GuardedThread:
    """Calls `turn` until `stop`, `interval_s` after the last one's end, or after the seconds that it returned.

    A turn waits on `stopping`, or no longer than `stop` may take.
    """

    def __init__(self, name: str, turn: Turn, log: ThreadLog, interval_s: float = 0.0) -> None:
        self.name = name
        self.stopping = threading.Event()
        self._turn = turn
        self._log = log
        self._interval_s = interval_s
        self._failures: Counter[str] = Counter()  # kind -> count, since a turn went well
        self._thread = self._new_thread()

    def start(self) -> None:
        """Raises RuntimeError: the system has no thread left."""
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> None:
        """Wait at most `timeout_s` for the turn. Harmless when repeated, or before `start`."""
        self.stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    @property
    def problem(self) -> str:
        """Why it does not run; empty while it does, and after `stop`."""
        if self.stopping.is_set() or self._thread.is_alive():
            return ""
        return f"thread {self.name} {'has ended' if self._thread.ident else 'was not started'}"

    def revive(self) -> None:
        """Of one thread."""
        if not self.problem:
            return
        has_run, thread = self._thread.ident is not None, self._new_thread()
        thread.start()
        self._thread = thread
        if has_run:
            self._log.event("thread_revived", "error", thread=self.name)

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name=self.name, daemon=True)

    def _run(self) -> None:
        pause_s, backoff = 0.0, Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while not self.stopping.wait(pause_s):
            try:
                wanted_s = self._turn()
                pause_s = self._interval_s if wanted_s is None else wanted_s
                backoff.reset()
                self._note_success()
            except Exception as error:
                pause_s = max(backoff.next_s(), self._interval_s)
                self._note_failure(error)

    def _note_failure(self, error: Exception) -> None:
        where = traceback.extract_tb(error.__traceback__)[-1]
        kind = f"{type(error).__name__} {getattr(error, 'errno', '')} {where.filename}:{where.lineno}"
        self._failures[kind] += 1
        count = self._failures[kind]
        if count == 10 ** (len(str(count)) - 1):
            self._log.event(
                "turn_failed", "error", thread=self.name, count=count, error=f"{type(error).__name__}: {error}",
                at=f"{where.filename}:{where.lineno}",
            )  # fmt: skip

    def _note_success(self) -> None:
        if self._failures:
            self._log.event("turns_succeed_again", thread=self.name, failed=self._failures.total())
            self._failures.clear()


class GuardedThreads:
    def __init__(self, log: ThreadLog) -> None:
        self._log = log
        self._threads: list[GuardedThread] = []

    def start(self, name: str, turn: Turn, interval_s: float = 0.0) -> GuardedThread:
        """Without a thread left in the system, `revive` starts it later."""
        thread = GuardedThread(name, turn, self._log, interval_s)
        self._threads = [*(other for other in self._threads if not other.stopping.is_set()), thread]
        try:
            thread.start()
        except RuntimeError as error:
            self._log.event("thread_not_started", "error", thread=name, error=error)
        return thread

    def problems(self) -> dict[str, str]:
        return {thread.name: thread.problem for thread in self._threads if thread.problem}

    def revive(self) -> None:
        """Raises RuntimeError: the system has no thread left."""
        for thread in self._threads:
            thread.revive()
