"""Pictures in block hashes: placeholder tokens are equal, what they show is not."""

import hashlib

from bireme.kv.blocks.block_manager import BlockManager, GroupSpec
from bireme.kv.blocks.events import EventBuffer
from bireme.kv.blocks.hashing import MediaSpan

SIZE = 4
PROMPT = [1, 2, *[5] * 10, 3, 4, 6, 7]  # a picture at tokens 2 to 11


def span(name, first=2, last=12):
    return MediaSpan(first, last, hashlib.sha256(name.encode()).digest())


def manager(**settings):
    return BlockManager([GroupSpec(0, 64)], SIZE, **settings)


def keep(blocks, *spans, salt=""):
    table = blocks.open("", salt, spans)
    blocks.grow(table, len(PROMPT), 0)
    blocks.commit(table, PROMPT, len(PROMPT))
    blocks.release(table)


def found(blocks, *spans, salt=""):
    return blocks.match(blocks.open("", salt, spans), PROMPT, len(PROMPT))


def test_the_same_picture_is_found():
    blocks = manager()
    keep(blocks, span("cat"))
    assert found(blocks, span("cat")) == 16


def test_another_picture_shares_nothing_from_its_first_block_on():
    blocks = manager()
    keep(blocks, span("cat", 5, 12))
    assert found(blocks, span("dog", 5, 12)) == 4


def test_no_picture_is_another_picture():
    blocks = manager()
    keep(blocks)
    assert found(blocks, span("cat")) == 0


def test_a_picture_of_which_another_part_is_shown_is_another():
    """Two pictures one after the other, their border in different places of the same block."""
    blocks = manager()
    keep(blocks, span("cat", 2, 6), span("dog", 6, 12))
    assert found(blocks, span("cat", 2, 7), span("dog", 7, 12)) == 4


def test_salts_keep_equal_pictures_apart():
    blocks = manager()
    keep(blocks, span("cat"), salt="a")
    assert found(blocks, span("cat"), salt="b") == 0


def test_events_tell_pictures_apart():
    stored = []
    for name in ("cat", "cat", "dog"):
        blocks = manager(events=EventBuffer(16))
        keep(blocks, span(name))
        stored.append([block.block_hash for event in blocks.events.drain() for block in event.blocks])
    assert stored[0] == stored[1] != stored[2]


def test_events_name_the_pictures_that_a_block_shows_a_part_of():
    blocks = manager(events=EventBuffer(16))
    keep(blocks, span("cat", 5, 8), span("dog", 7, 12))
    (stored,) = blocks.events.drain()
    cat, dog = span("cat").event_hash, span("dog").event_hash
    assert [block.media for block in stored.blocks] == [(), (cat, dog), (dog,), ()]
