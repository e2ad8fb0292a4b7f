"""Llama's kind of decoder on a CPU: weights in the order in which they are read, few operations between the products.

Weights in order (`pack`) are read two to four times as fast as plain ones where a step has few rows. They are the only
copy: the model's modules are emptied, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bireme.engines.torch.forward.decoder_ops import AttentionLayer, DecoderOps
from bireme.engines.torch.forward.decoder_weights import DecoderWeights
from bireme.engines.torch.forward.packed_linear import Experts, GatedMlp, Linear, make_mlp
from bireme.engines.torch.geometry import Rotary
from bireme.engines.torch.pools.kv_store import KvStore
from bireme.engines.torch.step import Batch, KernelGroup
from bireme.engines.torch.storage import plain


@dataclass(frozen=True, slots=True)
class PackedLayer:
    group: int  # of its window
    attention_norm: Tensor  # norms are float32
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    mlp: GatedMlp | Experts
    attention_post_norm: Tensor | None
    mlp_post_norm: Tensor | None


class PackedDecoder:
    """Computes steps over the pools; used by the engine's thread."""

    def __init__(
        self,
        weights: DecoderWeights,
        store: KvStore,
        make_ops: Callable[[list[AttentionLayer]], DecoderOps],
        is_shared: bool = False,
    ) -> None:
        """Keeps no reference to `weights`, so that packing frees each. `is_shared`: they stay as they are."""
        windows = [store.windows[group] for group in store.group_of]
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
                Linear(plain(layer.qkv), layer.qkv_bias),
                Linear(plain(layer.output)),
                _float(layer.mlp_norm),
                make_mlp(self.ops, layer, weights.is_gelu),
                _float(layer.attention_post_norm),
                _float(layer.mlp_post_norm),
            )
            for group, layer in zip(store.group_of, weights.layers, strict=True)
        ]
        # A copy: one tensor of a checkpoint's file keeps the whole file in memory.
        self._embeddings = weights.embeddings if is_shared else weights.embeddings.clone()
        self._norm, self._eps = _float(weights.norm), weights.eps
        self._scale = None if weights.embed_scale == 1 else torch.tensor(weights.embed_scale).to(store.dtype)
        self._head, self._softcap = Linear(weights.head), weights.softcap
        self.has_experts = weights.has_experts

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def compute(self, batch: Batch) -> Tensor:
        """Any step: writes its KV rows, returns logits (rows wanted, vocabulary)."""
        ops, eps, positions = self.ops, self._eps, batch.positions[0]
        x = F.embedding(batch.ids[0], self._embeddings)
        if self._scale is not None:
            x *= self._scale
        for index, layer in enumerate(self._layers):
            group = batch.groups[layer.group]
            assert not isinstance(group, KernelGroup)
            qkv = layer.qkv(ops.rms_norm(x, layer.attention_norm, eps))
            x = self._add(x, layer.output, ops.attend(index, qkv, positions, group), layer.attention_post_norm)
            x = self._add(x, layer.mlp, ops.rms_norm(x, layer.mlp_norm, eps), layer.mlp_post_norm)
        if not batch.is_decode:
            x = x[batch.logits_rows]
        logits = self._head(ops.rms_norm(x, self._norm, eps))
        return logits.div_(self._softcap).tanh_().mul_(self._softcap) if self._softcap else logits

    def _add(self, x: Tensor, part: Linear | GatedMlp | Experts, inner: Tensor, post_norm: Tensor | None) -> Tensor:
        if post_norm is None:
            return part(inner, x)
        return self.ops.rms_norm(part(inner), post_norm, self._eps, x)

    def pack(self, model: Any) -> str:
        """Put the weights in order and empty the model's modules. Returns why some are plain; empty: none."""
        known: dict[Any, str] = {}
        for layer, module in zip(self._layers, model.model.layers, strict=True):
            for linear in (layer.qkv, layer.output, *layer.mlp.linears):
                linear.pack(self.ops, known)
            module.to("meta")
        self._head.pack(self.ops, known)
        model.to("meta")
        return "; ".join(sorted(set(filter(None, known.values()))))


def _with_float_norms(rotary: Rotary) -> Rotary:
    return replace(rotary, q_norm=_float(rotary.q_norm), k_norm=_float(rotary.k_norm))


def _float(norm: Tensor | None) -> Any:
    """Return a copy in float32."""
    return None if norm is None else norm.to(torch.float32, copy=True)
