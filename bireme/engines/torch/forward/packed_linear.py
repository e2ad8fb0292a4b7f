"""Products with packed weights, and the MLPs that are made of them.

All are called with rows (T, hidden), and with rows that the result is added to; these are not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bireme.engines.torch.forward.decoder_ops import DecoderLinear, DecoderOps
from bireme.engines.torch.forward.decoder_weights import DecoderLayer
from bireme.engines.torch.forward.quantized_linear import QuantizedLinear, StoredRows, round_rows
from bireme.engines.torch.geometry import ClampedGate, Mixture
from bireme.engines.torch.storage import plain

_EXPECTED_ROWS = 16  # of a step: what oneDNN chooses the order for; products of other shapes read it too
_CHECKED_ROWS = (1, 40)
_MOST_ERROR = {torch.bfloat16: 0.02, torch.float32: 1e-4}  # relative


class Linear:
    """x (T, in) -> (T, out), with weights plain or, once packed, in the order in which they are read.

    Weights of float32 that bfloat16 holds without loss, such as a checkpoint's of bfloat16, are kept as that: half as
    much is read. They, and those of bfloat16 where the CPU has tiles, go into an order of our own, all others into
    oneDNN's. Those whose rows the file has in blocks that there are products with stay in these.
    """

    kept: QuantizedLinear | None = None  # in the file's blocks

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        self._multiply: DecoderLinear = self._plainly

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        return self._multiply(x, add_to)

    def _plainly(self, x: Tensor, add_to: Tensor | None) -> Tensor:
        product = F.linear(x, self._weight, self._bias)
        return product if add_to is None else product.add_(add_to)

    def _by_onednn(self, x: Tensor, add_to: Tensor | None) -> Tensor:
        linear: Any = torch.ops.mkldnn._linear_pointwise
        if add_to is None:
            found: Tensor = linear(x, self._weight, self._bias, "none", [], "")
        else:
            found = linear.binary(x, add_to, self._weight, self._bias, "add")
        return found

    def pack(self, ops: DecoderOps, known: dict[Any, str], stored: Sequence[StoredRows] = ()) -> None:
        """Weights that can't be packed, or compute something else then, stay plain.

        `known`: why those of a kind can't be; empty: they can. Each kind is checked once. `stored`: their rows as the
        file has them.
        """
        if stored and self._keep(ops, known, stored):
            return
        plain, short = self._weight, _in_two_bytes(self._weight)
        own = None if short is None else ops.linear(short, self._bias)
        kind = (*plain.shape, plain.dtype, self._bias is None, own is None)
        if known.get(kind):
            return
        try:
            if own is not None:
                self._multiply, self._weight = own, plain.new_empty(0)
            else:
                self._weight = torch.ops.mkldnn._reorder_linear_weight(plain, _EXPECTED_ROWS)
                self._multiply = self._by_onednn
            if kind not in known:
                self._check(plain)
            known[kind] = ""
        except (RuntimeError, AttributeError) as error:  # AttributeError: this torch has no such operation
            self._weight, self._multiply = plain, self._plainly
            known[kind] = str(error).partition("\n")[0]

    def _keep(self, ops: DecoderOps, known: dict[Any, str], stored: Sequence[StoredRows]) -> bool:
        """Return whether it multiplies with the file's blocks from now on."""
        plain, kind = self._weight, (*self._weight.shape, self._bias is None, *(part.form for part in stored))
        if known.get(kind):
            return False
        try:
            own = ops.quantized(stored, self._bias)
            if own is None:
                return False
            self._multiply, self._weight = own, plain.new_empty(0)
            if kind not in known:
                self._check(plain, round_rows)
            known[kind], self.kept = "", own
        except (RuntimeError, ValueError) as error:
            self._weight, self._multiply = plain, self._plainly
            known[kind] = str(error)
        return self.kept is not None

    def _check(self, plain: Tensor, rounded: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        """Raises RuntimeError: it computes something else. `rounded`: what the product makes of x first."""
        as_plain = Linear(plain, self._bias)
        for count in _CHECKED_ROWS:
            x, add_to = (torch.randn(count, width).to(plain.dtype) for width in reversed(plain.shape))
            right = as_plain(rounded(x).to(plain.dtype), add_to).float()
            error = float((self(x, add_to) - right).float().norm() / right.norm().clamp_min(1e-30))
            if not error <= _MOST_ERROR[plain.dtype]:
                raise RuntimeError(f"a packed product of {count} rows is {error:.3g} off")


def _in_two_bytes(weight: Tensor) -> Tensor | None:
    """Return it as bfloat16; None: that would lose something."""
    short = weight.bfloat16()
    return short if torch.equal(short.to(weight.dtype), weight) else None


class GatedMlp:
    def __init__(
        self, ops: DecoderOps, gate_up: Linear, down: Linear, is_gelu: bool, clamp: ClampedGate | None = None
    ) -> None:
        self._ops, self._is_gelu, self._clamp = ops, is_gelu, clamp
        self._gate_up, self._down = gate_up, down
        self.linears = [gate_up, down]

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        gate_up = self._gate_up(x)
        inner = self._ops.gate(gate_up, self._is_gelu) if self._clamp is None else self._clamp.of(gate_up)
        return self._down(inner, add_to)


class Experts:
    """Each token has some of them: rows are put in the experts' order, so that each computes its own at once.

    Rows are repeated up to one of few numbers: oneDNN compiles a product for each number of rows that it meets, in half
    a millisecond, and keeps as many as its cache holds.
    """

    def __init__(self, mixture: Mixture, experts: list[GatedMlp]) -> None:
        router = mixture.router
        # Copies: views would keep the checkpoint's file in memory.
        self._weight, self._bias = router.weight.clone(), None if router.bias is None else router.bias.clone()
        self._top_k, self._is_normed, self._experts = router.top_k, router.is_normed, experts
        self.linears = [linear for expert in experts for linear in expert.linears]

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        shares, chosen = F.linear(x, self._weight, self._bias).softmax(-1, dtype=torch.float32).topk(self._top_k)
        if self._is_normed:  # (T, top_k)
            shares /= shares.sum(-1, keepdim=True)
        order = chosen.flatten().argsort()
        tokens = order // self._top_k
        rows = x[tokens].split(chosen.flatten().bincount(minlength=len(self._experts)).tolist())
        parts = [(expert, own) for expert, own in zip(self._experts, rows, strict=True) if len(own)]
        found = torch.cat([expert(_filled(own))[: len(own)] for expert, own in parts])
        total = torch.zeros(x.shape) if add_to is None else add_to.to(torch.float32, copy=True)
        return total.index_add_(0, tokens, found * shares.flatten()[order, None]).to(x.dtype)


def _filled(rows: Tensor) -> Tensor:
    """Return the rows, and the last one again up to the next of eight numbers an octave."""
    more = -len(rows) % (1 << max(0, len(rows).bit_length() - 4))
    return rows if more == 0 else torch.cat([rows, rows[-1:].expand(more, -1)])


def make_mlp(ops: DecoderOps, layer: DecoderLayer, is_gelu: bool) -> GatedMlp | Experts:
    gate_up, down, mixture = plain(layer.gate_up), plain(layer.down), layer.mixture
    if mixture is None:
        return GatedMlp(ops, Linear(gate_up), Linear(down), is_gelu)
    gate_ups = _linears(gate_up, mixture.gate_up_bias)
    experts = zip(gate_ups, _linears(down, mixture.down_bias), strict=True)
    return Experts(mixture, [GatedMlp(ops, *own, is_gelu, mixture.clamp) for own in experts])


def _linears(weights: Tensor, biases: Tensor | None) -> list[Linear]:
    own = [None] * len(weights) if biases is None else list(biases.clone())
    return [Linear(weight, bias) for weight, bias in zip(weights, own, strict=True)]
