"""Log probabilities of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bireme.messages import TokenLogprob, TokenLogprobs

if TYPE_CHECKING:
    import torch

LEAST = -9999.0  # instead of minus infinity, which JSON lacks; OpenAI's and vLLM's value
_ROWS_AT_ONCE = 64  # of a long prompt: bounds the float32 copy


def token_logprobs(logits_RV: torch.Tensor, tokens: Sequence[int], k: int) -> list[TokenLogprobs]:
    """Return for each row its token with its rank, then the k likeliest, best first."""
    found: list[TokenLogprobs] = []
    for at in range(0, len(tokens), _ROWS_AT_ONCE):
        found += _block(logits_RV[at : at + _ROWS_AT_ONCE], tokens[at : at + _ROWS_AT_ONCE], k)
    return found


def _block(logits_RV: torch.Tensor, tokens: Sequence[int], k: int) -> list[TokenLogprobs]:
    import torch

    logits_RV = logits_RV.float()
    total_R1 = logits_RV.logsumexp(-1, keepdim=True)
    ids_R1 = torch.tensor(tokens, dtype=torch.int64, device=logits_RV.device).unsqueeze(1)
    values, ids = logits_RV.gather(1, ids_R1), ids_R1
    ranks = ((logits_RV > values).sum(-1) + 1).tolist()
    if k:
        best = logits_RV.topk(min(k, logits_RV.shape[1]), -1)
        values, ids = torch.cat([values, best.values], 1), torch.cat([ids_R1, best.indices], 1)
    logprobs = (values - total_R1).clamp_(min=LEAST).tolist()
    return [
        list(map(TokenLogprob, row_ids, row, [rank, *range(1, len(row))]))
        for row_ids, row, rank in zip(ids.tolist(), logprobs, ranks, strict=True)
    ]
