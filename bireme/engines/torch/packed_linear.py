"""Products with weights in oneDNN's own order, and the MLPs that are made of them.

All are called with rows (T, hidden), and with rows that the result is added to; these are not changed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bireme.engines.torch.decoder_ops import DecoderOps
from bireme.engines.torch.decoder_weights import DecoderLayer, TopKRouter

_EXPECTED_ROWS = 16  # of a step: what oneDNN chooses the order for; products of other shapes read it too
_CHECKED_ROWS = (1, 40)
_MOST_ERROR = {torch.bfloat16: 0.02, torch.float32: 1e-4}  # relative


class Linear:
    """x (T, in) -> (T, out), with weights plain or packed.

    Weights of float32 that bfloat16 holds without loss, such as a checkpoint's of bfloat16, are kept as both: a product
    of few rows takes as long as reading its weights, of which there is half as much.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        self._is_packed = False
        self._short: Tensor | None = None  # the weights in bfloat16
        self._ops: DecoderOps | None = None

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        if self._short is not None and self._ops is not None and len(x) <= self._ops.most_rows:
            return self._ops.few_rows(x, self._short, self._bias, add_to)
        if not self._is_packed:
            product = F.linear(x, self._weight, self._bias)
            return product if add_to is None else product.add_(add_to)
        linear: Any = torch.ops.mkldnn._linear_pointwise
        if add_to is None:
            found: Tensor = linear(x, self._weight, self._bias, "none", [], "")
        else:
            found = linear.binary(x, add_to, self._weight, self._bias, "add")
        return found

    @property
    def kind(self) -> tuple[Any, ...]:
        """What decides whether oneDNN can pack the weights and computes the same with them."""
        return tuple(self._weight.shape), self._weight.dtype, self._bias is None

    def shorten(self, ops: DecoderOps) -> None:
        """Keep the weights in bfloat16 as well where that loses nothing; comes before `pack`."""
        weight = self._weight
        if weight.dtype is torch.float32 and ops.most_rows and len(weight) % 4 == 0:
            short = weight.bfloat16()
            if torch.equal(short.float(), weight):
                self._short, self._ops = short, ops

    def pack(self, is_checked: bool = True) -> None:
        """Raises RuntimeError where oneDNN can't, or computes something else; the weights are plain then."""
        plain = self._weight
        counts = _CHECKED_ROWS if is_checked else ()
        rows = [torch.randn(count, plain.shape[1]).to(plain.dtype) for count in counts]
        expected = [self(x, self(x)) for x in rows]
        try:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(plain, _EXPECTED_ROWS)
            self._is_packed = True
            for x, right in zip(rows, expected, strict=True):
                error = float((self(x, self(x)) - right).float().norm() / right.float().norm().clamp_min(1e-30))
                if not error <= _MOST_ERROR[plain.dtype]:
                    raise RuntimeError(f"a packed product of {len(x)} rows is {error:.3g} off")
        except (RuntimeError, AttributeError) as error:  # AttributeError: this torch has no such operation
            self._weight, self._is_packed = plain, False
            raise RuntimeError(str(error).partition("\n")[0]) from error


class GatedMlp:
    def __init__(self, ops: DecoderOps, gate_up: Tensor, down: Tensor, is_gelu: bool) -> None:
        self._ops, self._is_gelu = ops, is_gelu
        self._gate_up, self._down = Linear(gate_up), Linear(down)
        self.linears = [self._gate_up, self._down]

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        return self._down(self._ops.gate(self._gate_up(x), self._is_gelu), add_to)


class Experts:
    """Each token has some of them: rows are put in the experts' order, so that each computes its own at once."""

    def __init__(self, router: TopKRouter, experts: list[GatedMlp]) -> None:
        self._weight = router.weight.clone()  # a view would keep the checkpoint's file in memory
        self._top_k, self._is_normed, self._experts = router.top_k, router.is_normed, experts
        self.linears = [linear for expert in experts for linear in expert.linears]

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        shares, chosen = F.linear(x, self._weight).softmax(-1, dtype=torch.float32).topk(self._top_k)  # (T, top_k)
        if self._is_normed:
            shares /= shares.sum(-1, keepdim=True)
        order = chosen.flatten().argsort()
        tokens = order // self._top_k
        rows = x[tokens].split(chosen.flatten().bincount(minlength=len(self._experts)).tolist())
        found = torch.cat([expert(own) for expert, own in zip(self._experts, rows, strict=True) if len(own)])
        total = torch.zeros(x.shape) if add_to is None else add_to.to(torch.float32, copy=True)
        return total.index_add_(0, tokens, found * shares.flatten()[order, None]).to(x.dtype)


def make_mlp(ops: DecoderOps, layer: DecoderLayer, is_gelu: bool) -> GatedMlp | Experts:
    if layer.router is None:
        return GatedMlp(ops, layer.gate_up, layer.down, is_gelu)
    parts = zip(layer.gate_up, layer.down, strict=True)
    return Experts(layer.router, [GatedMlp(ops, gate_up, down, is_gelu) for gate_up, down in parts])
