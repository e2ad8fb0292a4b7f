"""Log probabilities of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bireme.messages import TokenLogprob, TokenLogprobs

if TYPE_CHECKING:
    import torch

LEAST = -9999.0  # instead of minus infinity, which JSON lacks; OpenAI's and vLLM's value
_ROWS_AT_ONCE = 64  # of a long prompt: bounds the float32 copy


@dataclass(slots=True)
class Measured:
    """Tensors of `token_logprobs`."""

    ids: torch.Tensor  # (R, 1 + k)
    logprobs: torch.Tensor  # (R, 1 + k)
    ranks: torch.Tensor  # (R,)

    def to_host(self) -> Measured:
        # To be read once the device has come so far.
        return Measured(*(one.to("cpu", non_blocking=True) for one in (self.ids, self.logprobs, self.ranks)))

    def read(self) -> list[TokenLogprobs]:
        rows = zip(self.ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), strict=True)
        return [list(map(TokenLogprob, ids, values, [rank, *range(1, len(ids))])) for ids, values, rank in rows]


def token_logprobs(logits_RV: torch.Tensor, tokens: Sequence[int], k: int) -> list[TokenLogprobs]:
    """Return for each row its token with its rank, then the k likeliest, best first."""
    found: list[TokenLogprobs] = []
    for at in range(0, len(tokens), _ROWS_AT_ONCE):
        found += _block(logits_RV[at : at + _ROWS_AT_ONCE], tokens[at : at + _ROWS_AT_ONCE], k)
    return found


def _block(logits_RV: torch.Tensor, tokens: Sequence[int], k: int) -> list[TokenLogprobs]:
    import torch

    return measure(logits_RV, torch.tensor(tokens, dtype=torch.int64, device=logits_RV.device), k).read()


def measure(logits_RV: torch.Tensor, ids_R: torch.Tensor, k: int) -> Measured:
    """As `token_logprobs`, without waiting."""
    import torch

    logits_RV, ids = logits_RV.float(), ids_R.unsqueeze(1)
    total_R1 = logits_RV.logsumexp(-1, keepdim=True)
    values = logits_RV.gather(1, ids)
    ranks = (logits_RV > values).sum(-1) + 1
    if k:
        best = logits_RV.topk(min(k, logits_RV.shape[1]), -1)
        values, ids = torch.cat([values, best.values], 1), torch.cat([ids, best.indices], 1)
    return Measured(ids, (values - total_R1).clamp_(min=LEAST), ranks)
