"""The next token of every row, chosen on the GPU as logits/filters.py chooses it.

A threshold is found without a sort: the range of values that it lies in is cut to a quarter or less in each pass over
the logits. The draw looks for noise in tiles alone that can hold the winner. One program a row; a greedy row only looks
for the largest logit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl
from torch import Tensor

from bireme.engines.torch.kernels.launch import chain, wait
from bireme.logits.rows import Row
from bireme.logits.sending import send

# Columns of a slot's row, int32; floats by their bits.
NUM_PROMPT, TOP_K, SEED_LOW, SEED_HIGH, TEMPERATURE, TOP_P, MIN_P, NUM_COLUMNS = range(8)
UNUSABLE = -1  # in place of the token of a row whose logits are not finite
_INFINITE = tl.constexpr(0x7F800000)  # the bits of infinity
_BLOCK = tl.constexpr(256)  # as in logits/random.py
_LANE = tl.constexpr(8)  # neighboring tokens of a thread


@triton.jit  # type: ignore[untyped-decorator]
def _tile(logits, begin, size, TILE: tl.constexpr):
    """Return a tile's token ids and logits, both (TILE / 8, 8)."""
    ids = begin + tl.arange(0, TILE // _LANE)[:, None] * _LANE + tl.arange(0, _LANE)[None, :]
    return ids, tl.load(logits + ids, ids < size, -float("inf")).to(tl.float32)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["step_stride"], do_not_specialize_on_alignment=["steps", "requests", "last", "tokens"]
)
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
    CHAINED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wait(CHAINED)
    own = logits + row * row_stride
    slot = tl.load(steps + row * step_stride).to(tl.int64)
    settings = requests + slot * 7
    temperature = tl.load(settings + 4).to(tl.float32, bitcast=True)
    tops = tl.full([TILE // _LANE], -float("inf"), tl.float32)
    places = tl.full([TILE // _LANE], 0, tl.int32) + size
    bad = tl.full([TILE // _LANE], 0, tl.int32)
    for begin in range(0, size, TILE):
        ids, x = _tile(own, begin, size, TILE)
        bad |= tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 1)
        top = tl.max(x, 1)
        where = tl.min(tl.where(x == top[:, None], ids, size), 1)
        places = tl.where(top > tops, where, places)
        tops = tl.maximum(tops, top)
    best = tl.max(tops, 0)
    token = tl.min(tl.where(tops == best, places, size), 0)
    is_usable = (tl.max(bad, 0) == 0) & (best > -float("inf"))
    if is_usable & (temperature > 0):
        scale = tl.div_rn(1.0, temperature)
        top_k = tl.load(settings + 1)
        top_p = tl.load(settings + 5).to(tl.float32, bitcast=True)
        min_p = tl.load(settings + 6).to(tl.float32, bitcast=True)
        limit = tl.full([], _INFINITE, tl.int32)
        if (top_k > 0) & (top_k < size):
            limit = _least_limit(own, size, limit, best, scale, top_k.to(tl.float32), True, TILE)
        if top_p < 1:
            sums = tl.zeros([TILE // _LANE], tl.float32)
            for begin in range(0, size, TILE):
                ids, x = _tile(own, begin, size, TILE)
                below = (best - x) * scale
                sums += tl.sum(tl.where(_bits(below) <= limit, tl.exp(-below), 0.0), 1)
            enough = tl.maximum(top_p * tl.sum(sums, 0), 1e-30)  # the likeliest token at least
            limit = _least_limit(own, size, limit, best, scale, enough, False, TILE)
        if min_p > 0:
            limit = tl.minimum(limit, _bits(tl.abs(tl.log(min_p))))
        position = tl.load(steps + row * step_stride + 1)
        token = _largest_with_noise(own, size, settings, position, token, limit, best, scale, TILE)
    token = tl.where(is_usable, token, -1)
    tl.store(tokens + row, token)
    tl.store(last + slot, token)


@triton.jit
def _bits(x):
    """Return what sorts as these float32 from 0 on do."""
    return x.to(tl.int32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _least_limit(own, size, limit, best, scale, enough, IS_COUNT: tl.constexpr, TILE: tl.constexpr):
    """Return how far below the likeliest, at most `limit`, `enough` tokens, or weights, are found; by its bits."""
    low, high = tl.full([], -1, tl.int32), limit  # too few are found up to the one, enough up to the other
    while high - low > 1:
        quarter = tl.maximum((high - low) // 4, 1)
        one, two, three = low + quarter, low + (high - low) // 2, high - quarter
        ones = tl.zeros([TILE // _LANE], tl.float32)
        twos, threes = ones, ones
        first = tl.full([TILE // _LANE], _INFINITE, tl.int32)
        final = tl.full([TILE // _LANE], -1, tl.int32)
        for begin in range(0, size, TILE):
            ids, x = _tile(own, begin, size, TILE)
            below = (best - x) * scale
            bits = _bits(below)
            weight = tl.full([TILE // _LANE, _LANE], 1.0, tl.float32)
            if not IS_COUNT:
                weight = tl.exp(-below)
            ones += tl.sum(tl.where(bits <= one, weight, 0.0), 1)
            twos += tl.sum(tl.where(bits <= two, weight, 0.0), 1)
            threes += tl.sum(tl.where(bits <= three, weight, 0.0), 1)
            first = tl.minimum(first, tl.min(tl.where(bits > low, bits, _INFINITE), 1))
            final = tl.maximum(final, tl.max(tl.where(bits <= high, bits, -1), 1))
        is_one, is_two, is_three = tl.sum(ones, 0) >= enough, tl.sum(twos, 0) >= enough, tl.sum(threes, 0) >= enough
        bound = tl.where(is_one, low, tl.where(is_two, one, tl.where(is_three, two, three)))
        high = tl.where(is_one, one, tl.where(is_two, two, tl.where(is_three, three, high)))
        low = tl.maximum(bound, tl.min(first, 0) - 1)  # to the values that there are
        high = tl.minimum(high, tl.max(final, 0))
    return high


@triton.jit  # type: ignore[untyped-decorator]
def _largest_with_noise(own, size, settings, position, token, limit, best, scale, TILE: tl.constexpr):
    """Return the token with the largest score; `token` is the likeliest, whose score the others have to exceed."""
    key, other = _key(settings, position + 1 - tl.load(settings))
    own_block = (token // _BLOCK).to(tl.uint32)
    own_least = _least(own_block, key, other)
    own_e = _exponential(_mix(token.to(tl.uint32), key, other))
    score = -tl.log(own_least + tl.where(_member(own_block, key, other) == token % _BLOCK, 0.0, own_e))
    firsts, member = tl.arange(0, TILE // _BLOCK) * _BLOCK, tl.arange(0, _BLOCK)
    for begin in range(0, size, TILE):
        ids = begin + firsts[:, None] + member[None, :]
        below = (best - tl.load(own + ids, ids < size, -float("inf")).to(tl.float32)) * scale
        numbers = ((begin + firsts) // _BLOCK).to(tl.uint32)
        least = _least(numbers, key, other)
        least_below = tl.min(below, 1)
        bounds = tl.where(_bits(least_below) <= limit, -least_below - tl.log(least), -float("inf"))
        if tl.max(bounds, 0) > score:
            members = _member(numbers, key, other)
            e = _exponential(_mix(ids.to(tl.uint32), key, other))
            e = tl.where(member[None, :] == members[:, None], 0.0, e) + least[:, None]
            scores = tl.where(_bits(below) <= limit, -below - tl.log(e), -float("inf"))
            top = tl.max(scores)
            where = tl.min(tl.where(scores == top, ids, size))
            token = tl.where(top > score, where, token)
            score = tl.maximum(score, top)
    return token


@triton.jit
def _key(settings, draw):
    """Return the key of logits/random.py for this draw."""
    low = tl.load(settings + 2).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(settings + 3).to(tl.uint32, bitcast=True).to(tl.uint64)
    zero = tl.full([], 0, tl.uint32)
    first, second, _, _ = tl.philox((high << 32) | low, draw.to(tl.uint32), zero, zero, zero)
    return first, second


@triton.jit
def _mix(words, key, other):
    words += key
    words ^= words >> 16
    words *= 0x7FEB352D
    words ^= words >> 15
    words ^= other
    words *= 0x846CA68B
    return words ^ (words >> 16)


@triton.jit
def _least(blocks, key, other):
    return _exponential(_mix(blocks | 0x80000000, key, other)) / _BLOCK


@triton.jit
def _member(blocks, key, other):
    return (_mix(blocks | 0xC0000000, key, other) >> 24).to(tl.int32)


@triton.jit
def _exponential(words):
    share = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    return tl.where(share < 0.000244140625, share + share * share * 0.5, -tl.log(1.0 - share))


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
        TILE=max(256, min(8192, triton.next_power_of_2(size))),
        num_warps=32 if size > 4096 else 4,
        **chain(logits),
    )


def draw_rows(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """Return a token for each row of logits (R, V) that are not of a step."""
    found: list[int] = start_draw(logits, rows).tolist()
    return found


def start_draw(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Return the tokens on the device, int32, without waiting for them."""
    told = np.array([[at, row.num_output - 1] for at, row in enumerate(rows)], dtype=np.int32)
    asked = np.stack([request_columns(row, 0) for row in rows])
    both = send(np.concatenate([told, asked], 1), logits.device)
    last, tokens = both.new_empty(2, len(rows))
    draw(logits, both, both[:, 2:].contiguous(), last, tokens, logits.shape[1])
    return tokens


def step_columns(row: Row, num_prompt: int) -> npt.NDArray[np.int32]:
    """Return a slot's row for the draws of steps: of one that is chosen again each time the cheapest."""
    columns = request_columns(row, num_prompt)
    columns[TEMPERATURE] *= not row.is_always_edited
    return columns


def request_columns(row: Row, num_prompt: int) -> npt.NDArray[np.int32]:
    """Return a row's parameters for the kernel."""
    seed = np.array([row.seed & 0xFFFFFFFF, row.seed >> 32], dtype=np.uint32).view(np.int32)
    floats = np.array([row.temperature, row.top_p, row.min_p], dtype=np.float32).view(np.int32)
    return np.array([num_prompt, row.top_k, *seed, *floats], dtype=np.int32)
