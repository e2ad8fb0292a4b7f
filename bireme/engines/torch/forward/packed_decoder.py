"""Llama's kind of decoder on a CPU: weights in the order in which they are read, few operations between the products.

Weights in order (`pack`) are read two to four times as fast as plain ones where a step has few rows. They are the only
copy: the model's modules are emptied, layer by layer. Some may stay as their file has them (`kept_weights.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bireme.engines.torch.forward.decoder_ops import AttentionLayer, DecoderOps
from bireme.engines.torch.forward.decoder_weights import DecoderWeights
from bireme.engines.torch.forward.kept_weights import KeptWeights
from bireme.engines.torch.forward.native_step import MOST_ROWS, NativeStep, StepLayer
from bireme.engines.torch.forward.packed_linear import Experts, GatedMlp, Linear, make_mlp
from bireme.engines.torch.forward.tapped import TappedRows
from bireme.engines.torch.geometry import Rotary
from bireme.engines.torch.pools.kv_store import KvStore
from bireme.engines.torch.step import Batch, KernelGroup, TableStep
from bireme.engines.torch.storage import WeightForm, plain
from bireme.own_process import give_back_memory


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
                    _float(layer.sinks),
                )
                for index, layer in enumerate(weights.layers)
            ]
        )
        self._layers = [
            PackedLayer(
                group,
                _float(layer.attention_norm),
                Linear(plain(layer.qkv), layer.qkv_bias),
                Linear(plain(layer.output), layer.output_bias),
                _float(layer.mlp_norm),
                make_mlp(self.ops, layer, weights.is_gelu),
                _float(layer.attention_post_norm),
                _float(layer.mlp_post_norm),
            )
            for group, layer in zip(store.group_of, weights.layers, strict=True)
        ]
        # A copy: one tensor of a checkpoint's file keeps the whole file in memory.
        embeddings = weights.embeddings if is_shared else weights.embeddings.clone()
        self._embed: Callable[[Tensor], Tensor] = partial(F.embedding, weight=embeddings)
        self.form = WeightForm.PLAIN  # of most layers' projections
        self._dtype = store.dtype
        self._norm, self._eps, self._is_gelu = _float(weights.norm), weights.eps, weights.is_gelu
        self._step: NativeStep | None = None
        self._scale = None if weights.embed_scale == 1 else torch.tensor(weights.embed_scale).to(store.dtype)
        self._head, self._softcap = Linear(weights.head), weights.softcap
        self.has_experts = weights.has_experts
        self._tapped: TappedRows | None = None

    def tap(self, tapped: TappedRows) -> None:
        """Have it keep its layers' outputs from now on."""
        self._tapped, self._step = tapped, None  # a step in one call leaves none of them

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def compute(self, batch: Batch) -> Tensor:
        """Any step: writes its KV rows, returns logits (rows wanted, vocabulary)."""
        x = self.embed(batch.ids[0])
        if self._step is not None and batch.is_decode and len(x) <= MOST_ROWS:
            self._step(x, batch.positions[0], [group for group in batch.groups if isinstance(group, TableStep)])
        else:
            x = self._by_operations(x, batch)
        if not batch.is_decode:
            x = x[batch.logits_rows]
        logits = self._head(self.ops.rms_norm(x, self._norm, self._eps))
        return logits.div_(self._softcap).tanh_().mul_(self._softcap) if self._softcap else logits

    def embed(self, ids: Tensor) -> Tensor:
        x = self._embed(ids)
        return x if self._scale is None else x.mul_(self._scale)

    def _by_operations(self, x: Tensor, batch: Batch) -> Tensor:
        ops, eps, positions = self.ops, self._eps, batch.positions[0]
        for index, layer in enumerate(self._layers):
            group = batch.groups[layer.group]
            assert not isinstance(group, KernelGroup)
            qkv = layer.qkv(ops.rms_norm(x, layer.attention_norm, eps))
            x = self._add(x, layer.output, ops.attend(index, qkv, positions, group), layer.attention_post_norm)
            x = self._add(x, layer.mlp, ops.rms_norm(x, layer.mlp_norm, eps), layer.mlp_post_norm)
            if self._tapped is not None and index in self._tapped.layers:
                self._tapped.keep(index, x)
        return x

    def _add(self, x: Tensor, part: Linear | GatedMlp | Experts, inner: Tensor, post_norm: Tensor | None) -> Tensor:
        if post_norm is None:
            return part(inner, x)
        return self.ops.rms_norm(part(inner), post_norm, self._eps, x)

    def pack(self, model: Any, blocks: KeptWeights | None = None) -> str:
        """Put the weights in order and empty the model's modules. Returns why some are plain; empty: none.

        `blocks`: of those that stay as their file has them, where there are products with these.
        """
        known: dict[Any, str] = {}
        linears = [[layer.qkv, layer.output, *layer.mlp.linears] for layer in self._layers]
        for index, (own, module) in enumerate(zip(linears, model.model.layers, strict=True)):
            stored = blocks.of_layer(index) if blocks is not None else []
            for place, linear in enumerate(own):  # experts have more than a dense layer's
                linear.pack(self.ops, known, stored[place] if len(own) == len(stored) else ())
            module.to("meta")
        self._head.pack(self.ops, known, blocks.of_head() if blocks is not None else ())
        if blocks is not None:
            self._keep_embeddings(blocks)
            self._step = self._whole_step(linears)
            self._tell([*chain(*linears), self._head], blocks)
        model.to("meta")
        give_back_memory()  # of the weights as they were loaded
        return "; ".join(sorted(set(filter(None, known.values()))))

    def _whole_step(self, linears: list[list[Linear]]) -> NativeStep | None:
        if self._tapped is not None:
            return None
        layers = []
        for layer, own in zip(self._layers, linears, strict=True):
            kept = [linear.kept for linear in own if linear.kept is not None]
            if len(kept) < len(own) or isinstance(layer.mlp, Experts):
                return None
            norms = layer.attention_norm, layer.mlp_norm, layer.attention_post_norm, layer.mlp_post_norm
            layers.append(StepLayer(norms, tuple(kept), layer.group))
        return self.ops.step(layers, self._eps, self._is_gelu)

    def _keep_embeddings(self, blocks: KeptWeights) -> None:
        kept = self._head.kept if blocks.is_tied else None
        if not blocks.is_tied and (parts := blocks.of_embeddings()):
            kept = self.ops.quantized(parts, None)
        if kept is not None:
            self._embed = partial(kept.take_rows, dtype=self._dtype)

    def _tell(self, linears: list[Linear], blocks: KeptWeights) -> None:
        kept = [linear.kept for linear in linears if linear.kept is not None]
        forms = Counter(form for own in kept for form in own.forms)
        if forms:
            self.form = WeightForm(forms.most_common(1)[0][0].lower())
        blocks.tell(forms, sum(own.num_bytes for own in kept), self.ops.instructions)


def _with_float_norms(rotary: Rotary) -> Rotary:
    return replace(rotary, q_norm=_float(rotary.q_norm), k_norm=_float(rotary.k_norm))


def _float(norm: Tensor | None) -> Any:
    """Return a copy in float32."""
    return None if norm is None else norm.to(torch.float32, copy=True)
