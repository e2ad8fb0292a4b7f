"""Messages of the control socket between two engine processes, as msgpack arrays.

    importer -> exporter   Claim, Ack, Cancel, Ping
    exporter -> importer   Offer, Progress, Kept, Refuse, Pong

`number` is the importer's own count of its fetches and comes back in the answer. Later versions only
append fields, so that a claim of another version can still be refused by its number.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bireme.kv.transfer.base import KvLayout

VERSION = 2
MAX_MESSAGE_BYTES = 1 << 20


class WriteTarget(msgspec.Struct, array_like=True, frozen=True):
    """Memory of the importer that takes the rows."""

    agent: str
    metadata: bytes  # of the agent, as its library made it
    address: int
    num_bytes: int


class SharedRegion(msgspec.Struct, array_like=True, frozen=True):
    """One tensor."""

    allocation: int  # in which it lies
    offset: int  # bytes from there
    row_bytes: int
    num_rows: int

    def lies_within(self, sizes: Sequence[int]) -> bool:
        """Whether it is in one of the allocations of these sizes."""
        if not 0 <= self.allocation < len(sizes) or self.offset < 0 or self.num_rows < 0:
            return False
        return self.offset + self.row_bytes * self.num_rows <= sizes[self.allocation]


class SharedMemory(msgspec.Struct, array_like=True, frozen=True):
    """Memory of a process that others of the host can map."""

    pid: int
    handles: tuple[bytes, ...]  # of its allocations: a GPU's as its library made them, or descriptor and name
    addresses: tuple[int, ...]  # where these lie in the process that has them
    sizes: tuple[int, ...]  # of the allocations, bytes
    regions: tuple[tuple[SharedRegion, ...], ...]  # in the order of RowMemory.regions
    gpu: str = ""  # on which it lies; "": in host memory


class RowSource(msgspec.Struct, array_like=True, frozen=True):
    """Where rows lie that the importer copies itself."""

    memory: SharedMemory
    runs: tuple[bytes, ...]  # a group: pairs (first row, number of rows) of the tokens that are sent, int64


class Claim(msgspec.Struct, array_like=True, tag="claim", frozen=True):
    version: int
    number: int
    lease_id: int
    generation: int
    life: int  # the exporter's, as the params say
    num_tokens: int
    layout: KvLayout
    firsts: tuple[int, ...]  # a group: tokens before it are not sent
    pid: int  # the importer's: when it dies the claim ends
    host: str = ""  # on which that is; discovery.records.host_id
    backend: str = "shm"
    target: WriteTarget | None = None
    maps_memory: bool = False  # the importer can copy the rows out of the exporter's memory


class Ack(msgspec.Struct, array_like=True, tag="ack", frozen=True):
    """The importer has every row; it reads the file no more."""

    lease_id: int
    generation: int
    number: int = 0  # not 0: it copied them itself, and wants to know whether they were kept


class Cancel(msgspec.Struct, array_like=True, tag="cancel", frozen=True):
    """The fetch wants no rows (any more). Ends the lease unless another fetch has claimed it."""

    number: int
    lease_id: int
    generation: int


class PeerPing(msgspec.Struct, array_like=True, tag="ping", frozen=True):
    """The importer is still there; asks whether the exporter is."""


class PeerPong(msgspec.Struct, array_like=True, tag="pong", frozen=True): ...


class Offer(msgspec.Struct, array_like=True, tag="offer", frozen=True):
    """Rows will come, laid out as chunks.plan_chunks says."""

    number: int
    name: str  # of the place where they are; empty: there is nothing to copy, or the importer made the place
    num_bytes: int
    chunk_bytes: int
    source: RowSource | None = None  # the importer copies the rows itself


class Progress(msgspec.Struct, array_like=True, tag="progress", frozen=True):
    """The first chunks are there."""

    number: int
    num_chunks: int


class Kept(msgspec.Struct, array_like=True, tag="kept", frozen=True):
    """The rows stayed what they were until the importer's ack."""

    number: int


class Refuse(msgspec.Struct, array_like=True, tag="refuse", frozen=True):
    """No more rows will come: the exporter has stopped writing."""

    number: int
    error: str  # errors.to_message
    has_loose_writes: bool = False  # it gave up writes that may arrive all the same


encode = msgspec.msgpack.Encoder().encode
decode_to_exporter = msgspec.msgpack.Decoder(Claim | Ack | Cancel | PeerPing).decode
decode_to_importer = msgspec.msgpack.Decoder(Offer | Progress | Kept | Refuse | PeerPong).decode
