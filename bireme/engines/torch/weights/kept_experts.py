"""gpt-oss' experts as its files have them, MXFP4: a module in the place of transformers', and how a model gets it.

Values and scales go from the files to the device as they are, under the files' own names.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from bireme.engines.torch.geometry import ClampedGate
from bireme.engines.torch.storage import MXFP4_GROUP, Mxfp4Weight

METHOD = "mxfp4"  # quantization_config.quant_method
CLASS = "GptOssForCausalLM"
_PROJECTIONS = ("gate_up_proj", "down_proj")
_INIT_STD = 0.02  # of weights that are made up
_MADE_UP_EXPONENTS = (118, 121)  # of values of 3, on average: as small as weights are


class Mxfp4Experts(torch.nn.Module):  # type: ignore[misc]
    """It computes with one expert after the other made plain: what kernels are compared with."""

    def __init__(self, experts: Any, count: int = 0) -> None:
        """`experts`: transformers' module, whose biases and settings stay. `count`: of experts; 0: as many."""
        super().__init__()
        self.gate = ClampedGate(float(experts.limit), float(experts.alpha))
        for name in _PROJECTIONS:
            plain, bias = getattr(experts, name), getattr(experts, f"{name}_bias")
            number, columns, rows = plain.shape
            shape = (count or number, rows, columns // MXFP4_GROUP, MXFP4_GROUP // 2)
            blocks = torch.empty(shape, dtype=torch.uint8, device=plain.device)
            self.register_buffer(f"{name}_blocks", blocks)
            self.register_buffer(f"{name}_scales", blocks.new_empty(shape[:3]))
            if count:
                bias = torch.nn.Parameter(bias.new_zeros(count, rows), requires_grad=False)
            self.register_parameter(f"{name}_bias", bias)

    def stored(self, name: str) -> Mxfp4Weight:
        """Return the experts' weights of a projection, (E, out, in)."""
        return Mxfp4Weight(getattr(self, f"{name}_blocks").flatten(2), getattr(self, f"{name}_scales"))

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """x (T, hidden), chosen and shares (T, top_k) -> (T, hidden)."""
        gate_up, down = map(self.stored, _PROJECTIONS)
        total = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            tokens, places = torch.where(chosen == expert)
            inner = x[tokens] @ gate_up.expert(expert).T.to(x.dtype) + self.gate_up_proj_bias[expert]
            found = self.gate.of(inner) @ down.expert(expert).T.to(x.dtype) + self.down_proj_bias[expert]
            total.index_add_(0, tokens, (found * shares[tokens, places, None]).to(x.dtype))
        return total


def keep_experts(model: Any) -> None:
    """Have a model without plain weights of its experts."""
    for layer in model.model.layers:
        layer.mlp.experts = Mxfp4Experts(layer.mlp.experts)


def make_up_experts(model: Any, count: int) -> None:
    """Give a model of few experts so many of random weights, and routers for them."""
    for layer in model.model.layers:
        router, experts = layer.mlp.router, Mxfp4Experts(layer.mlp.experts, count)
        for name in _PROJECTIONS:
            getattr(experts, f"{name}_blocks").random_(0, 256)
            getattr(experts, f"{name}_scales").random_(*_MADE_UP_EXPONENTS)
        weight = torch.randn(count, router.hidden_dim, device=router.weight.device) * _INIT_STD
        router.weight = torch.nn.Parameter(weight.to(router.weight.dtype), requires_grad=False)
        router.bias = torch.nn.Parameter(router.bias.new_zeros(count), requires_grad=False)
        layer.mlp.experts, router.num_experts = experts, count


def why_experts_not_kept(name: str, num_layers: int, stored: Collection[str] | None) -> str:
    """Return what keeps experts from staying MXFP4; empty: they stay.

    `stored`: names of weights that are so; None: all are made up.
    """
    if name != CLASS:
        return f"{name} has no decoder of experts in MXFP4"
    if stored is None:
        return ""
    expected = {f"model.layers.{at}.mlp.experts.{own}" for at in range(num_layers) for own in _PROJECTIONS}
    if others := sorted(expected ^ set(stored)):
        return f"{others[0]} is stored {'plain' if others[0] in expected else 'in MXFP4'}"
    return ""
