"""Llama's kind of decoder on a GPU, made of few kernels. Of a decode step with one row, a layer is five kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from bireme.engines.torch.attention import Extras, KernelGroup
from bireme.engines.torch.batch import Batch
from bireme.engines.torch.decoder_weights import DecoderWeights
from bireme.engines.torch.kernel_step import attend_stored
from bireme.engines.torch.kernels.decode_attention import decode_attention
from bireme.engines.torch.kernels.few_rows_linear import MOST_ROWS, few_rows_linear
from bireme.engines.torch.kernels.one_row_linear import one_row_linear
from bireme.engines.torch.kernels.rotary import rotate_and_store
from bireme.engines.torch.kernels.row_wise import rms_norm, silu_times
from bireme.engines.torch.kernels.step_begin import begin_step
from bireme.engines.torch.kv_store import KvStore

if TYPE_CHECKING:
    from bireme.engines.torch.resident_decode import DecodeState


class FusedDecoder:
    """Computes steps over the pools; used by the engine's thread."""

    def __init__(self, weights: DecoderWeights, store: KvStore) -> None:
        self.weights = weights
        self._store = store
        self._windows = [store.groups[group].window for group in store.group_of]

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def compute(self, batch: Batch) -> Tensor:
        """Any step, kernel by kernel: writes its KV rows, returns logits (rows wanted, vocabulary)."""
        weights, store = self.weights, self._store
        x, positions = F.embedding(batch.ids[0], weights.embeddings), batch.positions[0]
        heads = weights.num_heads
        for index, layer in enumerate(weights.layers):
            group, keys, values = batch.groups[store.group_of[index]], store.keys[index], store.values[index]
            assert isinstance(group, KernelGroup)
            qkv = F.linear(rms_norm(x, layer.attention_norm, weights.eps), layer.qkv, layer.qkv_bias)
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
            size, extras = store.tokens_per_block, Extras(layer.scaling)
            attended = attend_stored(group, query, key, value, keys, values, size, extras)
            x.addmm_(attended.flatten(1), layer.output.t())
            gate_up = F.linear(rms_norm(x, layer.mlp_norm, weights.eps), layer.gate_up)
            x.addmm_(silu_times(gate_up), layer.down.t())
        return F.linear(rms_norm(x[batch.logits_rows], weights.norm, weights.eps), weights.head)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def decode(self, state: DecodeState, rows: int) -> Tensor:
        """A step of one token for each of the first rows of `state`: returns their logits, which are the state's."""
        weights, store, is_one = self.weights, self._store, rows == 1
        (steps, parts), logits, eps = state.views(state.told, rows), state.logits[:rows], weights.eps
        x = begin_step(steps, state.tables, state.last, weights.embeddings)
        for index, layer in enumerate(weights.layers):
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
            )
            if is_one:
                one_row_linear(attended, layer.output, add_to=x)
                inner = one_row_linear(x, layer.gate_up, None, layer.mlp_norm, eps, is_gated=True)
                one_row_linear(inner, layer.down, add_to=x)
            elif rows <= MOST_ROWS:
                few_rows_linear(attended, layer.output, add_to=x)
                x.addmm_(few_rows_linear(rms_norm(x, layer.mlp_norm, eps), layer.gate_up, True), layer.down.t())
            else:
                x.addmm_(attended, layer.output.t())
                inner = silu_times(F.linear(rms_norm(x, layer.mlp_norm, eps), layer.gate_up))
                x.addmm_(inner, layer.down.t())
        if is_one:
            one_row_linear(x, weights.head, None, weights.norm, eps, out=logits)
        else:
            torch.mm(rms_norm(x, weights.norm, eps), weights.head.t(), out=logits)
        return logits
