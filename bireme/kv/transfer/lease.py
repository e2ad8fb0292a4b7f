"""Leases of exported KV: who may free which blocks, and when.

    RESERVED -> EXPORTED -> CLAIMED -> ACKED
        any live state -> ABORTED        EXPORTED, CLAIMED -> EXPIRED

A lease is claimed once; its id is random, so that it can't be guessed. `release` is called exactly once, and never
while rows are being read. RESERVED has no time limit: the engine ends it by export or abort. EXPORTED and CLAIMED have
the same limit each.
"""

from __future__ import annotations

import enum
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from bireme.errors import NotFoundError
from bireme.kv.transfer.memory import TokenRows

REMEMBERED = 4096  # ended leases whose end is still known, for error texts


class LeaseState(enum.Enum):
    RESERVED = "reserved"
    EXPORTED = "exported"
    CLAIMED = "claimed"
    ACKED = "acked"
    EXPIRED = "expired"
    ABORTED = "aborted"


LIVE = (LeaseState.RESERVED, LeaseState.EXPORTED, LeaseState.CLAIMED)
_WHY_GONE = {
    LeaseState.CLAIMED: "was claimed before",
    LeaseState.ACKED: "was used before",
    LeaseState.EXPIRED: "has expired (cache_transceiver_config.kv_transfer_timeout_ms)",
    LeaseState.ABORTED: "was aborted",
}


@dataclass(slots=True, eq=False)
class TableLease:
    """One lease; made by LeaseTable.reserve. Thread-safe: every change happens under the table's lock."""

    _table: LeaseTable
    lease_id: int
    generation: int
    _release: Callable[[], None] | None  # None: has been called
    num_tokens: int = 0
    is_canary: bool = False
    state: LeaseState = LeaseState.RESERVED
    _rows: TokenRows | None = None
    _deadline: float = 0.0
    _is_copying: bool = False

    def export(self, num_tokens: int, rows: TokenRows) -> None:
        """RESERVED -> EXPORTED. Does nothing after the lease's end (an abort was first)."""
        with self._table.lock:
            if self.state not in LIVE:
                return
            assert self.state is LeaseState.RESERVED, f"a lease is exported once; this one is {self.state.value}"
            self.num_tokens, self._rows = num_tokens, rows
            self._table.move(self, LeaseState.EXPORTED)

    def abort(self) -> None:
        """Any live state -> ABORTED. Blocks are freed now, or when the current copy ends."""
        self._table.end(self, LeaseState.ABORTED)

    def ack(self) -> bool:
        """CLAIMED -> ACKED. Returns False when the lease had ended before."""
        assert self.state is not LeaseState.RESERVED and self.state is not LeaseState.EXPORTED
        return self._table.end(self, LeaseState.ACKED)

    @property
    def rows(self) -> TokenRows | None:
        """Where the rows lie; only `begin_copy` allows to read them. None: the lease has ended."""
        with self._table.lock:
            return self._rows

    def begin_copy(self) -> TokenRows | None:
        """Pin the rows. Returns None when the lease has ended: then they must not be read."""
        with self._table.lock:
            if self.state is not LeaseState.CLAIMED:
                return None
            self._is_copying = True
            return self._rows

    def end_copy(self) -> None:
        """Free the blocks: a lease is copied once, completely or not."""
        with self._table.lock:
            self._is_copying = False
            self._table.release(self)

    def restart_timer(self) -> None:
        with self._table.lock:
            self._table.restart_timer(self)

    def _take_release(self) -> Callable[[], None] | None:
        release, self._release, self._rows = self._release, None, None
        return release


@dataclass(frozen=True, slots=True)
class Expired:
    lease: TableLease
    was: LeaseState  # EXPORTED: nobody claimed it; CLAIMED: the importer fell silent


class LeaseTable:
    """All live leases of one exporting engine."""

    def __init__(
        self,
        timeout_s: float,
        run: Callable[[Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`run` hands a release callback to the transfer's thread; it must not call it at once."""
        self.lock = threading.RLock()
        self._timeout_s = timeout_s
        self._run = run
        self._clock = clock
        self._live: dict[int, TableLease] = {}
        self._ended: dict[int, LeaseState] = {}
        self._counts = dict.fromkeys(LeaseState, 0)
        self._generation = 0
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._live)

    def reserve(self, release: Callable[[], None]) -> TableLease:
        with self.lock:
            self._generation += 1
            lease = TableLease(self, self._new_id(), self._generation, release)
            self._live[lease.lease_id] = lease
            self._counts[LeaseState.RESERVED] += 1
            if self._is_closed:
                lease.abort()
            return lease

    def claim(self, lease_id: int, generation: int) -> TableLease:
        """EXPORTED -> CLAIMED. Raises NotFoundError with the lease's end."""
        with self.lock:
            lease = self._live.get(lease_id)
            if lease is None or lease.generation != generation or lease.state is not LeaseState.EXPORTED:
                raise self.gone(lease_id, generation)
            self.move(lease, LeaseState.CLAIMED)
            return lease

    def gone(self, lease_id: int, generation: int) -> NotFoundError:
        """Return the error for who wants a lease that has ended, or can't have it."""
        return NotFoundError(f"the KV lease of this request {self._why_gone(lease_id, generation)}; prefill again")

    def find(self, lease_id: int, generation: int) -> TableLease | None:
        lease = self._live.get(lease_id)
        return lease if lease is not None and lease.generation == generation else None

    def expire(self) -> list[Expired]:
        now = self._clock()
        with self.lock:
            late = [
                Expired(lease, lease.state)
                for lease in self._live.values()
                if lease.state is not LeaseState.RESERVED and lease._deadline <= now
            ]
            for expired in late:
                self.end(expired.lease, LeaseState.EXPIRED)
        return late

    def close(self) -> None:
        """Abort every lease, also those reserved from now on."""
        with self.lock:
            self._is_closed = True
            for lease in list(self._live.values()):
                lease.abort()

    def counts(self) -> dict[LeaseState, int]:
        """Return how many leases are in each live state."""
        with self.lock:
            return {state: self._counts[state] for state in LIVE}

    def end(self, lease: TableLease, state: LeaseState) -> bool:
        with self.lock:
            if lease.state not in LIVE:
                return False
            self.move(lease, state)
            del self._live[lease.lease_id]
            self._ended[lease.lease_id] = state
            if len(self._ended) > REMEMBERED:
                del self._ended[next(iter(self._ended))]
            if not lease._is_copying:
                self.release(lease)
            return True

    def release(self, lease: TableLease) -> None:
        callback = lease._take_release()
        if callback is not None:
            self._run(callback)

    def move(self, lease: TableLease, state: LeaseState) -> None:
        """Change the state and start its time limit. The caller holds the lock."""
        self._counts[lease.state] -= 1
        self._counts[state] += 1
        lease.state = state
        self.restart_timer(lease)

    def restart_timer(self, lease: TableLease) -> None:
        lease._deadline = self._clock() + self._timeout_s

    def _new_id(self) -> int:
        while True:
            lease_id = secrets.randbits(63)
            if lease_id and lease_id not in self._live and lease_id not in self._ended:
                return lease_id

    def _why_gone(self, lease_id: int, generation: int) -> str:
        lease = self._live.get(lease_id)
        if lease is not None and lease.generation == generation:
            return _WHY_GONE.get(lease.state, "is not exported yet")
        return _WHY_GONE.get(self._ended.get(lease_id, LeaseState.RESERVED), "is not known here")
