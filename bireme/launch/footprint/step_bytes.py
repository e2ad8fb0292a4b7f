"""What the largest step takes beyond weights and pools, by the way in which it is computed."""

from __future__ import annotations

from typing import NamedTuple

from bireme.engines.torch.geometry import MOST_GATHERED_BYTES, MOST_SCORES
from bireme.launch.footprint.decoder_shape import DecoderShape

_FLOAT = 4


class StepWidths(NamedTuple):
    tokens: int
    seen: int
    rows: int  # whose logits are made
    item: int  # bytes of a value


def packed_step(shape: DecoderShape, on: StepWidths, has_kernels: bool) -> int:
    """On a CPU, by the engine's own decoder, whose attention is compiled where `has_kernels`."""
    heads, key, value = max(shape.key_sizes)
    queries = shape.num_heads * key
    qkv = queries + heads * (key + value)
    mlp = on.tokens * on.item * (2 * shape.hidden + 3 * max(shape.mlp_width, 0))
    if shape.num_experts:
        rows = on.tokens * shape.experts_per_token
        busiest = -(-rows // shape.num_experts) * 3 * shape.expert_width * on.item
        mlp = max(mlp, on.tokens * shape.hidden * 2 * on.item + rows * shape.hidden * (3 * on.item + _FLOAT) + busiest)
    seen = _prefix(shape, on) if has_kernels else max(_prefix(shape, on), _gathered_rows(shape, on))
    attention = on.tokens * on.item * (2 * shape.hidden + qkv + 2 * queries) + seen + _scores(shape, on)
    logits = on.rows * shape.vocab * (on.item + 2 * _FLOAT)
    return max(mlp, attention, logits)


def _prefix(shape: DecoderShape, on: StepWidths) -> int:
    """Return the gathered keys and values of a prompt's part, and the mask of what each token sees."""
    return on.seen * _gathered_token(shape, on) + on.tokens * on.seen * (1 + on.item)


def _gathered_rows(shape: DecoderShape, on: StepWidths) -> int:
    """Return what is gathered for decode rows at once where no kernel reads the pools."""
    each = on.seen * _gathered_token(shape, on)
    return max(each, min(on.rows * each, MOST_GATHERED_BYTES))


def _gathered_token(shape: DecoderShape, on: StepWidths) -> int:
    heads, key, value = max(shape.key_sizes)
    padded = key if value < key else 0  # values, to the size of keys
    return heads * (key + value + padded) * on.item


def _scores(shape: DecoderShape, on: StepWidths) -> int:
    """Return the scores of attention that writes them out, and keys and values for each head."""
    if not shape.writes_scores:
        return 0
    _, key, value = max(shape.key_sizes)
    scores = min(MOST_SCORES, shape.num_heads * on.tokens * on.seen)
    return scores * (2 * on.item + 2 * _FLOAT) + on.seen * shape.num_heads * (key + value) * on.item


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
        attention += max(_prefix(shape, on), _gathered_rows(shape, on)) + _scores(shape, on)
    logits = on.rows * shape.vocab * (on.item + 2 * _FLOAT)
    return max(norm, mlp, attention, logits)
