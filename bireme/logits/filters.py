"""Temperature, top-k, top-p and min-p as one threshold a row, and the draw, on a CPU.

Each filter keeps the tokens at or above some value, exact ties (frequent in bf16) together, so device and batch change
nothing. Order and meaning are transformers': temperature, top-k, top-p among the survivors, then min-p.

The draw takes the largest of scaled logit + noise (`random.py`), of two equal ones the first. Logits are scaled as
(logit - largest) * (1 / temperature) in float32. The GPU's kernel (engines/torch/kernels/draw.py) draws the same
tokens, except for numbers on a rounding error between two.

Suffixes: R rows, V vocabulary, B blocks.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bireme.logits.random import BLOCK, Key, Words, least_of_blocks, noise_of_ids
from bireme.logits.rows import Row

if TYPE_CHECKING:
    import torch

Logits = npt.NDArray[np.float32]
_DEPTHS = (-6.0, -12.0, -np.inf)  # how far below the likeliest token to look for a nucleus, in steps
_FIRST_BLOCKS = 128  # looked into at first: with the best of their scores few others are left
_MARGIN = 1e-3  # above what rounding makes of a score
_LEAST = -3.0  # below the largest logit's score whatever its noise


def draw_row(logits_V: Logits, row: Row, key: Key) -> int:
    """Return a token id; overwrites the logits (finite maximum)."""
    blocks_B = _blocks(logits_V.size)
    largest_B = np.maximum.reduceat(logits_V, blocks_B * np.int64(BLOCK))
    largest, scale = largest_B.max(), np.float32(1) / np.float32(row.temperature)
    largest_B = (largest_B - largest) * scale  # at most 0 from here on: no temperature overflows
    threshold = math.log(row.min_p) if row.min_p else -math.inf
    if row.top_k or row.top_p < 1:
        logits_V -= largest
        logits_V *= scale
        largest, scale = np.float32(0), np.float32(1)
        threshold = max(threshold, nucleus_of_row(logits_V, row.top_k or logits_V.size, row.top_p))
    least_B = least_of_blocks(key, blocks_B)
    noise_B = -np.log(least_B)  # the largest of each block
    bounds_B = largest_B + noise_B  # of the scores
    bounds_B[largest_B < threshold] = -np.inf

    def best_from(bound: float) -> tuple[float, int]:
        """Return the best score and its id of those that may reach this one."""
        blocks = np.flatnonzero(bounds_B >= bound)
        cuts = (np.float32(bound - _MARGIN) - noise_B[blocks]) / scale + largest
        values = _rows_of(logits_V, blocks)
        at = np.flatnonzero(values >= cuts[:, None])
        ids = blocks[at // BLOCK] * BLOCK + at % BLOCK
        scaled = (values.ravel()[at] - largest) * scale
        scores = noise_of_ids(key, ids.astype(np.uint32), least_B[ids // BLOCK])
        scores += np.where(scaled >= threshold, scaled, -np.inf)
        best = int(scores.argmax())
        return float(scores[best]), int(ids[best])

    few = max(1, min(_FIRST_BLOCKS, bounds_B.size // 2))
    first = max(float(np.partition(bounds_B, -few)[-few]), _LEAST)
    score, token = best_from(first)
    return token if score >= first else best_from(score)[1]


def _rows_of(logits_V: Logits, blocks: npt.NDArray[np.int64]) -> Logits:
    """Return these blocks' logits, (blocks, BLOCK); past the vocabulary minus infinity."""
    num_whole = logits_V.size // BLOCK
    whole = logits_V[: num_whole * BLOCK].reshape(-1, BLOCK)
    if not blocks.size or blocks[-1] < num_whole:
        return whole[blocks]
    rest = np.full((1, BLOCK), -np.inf, dtype=np.float32)
    rest[0, : logits_V.size % BLOCK] = logits_V[num_whole * BLOCK :]
    return np.concatenate([whole[blocks[:-1]], rest])


@functools.lru_cache(maxsize=4)
def _blocks(size: int) -> Words:
    return np.arange(-(-size // BLOCK), dtype=np.uint32)


def nucleus_of_row(scaled_V: Logits, top_k: int, top_p: float) -> float:
    """Return the smallest value of the nucleus among the top k; the vocabulary's size turns k off."""
    is_limited = top_k < scaled_V.size
    total = 0.0 if is_limited else float(np.exp(scaled_V).sum(dtype=np.float64))
    for least in _DEPTHS:
        some = scaled_V if least == -np.inf else scaled_V[scaled_V >= least]
        if is_limited and some.size < top_k:
            continue
        some = np.sort(some)[::-1]
        if is_limited:
            some = some[: np.searchsorted(-some, -some[top_k - 1], side="right")]  # ties with the k-th stay
        weights = np.exp(some)
        cumulative = weights.cumsum(dtype=np.float64)
        wanted = top_p * (float(cumulative[-1]) if is_limited else total)
        count = int(np.count_nonzero(cumulative - weights < wanted))
        if is_limited or count < some.size:
            break
    return float(some[max(count, 1) - 1])


def nucleus_of_batch(scaled_RV: torch.Tensor, top_k_R1: torch.Tensor, top_p_R1: torch.Tensor) -> torch.Tensor:
    """Return the smallest value of each row's nucleus among its top k, (rows, 1).

    top_p >= 1 keeps every token of the top k, also those of probability 0 in float32.
    """
    sorted_RV = scaled_RV.sort(-1, descending=True).values
    is_kept_RV = sorted_RV >= sorted_RV.gather(1, top_k_R1 - 1)
    probs_RV = sorted_RV.exp().mul_(is_kept_RV)
    cumulative_RV = probs_RV.cumsum(-1)
    before_RV = cumulative_RV - probs_RV
    reaches_RV = (before_RV < top_p_R1 * cumulative_RV[:, -1:]).logical_or_(top_p_R1 >= 1)
    count_R1 = reaches_RV.logical_and_(is_kept_RV).sum(-1, keepdim=True).clamp_(min=1)
    return sorted_RV.gather(1, count_R1 - 1)
