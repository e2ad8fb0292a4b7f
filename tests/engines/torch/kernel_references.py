"""What each kernel computes, by torch's own operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bireme.engines.torch.geometry import ClampedGate, Rotary
from bireme.engines.torch.kernels.decode_attention import Scratch
from bireme.engines.torch.kernels.step_begin import FIRST_DRAFTED, NO_BLOCK, TAKE_LAST


def decode_attention(
    qkv: Tensor,
    rotary: Rotary,
    parts: Tensor,
    table: Tensor,
    keys: Tensor,
    values: Tensor,
    scratch: Scratch,
    block_size: int,
    num_heads: int,
    scaling: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same, row by row."""
    rows = sorted({tuple(part[:3]) for part in parts.tolist() if part[6]})
    own = table[[slot for _, slot, _ in rows]]
    position = torch.tensor([position for *_, position in rows], device=qkv.device)
    slots = own.gather(1, (position // block_size)[:, None]).long()[:, 0] * block_size + position % block_size
    turned = rotate_and_store(
        qkv,
        rotary.q_norm,
        rotary.k_norm,
        rotary.eps,
        rotary.cos_sin,
        position,
        slots,
        keys,
        values,
        num_heads,
    )
    num_kv = keys.shape[1] // rotary.cos_sin.shape[1]
    query, lengths = turned[:, :num_heads], position + 1
    settings = (block_size, num_kv, scaling, window, softcap or None, sinks)
    return paged_decode(query, keys, values, own, lengths, *settings).flatten(1)


def choose_experts(logits: Tensor, top_k: int, is_normed: bool) -> tuple[Tensor, Tensor]:
    shares, chosen = logits.softmax(-1, dtype=torch.float32).topk(top_k)
    return chosen.int(), shares / shares.sum(-1, keepdim=True) if is_normed else shares


def experts_linear(
    x: Tensor,
    weight: Tensor,
    chosen: Tensor,
    is_gated: bool = False,
    is_gelu: bool = False,
    bias: Tensor | None = None,
    clamp: ClampedGate | None = None,
) -> Tensor:
    """The same in float32; chosen (P,)."""
    rows = x.repeat_interleave(len(chosen) // len(x), 0).float()
    result = torch.stack([weight[expert].float() @ row for expert, row in zip(chosen.tolist(), rows, strict=True)])
    if bias is not None:
        result += bias[chosen.long()].float()
    if clamp is not None and is_gated:
        own, up = result[:, ::2].clamp(max=clamp.limit), result[:, 1::2].clamp(-clamp.limit, clamp.limit)
        return (own * torch.sigmoid(clamp.alpha * own) * (up + 1)).to(x.dtype)
    return (gate(result, is_gelu) if is_gated else result).to(x.dtype)


def add_shares(found: Tensor, shares: Tensor, x: Tensor) -> Tensor:
    """The same; `x` is left alone."""
    parts = found.float().view(*shares.shape, -1) * shares[..., None]
    return (x.float() + parts.sum(1)).to(x.dtype)


def add_row_experts(
    x: Tensor,
    norm: Tensor,
    eps: float,
    chosen: Tensor,
    shares: Tensor,
    gate_up: Tensor,
    down: Tensor,
    is_gelu: bool = False,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    clamp: ClampedGate | None = None,
) -> Tensor:
    """The same in float32; `x` is left alone."""
    normed = F.rms_norm(x.float(), (x.shape[1],), norm.float(), eps)
    inner = experts_linear(normed, gate_up, chosen.view(-1), True, is_gelu, gate_up_bias, clamp).to(x.dtype)
    return add_shares(experts_linear(inner.float(), down, chosen.view(-1), bias=down_bias), shares, x)


def few_rows_linear(
    x: Tensor, weight: Tensor, is_gated: bool = False, is_gelu: bool = False, add_to: Tensor | None = None
) -> Tensor:
    """The same in float32; `add_to` is left alone."""
    result = F.linear(x.float(), weight.float())
    if is_gated:
        result = gate(result, is_gelu)
    return (result if add_to is None else add_to.float() + result).to(x.dtype)


def one_row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    is_gated: bool = False,
    is_gelu: bool = False,
    add_to: Tensor | None = None,
) -> Tensor:
    """The same in float32; `add_to` is left alone."""
    wide = x.float()
    if norm is not None:
        wide = F.rms_norm(wide, (x.shape[1],), norm.float(), eps)
    result = F.linear(wide, weight.float(), None if bias is None else bias.float())
    if is_gated:
        result = gate(result, is_gelu)
    return (result if add_to is None else add_to.float() + result).to(x.dtype)


def packed_prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    query_begins: Tensor,
    key_begins: Tensor,
    longest_query: int,
    num_kv_heads: int,
    scaling: float,
    window: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    parts: int = 1,
) -> Tensor:
    """The same, token by token, in float32."""
    found, repeats = [], query.shape[1] // num_kv_heads
    own, seen = query_begins.tolist(), key_begins.tolist()
    for chunk in range(len(own) - 1):
        slots = rows[seen[chunk] : seen[chunk + 1]]
        key, value = (
            pool[slots].view(len(slots), num_kv_heads, -1).repeat_interleave(repeats, 1).float()
            for pool in (keys, values)
        )
        before = len(slots) - (own[chunk + 1] - own[chunk])
        for index, one in enumerate(query[own[chunk] : own[chunk + 1]]):
            last = before + index + 1
            part = slice(max(0, last - window) if window else 0, last)
            scores = torch.einsum("hk,lhk->hl", one.float(), key[part]) * scaling
            found.append(torch.einsum("hl,lhv->hv", _weights(scores, softcap, sinks), value[part]))
    return torch.stack(found).to(query.dtype)


def _weights(scores: Tensor, softcap: float | None, sinks: Tensor | None) -> Tensor:
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None]], 1)
    return scores.softmax(-1)[:, : scores.shape[1] - (sinks is not None)]


def paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    block_size: int,
    num_kv_heads: int,
    scaling: float,
    window: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same, row by row, in float32."""
    rows, repeats = [], query.shape[1] // num_kv_heads
    for one, blocks, length in zip(query, table.long(), lengths.tolist(), strict=True):
        at = torch.arange(max(0, length - window) if window else 0, length, device=query.device)
        slots = blocks[at // block_size] * block_size + at % block_size
        key, value = (
            pool[slots].view(len(at), num_kv_heads, -1).repeat_interleave(repeats, 1).float() for pool in (keys, values)
        )
        scores = torch.einsum("hk,lhk->hl", one.float(), key) * scaling
        rows.append(torch.einsum("hl,lhv->hv", _weights(scores, softcap, sinks), value))
    return torch.stack(rows).to(query.dtype)


def rotate_and_store(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
) -> Tensor:
    tokens, size = len(qkv), cos_sin.shape[1]
    num_kv = keys.shape[1] // size
    heads = qkv.view(tokens, -1, size).float()
    query, key, value = heads.split([num_heads, num_kv, num_kv], 1)
    if q_norm is not None and k_norm is not None:
        query, key = F.rms_norm(query, (size,), q_norm.float(), eps), F.rms_norm(key, (size,), k_norm.float(), eps)
    both = torch.cat([query, key], 1)
    cos, sin = cos_sin[positions].float().chunk(2, -1)
    cos, sin = torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]
    out = (both * cos + both.roll(size // 2, -1) * sin).to(qkv.dtype)
    keys[slots], values[slots] = out[:, num_heads:].flatten(1), value.flatten(1).to(values.dtype)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, add_to: Tensor | None = None) -> Tensor:
    """The same; `add_to` is left alone."""
    normed = F.rms_norm(x.float(), (x.shape[1],), weight.float(), eps)
    return (normed if add_to is None else add_to.float() + normed).to(x.dtype)


def gate(gate_up: Tensor, is_gelu: bool = False) -> Tensor:
    own, up = gate_up.float().chunk(2, -1)
    return ((F.gelu(own, approximate="tanh") if is_gelu else F.silu(own)) * up).to(gate_up.dtype)


def cap(x: Tensor, softcap: float) -> Tensor:
    """The same; `x` is left alone."""
    return (softcap * torch.tanh(x.float() / softcap)).to(x.dtype)


def begin_step(steps: Tensor, tables: Tensor, last: Tensor, embeddings: Tensor, drafted: Tensor) -> Tensor:
    tokens = []
    for slot, _, token, *blocks in steps.tolist():
        for group, (column, block) in enumerate(zip(blocks[::2], blocks[1::2], strict=True)):
            if column != NO_BLOCK:
                tables[group, slot, column] = block
        if token <= FIRST_DRAFTED:
            token = max(0, int(drafted[FIRST_DRAFTED - token]))
        tokens.append(int(last[slot]) if token == TAKE_LAST else token)
    return embeddings[tokens]
