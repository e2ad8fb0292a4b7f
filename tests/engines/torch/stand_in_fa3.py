"""What the wheel fa3-fwd 0.0.3 gives, in plain torch: its function's arguments, order and defaults, what it refuses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class StandInFa3:
    """Its module. `spoil` changes a result, and may raise."""

    def __init__(self, spoil: Any = lambda found: found) -> None:
        self._spoil = spoil
        self.calls: list[tuple[int, int, bool]] = []  # longest query and key, causal

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        qv: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        return_attn_probs: bool = False,
    ) -> Any:
        assert not return_attn_probs and softcap == 0.0 and seqused_q is None and seqused_k is None
        if window_size != (-1, -1):
            raise RuntimeError("This flash attention build does not support local attention.")
        if q.dtype is torch.float16:
            raise RuntimeError("This flash attention build does not support FP16.")
        assert q.dtype is k.dtype is v.dtype is torch.bfloat16
        assert cu_seqlens_q.dtype is cu_seqlens_k.dtype is torch.int32
        self.calls.append((max_seqlen_q, max_seqlen_k, causal))
        out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype)
        for at in range(len(cu_seqlens_q) - 1):
            own, seen = (slice(int(ends[at]), int(ends[at + 1])) for ends in (cu_seqlens_q, cu_seqlens_k))
            num_tokens, num_seen = own.stop - own.start, seen.stop - seen.start
            assert num_tokens <= max_seqlen_q and num_seen <= max_seqlen_k
            mask = torch.ones(num_tokens, num_seen, dtype=torch.bool)
            if causal:
                mask = mask.tril(num_seen - num_tokens)  # from the lower right corner
            parts = (rows.float().transpose(0, 1)[None] for rows in (q[own], k[seen], v[seen]))
            found = scaled_dot_product_attention(*parts, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
            out[own] = found[0].transpose(0, 1).to(q.dtype)
        return self._spoil(out)
