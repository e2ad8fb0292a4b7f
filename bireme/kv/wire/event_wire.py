"""KV events and load on the wire: vLLM's frames, which Dynamo's routers read as well.

    [topic, seq, payload]    topic `kv-events` (of rank r > 0 `r/kv-events`), seq: signed 64 bits, big endian, from 0
                             without gaps a rank; payload: msgpack of an EventBatch
    [`load`, seq, payload]   on a socket of its own; payload: msgpack of a LoadReport

Who missed something asks for it: a request is a first seq (and, for a rank other than 0, its topic); each answer is
[seq, payload], the last one [-1, ""]. What is no longer kept is answered by a snapshot: AllBlocksCleared and
BlockStored of all that is held, every batch with the seq that it includes. A request with seq -1 asks for that.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from bireme.kv.blocks.events import DEVICE, DISK, HOST

EVENT_TOPIC = b"kv-events"
LOAD_TOPIC = b"load"
SNAPSHOT = END = -1
MAX_PAYLOAD_BYTES = 64 << 20  # of one message; a reader refuses more
MEDIA_OF_TIERS = {DEVICE: "GPU", HOST: "CPU", DISK: "DISK"}  # vLLM's names
TIERS_OF_MEDIA = {name: tier for tier, name in MEDIA_OF_TIERS.items()}

Hash = Annotated[int, msgspec.Meta(ge=0)]


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Consecutive blocks. Salted ones have no tokens and block size 0, so that readers of tokens leave them out."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]  # of all blocks
    block_size: int
    lora_id: int | None = None  # vLLM has replaced it by lora_name
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[str] | None] | None = (
        None  # a block's pictures: 64 hexadecimal digits, the hash in the first 16
    )


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    block_hashes: list[Hash]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """This rank holds nothing, as far as is known."""


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    ts: float  # Unix time
    events: list[WireEvent]
    data_parallel_rank: int | None = None


class StoredHashes(msgspec.Struct, frozen=True, array_like=True, tag="BlockStored", gc=False):
    """A BlockStored as routers read it: its tokens, which would take most of the time, are left as they came."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


ReadEvent = StoredHashes | BlockRemoved | AllBlocksCleared


class DecodedBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An EventBatch as routers decode it."""

    ts: float
    events: list[ReadEvent]
    data_parallel_rank: int | None = None


# Prompts whose cost is told: the shortest that costs more than its launch, and fourfold lengths from there.
PRICED_TOKENS = (32, 128, 512, 2048, 8192)


class WorkerPrices(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the worker's engine takes, measured by itself, in milliseconds."""

    step_ms: float  # with the requests that run now, and no prompt
    prompt_ms: tuple[float, float, float, float, float]  # what prompts of PRICED_TOKENS, alone or in parts, add to that
    measured_tokens: int  # of prompts in the largest step that it has computed: beyond, it guesses
    transfer_start_ms: float = -1.0  # of KV from prefill; below 0: not measured
    transfer_ms_per_token: float = 0.0


class WorkerLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    num_running: int  # requests
    num_waiting: int
    num_waiting_tokens: int  # prompt tokens that are still to be computed, of waiting and running requests
    num_blocks_used: int
    num_blocks: int
    step: int  # engine steps done
    prices: WorkerPrices | None = None  # None: it has measured none


class LoadReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Also the publisher's sign of life: who it is, and where each rank's sequence stands."""

    ts: float
    load: WorkerLoad
    worker: str
    life: int
    next_seqs: list[int]  # of the ranks' next batches; empty: no events are published


def event_topic(rank: int) -> bytes:
    return EVENT_TOPIC if rank == 0 else b"%d/%s" % (rank, EVENT_TOPIC)


def rank_of(topic: bytes) -> int | None:
    """Return the rank whose events have this topic; None: it is no topic of events."""
    rank, slash, name = topic.rpartition(b"/")
    if name != EVENT_TOPIC or bool(slash) != bool(rank):
        return None
    return int(rank) if rank.isdigit() else (None if rank else 0)


def encode_seq(seq: int) -> bytes:
    return seq.to_bytes(8, "big", signed=True)


def decode_seq(data: bytes) -> int:
    """Raises ValueError."""
    if len(data) != 8:
        raise ValueError(f"a sequence number has 8 bytes, not {len(data)}")
    return int.from_bytes(data, "big", signed=True)


encode_payload = msgspec.msgpack.Encoder().encode
decode_batch = msgspec.msgpack.Decoder(DecodedBatch).decode
decode_load = msgspec.msgpack.Decoder(LoadReport).decode
