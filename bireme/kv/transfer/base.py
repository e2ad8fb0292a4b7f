"""KV rows from a prefill engine to a decode engine: the interface.

Only the exporting process changes a lease (lease.py). Rows are addressed by token position, not by block: both sides
may have different block sizes, and the importer can skip rows that it holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from bireme.disagg import DisaggregatedParams
from bireme.discovery.records import WorkerRecord
from bireme.errors import (
    BiremeError,
    DeadlineExceededError,
    EngineLostError,
    KvTransferError,
    ResourceExhaustedError,
    UnavailableError,
)
from bireme.kv.transfer.memory import RowMemory, TokenRows


class GroupLayout(msgspec.Struct, frozen=True, array_like=True):
    """Layers that share one attention window, or a head's layer."""

    window: int  # tokens visible; 0: all
    row_bytes: tuple[int, ...]  # one layer each: bytes of one token's K row and V row together

    @property
    def bytes_per_token(self) -> int:
        return sum(self.row_bytes)


class KvLayout(msgspec.Struct, frozen=True, array_like=True):
    """What both sides must agree on; a mismatch is refused at the claim, with the field's name."""

    model: str  # digest or name: different models never exchange KV
    dtype: str
    groups: tuple[GroupLayout, ...]
    scales: tuple[tuple[float, float], ...] = ()  # of 8-bit floats: keys' and values', a layer each
    head: str = ""  # digest of the head that drafts, whose layer is the last group; "": there is none

    @property
    def bytes_per_token(self) -> int:
        return sum(group.bytes_per_token for group in self.groups)

    def of(self, num_groups: int) -> KvLayout:
        """Return what is transferred where so many groups are asked for: all, or the model's without the head's."""
        if not self.head or num_groups == len(self.groups):
            return self
        return msgspec.structs.replace(self, groups=self.groups[:-1], head="")

    @property
    def identity(self) -> str:
        """Return what rows of equal tokens are equal by: the model, and with 8-bit floats that form and its scales."""
        if not self.scales:
            return self.model
        return hashlib.sha256(f"{self.model} {self.dtype} {self.scales}".encode()).hexdigest()


Done = Callable[[BiremeError | None], None]
Find = Callable[[str], WorkerRecord]  # worker id -> its record; raises NotFoundError


class Lease(Protocol):
    lease_id: int
    generation: int
    is_canary: bool  # to be set before the export: its transfer is not counted

    def export(self, num_tokens: int, rows: TokenRows) -> None:
        """RESERVED -> EXPORTED: rows of tokens [0, num_tokens) may be read, by another thread, until released."""

    def abort(self) -> None:
        """End it now, or when the current copy ends. Harmless after the end."""


class Fetch(Protocol):
    def cancel(self) -> None:
        """Give up; `done` is still called (RequestCancelledError), after the last write."""


class KvFetch(Fetch, Protocol):
    @property
    def num_bytes(self) -> int:
        """Of the rows that it copies; 0: not known yet."""

    @property
    def way(self) -> str:
        """How they come: `mapped`, out of the exporter's own memory, or by a backend, which has a name."""


def fetch_failure(error: BiremeError) -> BiremeError:
    """Return the error for `done`: lack of time, of room or of the exporter is not this engine's fault."""
    is_foreign = isinstance(error, (UnavailableError, DeadlineExceededError, ResourceExhaustedError))
    return KvTransferError(str(error)) if is_foreign and not isinstance(error, EngineLostError) else error


class KvTransfer(Protocol):
    """One per engine process; both roles. Owns its threads and sockets."""

    @property
    def endpoint(self) -> str:
        """Address of the control socket, for discovery."""

    @property
    def reaches_other_hosts(self) -> bool: ...

    @property
    def line_ms(self) -> tuple[float, float] | None:
        """What fetches take: start, and price of a token; None: too few have ended."""

    def start(self, layout: KvLayout, memory: RowMemory | None = None) -> None:
        """Begin to serve. `memory`: where the rows of most leases and fetches will lie. Raises ConfigError."""

    def reserve(self, release: Callable[[], None]) -> Lease:
        """Make a lease. `release` is called once, on the transfer's thread, when its blocks may be freed."""

    def fetch(self, params: DisaggregatedParams, firsts: Sequence[int], rows: TokenRows, done: Done) -> KvFetch:
        """Claim params' lease and copy, group by group, tokens [firsts[group], params.num_tokens) into `rows`.

        `firsts` may leave out a head's group, which the exporter may not have: `params.head` says so.
        Returns at once; the rows are written, and `done` is called, on the transfer's thread. Errors given to `done`:
        NotFoundError (lease gone, claimed before, other life), KvTransferError (exporter gone or silent, no room for
        its rows), RequestError (layouts differ), RequestCancelledError, EngineLostError (this side is stopping).
        """

    def close(self) -> None:
        """Abort all leases and fetches, end the threads, remove shared-memory files."""
