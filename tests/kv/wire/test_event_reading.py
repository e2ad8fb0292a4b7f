"""Batches of KV events as columns: compiled code and the msgpack library read the same, whatever comes."""

import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bireme.kv.wire.event_reading import EventReader, read_batch
from bireme.kv.wire.event_wire import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, encode_payload

HASHES = st.lists(st.integers(0, (1 << 64) - 1) | st.integers(0, 300), max_size=5)
TOKENS = st.lists(st.integers(0, 1 << 33), max_size=20)
MEDIA = st.sampled_from([None, "GPU", "CPU", "DISK", "GPU_2", ""])
STORED = st.builds(
    BlockStored, HASHES, st.none() | st.integers(0, (1 << 64) - 1), TOKENS, st.integers(0, 256), st.none() | st.just(7),
    MEDIA, st.none() | st.text(max_size=40), st.none() | st.just([None, ["ab" * 32]]),
)  # fmt: skip
EVENTS = st.lists(STORED | st.builds(BlockRemoved, HASHES, MEDIA) | st.builds(AllBlocksCleared), max_size=4)
PAYLOADS = st.builds(EventBatch, st.floats(), EVENTS, st.none() | st.integers(0, 300)).map(encode_payload)
ANYTHING = st.recursive(
    st.none() | st.integers(-9, 1 << 63) | st.floats() | st.text(max_size=9) | st.sampled_from(["BlockStored"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=12,
).map(msgspec.msgpack.encode)


@pytest.fixture(scope="module")
def reader():
    return EventReader()


def shown(batch):
    if batch is None:
        return None
    changes = batch.changes
    rows = [
        (kind, tier, changes.hashes[first:end].tolist())
        for kind, tier, first, end, _ in changes.rows[changes.first : changes.end].tolist()
    ]
    return struct.pack("d", batch.ts), batch.data_parallel_rank, rows, batch.begins_anew


@settings(deadline=None)
@given(st.lists(PAYLOADS, max_size=5))
def test_messages_read_together_are_what_each_says(payloads):
    found = EventReader().read(payloads)
    assert [shown(one) for one in found] == [shown(read_batch(payload)) for payload in payloads]
    assert None not in found


@settings(deadline=None)
@given(st.lists(PAYLOADS | ANYTHING, min_size=1, max_size=3), st.data())
def test_broken_messages_are_malformed_as_the_library_says_and_harm_no_other(payloads, data):
    number = data.draw(st.integers(0, len(payloads) - 1))
    broken = bytearray(payloads[number])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(broken)))
        broken[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    payloads[number] = bytes(broken)
    found = EventReader().read(payloads)
    assert [shown(one) for one in found] == [shown(read_batch(payload)) for payload in payloads]


def test_every_message_cut_short_is_malformed(reader):
    whole = encode_payload(EventBatch(1.0, [BlockStored([1, 1 << 60], 3, [1, 300, 70_000], 2), BlockRemoved([9])], 0))
    assert reader.read([whole[:end] for end in range(len(whole))]) == [None] * len(whole)
    assert reader.read([whole + b"\x00"]) == [None]


def test_lengths_that_lie_read_nothing_beyond_the_message(reader):
    huge = b"\xdd\xff\xff\xff\xff"
    head = b"\x93\xcb" + struct.pack(">d", 1.0)
    lies = [head + huge, head + b"\x91" + huge, head + b"\x91\x92\xacBlockRemoved" + huge + b"\x01" * 40]
    assert reader.read(lies) == [None] * 3


def test_the_plain_form_is_read_by_compiled_code(reader):
    pytest.importorskip("numba")
    stored = BlockStored([1 << 63, 5], None, [1, 200, 300, 70_000], 2, medium="CPU", lora_name="adapter-a")
    payload = encode_payload(EventBatch(2.5, [AllBlocksCleared(), stored, BlockRemoved([7], "GPU")], 3))
    one, other = reader.read([payload, payload])
    assert one.changes.joined(other.changes) is not None, "each was left to the library"
    assert shown(one)[1:] == (3, [(2, 0, []), (0, 1, [1 << 63, 5]), (1, 0, [7])], True)


def test_a_batch_that_waits_alone_keeps_what_it_says(reader):
    payloads = [encode_payload(EventBatch(1.0, [BlockStored([at, at + 1], None, [], 2)], 0)) for at in (10, 20, 30)]
    found = reader.read(payloads)
    assert [shown(one.alone()) for one in found] == [shown(one) for one in found]
    assert found[1].alone().changes.hashes.base is None and found[1].alone().changes.hashes.size == 2


def test_nothing_is_nothing(reader):
    assert reader.read([]) == []
    (empty,) = reader.read([encode_payload(EventBatch(1.0, [], 0))])
    assert shown(empty)[2:] == ([], False) and shown(empty.alone()) == shown(empty)
    assert np.size(empty.alone().changes.hashes) == 0
