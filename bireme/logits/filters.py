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

if TYPE_CHECKING:
    import torch


def scale(logits_RV: torch.Tensor, temperature_R1: torch.Tensor) -> torch.Tensor:
    """Return (logits - row maximum) / temperature: at most 0, so no temperature overflows. Works in place."""
    return logits_RV.sub_(logits_RV.amax(-1, keepdim=True)).div_(temperature_R1)


def top_k_threshold(scaled_RV: torch.Tensor, top_k_R1: torch.Tensor, largest_k: int) -> torch.Tensor:
    """Return the k-th largest value of each row, (rows, 1)."""
    return scaled_RV.topk(largest_k, -1).values.gather(1, top_k_R1 - 1)


def top_p_threshold(scaled_RV: torch.Tensor, top_k_R1: torch.Tensor, top_p_R1: torch.Tensor) -> torch.Tensor:
    """Return the smallest value of each row's nucleus among its top k, (rows, 1); k is the vocabulary when off."""
    sorted_RV = _descending(scaled_RV)
    is_kept_RV = sorted_RV >= sorted_RV.gather(1, top_k_R1 - 1)
    probs_RV = sorted_RV.exp().mul_(is_kept_RV)
    cumulative_RV = probs_RV.cumsum(-1)
    before_RV = cumulative_RV - probs_RV
    in_nucleus_RV = (before_RV < top_p_R1 * cumulative_RV[:, -1:]).logical_and_(is_kept_RV)
    count_R1 = in_nucleus_RV.sum(-1, keepdim=True).clamp_(min=1)
    return sorted_RV.gather(1, count_R1 - 1)


def _descending(values_RV: torch.Tensor) -> torch.Tensor:
    """Sort each row, largest first."""
    if values_RV.device.type != "cpu":
        return values_RV.sort(-1, descending=True).values
    import torch

    # numpy's vectorised sort of values alone takes a twelfth of torch's, which also sorts indices
    return torch.from_numpy(np.sort(values_RV.neg().numpy(), axis=-1)).neg_()


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
