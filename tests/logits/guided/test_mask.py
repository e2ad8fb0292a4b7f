"""Packed masks on logits."""

from __future__ import annotations

import numpy as np
import pytest

from bireme.logits.guided.guidance import allocate
from bireme.logits.guided.mask import apply

torch = pytest.importorskip("torch")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [5, 32, 33, 1000])
def test_what_is_not_allowed_becomes_minus_infinity(device, vocab_size):
    rng = np.random.default_rng(0)
    bitmask = rng.integers(-(2**31), 2**31, (2, -(-vocab_size // 32))).astype(np.int32)
    logits = torch.zeros(4, vocab_size, device=device)
    apply(logits, torch.from_numpy(bitmask), [3, 1])
    found = torch.isfinite(logits).cpu().numpy()
    for row, position in ((3, 0), (1, 1)):
        expected = [bool(bitmask[position, at // 32] >> (at % 32) & 1) for at in range(vocab_size)]
        assert found[row].tolist() == expected
    assert found[0].all() and found[2].all()


def test_a_fresh_mask_allows_everything():
    logits = torch.zeros(2, 70)
    apply(logits, torch.from_numpy(allocate(2, 70)), [0, 1])
    assert torch.isfinite(logits).all()
