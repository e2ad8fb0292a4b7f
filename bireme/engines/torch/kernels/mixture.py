"""The MLP of a mixture of experts: norm, router, the experts' products in the form of their weights, and their sum."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from bireme.engines.torch.geometry import Mixture
from bireme.engines.torch.kernels.experts import (
    Tiles,
    add_row_experts,
    add_shares,
    choose_experts,
    experts_linear,
    group_pairs,
)
from bireme.engines.torch.kernels.mxfp4_experts import add_row_mxfp4, even_first, mxfp4_linear
from bireme.engines.torch.kernels.one_row_linear import one_row_linear
from bireme.engines.torch.kernels.row_wise import rms_norm
from bireme.engines.torch.storage import Mxfp4Weight, Weight, plain


def add_experts(
    x: Tensor, norm: Tensor, eps: float, mixture: Mixture, gate_up: Weight, down: Weight, is_gelu: bool = False
) -> None:
    """Add to x (R, hidden), in place, what the experts that the router chooses make of it.

    norm (hidden,): of the RMS norm that x goes through first.
    """
    router = mixture.router
    if len(x) == 1:
        logits = one_row_linear(x, router.weight, router.bias, norm, eps)
        chosen, shares = choose_experts(logits, router.top_k, router.is_normed)
        biases = mixture.gate_up_bias, mixture.down_bias, mixture.clamp
        if isinstance(gate_up, Mxfp4Weight) and isinstance(down, Mxfp4Weight):
            add_row_mxfp4(x, norm, eps, chosen, shares, gate_up, down, *biases)
        else:
            add_row_experts(x, norm, eps, chosen, shares, plain(gate_up), plain(down), is_gelu, *biases)
        return
    normed = rms_norm(x, norm, eps)
    logits = F.linear(normed, router.weight, router.bias)
    chosen, shares = choose_experts(logits, router.top_k, router.is_normed)
    tiles = group_pairs(chosen, len(router.weight))
    add_shares(_products(normed, tiles, mixture, gate_up, down, is_gelu), shares, x)


def _products(x: Tensor, tiles: Tiles, mixture: Mixture, gate_up: Weight, down: Weight, is_gelu: bool) -> Tensor:
    """Return what each pair's expert makes of its token of x (R, hidden) -> (P, hidden)."""
    biases, clamp = (mixture.gate_up_bias, mixture.down_bias), mixture.clamp
    if isinstance(gate_up, Mxfp4Weight) and isinstance(down, Mxfp4Weight):
        inner = mxfp4_linear(even_first(x), gate_up, tiles, True, biases[0], clamp)
        return mxfp4_linear(inner, down, tiles, bias=biases[1])
    inner = experts_linear(x, plain(gate_up), tiles, True, is_gelu, biases[0], clamp)
    return experts_linear(inner, plain(down), tiles, bias=biases[1])
