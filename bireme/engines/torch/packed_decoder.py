"""Llama's kind of decoder on a CPU: weights in oneDNN's own order, few operations between the products.

oneDNN reads weights that it has put in order (`pack`) two to four times as fast as plain ones where a step has few
rows. They are the only copy: the model's modules are emptied, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bireme.engines.torch.attention import GroupStep
from bireme.engines.torch.batch import Batch
from bireme.engines.torch.decoder_ops import AttentionLayer, DecoderOps
from bireme.engines.torch.decoder_weights import DecoderWeights, Rotary
from bireme.engines.torch.kv_store import KvStore

_EXPECTED_ROWS = 16  # of a step: what oneDNN chooses the order for; products of other shapes read it too
_CHECKED_ROWS = (1, 40)
_MOST_ERROR = {torch.bfloat16: 0.02, torch.float32: 1e-4}  # relative


class Linear:
    """x (T, in) -> (T, out), with weights plain or packed."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        self._is_packed = False

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        if not self._is_packed:
            product = F.linear(x, self._weight, self._bias)
            return product if add_to is None else product.add_(add_to)
        linear: Any = torch.ops.mkldnn._linear_pointwise
        if add_to is None:
            found: Tensor = linear(x, self._weight, self._bias, "none", [], "")
        else:
            found = linear.binary(x, add_to, self._weight, self._bias, "add")
        return found

    def pack(self) -> None:
        """Raises RuntimeError where oneDNN can't, or computes something else; the weights are plain then."""
        plain = self._weight
        rows = [torch.randn(count, plain.shape[1]).to(plain.dtype) for count in _CHECKED_ROWS]
        expected = [self(x, self(x)) for x in rows]
        try:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(plain, _EXPECTED_ROWS)
            self._is_packed = True
            for x, right in zip(rows, expected, strict=True):
                error = float((self(x, self(x)) - right).float().norm() / right.float().norm())
                if not error <= _MOST_ERROR[plain.dtype]:
                    raise RuntimeError(f"a packed product of {len(x)} rows is {error:.3g} off")
        except (RuntimeError, AttributeError) as error:  # AttributeError: this torch has no such operation
            self._weight, self._is_packed = plain, False
            raise RuntimeError(str(error).partition("\n")[0]) from error


@dataclass(frozen=True, slots=True)
class PackedLayer:
    group: int  # of its window
    attention_norm: Tensor  # norms are float32
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    attention_post_norm: Tensor | None
    mlp_post_norm: Tensor | None


class PackedDecoder:
    """Computes steps over the pools; used by the engine's thread."""

    def __init__(
        self, weights: DecoderWeights, store: KvStore, make_ops: Callable[[list[AttentionLayer]], DecoderOps]
    ) -> None:
        """Keeps no reference to `weights`, so that packing frees each."""
        windows = [store.groups[group].window for group in store.group_of]
        self.ops = make_ops(
            [
                AttentionLayer(
                    _with_float_norms(layer.rotary),
                    store.keys[index],
                    store.values[index],
                    weights.num_heads,
                    store.tokens_per_block,
                    windows[index],
                    layer.scaling,
                    layer.softcap,
                )
                for index, layer in enumerate(weights.layers)
            ]
        )
        self._layers = [
            PackedLayer(
                group,
                _float(layer.attention_norm),
                Linear(layer.qkv, layer.qkv_bias),
                Linear(layer.output),
                _float(layer.mlp_norm),
                Linear(layer.gate_up),
                Linear(layer.down),
                _float(layer.attention_post_norm),
                _float(layer.mlp_post_norm),
            )
            for group, layer in zip(store.group_of, weights.layers, strict=True)
        ]
        # Copies: one tensor of a checkpoint's file keeps the whole file in memory.
        self._embeddings, self._norm, self._eps = weights.embeddings.clone(), _float(weights.norm), weights.eps
        self._scale = None if weights.embed_scale == 1 else torch.tensor(weights.embed_scale).to(store.dtype)
        self._head, self._softcap, self._is_gelu = Linear(weights.head), weights.softcap, weights.is_gelu

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def compute(self, batch: Batch) -> Tensor:
        """Any step: writes its KV rows, returns logits (rows wanted, vocabulary)."""
        ops, eps, positions = self.ops, self._eps, batch.positions[0]
        x = F.embedding(batch.ids[0], self._embeddings)
        if self._scale is not None:
            x *= self._scale
        for index, layer in enumerate(self._layers):
            group = batch.groups[layer.group]
            assert isinstance(group, GroupStep)
            qkv = layer.qkv(ops.rms_norm(x, layer.attention_norm, eps))
            x = self._add(x, layer.output, ops.attend(index, qkv, positions, group), layer.attention_post_norm)
            inner = ops.gate(layer.gate_up(ops.rms_norm(x, layer.mlp_norm, eps)), self._is_gelu)
            x = self._add(x, layer.down, inner, layer.mlp_post_norm)
        if not batch.is_decode:
            x = x[batch.logits_rows]
        logits = self._head(ops.rms_norm(x, self._norm, eps))
        return logits.div_(self._softcap).tanh_().mul_(self._softcap) if self._softcap else logits

    def _add(self, x: Tensor, linear: Linear, inner: Tensor, post_norm: Tensor | None) -> Tensor:
        if post_norm is None:
            return linear(inner, x)
        return self.ops.rms_norm(linear(inner), post_norm, self._eps, x)

    def pack(self, model: Any) -> str:
        """Put the weights in oneDNN's order and empty the model's modules. Returns why some are plain; empty: none."""
        reasons = set()
        for layer, module in zip(self._layers, model.model.layers, strict=True):
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                reasons.add(_pack(linear))
            module.to("meta")
        reasons.add(_pack(self._head))
        model.to("meta")
        return "; ".join(sorted(filter(None, reasons)))


def _pack(linear: Linear) -> str:
    try:
        linear.pack()
    except RuntimeError as error:
        return str(error)
    return ""


def _with_float_norms(rotary: Rotary) -> Rotary:
    return replace(rotary, q_norm=_float(rotary.q_norm), k_norm=_float(rotary.k_norm))


def _float(norm: Tensor | None) -> Any:
    """Return a copy in float32."""
    return None if norm is None else norm.to(torch.float32, copy=True)
