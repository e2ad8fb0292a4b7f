"""Attention over paged KV instead of transformers' own: `AttentionInterface` calls `paged_attention`.

`PagedStep` is plain torch, for CPUs; `kernel_step.py` has its counterpart for GPUs.

All tokens of a step are one packed row; decode rows come first, then prefill chunks. The step's description is in a
context variable, because some model families drop keyword arguments. An argument that changes the result is honored or
refused, never ignored.

Shapes: T tokens, H query heads, N key/value heads, G = H / N, K head size of keys, V of values, L KV rows.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bireme.engines.torch.geometry import MOST_GATHERED_BYTES, MOST_SCORES, LayerGeometry
from bireme.engines.torch.step import ChunkView, DecodeView, GroupStep
from bireme.engines.torch.storage import E4M3, to_fp8

NAME = "bireme_paged"  # absent from transformers' mask functions, so that no dense mask is built


class AttentionStep(Protocol):
    """How the attention calls of one forward pass are computed."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, extras: Extras) -> Tensor:
        """query (1, H, T, K), key (1, N, T, K), value (1, N, T, V) -> (1, T, H, V)."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What a layer asks of attention beyond query, key and value."""

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None  # (H,)
    window: int = 0
    unknown: tuple[str, ...] = ()  # arguments given that this attention does not know


_LEAST_ROWS = 16  # whose scores are written out at once
current: ContextVar[AttentionStep] = ContextVar("bireme_attention_step")
# Some families give these; no effect here: positions are applied already, masks are the step's own.
_HARMLESS = frozenset(
    "position_ids use_cache is_causal output_attentions output_hidden_states cache_position position_embeddings "
    "output_router_logits past_key_values return_dict logits_to_keep".split()
)


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    unknown = tuple(name for name, given in others.items() if given is not None and name not in _HARMLESS)
    if attention_mask is not None:
        unknown += ("attention_mask",)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    extras = Extras(scale, softcap, s_aux, sliding_window or 0, unknown)
    return current.get().attend(module.layer_idx, query, key, value, extras), None


def register() -> None:
    """Register the function with transformers; may be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)


def store_rows(slots: Tensor, new: Tensor, pool: Tensor, scale: float = 1.0) -> None:
    """Put the keys or values (1, N, T, size) of a step's tokens into their pool rows. `scale`: of 8-bit floats."""
    rows = new[0].transpose(0, 1).reshape(len(slots), -1)
    if pool.dtype is E4M3:  # which torch does not copy by index
        pool.view(torch.uint8).index_copy_(0, slots, to_fp8(rows, scale).view(torch.uint8))
    else:
        pool.index_copy_(0, slots, rows.to(pool.dtype))


@dataclass(slots=True)
class PagedStep:
    """A forward pass over the pools: stores new keys and values, then attends."""

    keys: list[Tensor]  # per layer (pool rows, N * K)
    values: list[Tensor]  # per layer (pool rows, N * V)
    groups: list[GroupStep]  # per layer: its group's
    block_size: int

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, extras: Extras) -> Tensor:
        group, keys, values = self.groups[layer], self.keys[layer], self.values[layer]
        store_rows(group.slots, key, keys)
        store_rows(group.slots, value, values)
        parts = []
        if group.decode is not None:
            parts.append(self._decode(group.decode, query, key.shape[1], keys, values, extras))
        for chunk in group.chunks:
            parts.append(attend_chunk(chunk, query, key, value, keys, values, extras))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _decode(
        self, view: DecodeView, query: Tensor, num_kv: int, keys: Tensor, values: Tensor, extras: Extras
    ) -> Tensor:
        """Rows take turns: what is copied for them at once would else grow with the batch and its longest context."""
        row_bytes = view.num_blocks * self.block_size * _gathered_width(keys, values) * keys.element_size()
        most = max(1, MOST_GATHERED_BYTES // row_bytes)
        parts = [
            self._decode_rows(view, slice(begin, min(begin + most, view.num_rows)), query, num_kv, keys, values, extras)
            for begin in range(0, view.num_rows, most)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _decode_rows(
        self, view: DecodeView, own: slice, query: Tensor, num_kv: int, keys: Tensor, values: Tensor, extras: Extras
    ) -> Tensor:
        rows, heads, size = own.stop - own.start, query.shape[1], query.shape[3]
        length = view.num_blocks * self.block_size
        blocks = view.blocks[own.start * view.num_blocks : own.stop * view.num_blocks]
        query_BNGK = query[0, :, own].transpose(0, 1).reshape(rows, num_kv, heads // num_kv, size)
        key_BNLK = _gather(keys, blocks, self.block_size).view(rows, length, num_kv, -1).transpose(1, 2)
        value_BNLV = _gather(values, blocks, self.block_size).view(rows, length, num_kv, -1).transpose(1, 2)
        mask = None if view.mask is None else view.mask[own]
        if mask is None and view.last - view.first < length:
            key_BNLK, value_BNLV = key_BNLK[:, :, view.first : view.last], value_BNLV[:, :, view.first : view.last]
        if mask is not None:  # unseen rows may be NaN, left by a request that failed: NaN times 0 is NaN
            hidden_B1L1 = ~mask.transpose(2, 3)
            key_BNLK.masked_fill_(hidden_B1L1, 0)
            value_BNLV.masked_fill_(hidden_B1L1, 0)
        sinks = None if extras.sinks is None else extras.sinks.view(1, num_kv, -1, 1)
        out_BNGV = attend(query_BNGK, key_BNLK, value_BNLV, mask, extras, sinks)
        return out_BNGV.reshape(1, rows, heads, -1)


def attend_chunk(
    view: ChunkView, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, extras: Extras
) -> Tensor:
    """Attend of one prefill chunk, whose rows are in the pools; query (1, H, T, K) -> (1, tokens, H, V)."""
    num_kv, own = key.shape[1], slice(view.begin, view.end)
    if view.rows is None:
        key_1NLK, value_1NLV = key[:, :, own], value[:, :, own]
    else:
        key_1NLK = keys.index_select(0, view.rows).view(1, len(view.rows), num_kv, -1).transpose(1, 2)
        value_1NLV = values.index_select(0, view.rows).view(1, len(view.rows), num_kv, -1).transpose(1, 2)
    sinks = None if extras.sinks is None else extras.sinks.view(1, -1, 1, 1)
    found = attend(query[:, :, own], key_1NLK, value_1NLV, view.mask, extras, sinks, view.mask is None)
    return found.transpose(1, 2)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    extras: Extras,
    sinks: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Attention of (B, heads, T, K) over (B, N, L, K); heads may be a multiple of N.

    mask is true where visible; sinks broadcast to (B, heads, T, 1).
    """
    if extras.softcap is None and sinks is None:
        grouped = query.shape[1] != key.shape[1]
        causal, size = is_causal and query.shape[2] > 1, value.shape[3]
        if query.device.type == "cpu" and size < key.shape[3]:  # latent attention, whose scores torch would write out
            value = F.pad(value, (0, key.shape[3] - size))
        found = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=extras.scaling, enable_gqa=grouped
        )
        return found[..., :size]
    return _attend_in_parts(query, key, value, _causal(query, key) if is_causal else mask, extras, sinks)


def _attend_in_parts(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, extras: Extras, sinks: Tensor | None
) -> Tensor:
    """On a CPU a long prompt's scores are written out for some of its rows at a time."""
    if (repeats := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    size = query.shape[2]
    if query.device.type == "cpu":
        size = max(_LEAST_ROWS, MOST_SCORES // (query.shape[0] * query.shape[1] * key.shape[2]))
    parts = []
    for own in (slice(begin, begin + size) for begin in range(0, query.shape[2], size)):
        parts.append(_attend_eagerly(query[:, :, own], key, value, _rows(mask, own), extras, _rows(sinks, own)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _rows(each: Tensor | None, own: slice) -> Tensor | None:
    """Return what is of some query rows; one row is of all."""
    return each if each is None or each.shape[-2] == 1 else each[..., own, :]


def _attend_eagerly(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, extras: Extras, sinks: Tensor | None
) -> Tensor:
    """With softcap or sinks, which scaled_dot_product_attention does not have; as many heads of all."""
    scores = (query @ key.transpose(-1, -2)).mul_(extras.scaling)
    if extras.softcap is not None:
        scores = torch.tanh(scores / extras.softcap) * extras.softcap
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
    sinks = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1, dtype=torch.float32)[..., :-1]
    return weights.to(value.dtype) @ value


def _causal(query: Tensor, key: Tensor) -> Tensor:
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()


def _gathered_width(keys: Tensor, values: Tensor) -> int:
    """Return the values of a token that are copied: values that are narrower than keys twice, once padded."""
    padded = keys.shape[1] if values.shape[1] < keys.shape[1] else 0
    return int(keys.shape[1] + values.shape[1] + padded)


def _gather(pool: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    """Copy whole blocks: one index and one long move each, instead of one a token."""
    return pool.view(-1, block_size * pool.shape[1]).index_select(0, blocks)


@dataclass(slots=True)
class ProbeStep:
    """A forward pass without pools that records each layer's geometry."""

    seen: dict[int, LayerGeometry] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, extras: Extras) -> Tensor:
        self.seen[layer] = LayerGeometry(
            key.shape[1], key.shape[3], value.shape[3], extras.window, key.dtype, extras.unknown
        )
        sinks = None if extras.sinks is None else extras.sinks.view(1, -1, 1, 1)
        return attend(query, key, value, None, extras, sinks, is_causal=True).transpose(1, 2)


class SizingStep:
    """A forward pass without attention: its memory is what the rest of the model needs."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, extras: Extras) -> Tensor:
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
