"""The matrix products of a decoder's layers, with what stands around them: which serves what form and how many rows.

| form of the weights | rows | class | products | activations |
|---|---|---|---|---|
| plain | 1, in decode steps | OneRow | kernels/one_row_linear.py, norms and gate within | as they are |
| plain | 2 to 32, in decode steps | FewRows | kernels/few_rows_linear.py, and cuBLAS's | as they are |
| plain | others | ManyRows | cuBLAS's | as they are |
| fp8_channel, fp8_blocks | 1, anywhere | OneRow | kernels/one_row_fp8.py, norms and gate within | as they are |
| the same | more | RoundedRows | kernels/rounded_linear.py: torch's, or ours | rounded by norm and gate |
| int4_groups, whole blocks, no float16 | 1, anywhere | OneRow | kernels/one_row_int4.py, as above | as they are |
| the same, float16, or finer groups | to 512 | FewStoredRows | kernels/int4_linear.py, the gate within | as they are |
| the same | more | ManyRows | cuBLAS's, with a matrix that is made plain for it | as they are |

Embeddings, norms, routers and the head are plain in every form. So may projections be beside others that are not: the
class is the others' then, and rows are multiplied as they are, by cuBLAS, or few rows beside 4 bits by plain weights'
kernels. Experts are plain, or MXFP4 beside plain projections: kernels/mixture.py has their products.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bireme.engines.torch.forward.decoder_weights import DecoderLayer, DecoderWeights
from bireme.engines.torch.kernels.few_rows_linear import MOST_ROWS, few_rows_linear
from bireme.engines.torch.kernels.int4_linear import MOST_ROWS as MOST_INT4_ROWS
from bireme.engines.torch.kernels.int4_linear import few_rows_int4, make_counters, plain_weight
from bireme.engines.torch.kernels.mixture import add_experts
from bireme.engines.torch.kernels.one_row_fp8 import one_row_fp8
from bireme.engines.torch.kernels.one_row_int4 import one_row_int4, takes
from bireme.engines.torch.kernels.one_row_linear import one_row_linear
from bireme.engines.torch.kernels.rounded_linear import rounded_linear
from bireme.engines.torch.kernels.row_wise import gate, rms_norm, rounded_gate, rounded_rows
from bireme.engines.torch.storage import Fp8Weight, Int4Weight, Weight, WeightForm, plain, rounds_activations


def products_for(
    weights: DecoderWeights, x: Tensor, is_decode: bool = False, counters: Tensor | None = None
) -> ManyRows:
    """Return those of a step whose rows are x (R, hidden), which they add to in place.

    `is_decode`: a step of ResidentDecode, whose rows are few more often than not. `counters`: of `counters_for`.
    """
    rows, kind = len(x), ManyRows
    if rounds_activations(weights.form, rows):
        kind = RoundedRows
    elif weights.form is WeightForm.INT4_GROUPS:
        kind = FewStoredRows if rows <= MOST_INT4_ROWS else ManyRows
        if rows == 1 and _are_of_one_row(weights, x.dtype):
            kind = OneRow
    elif weights.form is not WeightForm.PLAIN:
        kind = OneRow
    elif is_decode and rows <= MOST_ROWS:
        kind = OneRow if rows == 1 else FewRows
    return kind(weights, x, counters)


def counters_for(weights: DecoderWeights) -> Tensor | None:
    """Return what products of one step after the other count with; None: they count nothing."""
    is_counted = weights.form is WeightForm.INT4_GROUPS
    return make_counters(weights.head.device) if is_counted else None


class ManyRows:
    """Of plain weights, and what the others have in common."""

    are_alone = False  # programs of a product all run at once: `kernels.launch.wait` says what that asks for

    def __init__(self, weights: DecoderWeights, x: Tensor, counters: Tensor | None = None) -> None:
        self._x, self._eps, self._is_gelu = x, weights.eps, weights.is_gelu
        self._counters = counters

    def qkv(self, layer: DecoderLayer) -> Tensor:
        """Return queries, keys and values (R, (H + 2 N) K)."""
        normed = rms_norm(self._x, layer.attention_norm, self._eps)
        return F.linear(normed, self._plain(layer.qkv), layer.qkv_bias)

    def add_output(self, layer: DecoderLayer, attended: Tensor) -> None:
        """Add to the rows what the layer's output projection makes of attended (R, H K)."""
        self._add(attended, layer.output, layer.attention_post_norm, layer.output_bias)

    def add_mlp(self, layer: DecoderLayer) -> None:
        """Add to the rows what the layer's MLP makes of them."""
        if layer.mixture is not None:
            weights = layer.gate_up, layer.down
            add_experts(self._x, layer.mlp_norm, self._eps, layer.mixture, *weights, self._is_gelu)
        else:
            self._add(self._inner(layer), layer.down, layer.mlp_post_norm)

    def rows(self) -> Tensor:
        """Return x with all that was added."""
        return self._x

    def _inner(self, layer: DecoderLayer) -> Tensor:
        normed = rms_norm(self._x, layer.mlp_norm, self._eps)
        return gate(F.linear(normed, self._plain(layer.gate_up)), self._is_gelu)

    def _add(self, inner: Tensor, weight: Weight, post_norm: Tensor | None, bias: Tensor | None = None) -> None:
        if post_norm is not None:
            rms_norm(F.linear(inner, self._plain(weight), bias), post_norm, self._eps, self._x)
        elif bias is not None:
            self._x += F.linear(inner, self._plain(weight), bias)
        else:
            self._x.addmm_(inner, self._plain(weight).t())

    def _plain(self, weight: Weight) -> Tensor:
        return plain_weight(weight, self._x.dtype) if isinstance(weight, Int4Weight) else plain(weight)


class FewRows(ManyRows):
    """cuBLAS has the products that it is quicker at."""

    def add_output(self, layer: DecoderLayer, attended: Tensor) -> None:
        self._add_few(attended, layer.output, layer.attention_post_norm, layer.output_bias)

    def _inner(self, layer: DecoderLayer) -> Tensor:
        normed = rms_norm(self._x, layer.mlp_norm, self._eps)
        return self._few(normed, layer.gate_up, is_gated=True, is_gelu=self._is_gelu)

    def _few(self, inner: Tensor, weight: Weight, add_to: Tensor | None = None, **how: Any) -> Tensor:
        if isinstance(weight, Int4Weight):
            return few_rows_int4(inner, weight, add_to=add_to, counters=self._counters, **how)
        return few_rows_linear(inner, plain(weight), add_to=add_to, **how)

    def _add_few(self, inner: Tensor, weight: Weight, post_norm: Tensor | None, bias: Tensor | None = None) -> None:
        add_to = self._x if post_norm is None else None
        product = self._few(inner, weight, add_to, bias=bias)
        if post_norm is not None:
            rms_norm(product, post_norm, self._eps, self._x)


class OneRow(FewRows):
    def qkv(self, layer: DecoderLayer) -> Tensor:
        return _one_row(self._x, layer.qkv, layer.qkv_bias, layer.attention_norm, self._eps)

    def _inner(self, layer: DecoderLayer) -> Tensor:
        given = (self._x, layer.gate_up, None, layer.mlp_norm, self._eps)
        return _one_row(*given, is_gated=True, is_gelu=self._is_gelu)

    def _few(self, inner: Tensor, weight: Weight, add_to: Tensor | None = None, **how: Any) -> Tensor:
        return _one_row(inner, weight, add_to=add_to, **how)

    def _add(self, inner: Tensor, weight: Weight, post_norm: Tensor | None, bias: Tensor | None = None) -> None:
        self._add_few(inner, weight, post_norm, bias)


class FewStoredRows(FewRows):
    are_alone = True

    def _few(self, inner: Tensor, weight: Weight, add_to: Tensor | None = None, **how: Any) -> Tensor:
        if isinstance(weight, Int4Weight) or 1 < len(inner) <= MOST_ROWS:
            return super()._few(inner, weight, add_to, **how)
        return (_one_row if len(inner) == 1 else _many_rows)(inner, plain(weight), add_to=add_to, **how)

    def qkv(self, layer: DecoderLayer) -> Tensor:
        normed = rms_norm(self._x, layer.attention_norm, self._eps)
        return self._few(normed, layer.qkv, bias=layer.qkv_bias)

    def _add(self, inner: Tensor, weight: Weight, post_norm: Tensor | None, bias: Tensor | None = None) -> None:
        self._add_few(inner, weight, post_norm, bias)


class RoundedRows(ManyRows):
    """What a product adds waits for the next norm, which adds it on its way."""

    def __init__(self, weights: DecoderWeights, x: Tensor, counters: Tensor | None = None) -> None:
        super().__init__(weights, x, counters)
        self._form = weights.form
        self._more: Tensor | None = None

    def qkv(self, layer: DecoderLayer) -> Tensor:
        return self._of_normed(layer.attention_norm, layer.qkv, layer.qkv_bias)

    def add_output(self, layer: DecoderLayer, attended: Tensor) -> None:
        norm, bias = layer.attention_post_norm, layer.output_bias
        if isinstance(layer.output, Tensor):
            self._add(attended, layer.output, norm, bias)
        else:
            self._keep(rounded_rows(attended, self._form), layer.output, norm, bias)

    def add_mlp(self, layer: DecoderLayer) -> None:
        gate_up = self._of_normed(layer.mlp_norm, layer.gate_up)
        if isinstance(layer.down, Tensor):
            self._add(gate(gate_up, self._is_gelu), layer.down, layer.mlp_post_norm)
        else:
            self._keep(rounded_gate(gate_up, self._form, self._is_gelu), layer.down, layer.mlp_post_norm)

    def rows(self) -> Tensor:
        if self._more is not None:
            self._x += self._more
            self._more = None
        return self._x

    def _of_normed(self, norm: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, Tensor):
            return F.linear(rms_norm(self.rows(), norm, self._eps), weight, bias)
        return self._product(self._normed(norm), weight, bias)

    def _normed(self, norm: Tensor) -> tuple[Tensor, Tensor]:
        more, self._more = self._more, None
        return rounded_rows(self._x, self._form, norm, self._eps, more)

    def _product(self, rows: tuple[Tensor, Tensor], weight: Weight, bias: Tensor | None = None) -> Tensor:
        assert isinstance(weight, Fp8Weight)
        return rounded_linear(*rows, weight, self._x.dtype, bias)

    def _keep(
        self, rows: tuple[Tensor, Tensor], weight: Weight, post_norm: Tensor | None, bias: Tensor | None = None
    ) -> None:
        product = self._product(rows, weight, bias)
        if post_norm is None:
            self._more = product
        else:
            rms_norm(product, post_norm, self._eps, self._x)


def _many_rows(
    x: Tensor,
    weight: Tensor,
    is_gated: bool = False,
    is_gelu: bool = False,
    add_to: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """As `few_rows_linear`."""
    product = F.linear(x, weight, bias)
    if is_gated:
        product = gate(product, is_gelu)
    return product if add_to is None else add_to.add_(product)


def _are_of_one_row(weights: DecoderWeights, dtype: torch.dtype) -> bool:
    """Return whether products of one row take all matrices of 4 bits.

    What they round is a row times a norm's weights, before the norm's scale: that may exceed float16's largest number.
    """
    matrices = (part for layer in weights.layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down))
    return dtype is not torch.float16 and all(takes(weight) for weight in matrices if isinstance(weight, Int4Weight))


def _one_row(x: Tensor, weight: Weight, *given: Any, **how: Any) -> Tensor:
    if isinstance(weight, Fp8Weight):
        return one_row_fp8(x, weight, *given, **how)
    if isinstance(weight, Int4Weight):
        return one_row_int4(x, weight, *given, **how)
    return one_row_linear(x, plain(weight), *given, **how)
