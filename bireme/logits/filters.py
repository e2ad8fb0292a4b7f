"""Temperature, top-k, top-p and min-p as one threshold a row, and the draw itself.

Each filter keeps the tokens at or above some value, so together they are the largest of those values.
That needs no sorted copy of the vocabulary, and exact ties (frequent in bf16) are kept or dropped
together: the outcome does not depend on how a sort breaks them, hence not on device or batch. The draw is
the inverse of the cumulative distribution in the order of token ids, with one uniform number a token.

Order and meaning are transformers': temperature, top-k, top-p among the survivors, then min-p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

_DEPTHS = (-6.0, -12.0, -np.inf)  # how far below the likeliest token to look for a nucleus, in steps


def scale(logits_RV: torch.Tensor, temperature_R1: torch.Tensor) -> torch.Tensor:
    """Return (logits - row maximum) / temperature: at most 0, so no temperature overflows. Works in place."""
    return logits_RV.sub_(logits_RV.amax(-1, keepdim=True)).div_(temperature_R1)


def top_k_threshold(scaled_RV: torch.Tensor, top_k_R1: torch.Tensor, largest_k: int) -> torch.Tensor:
    """Return the k-th largest value of each row, (rows, 1)."""
    return scaled_RV.topk(largest_k, -1).values.gather(1, top_k_R1 - 1)


def top_p_threshold(scaled_RV: torch.Tensor, top_k_R1: torch.Tensor, top_p_R1: torch.Tensor) -> torch.Tensor:
    """Return the smallest value of each row's nucleus among its top k, (rows, 1); k is the vocabulary when off."""
    if scaled_RV.device.type != "cpu":
        return nucleus_of_batch(scaled_RV, top_k_R1, top_p_R1)
    import torch

    limits = zip(top_k_R1.squeeze(1).tolist(), top_p_R1.squeeze(1).tolist(), strict=True)
    found = [nucleus_of_row(row, k, p) for row, (k, p) in zip(scaled_RV.numpy(), limits, strict=True)]
    return torch.tensor(found, dtype=scaled_RV.dtype).unsqueeze(1)


def nucleus_of_batch(scaled_RV: torch.Tensor, top_k_R1: torch.Tensor, top_p_R1: torch.Tensor) -> torch.Tensor:
    """The nuclei of all rows from one sort: for GPUs, where that is cheap."""
    sorted_RV = scaled_RV.sort(-1, descending=True).values
    is_kept_RV = sorted_RV >= sorted_RV.gather(1, top_k_R1 - 1)
    probs_RV = sorted_RV.exp().mul_(is_kept_RV)
    cumulative_RV = probs_RV.cumsum(-1)
    before_RV = cumulative_RV - probs_RV
    in_nucleus_RV = (before_RV < top_p_R1 * cumulative_RV[:, -1:]).logical_and_(is_kept_RV)
    count_R1 = in_nucleus_RV.sum(-1, keepdim=True).clamp_(min=1)
    return sorted_RV.gather(1, count_R1 - 1)


def nucleus_of_row(scaled_V: npt.NDArray[np.float32], top_k: int, top_p: float) -> float:
    """The nucleus of one row: looks at the likeliest tokens alone as long as they suffice, for CPUs."""
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


def draw(scaled_RV: torch.Tensor, threshold_R1: torch.Tensor | None, uniform_R1: torch.Tensor) -> torch.Tensor:
    """Return one token id a row, (rows,); `scaled` is used up."""
    import torch

    if threshold_R1 is not None:
        scaled_RV.masked_fill_(scaled_RV < threshold_R1, float("-inf"))
    cumulative_RV = scaled_RV.exp_().cumsum(-1)
    total_R1 = cumulative_RV[:, -1:]
    below_total_R1 = torch.nextafter(total_R1, torch.zeros_like(total_R1))  # a product that rounds up finds no token
    target_R1 = torch.minimum(uniform_R1.to(total_R1.dtype) * total_R1, below_total_R1)
    return torch.searchsorted(cumulative_RV, target_R1, right=True).squeeze(1)
