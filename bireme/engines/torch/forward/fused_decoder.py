"""Llama's kind of decoder on a GPU, made of few kernels. Of a decode step with one row, a layer of Llama's own is
five kernels; norms of what attention and MLP add, and mixtures, take more.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bireme.engines.torch.forward.attention import Extras
from bireme.engines.torch.forward.decode_state import DecodeState
from bireme.engines.torch.forward.decoder_weights import DecoderLayer, DecoderWeights
from bireme.engines.torch.forward.flash_attention import FlashAttention
from bireme.engines.torch.forward.kernel_step import attend_stored
from bireme.engines.torch.kernels.chunk_attention import chunk_attention
from bireme.engines.torch.kernels.decode_attention import decode_attention
from bireme.engines.torch.kernels.experts import add_experts
from bireme.engines.torch.kernels.few_rows_linear import MOST_ROWS, few_rows_linear
from bireme.engines.torch.kernels.one_row_linear import one_row_linear
from bireme.engines.torch.kernels.rotary import rotate_and_store
from bireme.engines.torch.kernels.row_wise import cap, gate, rms_norm
from bireme.engines.torch.kernels.step_begin import POSITION, SLOT, begin_step
from bireme.engines.torch.pools.kv_store import KvStore
from bireme.engines.torch.step import Batch, KernelGroup


class FusedDecoder:
    """Computes steps over the pools; used by the engine's thread."""

    def __init__(self, weights: DecoderWeights, store: KvStore, flash: FlashAttention) -> None:
        """`flash`: for prompts that are launched kernel by kernel."""
        self.weights = weights
        self._store, self._flash = store, flash
        self._windows = [store.windows[group] for group in store.group_of]
        kinds = [_kind(layer, window) for layer, window in zip(weights.layers, self._windows, strict=True)]
        self.num_kinds = 1 + max(kinds.index(kind) for kind in kinds)  # layers in which are all kinds, the first ones
        self._scale = float(torch.tensor(weights.embed_scale).to(store.dtype))  # as transformers rounds it

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def compute(self, batch: Batch) -> Tensor:
        """Any step, kernel by kernel: writes its KV rows, returns logits (rows wanted, vocabulary)."""
        weights, store = self.weights, self._store
        x, positions = F.embedding(batch.ids[0], weights.embeddings), batch.positions[0]
        heads, eps = weights.num_heads, weights.eps
        if self._scale != 1:
            x *= self._scale
        for index, layer in enumerate(weights.layers):
            group, keys, values = batch.groups[store.group_of[index]], store.keys[index], store.values[index]
            assert isinstance(group, KernelGroup)
            qkv = F.linear(rms_norm(x, layer.attention_norm, eps), layer.qkv, layer.qkv_bias)
            rotary = layer.rotary
            turned = rotate_and_store(
                qkv,
                rotary.q_norm,
                rotary.k_norm,
                rotary.eps,
                rotary.cos_sin,
                positions,
                group.slots,
                keys,
                values,
                heads,
            )
            query, key = turned[:, :heads], turned[:, heads:]
            value = qkv[:, turned.shape[1] * turned.shape[2] :].view_as(key)
            size, extras = store.tokens_per_block, Extras(layer.scaling, layer.softcap or None)
            attended = attend_stored(group, query, key, value, keys, values, size, extras, self._flash)
            _add_product(x, attended.flatten(1), layer.output, layer.attention_post_norm, eps)
            self._add_mlp(x, layer, is_few=False)
        logits = _logits(rms_norm(x[batch.logits_rows], weights.norm, eps), weights.head)
        return cap(logits, weights.softcap) if weights.softcap else logits

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def decode(self, state: DecodeState, rows: int, num_layers: int | None = None) -> Tensor:
        """A step of one token for each of the first rows of `state`: returns their logits, which are the state's.

        `num_layers`: the first ones alone, for what their kernels need; None: all.
        """
        weights, store, is_one = self.weights, self._store, rows == 1
        (steps, parts), logits, eps = state.views(state.told, rows), state.logits[:rows], weights.eps
        x = begin_step(steps, state.tables, state.last, weights.embeddings, self._scale)
        for index, layer in enumerate(weights.layers[:num_layers]):
            if is_one:
                qkv = one_row_linear(x, layer.qkv, layer.qkv_bias, layer.attention_norm, eps)
            else:
                qkv = F.linear(rms_norm(x, layer.attention_norm, eps), layer.qkv, layer.qkv_bias)
            attended = decode_attention(
                qkv,
                layer.rotary,
                parts[store.group_of[index]],
                state.tables[store.group_of[index]],
                store.keys[index],
                store.values[index],
                state.scratch,
                store.tokens_per_block,
                weights.num_heads,
                layer.scaling,
                self._windows[index],
                layer.softcap,
            )
            add = _add_few if rows <= MOST_ROWS else _add_product
            add(x, attended, layer.output, layer.attention_post_norm, eps)
            self._add_mlp(x, layer, is_few=rows <= MOST_ROWS)
        if is_one:
            one_row_linear(x, weights.head, None, weights.norm, eps, out=logits)
        else:
            _logits(rms_norm(x, weights.norm, eps), weights.head, logits)
        return cap(logits, weights.softcap) if weights.softcap else logits

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def mixed(
        self,
        state: DecodeState,
        steps: Tensor,
        parts: Tensor,
        tiles: Tensor,
        wanted: Tensor,
        num_layers: int | None = None,
    ) -> Tensor:
        """A step of one token a row, as mixed_steps.py tells it: returns the logits of rows `wanted` (W,).

        `num_layers`: as for `decode`.
        """
        weights, store, eps, size = self.weights, self._store, self.weights.eps, self._store.tokens_per_block
        heads = weights.num_heads
        x = begin_step(steps, state.tables, state.last, weights.embeddings, self._scale)
        slots, positions = steps[:, SLOT].contiguous(), steps[:, POSITION].contiguous()
        blocks = state.tables[:, slots, positions // size]
        pool_rows = blocks * size + positions % size  # (groups, R)
        attended = torch.zeros(
            len(x), heads * weights.layers[0].rotary.cos_sin.shape[1], dtype=x.dtype, device=x.device
        )
        for index, layer in enumerate(weights.layers[:num_layers]):
            group, keys, values = store.group_of[index], store.keys[index], store.values[index]
            qkv = F.linear(rms_norm(x, layer.attention_norm, eps), layer.qkv, layer.qkv_bias)
            rotary, table, window = layer.rotary, state.tables[group], self._windows[index]
            norms = (rotary.q_norm, rotary.k_norm, rotary.eps)
            turned = rotate_and_store(qkv, *norms, rotary.cos_sin, positions, pool_rows[group], keys, values, heads)
            settings = (size, heads, layer.scaling, window, layer.softcap)
            decode_attention(qkv, rotary, parts[group], table, keys, values, state.scratch, *settings, attended)
            chunk_attention(turned, tiles, table, keys, values, attended, *settings)
            _add_product(x, attended, layer.output, layer.attention_post_norm, eps)
            self._add_mlp(x, layer, is_few=False)
        logits = _logits(rms_norm(x[wanted], weights.norm, eps), weights.head, state.logits[: len(wanted)])
        return cap(logits, weights.softcap) if weights.softcap else logits

    def _add_mlp(self, x: Tensor, layer: DecoderLayer, is_few: bool) -> None:
        """Add to x (R, hidden), in place, what the layer's MLP makes of it. `is_few`: of a decode step of few rows."""
        eps, is_gelu = self.weights.eps, self.weights.is_gelu
        if layer.router is not None:
            add_experts(x, layer.mlp_norm, eps, layer.router, layer.gate_up, layer.down, is_gelu)
        elif is_few and len(x) == 1:
            inner = one_row_linear(x, layer.gate_up, None, layer.mlp_norm, eps, is_gated=True, is_gelu=is_gelu)
            _add_few(x, inner, layer.down, layer.mlp_post_norm, eps)
        elif is_few:
            inner = few_rows_linear(rms_norm(x, layer.mlp_norm, eps), layer.gate_up, True, is_gelu)
            _add_product(x, inner, layer.down, layer.mlp_post_norm, eps)
        else:
            inner = gate(F.linear(rms_norm(x, layer.mlp_norm, eps), layer.gate_up), is_gelu)
            _add_product(x, inner, layer.down, layer.mlp_post_norm, eps)


def _kind(layer: DecoderLayer, window: int) -> tuple[Any, ...]:
    """Return what its kernels are chosen by."""
    parts = (layer.qkv, layer.qkv_bias, layer.output, layer.gate_up, layer.down, layer.attention_post_norm)
    shapes = tuple(None if part is None else (part.shape, part.dtype) for part in (*parts, layer.mlp_post_norm))
    return window, layer.softcap, layer.rotary.q_norm is None, layer.router is None, shapes


def _logits(x: Tensor, head: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the product in float32: bfloat16 would round it once more, and change what is drawn."""
    if x.is_cuda and x.dtype is not torch.float32:
        return torch.mm(x, head.t(), out_dtype=torch.float32, out=out)
    return torch.mm(x.float(), head.float().t(), out=out)


def _add_few(x: Tensor, inner: Tensor, weight: Tensor, post_norm: Tensor | None, eps: float) -> None:
    """Add to a few rows x (R, hidden), in place, the product, normed where there is a norm for it."""
    linear = one_row_linear if len(x) == 1 else few_rows_linear
    product = linear(inner, weight, add_to=x if post_norm is None else None)
    if post_norm is not None:
        rms_norm(product, post_norm, eps, x)


def _add_product(x: Tensor, inner: Tensor, weight: Tensor, post_norm: Tensor | None, eps: float) -> None:
    """The same of any number of rows."""
    if post_norm is None:
        x.addmm_(inner, weight.t())
    else:
        rms_norm(F.linear(inner, weight), post_norm, eps, x)
