"""The next token of every row, chosen on the GPU as logits/filters.py chooses it.

A threshold is found bit by bit instead of by a sort: the largest value that enough tokens, or enough probability, lie
at or above. One program a row; a greedy row only looks for the largest logit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.engines.torch.kernels.launch import chain, wait

# Columns of a slot's row, int32; floats by their bits.
NUM_PROMPT, TOP_K, SEED_LOW, SEED_HIGH, TEMPERATURE, TOP_P, MIN_P, NUM_COLUMNS = range(8)
UNUSABLE = -1  # in place of the token of a row whose logits are not finite


@triton.jit
def _order(x):
    """Return numbers that sort as these float32 do."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit  # type: ignore[untyped-decorator]
def _tile(logits, begin, size, TILE: tl.constexpr):
    at = begin + tl.arange(0, TILE)
    return tl.load(logits + at, at < size, -float("inf")).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _draw_kernel(
    logits,  # (R, V)
    steps,  # (R, step_stride): slot, position
    requests,  # (slots, 7)
    last,  # (slots,)
    tokens,  # (R,)
    step_stride,
    row_stride,
    size,
    TILE: tl.constexpr,
    BITS: tl.constexpr,  # of a logit, of its float32's 32
    CHAINED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wait(CHAINED)
    own = logits + row * row_stride
    slot = tl.load(steps + row * step_stride).to(tl.int64)
    settings = requests + slot * 7
    temperature = tl.load(settings + 4).to(tl.float32, bitcast=True)
    i = tl.arange(0, TILE)
    best = -float("inf")
    token = size
    num_bad = 0
    for begin in range(0, size, TILE):
        x = _tile(own, begin, size, TILE)
        num_bad += tl.sum(((x != x) | (x == float("inf"))).to(tl.int32), 0)
        top = tl.max(x, 0)
        where = tl.min(tl.where(x == top, begin + i, size), 0)
        token = tl.where(top > best, where, token)
        best = tl.maximum(best, top)
    is_usable = (num_bad == 0) & (best > -float("inf"))
    if is_usable & (temperature > 0):
        top_k = tl.load(settings + 1)
        top_p = tl.load(settings + 5).to(tl.float32, bitcast=True)
        min_p = tl.load(settings + 6).to(tl.float32, bitcast=True)
        least = tl.full([], -2147483648, tl.int32)  # in the order of `_order`
        if (top_k > 0) & (top_k < size):
            least = _largest_with(own, size, least, best, temperature, top_k.to(tl.float32), True, TILE, BITS)
        if top_p < 1:
            total = 0.0
            for begin in range(0, size, TILE):
                x = _tile(own, begin, size, TILE)
                total += tl.sum(tl.where(_order(x) >= least, tl.exp((x - best) / temperature), 0.0), 0)
            least = _largest_with(own, size, least, best, temperature, top_p * total, False, TILE, BITS)
        floor = tl.where(min_p > 0, tl.log(min_p), -float("inf"))
        whole = 0.0
        for begin in range(0, size, TILE):
            x = _tile(own, begin, size, TILE)
            scaled = (x - best) / temperature
            whole += tl.sum(tl.where((_order(x) >= least) & (scaled >= floor), tl.exp(scaled), 0.0), 0)
        position = tl.load(steps + row * step_stride + 1)
        target = _uniform(settings, position + 1 - tl.load(settings)) * whole
        below = (tl.cast(whole, tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
        target = tl.minimum(target, below)
        before = 0.0
        found = size
        likely = 0
        for begin in range(0, size, TILE):
            x = _tile(own, begin, size, TILE)
            scaled = (x - best) / temperature
            weight = tl.where((_order(x) >= least) & (scaled >= floor), tl.exp(scaled), 0.0)
            if found == size:
                reaches = (before + tl.cumsum(weight, 0) > target) & (weight > 0)
                found = tl.min(tl.where(reaches, begin + i, size), 0)
            likely = tl.maximum(likely, tl.max(tl.where(weight > 0, begin + i, 0), 0))
            before += tl.sum(weight, 0)
        token = tl.where(found == size, likely, found)  # sums in another order were a little smaller
    token = tl.where(is_usable, token, -1)
    tl.store(tokens + row, token)
    tl.store(last + slot, token)


@triton.jit  # type: ignore[untyped-decorator]
def _largest_with(
    own, size, least, best, temperature, enough, IS_COUNT: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr
):
    """Return the largest value that `enough` tokens, or weights, lie at or above, of those from `least` on."""
    top = _order(best)
    # Of numbers from 0: the sign bit of the order is turned over.
    found = tl.full([], 0, tl.uint32)
    for step in range(BITS):
        tried = found | (tl.full([], 1, tl.uint32) << (31 - step))
        bound = (tried ^ 0x80000000).to(tl.int32, bitcast=True)
        amount = 0.0
        for begin in range(0, size, TILE):
            x = _tile(own, begin, size, TILE)
            order = _order(x)
            weight = tl.full([TILE], 1.0, tl.float32)
            if not IS_COUNT:
                weight = tl.exp((x - best) / temperature)
            amount += tl.sum(tl.where((order >= bound) & (order >= least), weight, 0.0), 0)
        found = tl.where((amount >= enough) & (bound <= top), tried, found)
    return tl.maximum(least, (found ^ 0x80000000).to(tl.int32, bitcast=True))


@triton.jit
def _uniform(settings, draw):
    """Return the float32 of logits/random.py's number for this draw."""
    low = tl.load(settings + 2).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(settings + 3).to(tl.uint32, bitcast=True).to(tl.uint64)
    zero = tl.full([], 0, tl.uint32)
    first, second, _, _ = tl.philox((high << 32) | low, draw.to(tl.uint32), zero, zero, zero)
    word = ((first.to(tl.uint64) << 32) | second.to(tl.uint64)) >> 11
    return (word.to(tl.float64) * 1.1102230246251565e-16).to(tl.float32)


def draw(logits: Tensor, steps: Tensor, requests: Tensor, last: Tensor, tokens: Tensor, size: int) -> None:
    """Fill `tokens` (R,), and the rows' places in `last` (slots,), from logits (R, V), of which `size` are tokens.

    steps (R, 2 or more) int32: slot, and position of the row's token; requests (slots, 7) int32.
    """
    _draw_kernel[(len(logits),)](
        logits,
        steps,
        requests,
        last,
        tokens,
        steps.stride(0),
        logits.stride(0),
        size,
        TILE=min(8192, triton.next_power_of_2(size)),
        BITS=16 if logits.dtype == torch.bfloat16 else 32,
        num_warps=32 if size > 4096 else 4,
        **chain(logits),
    )
