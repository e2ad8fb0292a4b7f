import numpy as np
import pytest

from bireme.logits.random import philox, uniforms

# Random123's kat_vectors, philox4x32 10
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_published_answers(counter, key, words):
    assert philox(counter, key) == words
    arrays = [np.array([word], dtype=np.uint64) for word in (*counter, *key)]
    assert [int(word[0]) for word in philox(tuple(arrays[:4]), tuple(arrays[4:]))] == list(words)


def test_many_draws_at_once_equal_single_draws():
    seeds, positions = [7, 2**64 - 1, 0] * 20, list(range(60))
    single = [uniforms([seed], [at])[0] for seed, at in zip(seeds, positions, strict=True)]
    assert uniforms(seeds, positions).tolist() == single


def test_draws_are_uniform_over_positions_and_over_seeds():
    for seeds, positions in (([5] * 20000, range(20000)), (range(20000), [3] * 20000)):
        counts, _ = np.histogram(uniforms(list(seeds), list(positions)), bins=20, range=(0, 1))
        chi_square = float(((counts - 1000) ** 2 / 1000).sum())
        assert chi_square < 43.8  # 19 degrees of freedom, 0.1%
