"""Temperature, top-k, top-p and min-p as one threshold a row, and the draw itself.

Each filter keeps the tokens at or above some value, so together they are the largest of those values.
That needs no sorted copy of the vocabulary, and exact ties (frequent in bf16) are kept or dropped
together: the outcome does not depend on how a sort breaks them, hence not on device or batch. The draw is
the inverse of the cumulative distribution in the order of token ids, with one uniform number a token.

Order and meaning are transformers': temperature, top-k, top-p among the survivors, then min-p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_LADDER = (64, 1024)  # how many of the likeliest tokens to look at for top-p, before sorting all


def scale(logits_RV: torch.Tensor, temperature_R1: torch.Tensor) -> torch.Tensor:
    """Return (logits - row maximum) / temperature: at most 0, so no temperature overflows."""
    return logits_RV.sub(logits_RV.amax(-1, keepdim=True)).div_(temperature_R1)


def top_k_threshold(scaled_RV: torch.Tensor, top_k_R: torch.Tensor, largest_k: int) -> torch.Tensor:
    """Return the k-th largest value of each row, (rows, 1)."""
    return scaled_RV.topk(largest_k, -1).values.gather(1, top_k_R.unsqueeze(1) - 1)


def top_p_threshold(scaled_RV: torch.Tensor, floor_R1: torch.Tensor, top_p_R1: torch.Tensor) -> torch.Tensor:
    """Return the smallest value of each row's nucleus, (rows, 1); tokens below `floor` do not exist."""
    import torch

    total_R1 = scaled_RV.exp().mul_(scaled_RV >= floor_R1).sum(-1, keepdim=True)
    threshold_R1 = floor_R1.clone()
    rows = torch.arange(len(scaled_RV), device=scaled_RV.device)
    for size in (*_LADDER, scaled_RV.shape[1]):
        size = min(size, scaled_RV.shape[1])
        found, is_found = _nucleus(
            scaled_RV[rows].topk(size, -1).values, floor_R1[rows], total_R1[rows], top_p_R1[rows]
        )
        threshold_R1[rows[is_found]] = found[is_found]
        rows = rows[~is_found]
        if not len(rows) or size == scaled_RV.shape[1]:
            break
    return threshold_R1


def _nucleus(
    likeliest_RK: torch.Tensor, floor_R1: torch.Tensor, total_R1: torch.Tensor, top_p_R1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (smallest value of the nucleus, whether the nucleus ends among these K)."""
    probs_RK = likeliest_RK.exp().mul_(likeliest_RK >= floor_R1).div_(total_R1)
    before_RK = probs_RK.cumsum(-1) - probs_RK
    in_nucleus_RK = (before_RK < top_p_R1) & (likeliest_RK >= floor_R1)
    count_R1 = in_nucleus_RK.sum(-1, keepdim=True).clamp_(min=1)
    is_found = (count_R1 < likeliest_RK.shape[1]).squeeze(1)
    return likeliest_RK.gather(1, count_R1 - 1), is_found


def draw(scaled_RV: torch.Tensor, threshold_R1: torch.Tensor | None, uniform_R1: torch.Tensor) -> torch.Tensor:
    """Return one token id a row, (rows,); `scaled` is used up."""
    import torch

    weights_RV = scaled_RV.exp()
    if threshold_R1 is not None:
        weights_RV.mul_(scaled_RV >= threshold_R1)
    cumulative_RV = weights_RV.cumsum(-1)
    total_R1 = cumulative_RV[:, -1:]
    below_total_R1 = torch.nextafter(total_R1, torch.zeros_like(total_R1))  # a product that rounds up finds no token
    target_R1 = torch.minimum(uniform_R1.to(total_R1.dtype) * total_R1, below_total_R1)
    return torch.searchsorted(cumulative_RV, target_R1, right=True).squeeze(1)
