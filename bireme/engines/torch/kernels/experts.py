"""A mixture of experts: the MLP of a token is made of the few experts that its router chooses.

E experts; P = R * top_k pairs of a token and an expert, token by token. Pairs are computed in tiles that share an
expert, so that its weights are read once for all of a tile. Nothing is read back by the host and shapes depend on R
alone: there are as many tiles as there can be at most, and programs of unused ones end at once. Products of experts
that nobody has chosen are neither computed nor read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.engines.torch.geometry import ClampedGate
from bireme.engines.torch.kernels.launch import chain, wait
from bireme.engines.torch.kernels.paged_decode import precision
from bireme.engines.torch.kernels.row_wise import gated_up

_SINGLE_ROWS = 4  # up to here each pair is a tile: so few seldom share an expert
_MANY_PAIRS = 32  # an expert, on average: larger tiles
UNUSED = -1  # in place of a tile's expert


@triton.jit  # type: ignore[untyped-decorator]
def _choose_kernel(
    logits,  # (R, E)
    chosen,  # (R, TOP)
    shares,  # (R, TOP)
    E: tl.constexpr,
    TOP: tl.constexpr,
    PAD_E: tl.constexpr,
    PAD_TOP: tl.constexpr,
    IS_NORMED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row, e, t = tl.program_id(0).to(tl.int64), tl.arange(0, PAD_E), tl.arange(0, PAD_TOP)
    wait(CHAINED)
    logit = tl.load(logits + row * E + e, e < E, -float("inf")).to(tl.float32)
    likely = tl.exp(logit - tl.max(logit, 0))
    likely = likely / tl.sum(likely, 0)
    left = tl.where(e < E, likely, -1.0)
    experts = tl.zeros([PAD_TOP], tl.int32)
    weights = tl.zeros([PAD_TOP], tl.float32)
    for place in tl.static_range(TOP):
        most = tl.max(left, 0)
        # Of logits that are not numbers some expert, too: their row's result is no number either.
        expert = tl.min(tl.where(left == most, e, E - 1), 0)
        weight = tl.sum(tl.where(e == expert, likely, 0.0), 0)
        experts = tl.where(t == place, expert, experts)
        weights = tl.where(t == place, weight, weights)
        left = tl.where(e == expert, -1.0, left)
    if IS_NORMED:
        weights = weights / tl.sum(weights, 0)
    tl.store(chosen + row * TOP + t, experts, t < TOP)
    tl.store(shares + row * TOP + t, weights, t < TOP)


def choose_experts(logits: Tensor, top_k: int, is_normed: bool) -> tuple[Tensor, Tensor]:
    """logits (R, E) -> experts (R, top_k) int32, the likeliest first, and their weights (R, top_k) float32."""
    rows, experts = logits.shape
    chosen = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    shares = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    _choose_kernel[(rows,)](
        logits,
        chosen,
        shares,
        E=experts,
        TOP=top_k,
        PAD_E=triton.next_power_of_2(experts),
        PAD_TOP=triton.next_power_of_2(top_k),
        IS_NORMED=is_normed,
        num_warps=1,
        **chain(logits),
    )
    return chosen, shares


@dataclass(frozen=True, slots=True)
class Tiles:
    """Which pairs are computed together."""

    chosen: Tensor  # (R, top_k) int32
    experts: Tensor  # (tiles,) int32; UNUSED: none
    pairs: Tensor | None  # (tiles * rows,) int32, P in place of none; None: tile t is pair t
    rows: int  # pairs of a tile

    @property
    def num_pairs(self) -> int:
        return int(self.chosen.numel())


@triton.jit(do_not_specialize=["num_pairs"])  # type: ignore[untyped-decorator]
def _group_kernel(
    chosen,  # (P,)
    experts,  # (tiles,)
    pairs,  # (tiles * ROWS,)
    num_pairs,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    expert, i, r = tl.program_id(0), tl.arange(0, TILE), tl.arange(0, ROWS)
    wait(CHAINED)
    before = tl.zeros([TILE], tl.int32)
    own = tl.zeros([TILE], tl.int32)
    for begin in range(0, num_pairs, TILE):
        of = tl.load(chosen + begin + i, begin + i < num_pairs, 1 << 30)
        before += (of < expert).to(tl.int32)
        own += (of == expert).to(tl.int32)
    num_before, num_own = tl.sum(before, 0), tl.sum(own, 0)
    # One tile more than whole ones: room for what an expert has beyond its whole tiles, without knowing the others'.
    first = num_before // ROWS + expert
    end = (num_before + num_own) // ROWS + expert + 1
    used = (num_own + ROWS - 1) // ROWS
    for tile in range(first, end):
        tl.store(experts + tile, tl.where(tile < first + used, expert, -1))
    done = first * ROWS
    for begin in range(0, num_pairs, TILE):
        of = tl.load(chosen + begin + i, begin + i < num_pairs, 1 << 30)
        is_own = (of == expert).to(tl.int32)
        tl.store(pairs + done + tl.cumsum(is_own, 0) - 1, begin + i, is_own > 0)
        done += tl.sum(is_own, 0)
    tl.store(pairs + done + r, num_pairs + tl.zeros([ROWS], tl.int32), done + r < (first + used) * ROWS)


def group_pairs(chosen: Tensor, num_experts: int) -> Tiles:
    """chosen (R, top_k) int32 -> tiles, each of one expert."""
    rows, num_pairs = len(chosen), chosen.numel()
    if rows <= _SINGLE_ROWS:
        return Tiles(chosen, chosen.view(-1), None, 16)
    tile_rows = 64 if num_pairs // num_experts >= _MANY_PAIRS else 16
    num_tiles = num_pairs // tile_rows + num_experts
    experts = torch.empty(num_tiles, dtype=torch.int32, device=chosen.device)
    pairs = torch.empty(num_tiles * tile_rows, dtype=torch.int32, device=chosen.device)
    _group_kernel[(num_experts,)](chosen, experts, pairs, num_pairs, ROWS=tile_rows, TILE=1024, **chain(chosen))
    return Tiles(chosen, experts, pairs, tile_rows)


@triton.jit  # type: ignore[untyped-decorator]
def rows_of(expert, n, width, IS_GATED: tl.constexpr, IN_TURNS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return where rows n of an expert begin among those of all, and how many rows behind them those of up are."""
    if IN_TURNS and IS_GATED:
        return (expert * width + n) * 2, width * 0 + 1
    if IS_GATED:
        return expert * 2 * width + n, width
    return expert * width + n, width * 0


@triton.jit(do_not_specialize=["num_pairs"])  # type: ignore[untyped-decorator]
def _experts_kernel(
    x,  # (P / PAIRS, K)
    weight,  # (E, N, K), gated: (E, 2 N, K)
    bias,  # (E, N), gated: (E, 2 N)
    out,  # (P, N)
    experts,
    pairs,
    num_pairs,
    N,
    K: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LIMIT: tl.constexpr,  # of a clamped gate, whose rows of gate and up take turns
    ALPHA: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    n, tile = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N), tl.program_id(1)
    k, r = tl.arange(0, TILE_K), tl.arange(0, ROWS)
    wait(CHAINED)
    expert = tl.load(experts + tile).to(tl.int64)
    if expert >= 0:
        if IS_GROUPED:
            pair = tl.load(pairs + tile * ROWS + r)
        else:
            pair = tl.where(r == 0, tile, num_pairs)
        is_row, is_own = (n < N)[:, None], (pair < num_pairs)[None, :]
        of = x + (pair // PAIRS).to(tl.int64)[None, :] * K
        width = N.to(tl.int64)
        first, up = rows_of(expert, n, width, IS_GATED, LIMIT > 0)
        at = weight + first[:, None] * K + k[None, :]
        result = tl.zeros([TILE_N, ROWS], tl.float32)
        gated = tl.zeros([TILE_N, ROWS], tl.float32)
        for begin in range(0, K, TILE_K):
            is_there = begin + k < K
            w = tl.load(at + begin, is_row & is_there[None, :], 0.0)
            some = tl.load(of + (begin + k)[:, None], is_there[:, None] & is_own, 0.0)
            result = tl.dot(w, some, result, input_precision=PRECISION)
            if IS_GATED:
                u = tl.load(at + up * K + begin, is_row & is_there[None, :], 0.0)
                gated = tl.dot(u, some, gated, input_precision=PRECISION)
        if HAS_BIAS:
            result += tl.load(bias + first, n < N, 0.0).to(tl.float32)[:, None]
            if IS_GATED:
                gated += tl.load(bias + first + up, n < N, 0.0).to(tl.float32)[:, None]
        if IS_GATED:
            result = gated_up(result, gated, IS_GELU, LIMIT, ALPHA)
        to = out + pair.to(tl.int64)[None, :] * width + n[:, None]
        tl.store(to, result.to(out.dtype.element_ty), is_row & is_own)


def experts_linear(
    x: Tensor,
    weight: Tensor,
    tiles: Tiles,
    is_gated: bool = False,
    is_gelu: bool = False,
    bias: Tensor | None = None,
    clamp: ClampedGate | None = None,
) -> Tensor:
    """x (R, K) of tokens or (P, K) of pairs, weight (E, N, K) -> (P, N): each pair's product with its expert's weights.

    Gated: weight is (E, 2 N, K), gate above up, and the result is silu(gate) * up, or with tanh's approximation of
    GELU; with `clamp` it is that gate's. The bias (E, N), gated (E, 2 N), has the order of the weight's rows.
    """
    size, width = x.shape[1], weight.shape[1] // 2 if is_gated else weight.shape[1]
    out = torch.empty(tiles.num_pairs, width, dtype=x.dtype, device=x.device)
    is_large = tiles.rows > 16
    tile_n, tile_k = _tile_sizes(tiles, is_gated)
    _experts_kernel[(triton.cdiv(width, tile_n), len(tiles.experts))](
        x,
        weight,
        weight if bias is None else bias,
        out,
        tiles.experts,
        tiles.experts if tiles.pairs is None else tiles.pairs,
        tiles.num_pairs,
        width,
        K=size,
        PAIRS=tiles.num_pairs // len(x),
        ROWS=tiles.rows,
        TILE_N=tile_n,
        TILE_K=min(tile_k * 2 // x.dtype.itemsize, max(16, triton.next_power_of_2(size))),
        IS_GROUPED=tiles.pairs is not None,
        IS_GATED=is_gated,
        IS_GELU=is_gelu,
        HAS_BIAS=bias is not None,
        **of_clamp(clamp),
        PRECISION=precision(x.dtype),
        num_warps=8 if is_large else 4,
        num_stages=4 if is_gated and not is_large else 3,
        **chain(tiles.chosen),
    )
    return out


def _tile_sizes(tiles: Tiles, is_gated: bool) -> tuple[int, int]:
    """Return a tile's rows of the weight and its columns, of two bytes each."""
    if tiles.rows > 16:
        return 128, 64
    return 64 if tiles.pairs is not None else 32, 128 if is_gated else 256  # as few pairs leave programs idle


@triton.jit  # type: ignore[untyped-decorator]
def _add_shares_kernel(
    found,  # (P, W)
    shares,  # (P,)
    x,  # (R, W)
    W,
    TOP: tl.constexpr,
    TILE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    wait(CHAINED)
    total = tl.load(x + row * W + at, at < W, 0.0).to(tl.float32)
    for place in tl.static_range(TOP):
        pair = row * TOP + place
        total += tl.load(shares + pair) * tl.load(found + pair * W + at, at < W, 0.0).to(tl.float32)
    tl.store(x + row * W + at, total.to(x.dtype.element_ty), at < W)


def add_shares(found: Tensor, shares: Tensor, x: Tensor) -> None:
    """Add to x (R, W), in place, the sum of its pairs in found (P, W), each times its share (R, top_k)."""
    rows, width = x.shape
    grid = (rows, triton.cdiv(width, 512))
    _add_shares_kernel[grid](found, shares, x, width, TOP=shares.shape[1], TILE=512, num_warps=2, **chain(x))


@triton.jit  # type: ignore[untyped-decorator]
def _gated_row_kernel(
    x,  # (K,)
    weight,  # (E, 2 N, K)
    norm,  # (K,)
    bias,  # (E, 2 N)
    chosen,  # (TOP,)
    out,  # (TOP, N)
    eps,
    N,
    K: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    IS_GELU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    CHAINED: tl.constexpr,
):
    n, k, place = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N), tl.arange(0, TILE_K), tl.program_id(1)
    is_row = (n < N)[:, None]
    width = N.to(tl.int64)
    wait(CHAINED)
    first, up = rows_of(tl.load(chosen + place).to(tl.int64), n, width, True, LIMIT > 0)
    at = weight + first[:, None] * K + k[None, :]
    sums = tl.zeros([TILE_N, TILE_K], tl.float32)
    ups = tl.zeros([TILE_N, TILE_K], tl.float32)
    squares = tl.zeros([TILE_K], tl.float32)
    for begin in range(0, K, TILE_K):
        is_there = begin + k < K
        one = tl.load(x + begin + k, is_there, 0.0).to(tl.float32)
        squares += one * one
        one = one * tl.load(norm + begin + k, is_there, 0.0).to(tl.float32)
        sums += tl.load(at + begin, is_row & is_there[None, :], 0.0).to(tl.float32) * one[None, :]
        ups += tl.load(at + up * K + begin, is_row & is_there[None, :], 0.0).to(tl.float32) * one[None, :]
    scale = 1 / tl.sqrt(tl.sum(squares, 0) / K + eps)
    result, gated = tl.sum(sums, 1) * scale, tl.sum(ups, 1) * scale
    if HAS_BIAS:
        result += tl.load(bias + first, n < N, 0.0).to(tl.float32)
        gated += tl.load(bias + first + up, n < N, 0.0).to(tl.float32)
    result = gated_up(result, gated, IS_GELU, LIMIT, ALPHA)
    tl.store(out + place * N + n, result.to(out.dtype.element_ty), n < N)


@triton.jit  # type: ignore[untyped-decorator]
def _add_row_kernel(
    inner,  # (TOP, K)
    weight,  # (E, N, K)
    bias,  # (E, N)
    chosen,  # (TOP,)
    shares,  # (TOP,)
    x,  # (N,)
    N,
    K: tl.constexpr,
    TOP: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    n, k = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N), tl.arange(0, TILE_K)
    is_row = (n < N)[:, None]
    width = N.to(tl.int64)
    wait(CHAINED)
    sums = tl.zeros([TILE_N, TILE_K], tl.float32)
    result = tl.load(x + n, n < N, 0.0).to(tl.float32)
    for place in tl.static_range(TOP):
        first = tl.load(chosen + place).to(tl.int64) * width + n
        at = weight + first[:, None] * K + k[None, :]
        share = tl.load(shares + place)
        if HAS_BIAS:
            result += share * tl.load(bias + first, n < N, 0.0).to(tl.float32)
        for begin in range(0, K, TILE_K):
            is_there = begin + k < K
            one = tl.load(inner + place * K + begin + k, is_there, 0.0).to(tl.float32) * share
            sums += tl.load(at + begin, is_row & is_there[None, :], 0.0).to(tl.float32) * one[None, :]
    result += tl.sum(sums, 1)
    tl.store(x + n, result.to(x.dtype.element_ty), n < N)


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
) -> None:
    """Add to x (1, hidden), in place, what these experts make of it, each times its share.

    norm (hidden,): of the RMS norm that x goes through first; chosen and shares (1, top_k).
    """
    size, inner_size, top_k = x.shape[1], down.shape[2], chosen.numel()
    inner = torch.empty(top_k, inner_size, dtype=x.dtype, device=x.device)
    tile_k = min(2048, triton.next_power_of_2(size))
    _gated_row_kernel[(triton.cdiv(inner_size, 4096 // tile_k), top_k)](
        x,
        gate_up,
        norm,
        norm if gate_up_bias is None else gate_up_bias,
        chosen,
        inner,
        eps,
        inner_size,
        K=size,
        TILE_N=4096 // tile_k,
        TILE_K=tile_k,
        IS_GELU=is_gelu,
        HAS_BIAS=gate_up_bias is not None,
        **of_clamp(clamp),
        num_warps=4,
        **chain(x),
    )
    tile_k = min(1024, triton.next_power_of_2(inner_size))
    _add_row_kernel[(triton.cdiv(size, 4096 // tile_k),)](
        inner,
        down,
        norm if down_bias is None else down_bias,
        chosen,
        shares,
        x,
        size,
        K=inner_size,
        TOP=top_k,
        TILE_N=4096 // tile_k,
        TILE_K=tile_k,
        HAS_BIAS=down_bias is not None,
        num_warps=4,
        **chain(x),
    )


def of_clamp(clamp: ClampedGate | None) -> dict[str, float]:
    return {"LIMIT": 0.0, "ALPHA": 0.0} if clamp is None else {"LIMIT": clamp.limit, "ALPHA": clamp.alpha}
