"""What an EAGLE-3 head takes of memory beside its weights and pools, by its widths. Needs no torch."""

from __future__ import annotations

from typing import NamedTuple

from bireme.engines.torch.geometry import EngineLimits

NUM_TAPS = 3  # layers of the base model that a head reads
KEPT_BYTES = 1 << 28  # of layers' outputs that a head has not seen, of all sequences
_FLOAT = 4


class EagleWidths(NamedTuple):
    """Counts of values, of one token."""

    base: int  # what a layer of the base model gives
    hidden: int
    queries: int  # of all heads
    row: int  # keys and values
    vocab: int  # the base's
    draft_vocab: int


class EagleBytes(NamedTuple):
    tapped: int  # held from a step of the base until the next one's layers have given theirs, and until it is seen
    largest_pass: int

    def beside(self, step: int) -> int:
        """Return the peak of both. `step`: the base's largest."""
        return self.tapped + max(step, self.largest_pass)


def eagle_bytes(widths: EagleWidths, limits: EngineLimits, item: int) -> EagleBytes:
    """`item`: bytes of a value. A pass has as many rows as a step of the base at the most."""
    rows, ended = limits.max_num_tokens, limits.max_batch_size
    base, hidden, queries, row, vocab, draft_vocab = widths
    fused = rows * (NUM_TAPS * base + hidden) * item
    norm = rows * hidden * (3 * item + 2 * _FLOAT)
    held = rows * 4 * hidden * item  # what the base made, followers' embeddings, and both with their norms
    # Queries, keys and values, the same turned, which is computed in float32, and what is attended.
    attention = held + rows * ((3 * queries + 2 * row) * item + 2 * queries * _FLOAT) + limits.max_seq_len * row * item
    logits = held + ended * (draft_vocab * (item + _FLOAT) + vocab * 2 * _FLOAT)
    return EagleBytes(NUM_TAPS * rows * base * item + KEPT_BYTES, max(fused, norm, attention, logits))
