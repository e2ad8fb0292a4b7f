"""One rank's KV events as a reader follows them: in order, each once, whatever the way there loses or repeats.

Pure: it is told what arrives and says what to ask for. After a gap the missed batches are asked for, and what arrives
meanwhile waits; where the publisher no longer has them, or another life has taken its address, a snapshot comes in
their place. Until the answer is there readers keep what they knew; an answer that never comes voids it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from bireme.child_process import Backoff
from bireme.kv.wire.event_reading import BlockChanges, ReadBatch, cleared
from bireme.kv.wire.event_wire import END, SNAPSHOT

ANSWER_TIMEOUT_S = 2.0  # without any part of an answer; then it is asked for again
STALE_S = 5.0  # out of step for so long: what was known is forgotten
_BEHIND_S = 0.25  # a report of load may overtake the batches that it speaks of
_MAX_WAITING = 10_000  # batches that wait for an answer
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # between questions that follow each other


class KvEventStream:
    """Used from one thread. `question` says what to ask the publisher for, and when."""

    def __init__(
        self,
        apply: Callable[[BlockChanges], None],
        count: Callable[[str, int], None],
        clock: Callable[[], float] = time.monotonic,
        first: int | None = None,
    ) -> None:
        """`apply` gets changes in order; `count` gets `gaps`, `resyncs` and reasons why something was discarded.

        `first`: the seq to begin with; None: with a snapshot.
        """
        self._apply, self._count, self._clock = apply, count, clock
        self._expected = first  # next seq; None: only a snapshot helps
        self._last_ts = 0.0
        self._is_asking = True
        self._asked_at: float | None = None  # None: not yet, or again
        self._ask_at = 0.0
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._snapshot_seq: int | None = None  # of the snapshot that is being read
        self._waiting: deque[tuple[int, ReadBatch]] = deque()
        self._out_of_step_since: float | None = None  # None: in step, or nothing is known that could be wrong
        self._behind: tuple[int, float] | None = None  # (next seq that a report named, since when)

    @property
    def is_in_step(self) -> bool:
        return not self._is_asking

    def take(self, seq: int, batch: ReadBatch) -> None:
        """A batch has arrived by subscription."""
        if self._is_asking:
            self._wait(seq, batch)
        elif seq == self._expected:
            self._take_next(batch)
        elif self._expected is None or seq > self._expected:
            self._count("gaps", seq - self._expected if self._expected is not None else 1)
            self._ask()
            self._wait(seq, batch)
        elif batch.ts > self._last_ts:  # a later batch with a smaller number: the sequence has begun again
            self._count("dead_life", 1)
            self._forget()
            self._wait(seq, batch)
        else:
            self._count("repeated", 1)

    def take_malformed(self) -> None:
        """Something has arrived that can't be read: what it said is lost."""
        self._count("malformed", 1)
        if not self._is_asking:
            self._ask(from_start=True)

    def take_answer(self, seq: int, batch: ReadBatch | None) -> None:
        """A part of an answer has arrived; None: it can't be read, or is the end."""
        if not self._is_asking or self._asked_at is None:
            self._count("stray", 1)
        elif seq == END:
            self._end_answer()
        elif batch is None:
            self._count("malformed", 1)
            self._ask(from_start=True)
        else:
            self._asked_at = self._clock()
            self._take_part(seq, batch)

    def take_new_life(self) -> None:
        """Another publisher answers at this address: nothing that was known is true any more."""
        self._forget()

    def take_next_seq(self, next_seq: int) -> None:
        """A report has said which seq comes next: so the loss of a last batch is noticed too."""
        if self._is_asking or self._expected is None or next_seq <= self._expected:
            self._behind = None
        elif self._behind is None:
            self._behind = (next_seq, self._clock())

    def question(self) -> int | None:
        """Return the seq to ask for now, or SNAPSHOT; None: nothing. Call it after whatever arrived, and in time."""
        now = self._clock()
        self._catch_up(now)
        if not self._is_asking:
            return None
        if self._out_of_step_since is not None and now - self._out_of_step_since > STALE_S:
            self._forget()
        is_asked = self._asked_at is not None and now - self._asked_at <= ANSWER_TIMEOUT_S
        if is_asked or now < self._ask_at:
            return None
        self._asked_at, self._snapshot_seq = now, None
        self._ask_at = now + self._backoff.next_s()
        return SNAPSHOT if self._expected is None else self._expected

    def _catch_up(self, now: float) -> None:
        """Ask for what a report has named, if it does not come by itself."""
        if self._behind is None or self._expected is None or self._is_asking:
            return
        next_seq, since = self._behind
        if next_seq <= self._expected:
            self._behind = None
        elif now - since > _BEHIND_S:
            self._count("gaps", next_seq - self._expected)
            self._ask()

    def _take_next(self, batch: ReadBatch) -> None:
        assert self._expected is not None
        self._apply(batch.changes)
        self._expected += 1
        self._last_ts = batch.ts
        self._backoff.reset()

    def _ask(self, *, from_start: bool = False) -> None:
        """Fall out of step. `from_start`: what is missing can't be had one by one."""
        if from_start:
            self._expected = None
        if self._out_of_step_since is None:
            self._out_of_step_since = self._clock()
        self._is_asking, self._asked_at, self._behind = True, None, None

    def _forget(self) -> None:
        self._apply(cleared())
        self._ask(from_start=True)
        self._out_of_step_since = None

    def _wait(self, seq: int, batch: ReadBatch) -> None:
        self._waiting.append((seq, batch.alone()))
        if len(self._waiting) > _MAX_WAITING:
            self._waiting.popleft()
            self._count("overflow", 1)

    def _take_part(self, seq: int, batch: ReadBatch) -> None:
        if self._snapshot_seq is not None and seq == self._snapshot_seq:
            self._apply(batch.changes)
        elif self._snapshot_seq is None and seq == self._expected:
            self._take_next(batch)
        elif self._snapshot_seq is None and batch.begins_anew:
            self._apply(batch.changes)
            self._snapshot_seq, self._expected, self._last_ts = seq, None, batch.ts
        else:
            self._count("malformed", 1)
            self._ask(from_start=True)

    def _end_answer(self) -> None:
        if self._snapshot_seq is not None:
            self._expected = self._snapshot_seq + 1
        elif self._expected is None:  # such a rank has published nothing
            self._apply(cleared())
            self._expected = 0
        self._snapshot_seq = self._asked_at = self._out_of_step_since = None
        self._is_asking = False
        self._count("resyncs", 1)
        waiting, self._waiting = self._waiting, deque()
        for seq, batch in waiting:
            if self._is_asking or seq >= (self._expected or 0):  # earlier ones were in the answer
                self.take(seq, batch)
