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
from bireme.engines.torch.forward.products import ManyRows, counters_for, products_for
from bireme.engines.torch.forward.tapped import TappedRows
from bireme.engines.torch.kernels.chunk_attention import chunk_attention
from bireme.engines.torch.kernels.decode_attention import decode_attention
from bireme.engines.torch.kernels.draft_attention import draft_attention
from bireme.engines.torch.kernels.one_row_linear import one_row_linear
from bireme.engines.torch.kernels.rotary import rotate_and_store
from bireme.engines.torch.kernels.row_wise import cap, rms_norm
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
        self.scale = float(torch.tensor(weights.embed_scale).to(store.dtype))  # as transformers rounds it
        self._tapped: TappedRows | None = None
        self._counters = counters_for(weights)

    def tap(self, tapped: TappedRows) -> None:
        """Have steps keep the layers' outputs from now on: those of `compute` and of prompts' tokens row by row, decode
        steps by `tapped.places`, which there are.
        """
        assert tapped.places is not None
        self._tapped = tapped

    def embed(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.weights.embeddings)
        return x if self.scale == 1 else x.mul_(self.scale)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def compute(self, batch: Batch) -> Tensor:
        """Any step, kernel by kernel: writes its KV rows, returns logits (rows wanted, vocabulary)."""
        weights, store = self.weights, self._store
        x, positions = self.embed(batch.ids[0]), batch.positions[0]
        heads, eps = weights.num_heads, weights.eps
        products = products_for(weights, x, counters=self._counters)
        for index, layer in enumerate(weights.layers):
            group, keys, values = batch.groups[store.group_of[index]], store.keys[index], store.values[index]
            scales = store.scales[index]
            assert isinstance(group, KernelGroup)
            qkv = products.qkv(layer)
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
                scales,
            )
            query, key = turned[:, :heads], turned[:, heads:]
            value = qkv[:, turned.shape[1] * turned.shape[2] :].view_as(key)
            size, extras = store.tokens_per_block, Extras(layer.scaling, layer.softcap or None, layer.sinks)
            attended = attend_stored(group, query, key, value, keys, values, size, extras, self._flash, scales)
            products.add_output(layer, attended.flatten(1))
            products.add_mlp(layer)
            self._keep(index, products, None)
        x = products.rows()
        logits = logits_of(rms_norm(x[batch.logits_rows], weights.norm, eps), weights.head)
        return cap(logits, weights.softcap) if weights.softcap else logits

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def decode(self, state: DecodeState, rows: int, num_layers: int | None = None) -> Tensor:
        """A step of one token for each of the first rows of `state`: returns their logits, which are the state's.

        `num_layers`: the first ones alone, for what their kernels need; None: all.
        """
        weights, store, is_one = self.weights, self._store, rows == 1
        (steps, parts), logits, eps = state.views(state.told, rows), state.logits[:rows], weights.eps
        x = begin_step(steps, state.tables, state.last, weights.embeddings, self.scale)
        products, cells = products_for(weights, x, True, self._counters), self._cells(steps)
        for index, layer in enumerate(weights.layers[:num_layers]):
            attended = decode_attention(
                products.qkv(layer),
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
                layer.sinks,
                scales=store.scales[index],
                is_alone=products.are_alone,
            )
            products.add_output(layer, attended)
            products.add_mlp(layer)
            self._keep(index, products, cells)
        x = products.rows()
        if is_one:
            one_row_linear(x, weights.head, None, weights.norm, eps, out=logits)
        else:
            logits_of(rms_norm(x, weights.norm, eps), weights.head, logits)
        return cap(logits, weights.softcap) if weights.softcap else logits

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def mixed(
        self,
        state: DecodeState,
        steps: Tensor,
        parts: Tensor,
        tiles: Tensor | None = None,
        wanted: Tensor | None = None,
        num_layers: int | None = None,
    ) -> Tensor:
        """A step of one token a row, of which several may be of one sequence: returns the logits of rows `wanted` (W,).

        `tiles`: of prompts' rows, as mixed_steps.py tells them; None: all rows are of runs, whose `parts` these are.
        `wanted` None: all. `num_layers`: as for `decode`.
        """
        weights, store, eps, size = self.weights, self._store, self.weights.eps, self._store.tokens_per_block
        heads = weights.num_heads
        x = begin_step(steps, state.tables, state.last, weights.embeddings, self.scale, state.drafted)
        slots, positions = steps[:, SLOT].contiguous(), steps[:, POSITION].contiguous()
        blocks = state.tables[:, slots, positions // size]
        pool_rows = blocks * size + positions % size  # (groups, R)
        attended = torch.zeros(
            len(x), heads * weights.layers[0].rotary.cos_sin.shape[1], dtype=x.dtype, device=x.device
        )
        products = products_for(weights, x, tiles is None, self._counters)
        cells = self._cells(steps) if tiles is None else None
        for index, layer in enumerate(weights.layers[:num_layers]):
            group, keys, values, scales = (
                store.group_of[index],
                store.keys[index],
                store.values[index],
                store.scales[index],
            )
            qkv = products.qkv(layer)
            rotary, table, window = layer.rotary, state.tables[group], self._windows[index]
            norms = (rotary.q_norm, rotary.k_norm, rotary.eps)
            turned = rotate_and_store(
                qkv, *norms, rotary.cos_sin, positions, pool_rows[group], keys, values, heads, scales
            )
            settings = (size, heads, layer.scaling, window, layer.softcap, layer.sinks)
            own, scratch = parts[group], state.scratch
            if tiles is None:
                run = state.run_tokens
                draft_attention(turned, own, table, keys, values, scratch, attended, run, *settings, scales)
            else:
                decode_attention(qkv, rotary, own, table, keys, values, scratch, *settings, attended, scales)
                chunk_attention(turned, tiles, table, keys, values, attended, *settings, scales)
            products.add_output(layer, attended)
            products.add_mlp(layer)
            self._keep(index, products, cells)
        x = products.rows() if wanted is None else products.rows()[wanted]
        logits = logits_of(rms_norm(x, weights.norm, eps), weights.head, state.logits[: len(x)])
        return cap(logits, weights.softcap) if weights.softcap else logits

    def _cells(self, steps: Tensor) -> Tensor | None:
        """Return where rows' layers' outputs go, (R,); None: they are not kept."""
        if self._tapped is None or self._tapped.places is None:
            return None
        cells: Tensor = self._tapped.places.cells(steps[:, SLOT], steps[:, POSITION]).long()
        return cells

    def _keep(self, index: int, products: ManyRows, cells: Tensor | None) -> None:
        """Keep a layer's outputs where steps are to. `cells` None: row by row."""
        tapped = self._tapped
        if tapped is None or (number := tapped.number_of.get(index)) is None:
            return
        if cells is None:
            tapped.keep(index, products.rows(), is_changed=True)
        elif tapped.places is not None:
            tapped.places.put(number, cells, products.rows())


def _kind(layer: DecoderLayer, window: int) -> tuple[Any, ...]:
    """Return what its kernels are chosen by."""
    parts = (layer.qkv, layer.qkv_bias, layer.output, layer.output_bias, layer.gate_up, layer.down)
    norms = (layer.attention_post_norm, layer.mlp_post_norm)
    shapes = tuple(None if part is None else (part.shape, part.dtype) for part in (*parts, *norms))
    absent = (layer.rotary.q_norm is None, layer.mixture is None, layer.sinks is None)
    return window, layer.softcap, absent, shapes


def logits_of(x: Tensor, head: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the product in float32: bfloat16 would round it once more, and change what is drawn."""
    if x.is_cuda and x.dtype is not torch.float32:
        return torch.mm(x, head.t(), out_dtype=torch.float32, out=out)
    return torch.mm(x.float(), head.float().t(), out=out)
