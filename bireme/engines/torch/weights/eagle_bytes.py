"""What an EAGLE-3 head takes of memory beside its weights and pools, by its widths. Needs no torch."""

from __future__ import annotations

from typing import NamedTuple

from bireme.engines.torch.geometry import EngineLimits

NUM_TAPS = 3  # layers of the base model that a head reads
KEPT_BYTES = 1 << 28  # of layers' outputs that a head has not seen, of all sequences
FIXED_ROWS = 768  # of a step that is a graph and has a prompt's tokens, whose layers' outputs have a place of their own
MOST_IN_ROUND = 128  # sequences that a head drafts for in one launch
_FEW = 16  # places of a sequence, that are kept however wide a model is
_MOST_PLACES = 64  # of one on a GPU, where there is room for all sequences' from the start
_MOST_PARTS = 64  # that attention cuts a row into
_FLOAT = 4


def places_of(limits: EngineLimits, place_bytes: int) -> int:
    """Return how many places of a sequence a GPU keeps the layers' outputs of, those of drafts that fail included.

    `place_bytes`: what they take of one.
    """
    held = KEPT_BYTES // (place_bytes * (limits.max_batch_size + 1))
    return max(_FEW + limits.max_draft_len, min(held, _MOST_PLACES))


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
    tapped = NUM_TAPS * rows * base * item + KEPT_BYTES
    return EagleBytes(tapped, max(fused, norm, attention, logits))


def gpu_bytes(widths: EagleWidths, limits: EngineLimits, item: int) -> int:
    """Return what a GPU has besides, from the start: layers' outputs of graphs' steps, and what rounds take."""
    base, hidden, queries, row, vocab, draft_vocab = widths
    place = NUM_TAPS * base * item
    kept = places_of(limits, place) * (limits.max_batch_size + 1) * place
    count = min(limits.max_batch_size, MOST_IN_ROUND)
    rows = count * (1 + limits.max_draft_len)
    logits = count * (vocab + draft_vocab) * _FLOAT
    of_rows = rows * (NUM_TAPS * base + 4 * hidden + 2 * queries + 2 * row) * item
    scratch = count * _MOST_PARTS * queries * _FLOAT
    return max(0, kept - KEPT_BYTES) + FIXED_ROWS * place + logits + scratch + limits.max_draft_len * of_rows
