import math

import numpy as np
import pytest

from bireme.logits.random import BLOCK, draw_key, least_of_blocks, noise_of_ids, philox

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


def noise(seed, position, size=BLOCK):
    key, ids = draw_key(seed, position), np.arange(size, dtype=np.uint32)
    return noise_of_ids(key, ids, least_of_blocks(key, ids // BLOCK))


def plain_noise(seed, position, token):
    """What the module's description says, in Python's own numbers."""
    first, second, _, _ = philox((position & 0xFFFFFFFF, position >> 32, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))

    def word(number):
        number = (number + first) & 0xFFFFFFFF
        number = ((number ^ number >> 16) * 0x7FEB352D) & 0xFFFFFFFF
        number = ((number ^ number >> 15 ^ second) * 0x846CA68B) & 0xFFFFFFFF
        return number ^ number >> 16

    def exponential(number):
        return -math.log1p(-(number + 0.5) * 2.0**-32)

    block, member = divmod(token, 256)
    e = exponential(word(2**31 | block)) / 256
    if word(3 * 2**30 | block) >> 24 != member:
        e += exponential(word(token))
    return -math.log(e)


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 1), (2**64 - 1, 2**31 - 2), (2**40 + 3, 5)])
def test_noise_is_what_its_description_says(seed, position):
    found, expected = noise(seed, position, 1000), [plain_noise(seed, position, token) for token in range(1000)]
    assert np.allclose(found, expected, atol=1e-5)


def test_noise_never_changes():
    """A stream that another version began goes on with the same tokens."""
    assert noise(42, 3, 300)[[0, 1, 255, 256, 299]].tolist() == pytest.approx(
        [3.975965, 1.790041, 3.727077, -0.12552, 1.860702], abs=1e-6
    )


@pytest.mark.parametrize("over", ["seeds", "positions", "tokens"])
def test_noise_has_gumbels_distribution_over_seeds_positions_and_tokens(over):
    if over == "tokens":
        found = noise(11, 4, 200 * BLOCK)
    else:
        found = np.concatenate([noise(*((at, 4) if over == "seeds" else (11, at))) for at in range(200)])
    shares = np.sort(np.exp(-np.exp(-found.astype(np.float64))))
    distance = np.abs(shares - (np.arange(len(shares)) + 0.5) / len(shares)).max()
    assert distance < 1.95 / math.sqrt(len(shares))  # Kolmogorov and Smirnov, 0.1%


def test_noise_of_neighbors_is_independent():
    """Of tokens of one block, of two blocks, of two positions and of two seeds."""
    e = np.array([[np.exp(-noise(seed, position, 2 * BLOCK)) for position in (5, 6)] for seed in range(3000)])
    e = e - 1  # of mean 0 and variance 1
    products = [
        e[:, 0, 0] * e[:, 0, 1],
        e[:, 0, 3] * e[:, 0, 3 + BLOCK],
        e[:, 0, 9] * e[:, 1, 9],
        e[:-1, 0, 9] * e[1:, 0, 9],
    ]
    within = (e[:, 0, :BLOCK].sum(1) ** 2).mean() / BLOCK  # 1 if the block's numbers are independent, of variance 1
    assert all(abs(product.mean()) < 3.3 / math.sqrt(len(product)) for product in products)
    assert abs(within - 1) < 3.3 * math.sqrt(2 / len(e))
