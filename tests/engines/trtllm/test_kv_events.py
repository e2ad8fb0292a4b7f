"""TensorRT-LLM's KV events: public hashes, one window, full blocks, gaps a rank, hashes of any sign."""

from __future__ import annotations

import pytest

from bireme.engines.trtllm.kv_events import KvEventReader, PicturePlaces, unsigned
from bireme.kv.blocks import hashing
from bireme.kv.blocks.events import DEVICE, HOST, BlocksCleared, BlocksMoved, BlocksRemoved, BlocksStored

SIZE = 4
TOKENS = list(range(1, 13))
PUBLIC = hashing.sequence_hashes(TOKENS, SIZE)


def block(block_hash, tokens, **more):
    unique = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens]
    return {"type": "stored_block", "block_hash": block_hash, "tokens": unique, **more}


def stored(event_id, *blocks, parent=None, window=100, **more):
    data = {"type": "stored", "parent_hash": parent, "blocks": list(blocks)}
    return {"event_id": event_id, "data": data, "window_size": window, **more}


def removed(event_id, *hashes, window=100, **more):
    return {
        "event_id": event_id,
        "data": {"type": "removed", "block_hashes": list(hashes)},
        "window_size": window,
        **more,
    }


def created(event_id, window):
    return {
        "event_id": event_id,
        "data": {"type": "created", "num_blocks_per_cache_level": [9, 0]},
        "window_size": window,
    }


@pytest.fixture
def reader():
    reader = KvEventReader(SIZE)
    reader.read(created(0, 100))
    return reader


def test_blocks_get_their_public_hashes(reader):
    (event,) = reader.read(stored(1, block(77, TOKENS[:4]), block(78, TOKENS[4:8])))
    assert isinstance(event, BlocksStored)
    assert [one.block_hash for one in event.blocks] == PUBLIC[:2]
    assert event.parent_hash is None


def updated(event_id, block_hash, **change):
    return {"event_id": event_id, "data": {"type": "updated", "block_hash": block_hash, **change}, "window_size": 100}


def test_a_block_that_goes_to_host_memory_and_back_is_told_as_moved(reader):
    reader.read(stored(1, block(77, TOKENS[:4])))
    down = reader.read(updated(2, 77, cache_level={"type": "event_diff", "old_value": 0, "new_value": 1}))
    up = reader.read(updated(3, 77, cache_level={"type": "event_diff", "old_value": 1, "new_value": 0}))
    assert down == [BlocksMoved(1, (PUBLIC[0],), HOST)] and up == [BlocksMoved(2, (PUBLIC[0],), DEVICE)]


def test_updates_of_priorities_and_of_unknown_blocks_say_nothing(reader):
    reader.read(stored(1, block(77, TOKENS[:4])))
    assert reader.read(updated(2, 77, priority={"type": "event_diff", "old_value": 35, "new_value": 50})) == []
    assert reader.read(updated(3, 78, cache_level={"type": "event_diff", "old_value": 0, "new_value": 1})) == []


def test_a_chain_goes_on_from_its_parent(reader):
    reader.read(stored(1, block(77, TOKENS[:4])))
    (event,) = reader.read(stored(2, block(78, TOKENS[4:8]), parent=77))
    assert (event.parent_hash, event.blocks[0].block_hash) == (PUBLIC[0], PUBLIC[1])


def test_a_removal_names_what_was_stored(reader):
    reader.read(stored(1, block(77, TOKENS[:4]), block(78, TOKENS[4:8])))
    (event,) = reader.read(removed(2, 78))
    assert event == BlocksRemoved(1, (PUBLIC[1],))
    assert reader.read(removed(3, 78)) == []


def test_partial_blocks_are_neither_stored_nor_removed(reader):
    (event,) = reader.read(stored(1, block(77, TOKENS[:4]), block(78, TOKENS[4:6])))
    assert len(event.blocks) == 1
    assert reader.read(removed(2, 78)) == []
    assert reader.read(stored(3, block(79, TOKENS[:2]))) == []


def test_a_block_that_is_too_long_drops_its_event(reader):
    assert reader.read(stored(1, block(77, TOKENS[:5]))) == []


@pytest.mark.parametrize("value", [2**64 - 5, -5, "fffffffffffffffb"])
def test_hashes_of_any_sign_or_spelling_are_one(reader, value):
    assert unsigned(value) == 2**64 - 5
    reader.read(stored(1, block(-5, TOKENS[:4])))
    (event,) = reader.read(removed(2, value))
    assert event.block_hashes == (PUBLIC[0],)


def test_only_the_widest_window_counts():
    reader = KvEventReader(SIZE)
    for at, window in enumerate((512, 32768, 1024)):
        reader.read(created(at, window))
    assert reader.read(stored(3, block(1, TOKENS[:4]), window=512)) == []
    assert len(reader.read(stored(4, block(1, TOKENS[:4]), window=32768))) == 1
    assert reader.read(removed(5, 1, window=512)) == []


def test_a_window_that_is_announced_later_changes_nothing(reader):
    reader.read(stored(1, block(77, TOKENS[:4])))
    reader.read(created(2, 9999))
    assert len(reader.read(stored(3, block(78, TOKENS[4:8]), parent=77))) == 1


def test_a_gap_voids_what_is_known_of_the_rank(reader):
    reader.read(stored(1, block(77, TOKENS[:4])))
    cleared, *rest = reader.read(stored(5, block(78, TOKENS[4:8]), parent=77))
    assert isinstance(cleared, BlocksCleared) and rest == []  # its parent is not known any more
    assert reader.num_gaps == 3


def test_a_gap_shows_in_events_of_other_windows_too(reader):
    assert isinstance(reader.read(stored(4, block(1, TOKENS[:4]), window=7))[0], BlocksCleared)


def test_ranks_count_for_themselves(reader):
    assert reader.read(created(0, 100) | {"attention_dp_rank": 1}) == []
    first = reader.read(stored(1, block(77, TOKENS[:4]), attention_dp_rank=1))
    second = reader.read(stored(1, block(77, TOKENS[:4])))
    assert (first[0].dp_rank, second[0].dp_rank) == (1, 0)
    assert reader.num_gaps == 0


def test_our_own_ids_have_no_gaps(reader):
    events = []
    for at, event in enumerate((block(77, TOKENS[:2]), block(78, TOKENS[:4]), block(79, TOKENS[4:8])), 1):
        events += reader.read(stored(at, event))
    assert [event.event_id for event in events] == [0, 1]


def test_salts_and_adapters_have_hashes_of_their_own(reader):
    (event,) = reader.read(stored(1, block(77, TOKENS[:4], cache_salt="tenant-a")))
    expected = hashing.local_hash(hashing.token_bytes(TOKENS[:4]), hashing.event_seed("", "tenant-a"))
    assert (event.cache_salt, event.blocks[0].block_hash) == ("tenant-a", expected)
    adapted = stored(2, block(78, TOKENS[:4]))
    adapted["data"]["lora_name"] = "poet"
    (event,) = reader.read(adapted)
    expected = hashing.local_hash(hashing.token_bytes(TOKENS[:4]), hashing.event_seed("poet", ""))
    assert (event.lora_name, event.blocks[0].block_hash) == ("poet", expected)
    both = stored(3, block(78, TOKENS[:4], cache_salt="a"), block(79, TOKENS[4:8], cache_salt="b"))
    assert reader.read(both) == []


def test_pictures_have_hashes_of_their_own(reader):
    keys = [{"type": "mm_key", "hash": "0123456789abcdef" + "0" * 48, "start_offset": 0}]
    (event,) = reader.read(stored(1, block(77, TOKENS[:4], mm_keys=keys)))
    expected = hashing.local_hash(hashing.token_bytes(TOKENS[:4]), media=[0x0123456789ABCDEF])
    assert event.blocks[0].block_hash == expected


def test_a_picture_s_key_of_another_type_or_without_a_hash_is_passed_over_and_voids_nothing(reader):
    picture = {"type": "mm_key", "hash": "0123456789abcdef" + "0" * 48, "start_offset": 0}
    others = [{"type": "audio_key", "hash": "12"}, {"type": "mm_key"}, {"type": "mm_key", "hash": ""}]
    (event,) = reader.read(stored(1, block(77, TOKENS[:4], mm_keys=[*others, picture])))
    expected = hashing.local_hash(hashing.token_bytes(TOKENS[:4]), media=[0x0123456789ABCDEF])
    assert isinstance(event, BlocksStored) and event.blocks[0].block_hash == expected


def test_events_without_ids_or_windows_of_old_releases_are_read(reader):
    event = stored(1, block(77, TOKENS[:4]))
    del event["event_id"], event["window_size"]
    assert len(reader.read(event)) == 1


@pytest.mark.parametrize("broken", [[{"token": 1}] * 4, [{"token_id": None}] * 4, "abcd", 5])
def test_an_event_that_can_not_be_read_is_dropped_alone_and_voids_its_rank(reader, broken, caplog):
    reader.read(stored(1, block(77, TOKENS[:4])))
    (cleared,) = reader.read(stored(2, block(78, TOKENS[4:8]) | {"tokens": broken}, parent=77))
    assert isinstance(cleared, BlocksCleared)
    assert "kv_event_unread count=1" in caplog.text
    assert len(reader.read(stored(3, block(79, TOKENS[:4])))) == 1
    assert reader.num_gaps == 0


def test_a_picture_s_digest_ends_what_can_be_named(reader):
    picture = block(78, TOKENS[4:8])
    picture["tokens"][1]["token_id"] = "ab" * 32
    (event,) = reader.read(stored(1, block(77, TOKENS[:4]), picture))
    assert len(event.blocks) == 1
    assert reader.read(stored(2, block(79, TOKENS[:4]), parent=78)) == []
    assert reader.read(removed(3, 78)) == []


PLACEHOLDER, VOCAB = 5, 100
SHOWN = [hashing.MediaSpan(2, 9, bytes(range(32)))]
PICTURED = [1, 2, *[PLACEHOLDER] * 7, 3, 4, 6]
DIGEST = f"{SHOWN[0].event_hash:016x}" + "0" * 48


@pytest.mark.parametrize(
    ("places", "has_keys"),
    [
        ([PLACEHOLDER] * 7, True),
        ([VOCAB + 1] * 7, True),
        ([DIGEST, *range(VOCAB + 1, VOCAB + 7)], False),
    ],
    ids=["the placeholder", "beyond the vocabulary", "a digest"],
)
def test_a_picture_s_places_are_named_as_a_router_names_them(places, has_keys):
    """In one event or in several: the digest is in the first block alone."""
    tokens, keys = [1, 2, *places, 3, 4, 6], [{"type": "mm_key", "hash": DIGEST, "start_offset": 0}]
    expected = hashing.sequence_hashes(PICTURED, SIZE, media=SHOWN)
    parts = [block(70 + at, tokens[at : at + 4], mm_keys=keys if has_keys else []) for at in (0, 4, 8)]
    whole, apart = (reader_of_pictures() for _ in range(2))
    (event,) = whole.read(stored(1, *parts))
    assert [one.block_hash for one in event.blocks] == expected
    found = [
        apart.read(stored(at + 1, part, parent=70 + 4 * (at - 1) if at else None)) for at, part in enumerate(parts)
    ]
    assert [event.blocks[0].block_hash for (event,) in found] == expected
    (gone,) = apart.read(removed(4, 70, 74, 78))
    assert list(gone.block_hashes) == expected and not apart._inside


def reader_of_pictures():
    reader = KvEventReader(SIZE, places=PicturePlaces(PLACEHOLDER, VOCAB))
    reader.read(created(0, 100))
    return reader


def test_an_owned_prompt_with_a_picture_is_left_out_once():
    reader = KvEventReader(SIZE, has_owners=False, places=PicturePlaces(PLACEHOLDER, VOCAB))
    reader.read(created(0, 100))
    reader.expect_owned(PICTURED, SHOWN)
    keys = [{"type": "mm_key", "hash": DIGEST, "start_offset": 0}]
    parts = [block(70 + at, PICTURED[at : at + 4], mm_keys=keys) for at in (0, 4, 8)]
    assert reader.read(stored(1, *parts)) == []
    assert len(reader.read(stored(2, *parts))) == 1


def owned_reader():
    reader = KvEventReader(SIZE, has_owners=False)
    reader.read(created(0, 100))
    return reader


def test_an_expected_chain_without_its_owner_is_left_out_once():
    reader = owned_reader()
    reader.expect_owned(TOKENS[:8])
    assert reader.read(stored(1, block(77, TOKENS[:4]), block(78, TOKENS[4:8]))) == []
    assert reader.read(removed(2, 77, 78)) == []
    (event,) = reader.read(stored(3, block(87, TOKENS[:4]), block(88, TOKENS[4:8])))  # the same prompt, anybody's
    assert [one.block_hash for one in event.blocks] == PUBLIC[:2]


def test_a_plain_chain_that_begins_alike_is_published():
    reader = owned_reader()
    reader.expect_owned(TOKENS[:8])
    (event,) = reader.read(stored(1, block(77, TOKENS[:4])))
    assert event.blocks[0].block_hash == PUBLIC[0]
    assert reader.read(stored(2, block(78, TOKENS[4:8]), parent=77)) == []


def test_prompts_shorter_than_a_block_have_no_chain_to_expect():
    reader = owned_reader()
    reader.expect_owned(TOKENS[:3])
    assert len(reader.read(stored(1, block(77, TOKENS[:4])))) == 1
