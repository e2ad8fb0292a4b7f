"""How chunks get from one engine process to another: what the backends of a LeasedTransfer have in common.

Leases, claims, admission, timers and plans are above this, and the same for all. An outlet and an inlet are the two
ends of one transfer; both lay chunks out as chunks.plan_chunks says. `store` and `load` run on the copier's thread.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from typing import Protocol

from bireme.kv.transfer.base import KvLayout
from bireme.kv.transfer.chunks import Chunk, TransferPlan
from bireme.kv.transfer.memory import RowMemory, TokenRows
from bireme.kv.transfer.wire import Claim, Offer, RowSource, WriteTarget


class PeerAddress(Protocol):
    """One life of an exporting engine, as its importer knows it."""

    @property
    def endpoint(self) -> str:
        """Of its control socket; no other life's."""

    @property
    def file_prefix(self) -> str:
        """Of the files that it may offer."""


class RowOutlet(Protocol):
    """The exporter's end."""

    name: str = ""  # what the importer must know to find it
    has_loose_writes: bool = False  # a chunk was given up that may arrive all the same

    def show(self, rows: TokenRows) -> RowSource | None:
        """Return where the rows lie if the importer copies them itself; they are then kept for it. None: `store`."""
        return None

    @abstractmethod
    def store(self, rows: TokenRows, chunk: Chunk) -> Generator[None, None, None]:
        """Send a chunk; it is there when the generator ends. Closing it before gives the chunk up."""

    def close(self) -> None:
        """No chunk will follow. The importer may still be reading."""
        return

    def discard(self, is_read: bool) -> None:
        """The transfer has ended. `is_read`: the importer has said that it reads no more."""
        return


class Inlet(Protocol):
    """The importer's end."""

    target: WriteTarget | None = None  # memory that the exporter writes to; None: the exporter makes the place
    maps_memory: bool = False  # it can copy rows out of the exporter's memory

    def attach(self, offer: Offer) -> None:
        """Find the outlet. Raises FileNotFoundError when it is gone, BiremeError when it can't be the right one."""
        return

    @abstractmethod
    def load(self, rows: TokenRows, chunk: Chunk) -> None:
        """Copy a chunk that is there to its rows; or start to."""

    def wait(self) -> None:
        """Wait until what `load` has started has ended."""
        return

    @abstractmethod
    def close(self) -> None:
        """The exporter has finished with it, or its writes can't arrive any more."""


class Backend(Protocol):
    name: str  # both sides of a transfer must have the same
    reaches_other_hosts: bool = False

    @abstractmethod
    def start(self, layout: KvLayout, memory: RowMemory | None, limit_bytes: int) -> None:
        """`memory`: where most rows will lie; `limit_bytes`: of rows on their way. Raises ConfigError."""

    def is_shown(self, claim: Claim) -> bool:
        """Whether the importer copies the rows itself: `show` of its outlet says where they lie."""
        return False

    def can_map(self, rows: TokenRows) -> bool:
        """Whether these rows lie in memory that the other side maps, or rows of its are copied to when it is mapped."""
        return False

    def chunk_bytes(self, claim: Claim, usual: int) -> int:
        """Return how many bytes of the rows go at a time."""
        return usual

    @abstractmethod
    def open_outlet(self, plan: TransferPlan, claim: Claim) -> RowOutlet:
        """Raises ResourceExhaustedError when there is no room now, UnavailableError when there is no way."""

    @abstractmethod
    def open_inlet(self, plan: TransferPlan, peer: PeerAddress) -> Inlet | None:
        """Return None when there is no room now."""

    def forget_peer(self, endpoint: str) -> None:
        """An exporter is gone. Runs on the copier."""
        return

    def forget_writers(self) -> None:
        """Keep writes under way from arriving; for peers that fell silent. Ends transfers under way."""
        return

    def tidy(self) -> None:
        """Give back what has not been needed for long. Called now and then."""
        return

    @abstractmethod
    def close(self) -> None: ...
