"""Public hashes have the values that other consumers compute; reuse hashes tell all that matters apart."""

from __future__ import annotations

from bireme.kv.blocks import hashing

FIVE = list(range(5, 37))


def test_the_first_block_of_32_has_the_golden_value():
    assert hashing.sequence_hashes(range(32), 32) == [5756925433886871916]


def test_the_second_block_has_the_golden_local_value():
    assert hashing.local_hashes(range(70), 32)[1] == 13958166640625465031


def test_blocks_of_four_have_the_golden_local_values():
    expected = [14643705804678351452, 16777012769546811212, 483935686894639516, 135165725823939817]
    assert hashing.local_hashes(range(1, 17), 4) == expected


def test_a_chain_has_the_golden_values():
    assert hashing.local_hashes(FIVE, 16) == [12561198586583604988, 14821068871314776554]
    assert hashing.sequence_hashes(FIVE, 16) == [12561198586583604988, 17946932516392534513]


def test_media_in_any_order_have_the_golden_value():
    tokens = hashing.token_bytes(range(32))
    assert hashing.local_hash(tokens, media=[0xDEADBEEF, 5]) == 8200895830983988540
    assert hashing.local_hash(tokens, media=[5, 0xDEADBEEF]) == 8200895830983988540


def test_lora_and_salt_have_the_golden_values():
    assert hashing.local_hashes(range(32), 32, hashing.event_seed("adapter-a")) == [7789262264348215317]
    assert hashing.local_hashes(range(32), 32, hashing.event_seed("", "tenant-a")) == [2219965901670897658]


def test_partial_blocks_have_no_hash():
    assert len(hashing.sequence_hashes(range(63), 32)) == 1


def test_reuse_roots_tell_their_parts_apart():
    roots = {hashing.reuse_root(*parts) for parts in (("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), ("abc",))}
    assert len(roots) == 5


def test_a_reuse_hash_stands_for_the_whole_prefix():
    tokens = hashing.token_bytes(range(8))
    one, other = hashing.reuse_root("m", "a"), hashing.reuse_root("m", "b")
    assert hashing.reuse_hash(one, tokens) != hashing.reuse_hash(other, tokens)
    assert len(hashing.reuse_hash(one, tokens)) == 32
