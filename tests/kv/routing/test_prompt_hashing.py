"""Hashes of whole prompts are those that engines compute block by block."""

import os
import subprocess
import sys

import numpy as np
import pytest

from bireme.kv.blocks import hashing
from bireme.kv.blocks.hashing import MediaSpan
from bireme.kv.routing.prompt_hashing import PromptHasher

RANDOM = np.random.default_rng(5)
LORA = hashing.event_seed("adapter-a")


def ids(*values):
    return np.array(values, np.int32)


def test_chains_and_seeds_have_the_golden_values():
    assert PromptHasher(32)(np.arange(32, dtype=np.int32)).tolist() == [5756925433886871916]
    assert PromptHasher(16)(np.arange(5, 37, dtype=np.int32)).tolist() == [12561198586583604988, 17946932516392534513]
    assert PromptHasher(32)(np.arange(32, dtype=np.int32), LORA).tolist() == [7789262264348215317]
    assert PromptHasher(4)(np.arange(1, 17, dtype=np.int32))[0] == 14643705804678351452


@pytest.mark.parametrize("size", [*range(1, 70), 96, 128, 255, 256])
def test_blocks_of_every_size_hash_as_in_the_engines(size):
    prompt = RANDOM.integers(0, 1 << 31, 4 * size + size // 2).astype(np.int32)
    for seed in (hashing.SEED, LORA, (1 << 64) - 1):
        assert PromptHasher(size)(prompt, seed).tolist() == hashing.sequence_hashes(prompt.tolist(), size, seed)


def test_pictures_change_the_blocks_they_touch_and_all_after():
    prompt = RANDOM.integers(0, 1000, 90).astype(np.int32)
    spans = [MediaSpan(10, 20, b"a" * 32), MediaSpan(20, 40, b"b" * 32), MediaSpan(70, 90, b"c" * 32)]
    expected: list[int] = []
    for first in range(0, 80, 16):
        shown = [span.event_hash for span in hashing.media_in(spans, first, first + 16)]
        local = hashing.local_hash(hashing.token_bytes(prompt[first : first + 16].tolist()), media=shown)
        expected.append(hashing.sequence_hash(expected[-1] if expected else None, local))
    assert PromptHasher(16)(prompt, media=spans).tolist() == expected
    assert PromptHasher(16)(prompt).tolist() != expected


def test_a_prompt_shorter_than_a_block_has_no_hash():
    assert PromptHasher(32)(ids(1, 2, 3)).tolist() == []
    assert PromptHasher(32)(ids()).tolist() == []


def test_arrays_that_cannot_be_written_and_slices_are_taken():
    raw = RANDOM.integers(0, 1000, 64).astype(np.int32)
    expected = hashing.sequence_hashes(raw[::2].tolist(), 8)
    assert PromptHasher(8)(raw[::2]).tolist() == expected
    assert PromptHasher(8)(np.frombuffer(raw[::2].tobytes(), np.int32)).tolist() == expected


def test_it_is_the_same_where_nothing_is_compiled():
    program = """
import numpy as np
from bireme.kv.blocks import hashing
from bireme.kv.routing.prompt_hashing import PromptHasher
for size in (1, 3, 8, 32, 50, 64):
    assert PromptHasher(size)(np.arange(200, dtype=np.int32)).tolist() == hashing.sequence_hashes(range(200), size)
"""
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", program], check=True, env=env)


@pytest.mark.parametrize("key", [hashing.salt_key(b"one deployment's key"), bytes(32)])
def test_salted_prompts_have_the_hashes_that_publishers_send(key):
    prompt = RANDOM.integers(0, 1000, 330).astype(np.int32)
    expected = [hashing.salted_hash(one, key) for one in PromptHasher(32)(prompt, LORA).tolist()]
    assert PromptHasher(32)(prompt, LORA, salt_key=key).tolist() == expected
    assert PromptHasher(32)(ids(1), LORA, salt_key=key).tolist() == []
