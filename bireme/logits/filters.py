"""Temperature, top-k, top-p and min-p as one threshold a row, and the draw, each for GPU and CPU.

Each filter keeps the tokens at or above some value, so together they keep those above the largest. Exact ties (frequent
in bf16) are kept or dropped together: the outcome does not depend on the order of a sort, hence not on device or batch.
The draw inverts the cumulative distribution in the order of token ids, with one uniform number a token. Order and
meaning are transformers': temperature, top-k, top-p among the survivors, then min-p.

`draw_batch` works on all rows at once, for GPUs, where sorting and summing a vocabulary is cheap. `draw_row` is for
CPUs, in numpy: it stays in cache, sorts only the likeliest tokens while they suffice, and sums blocks instead of the
whole vocabulary; several times faster there than torch on the batch. Both give the same tokens, except for numbers on a
rounding error between two.

Suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bireme.logits.rows import Row

if TYPE_CHECKING:
    import torch

Logits = npt.NDArray[np.float32]
_DEPTHS = (-6.0, -12.0, -np.inf)  # how far below the likeliest token to look for a nucleus, in steps
_BLOCK = 256  # tokens summed at once


def draw_row(logits_V: Logits, row: Row, uniform: float) -> int:
    """Return a token id; overwrites the logits (finite maximum)."""
    logits_V -= logits_V.max()  # at most 0 from here on: no temperature overflows
    logits_V /= np.float32(row.temperature)
    threshold = math.log(row.min_p) if row.min_p else -math.inf
    if row.top_k or row.top_p < 1:
        threshold = max(threshold, nucleus_of_row(logits_V, row.top_k or logits_V.size, row.top_p))
    weights_V = np.exp(logits_V)
    if threshold > -math.inf:
        weights_V[logits_V < threshold] = 0.0
    return _invert(weights_V, uniform)


def nucleus_of_row(scaled_V: Logits, top_k: int, top_p: float) -> float:
    """Return the smallest value of the nucleus among the top k; k is the vocabulary's size when off."""
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


def _invert(weights_V: Logits, uniform: float) -> int:
    """Return the first id at which the sum of weights exceeds this share of the whole."""
    sums = np.add.reduceat(weights_V, _block_starts(weights_V.size), dtype=np.float64).cumsum()
    target = min(uniform * sums[-1], np.nextafter(sums[-1], 0.0))  # a product that rounds up would find no token
    block = int(np.searchsorted(sums, target, side="right"))
    inside = weights_V[block * _BLOCK : (block + 1) * _BLOCK]
    before = sums[block - 1] if block else 0.0
    at = int(np.searchsorted(inside.cumsum(dtype=np.float64) + before, target, side="right"))
    if at == inside.size:  # the block's sum, rounded in another order, was a little larger
        at = int(np.flatnonzero(inside)[-1])
    return block * _BLOCK + at


@functools.lru_cache(maxsize=4)
def _block_starts(size: int) -> npt.NDArray[np.int64]:
    return np.arange(0, size, _BLOCK)


def draw_batch(logits_RV: torch.Tensor, rows: Sequence[Row], uniforms_R: npt.NDArray[np.float64]) -> list[int]:
    """Return a token id for each row; overwrites the logits (float32, finite maxima)."""
    import torch

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits_RV.device).unsqueeze(1)

    scaled_RV = logits_RV.sub_(logits_RV.amax(-1, keepdim=True)).div_(column([row.temperature for row in rows]))
    if any(row.top_k or row.top_p < 1 or row.min_p for row in rows):
        threshold_R1 = column([math.log(row.min_p) if row.min_p else -math.inf for row in rows])
        if any(row.top_k or row.top_p < 1 for row in rows):
            size = scaled_RV.shape[1]
            top_k = torch.tensor([[row.top_k or size] for row in rows], device=scaled_RV.device)
            threshold_R1 = threshold_R1.maximum(nucleus_of_batch(scaled_RV, top_k, column([row.top_p for row in rows])))
        scaled_RV.masked_fill_(scaled_RV < threshold_R1, -math.inf)
    cumulative_RV = scaled_RV.exp_().cumsum(-1)
    total_R1 = cumulative_RV[:, -1:]
    below_total_R1 = torch.nextafter(total_R1, torch.zeros_like(total_R1))
    target_R1 = torch.minimum(column(uniforms_R.tolist()) * total_R1, below_total_R1)
    chosen: list[int] = torch.searchsorted(cumulative_RV, target_R1, right=True).squeeze(1).tolist()
    return chosen


def nucleus_of_batch(scaled_RV: torch.Tensor, top_k_R1: torch.Tensor, top_p_R1: torch.Tensor) -> torch.Tensor:
    """Return the smallest value of each row's nucleus among its top k, (rows, 1); from one sort of all rows.

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
