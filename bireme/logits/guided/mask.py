"""Packed masks on logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bireme.logits.sending import send

if TYPE_CHECKING:
    import torch


def apply(logits: torch.Tensor, bitmask: torch.Tensor, rows: list[int]) -> None:
    """Set what `bitmask` (len(rows), words) does not allow to -inf in these rows of `logits` (any, vocab)."""
    import torch

    vocab_size = logits.shape[1]
    if logits.device.type == "cpu":
        bits = np.unpackbits((~bitmask.numpy()).view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
        denied = torch.from_numpy(bits.view(np.bool_))
        for position, row in enumerate(rows):  # in place: a gather would copy every row twice
            logits[row].masked_fill_(denied[position], float("-inf"))
        return
    words = bitmask.to(logits.device, non_blocking=True)
    shifts = torch.arange(32, device=logits.device, dtype=torch.int32)
    denied = ((words.unsqueeze(-1) >> shifts) & 1).view(len(rows), -1)[:, :vocab_size] == 0
    if rows == list(range(len(logits))):
        logits.masked_fill_(denied, float("-inf"))
        return
    where = send(np.array(rows), logits.device)
    logits[where] = logits[where].masked_fill(denied, float("-inf"))
