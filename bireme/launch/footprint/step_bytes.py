"""What the largest step takes beyond weights and pools, by the way in which it is computed."""

from __future__ import annotations

from typing import NamedTuple

from bireme.launch.footprint.decoder_shape import DecoderShape

_FLOAT = 4


class StepWidths(NamedTuple):
    tokens: int
    seen: int
    rows: int  # whose logits are made
    item: int  # bytes of a value


def packed_step(shape: DecoderShape, on: StepWidths) -> int:
    """On a CPU, by the engine's own decoder."""
    heads, key, value = max(shape.key_sizes)
    queries = shape.num_heads * key
    qkv = queries + heads * (key + value)
    mlp = on.tokens * on.item * (2 * shape.hidden + 3 * max(shape.mlp_width, 0))
    if shape.num_experts:
        rows = on.tokens * shape.experts_per_token
        busiest = -(-rows // shape.num_experts) * 3 * shape.expert_width * on.item
        mlp = max(mlp, on.tokens * shape.hidden * 2 * on.item + rows * shape.hidden * (3 * on.item + _FLOAT) + busiest)
    attention = on.tokens * on.item * (2 * shape.hidden + qkv + 2 * queries) + _prefix(shape, on)
    logits = on.rows * shape.vocab * (on.item + 2 * _FLOAT)
    return max(mlp, attention, logits)


def _prefix(shape: DecoderShape, on: StepWidths) -> int:
    """Return the gathered keys and values of a prompt's part, and the mask of what each token sees."""
    heads, key, value = max(shape.key_sizes)
    return on.seen * heads * (key + value) * on.item + on.tokens * on.seen * (1 + on.item)


def modules_step(shape: DecoderShape, on: StepWidths, is_gpu: bool) -> int:
    """By transformers' own modules."""
    heads, key, value = max(shape.key_sizes)
    queries = shape.num_heads * key
    norm = on.tokens * shape.hidden * (2 * on.item + 2 * _FLOAT)
    mlp = on.tokens * on.item * (2 * shape.hidden + 3 * shape.mlp_width)
    if shape.num_experts:
        rows = on.tokens * shape.experts_per_token
        mlp += rows * on.item * (2 * shape.hidden + 3 * shape.expert_width)
    attention = on.tokens * on.item * (2 * shape.hidden + 3 * queries + heads * (key + value))
    if not is_gpu:
        attention += _prefix(shape, on)
        if shape.has_sinks:  # scores, as matrices
            attention += shape.num_heads * on.tokens * on.seen * (2 * on.item + 2 * _FLOAT)
    logits = on.rows * shape.vocab * (on.item + 2 * _FLOAT)
    return max(norm, mlp, attention, logits)
