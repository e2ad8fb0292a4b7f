"""Llama's kind of decoder, made of few kernels, from the weights of a transformers model.

The projections of queries, keys and values are one matrix, as are those of gate and up. The model's own modules keep
views of them: they stay as usable as before, and nothing is held twice. Of a decode step with one row, a layer
is five kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bireme.engines.torch.attention import Extras, KernelGroup
from bireme.engines.torch.batch import Batch
from bireme.engines.torch.kernel_step import attend_stored
from bireme.engines.torch.kernels.decode_attention import Rotary, decode_attention
from bireme.engines.torch.kernels.few_rows_linear import MOST_ROWS, few_rows_linear
from bireme.engines.torch.kernels.one_row_linear import one_row_linear
from bireme.engines.torch.kernels.rotary import rotate_and_store
from bireme.engines.torch.kernels.row_wise import rms_norm, silu_times
from bireme.engines.torch.kernels.step_begin import begin_step
from bireme.engines.torch.kv_store import KvStore

if TYPE_CHECKING:
    from bireme.engines.torch.resident_decode import DecodeState

FAMILIES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})


@dataclass(frozen=True, slots=True)
class FusedLayer:
    attention_norm: Tensor
    qkv: Tensor  # ((H + 2 N) K, hidden)
    qkv_bias: Tensor | None
    output: Tensor  # (hidden, H K)
    mlp_norm: Tensor
    gate_up: Tensor  # (2 I, hidden)
    down: Tensor  # (hidden, I)
    rotary: Rotary
    scaling: float


@dataclass(frozen=True, slots=True)
class FusedWeights:
    embeddings: Tensor
    layers: tuple[FusedLayer, ...]
    norm: Tensor
    head: Tensor
    eps: float
    num_heads: int


def why_not_fused(model: Any) -> str:
    """Return what keeps a model from this decoder; empty: nothing does."""
    name, config = type(model).__name__, model.config
    if name not in FAMILIES:
        return f"{name} is not one of {', '.join(sorted(FAMILIES))}"
    layer = model.model.layers[0]
    if config.hidden_act != "silu":
        return f"hidden_act is {config.hidden_act}"
    if model.dtype not in (torch.bfloat16, torch.float32):
        return f"dtype is {str(model.dtype).removeprefix('torch.')}"
    if 2 * len(model.model.rotary_emb.inv_freq) != layer.self_attn.head_dim:
        return "only a part of each head is turned by its position"
    if layer.self_attn.o_proj.bias is not None or layer.mlp.down_proj.bias is not None:
        return "output projections have a bias"
    return ""


def fuse(model: Any, max_seq_len: int) -> FusedWeights:
    """Rearrange the weights of a model that `why_not_fused` has nothing against."""
    body = model.model
    device = body.embed_tokens.weight.device
    with torch.inference_mode(False), torch.no_grad():
        positions = torch.arange(max_seq_len, device=device)[None]
        cos, sin = body.rotary_emb(torch.zeros((), device=device), positions)  # float32, whatever the model's dtype
        half = cos.shape[-1] // 2
        cos_sin = torch.cat([cos[0, :, :half], sin[0, :, :half]], 1).contiguous()
        layers = tuple(_fuse_layer(layer, cos_sin) for layer in body.layers)
    return FusedWeights(
        body.embed_tokens.weight.detach(),
        layers,
        body.norm.weight.detach(),
        model.lm_head.weight.detach(),
        float(model.config.rms_norm_eps),
        int(model.config.num_attention_heads),
    )


def _fuse_layer(layer: Any, cos_sin: Tensor) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    eps = float(norms[0].variance_epsilon) if norms[0] is not None else 0.0
    return FusedLayer(
        attention_norm=layer.input_layernorm.weight.detach(),
        qkv=_join(projections),
        qkv_bias=None if projections[0].bias is None else torch.cat([part.bias for part in projections]),
        output=attention.o_proj.weight.detach(),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=_join((mlp.gate_proj, mlp.up_proj)),
        down=mlp.down_proj.weight.detach(),
        rotary=Rotary(cos_sin, eps, *(None if norm is None else norm.weight.detach() for norm in norms)),
        scaling=float(attention.scaling),
    )


def _join(parts: Sequence[Any]) -> Tensor:
    """Return the parts' weights as one matrix, of which they keep views."""
    joined = torch.cat([part.weight for part in parts])
    for part, own in zip(parts, joined.split([len(part.weight) for part in parts]), strict=True):
        part.weight.data = own
    return joined


class FusedDecoder:
    """Computes steps over the pools; used by the engine's thread."""

    def __init__(self, weights: FusedWeights, store: KvStore) -> None:
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
