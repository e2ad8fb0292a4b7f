"""What readers of KV events are told: chains, removals, tiers, copies, salted blocks, snapshots."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from bireme.kv.blocks.events import HOST, BlocksCleared, BlocksMoved, BlocksRemoved, BlocksStored, StoredBlock
from bireme.kv.blocks.hashing import event_seed, salt_key, salted_hash, sequence_hashes
from bireme.kv.publishing.held_blocks import HeldBlocks
from bireme.kv.wire.event_wire import AllBlocksCleared, BlockRemoved, BlockStored

SIZE = 4
TOKENS = list(range(5, 25))
HASHES = sequence_hashes(TOKENS, SIZE)
KEY = salt_key(b"the deployment's key")


def held():
    return HeldBlocks(SIZE, KEY)


def stored(first=0, last=5, salt="", tokens=TOKENS, media=()):
    hashes = sequence_hashes(tokens, SIZE, event_seed("", salt))
    blocks = tuple(
        StoredBlock(hashes[at], tuple(tokens[at * SIZE : (at + 1) * SIZE]), media) for at in range(first, last)
    )
    return BlocksStored(0, hashes[first - 1] if first else None, blocks, cache_salt=salt)


def removed(*hashes):
    return BlocksRemoved(0, tuple(hashes))


def replay(events):
    """Return what a reader believes: hash -> media."""
    found = {}
    for event in events:
        if isinstance(event, AllBlocksCleared):
            found.clear()
        for value in getattr(event, "block_hashes", ()):
            media = found.setdefault(value, set())
            (media.add if isinstance(event, BlockStored) else media.discard)(event.medium)
    return {value: media for value, media in found.items() if media}


def test_a_chain_is_told_as_one_event():
    told = held().apply([stored(0, 2)])
    assert told == [BlockStored(HASHES[:2], None, TOKENS[:8], SIZE, medium="GPU")]


def test_a_chain_that_goes_on_names_its_parent():
    blocks = held()
    blocks.apply([stored(0, 2)])
    assert blocks.apply([stored(2, 3)]) == [BlockStored(HASHES[2:3], HASHES[1], TOKENS[8:12], SIZE, medium="GPU")]


def test_evictions_share_an_event_and_unknown_ones_are_left_out():
    blocks = held()
    blocks.apply([stored()])
    told = blocks.apply([removed(HASHES[4]), removed(77), removed(HASHES[3])])
    assert told == [BlockRemoved([HASHES[4], HASHES[3]], "GPU")]


def test_a_block_of_two_copies_is_told_once_and_removed_with_the_last():
    blocks = held()
    blocks.apply([stored(0, 2)])
    assert blocks.apply([stored(0, 2)]) == []
    assert blocks.apply([removed(HASHES[1])]) == []
    assert blocks.apply([removed(HASHES[1])]) == [BlockRemoved([HASHES[1]], "GPU")]


def test_a_block_in_another_tier_is_stored_there_and_removed_here():
    blocks = held()
    blocks.apply([stored(0, 2)])
    there, here = blocks.apply([BlocksMoved(0, (HASHES[1],), HOST)])
    assert there == BlockStored([HASHES[1]], HASHES[0], TOKENS[4:8], SIZE, medium="CPU")
    assert here == BlockRemoved([HASHES[1]], "GPU")
    assert blocks.apply([removed(HASHES[1])]) == [BlockRemoved([HASHES[1]], "CPU")]


def test_after_a_loss_nothing_is_held():
    blocks = held()
    blocks.apply([stored()])
    assert blocks.apply([BlocksCleared(0), removed(HASHES[0])]) == [AllBlocksCleared()]
    assert list(blocks.snapshot()) == [] and len(blocks) == 0


def test_pictures_travel_as_the_hash_that_enters_the_block():
    (event,) = held().apply([stored(0, 1, media=(0xDEADBEEF,))])
    assert [int(key[:16], 16) for key in event.extra_keys[0]] == [0xDEADBEEF]
    assert len(event.extra_keys[0][0]) == 64


def test_a_salted_block_travels_without_tokens_under_a_keyed_hash():
    told = held().apply([stored(0, 2, salt="tenant")])
    engine_hashes = sequence_hashes(TOKENS, SIZE, event_seed("", "tenant"))[:2]
    assert told == [BlockStored([salted_hash(value, KEY) for value in engine_hashes], None, [], 0, medium="GPU")]


def test_without_the_key_nobody_can_confirm_a_guess_of_prompt_and_salt():
    (event,) = held().apply([stored(0, 2, salt="tenant")])
    guesses = {
        *sequence_hashes(TOKENS, SIZE),
        *sequence_hashes(TOKENS, SIZE, event_seed("", "tenant")),
        *(salted_hash(value, salt_key(b"")) for value in sequence_hashes(TOKENS, SIZE, event_seed("", "tenant"))),
    }
    assert not guesses & {*event.block_hashes, event.parent_block_hash}


def test_salted_blocks_are_removed_and_continued_under_their_keyed_hashes():
    blocks = held()
    (first,) = blocks.apply([stored(0, 1, salt="tenant")])
    (second,) = blocks.apply([stored(1, 2, salt="tenant")])
    engine_hash = sequence_hashes(TOKENS, SIZE, event_seed("", "tenant"))[1]
    assert second.parent_block_hash == first.block_hashes[0]
    assert blocks.apply([removed(engine_hash)]) == [BlockRemoved(second.block_hashes, "GPU")]


def test_a_snapshot_tells_parents_first_after_an_eviction_in_the_middle():
    blocks = held()
    blocks.apply([stored(), removed(HASHES[1]), stored(1, 2)])
    told = list(blocks.snapshot())
    assert [value for event in told for value in event.block_hashes] == HASHES
    assert len(told) == 1


def test_a_snapshot_is_of_its_moment_though_blocks_change_while_it_is_read():
    blocks = held()
    blocks.apply([stored()])
    snapshot = blocks.snapshot()
    blocks.apply([removed(*HASHES)])
    assert list(replay(snapshot)) == HASHES


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 2), st.booleans()), max_size=40))
def test_whatever_happens_a_snapshot_says_what_the_events_said(steps):
    blocks, told = held(), []
    for kind, at, prompt, is_salted in steps:
        tokens, salt = [prompt, *TOKENS[1:]], "s" if is_salted else ""
        value = sequence_hashes(tokens, SIZE, event_seed("", salt))[min(at, 4)]
        event = (
            stored(0, at, salt, tokens) if kind == 0
            else removed(value) if kind == 1
            else BlocksMoved(0, (value,), at % 3) if kind == 2
            else BlocksCleared(0) if at == 5 else removed(value)
        )  # fmt: skip
        told += blocks.apply([event])
    assert replay(told) == replay(blocks.snapshot())
