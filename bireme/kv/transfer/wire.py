"""Messages of the control socket between two engine processes, as msgpack arrays.

    importer -> exporter   Claim, Ack, Cancel
    exporter -> importer   Offer | Refuse, one a claim

`number` is the importer's own count of its fetches and comes back in the answer. Later versions only
append fields, so that a claim of another version can still be refused by its number.
"""

from __future__ import annotations

import msgspec

from bireme.kv.transfer.base import KvLayout

VERSION = 1
MAX_MESSAGE_BYTES = 1 << 20


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


class Ack(msgspec.Struct, array_like=True, tag="ack", frozen=True):
    """The importer has every row; the file may be removed."""

    lease_id: int
    generation: int


class Cancel(msgspec.Struct, array_like=True, tag="cancel", frozen=True):
    """The fetch wants no rows (any more). Ends the lease unless another fetch has claimed it."""

    number: int
    lease_id: int
    generation: int


class Offer(msgspec.Struct, array_like=True, tag="offer", frozen=True):
    """The rows are complete in a shared-memory file, laid out as chunks.plan_chunks says."""

    number: int
    file_name: str  # in /dev/shm; empty: there was nothing to copy
    num_bytes: int
    chunk_bytes: int


class Refuse(msgspec.Struct, array_like=True, tag="refuse", frozen=True):
    number: int
    error: str  # errors.to_message


encode = msgspec.msgpack.Encoder().encode
decode_to_exporter = msgspec.msgpack.Decoder(Claim | Ack | Cancel).decode
decode_to_importer = msgspec.msgpack.Decoder(Offer | Refuse).decode
