"""Products with 4-bit integers in groups (`storage.Int4Weight`): of few rows, and the plain weight for many.

The weights are the left operand of a tensor core's product, so that few rows waste none of it. `storage.packed` has
them in the order that its threads hold that operand in: of what a thread loads at once (16 bytes, of one row) nothing
is given to another thread. Two integers become bfloat16 by one instruction: they are put where 128 has the last bits
of its mantissa. Another takes 128 and the zero point off, which is exact. The scale is applied to a group's sum.

Where a matrix has too few rows to keep a GPU's multiprocessors busy, programs share its columns. What they sum is
added up by a second kernel, always in the same order.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.engines.torch.kernels.launch import chain, wait
from bireme.engines.torch.kernels.paged_decode import precision
from bireme.engines.torch.kernels.tiles import result_of, store_result, stored_how
from bireme.engines.torch.storage import PACKED, Int4Weight


class Int4Tiles(NamedTuple):
    """How a product is divided. A warp has 16 rows of weights at least."""

    rows: int  # of x, in a program
    n: int  # rows of weights
    warps: int
    stages: int  # blocks of PACKED inputs that are loaded or multiplied at once, less one
    splits: int = 1  # programs that share the columns


MOST_ROWS = 512  # of more the weight is made plain first
TILES = (  # by the most rows of x; chosen by the compiled code, `benchmarks/int4_products.py` has what to choose from
    (8, Int4Tiles(8, 64, 4, 5)),
    (16, Int4Tiles(16, 64, 4, 5)),
    (32, Int4Tiles(32, 64, 4, 4)),
    (64, Int4Tiles(64, 64, 4, 4)),
    (MOST_ROWS, Int4Tiles(128, 128, 8, 3)),
)
# Of float32, whose products the compiler writes out, one multiplication at a time.
_EXACT_TILES = Int4Tiles(8, 32, 2, 3)
_LARGE_BYTES = 114_688  # of shared memory, that the largest of them need; with two stages 73,728
_PROGRAMS = 264  # that keep a GPU busy: two for each of an H100's multiprocessors
_LEAST_BLOCKS = 4  # of columns, for a program
_MOST_SPLITS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _planes(word, zeros, IS_GPU: tl.constexpr) -> tl.tuple:
    """Return the four integers of each int16, the lowest first, less four `zeros`, which are 128 more than they are.

    Zeros are of the shape of words, or (N, 1), and of the dtype of what is returned.
    """
    if IS_GPU:
        found = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, m;
            mov.b32 m, 0xbf80bf80;
            lop3.b32 a, $4, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, $5, m, a;
            shr.u32 a, $4, 4;
            lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 $1, $6, m, a;
            shr.u32 a, $4, 8;
            lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 $2, $7, m, a;
            shr.u32 a, $4, 12;
            lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 $3, $8, m, a;
            }
            """,
            "=&r,=&r,=&r,=r,r,r,r,r,r",
            [word, zeros[0], zeros[1], zeros[2], zeros[3]],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        found = (
            _integer(word, zeros[0]),
            _integer(word >> 4, zeros[1]),
            _integer(word >> 8, zeros[2]),
            _integer(word >> 12, zeros[3]),
        )
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _integer(word, zero) -> tl.tensor:
    return ((word & 15).to(tl.float32) + 128 - zero.to(tl.float32)).to(zero.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _joined(a, b, c, d) -> tl.tensor:
    """Return four tiles (N, J) as one (N, 4 J), side by side."""
    whole = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 2, 3, 1))
    return tl.reshape(whole, [a.shape[0], 4 * a.shape[1]])


@triton.jit  # type: ignore[untyped-decorator]
def _scales_and_zeros(scales, zeros, n, k, N, K: tl.constexpr, GROUP: tl.constexpr) -> tl.tuple:
    """Return the scales of rows n (N, 1) at inputs k (1, J), and 128 more than the zeros, as float32."""
    group = tl.minimum(k // GROUP, K // GROUP - 1)  # of what is beyond K: any
    at = n.to(tl.int64) * (K // GROUP) + group
    return tl.load(scales + at, n < N, 0.0).to(tl.float32), tl.load(zeros + at, n < N, 0).to(tl.float32) + 128


@triton.jit  # type: ignore[untyped-decorator]
def _some(x, m, rows, k, K: tl.constexpr) -> tl.tensor:
    """Return x (rows, K) at inputs k (J, 1) and rows m (1, R): (J, R)."""
    return tl.load(x + m.to(tl.int64) * K + k, (k < K) & (m < rows), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _product(
    a, b, c, d, x, m, rows, first, K: tl.constexpr, IS_JOINED: tl.constexpr, PRECISION: tl.constexpr
) -> tl.tensor:
    """Return the product of a block's planes (N, J) with x at the inputs from `first` on and the rows m: (N, R)."""
    J: tl.constexpr = a.shape[1]
    if IS_JOINED:
        some = _some(x, m, rows, first + tl.arange(0, 4 * J)[:, None], K)
        part = tl.dot(_joined(a, b, c, d), some, input_precision=PRECISION)
    else:
        k = first + tl.arange(0, J)[:, None]
        part = tl.dot(a, _some(x, m, rows, k, K), input_precision=PRECISION)
        part = tl.dot(b, _some(x, m, rows, k + J, K), part, input_precision=PRECISION)
        part = tl.dot(c, _some(x, m, rows, k + 2 * J, K), part, input_precision=PRECISION)
        part = tl.dot(d, _some(x, m, rows, k + 3 * J, K), part, input_precision=PRECISION)
    return part


@triton.jit  # type: ignore[untyped-decorator]
def _tile_rows(first, N, TILE_N: tl.constexpr, WARPS: tl.constexpr, IS_GATED: tl.constexpr) -> tl.tuple:
    """Return the weight's rows of a tile as they are loaded and as they are multiplied, each (TILE_N, 1) with a mask.

    Warps multiply 16 rows each, of which a thread has one of the first eight and one of the others. They are loaded as
    threads lie: all warps' first eight, then all others'. Gated, the gate is the first eight and up the others.
    """
    r = tl.arange(0, TILE_N)[:, None]
    warp, half = r // 8 % WARPS + r // (16 * WARPS) * WARPS, r // (8 * WARPS) % 2
    if IS_GATED:
        n, in_order = first // 2 + warp * 8 + r % 8, first // 2 + r // 16 * 8 + r % 8
        found = n + half * N, n < N, in_order + r // 8 % 2 * N, in_order < N
    else:
        n, in_order = first + warp * 16 + half * 8 + r % 8, first + r
        found = n, n < N, in_order, in_order < N
    return found


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _rows_kernel(
    x,  # (rows, K)
    weight,  # (N, K / 4) int16, K rounded up to PACKED; gated: (2 N, K / 4)
    scales,  # (N, K / GROUP); gated: 2 N
    zeros,  # as scales
    bias,  # (N,)
    out,  # (rows, N); split: (SPLITS, rows, N) float32, gated: 2 N
    rows,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
    WARPS: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_JOINED: tl.constexpr,  # a product of a whole block, which an asynchronous one is to be; else four
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    IS_ADDED: tl.constexpr,
    IS_GPU: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    J: tl.constexpr = PACKED // 4
    BLOCKS: tl.constexpr = (K + PACKED - 1) // PACKED
    OWN: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    # Planes of a block that share a scale: all four, each has its own (1), or there are more scales than planes (0).
    SHARING: tl.constexpr = 4 if GROUP % PACKED == 0 or GROUP == K else GROUP % J == 0
    total = 2 * N if IS_GATED else N
    n, is_n, n_in_order, is_in_order = _tile_rows(tl.program_id(1) * TILE_N, N, TILE_N, WARPS, IS_GATED)
    m = (tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS))[None, :]
    at = weight + n.to(tl.int64) * (BLOCKS * J) + tl.arange(0, J)[None, :]
    begin = tl.program_id(2) * OWN
    one = tl.arange(0, 1)[None, :]
    scale, zero = _scales_and_zeros(scales, zeros, n_in_order, begin * PACKED + one, total, K, GROUP)
    wait(CHAINED)
    result = tl.zeros([TILE_N, TILE_ROWS], tl.float32)
    for block in range(begin, tl.minimum(begin + OWN, BLOCKS)):
        w = tl.load(at + block * J, is_n, 0)
        w = tl.reshape(w, [TILE_N // (16 * WARPS), 2, WARPS, 8, 4, 2, 2, 2])
        w = tl.reshape(tl.permute(w, (0, 2, 1, 3, 5, 6, 4, 7)), [TILE_N, J])
        first = block * PACKED
        if SHARING == 4:
            next_first = first + PACKED + one  # loaded a block before they are needed
            next_scale, next_zero = _scales_and_zeros(scales, zeros, n_in_order, next_first, total, K, GROUP)
            z = zero.to(x.dtype.element_ty)
            a, b, c, d = _planes(w, (z, z, z, z), IS_GPU)
            part = _product(a, b, c, d, x, m, rows, first, K, IS_JOINED, PRECISION)
            result += part * scale
            scale, zero = next_scale, next_zero
        else:  # a plane has one group, or some
            k = first + tl.arange(0, J)[:, None]
            at_k = first + (one if SHARING else tl.arange(0, J)[None, :])
            sa, za = _scales_and_zeros(scales, zeros, n_in_order, at_k, total, K, GROUP)
            sb, zb = _scales_and_zeros(scales, zeros, n_in_order, at_k + J, total, K, GROUP)
            sc, zc = _scales_and_zeros(scales, zeros, n_in_order, at_k + 2 * J, total, K, GROUP)
            sd, zd = _scales_and_zeros(scales, zeros, n_in_order, at_k + 3 * J, total, K, GROUP)
            to = x.dtype.element_ty
            a, b, c, d = _planes(w, (za.to(to), zb.to(to), zc.to(to), zd.to(to)), IS_GPU)
            if not SHARING:
                a, b = (a.to(tl.float32) * sa).to(to), (b.to(tl.float32) * sb).to(to)
                c, d = (c.to(tl.float32) * sc).to(to), (d.to(tl.float32) * sd).to(to)
                sa, sb, sc, sd = 1.0, 1.0, 1.0, 1.0
            result += tl.dot(a, _some(x, m, rows, k, K), input_precision=PRECISION) * sa
            result += tl.dot(b, _some(x, m, rows, k + J, K), input_precision=PRECISION) * sb
            result += tl.dot(c, _some(x, m, rows, k + 2 * J, K), input_precision=PRECISION) * sc
            result += tl.dot(d, _some(x, m, rows, k + 3 * J, K), input_precision=PRECISION) * sd
    if SPLITS > 1:
        to = out + (tl.program_id(2) * rows + m).to(tl.int64) * total + n_in_order
        tl.store(to, result, is_in_order & (m < rows))
    elif IS_GATED:
        both = tl.permute(tl.reshape(result, [TILE_N // 16, 2, 8, TILE_ROWS]), (0, 2, 3, 1))
        result, gated = tl.split(both)
        result = tl.reshape(result, [TILE_N // 2, TILE_ROWS])
        gated = tl.reshape(gated, [TILE_N // 2, TILE_ROWS])
        own_n = (tl.program_id(1) * (TILE_N // 2) + tl.arange(0, TILE_N // 2))[:, None]
        to, is_there = out + m.to(tl.int64) * N + own_n, (own_n < N) & (m < rows)
        store_result(result, gated, bias + own_n, own_n < N, to, is_there, HAS_BIAS, True, IS_GELU, IS_ADDED)
    else:
        to, is_there, own_bias = out + m.to(tl.int64) * N + n_in_order, is_in_order & (m < rows), bias + n_in_order
        store_result(result, result, own_bias, is_in_order, to, is_there, HAS_BIAS, False, IS_GELU, IS_ADDED)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _sum_kernel(
    parts,  # (SPLITS, rows, N) float32, gated: 2 N
    bias,  # (N,)
    out,  # (rows, N)
    rows,
    N,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    IS_ADDED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    n, row = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1).to(tl.int64)
    total = N * 2 if IS_GATED else N
    wait(CHAINED)
    result, gated = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for split in tl.static_range(SPLITS):
        at = parts + (split * rows + row) * total + n
        result += tl.load(at, n < N, 0.0)
        if IS_GATED:
            gated += tl.load(at + N, n < N, 0.0)
    store_result(result, gated, bias + n, n < N, out + row * N + n, n < N, HAS_BIAS, IS_GATED, IS_GELU, IS_ADDED)


@triton.jit  # type: ignore[untyped-decorator]
def _plain_kernel(
    weight,  # (N, K / 4) int16, K rounded up to PACKED
    scales,
    zeros,
    out,  # (N, K)
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    TILE_N: tl.constexpr,
    IS_GPU: tl.constexpr,
):
    J: tl.constexpr = PACKED // 4
    BLOCKS: tl.constexpr = (K + PACKED - 1) // PACKED
    n, block = (tl.program_id(0) * TILE_N + tl.arange(0, TILE_N))[:, None], tl.program_id(1)
    w = tl.load(weight + n.to(tl.int64) * (BLOCKS * J) + block * J + tl.arange(0, J)[None, :], n < N, 0)
    w = tl.reshape(tl.permute(tl.reshape(w, [TILE_N, 4, 2, 2, 2]), (0, 2, 3, 1, 4)), [TILE_N, J])
    none = tl.full([TILE_N, 1], 128, tl.bfloat16 if IS_GPU else tl.float32)
    a, b, c, d = _planes(w, (none, none, none, none), IS_GPU)
    k = block * PACKED + tl.arange(0, PACKED)[None, :]
    of = k
    if GROUP % PACKED == 0 or GROUP == K:  # all of the block is of one group
        of = block * PACKED + tl.arange(0, 1)[None, :]
    scale, zero = _scales_and_zeros(scales, zeros, n, of, N, K, GROUP)
    values = (_joined(a, b, c, d).to(tl.float32) - (zero - 128)) * scale
    tl.store(out + n.to(tl.int64) * K + k, values.to(out.dtype.element_ty), (n < N) & (k < K))


def few_rows_int4(
    x: Tensor,
    weight: Int4Weight,
    is_gated: bool = False,
    is_gelu: bool = False,
    add_to: Tensor | None = None,
    bias: Tensor | None = None,
    tiles: Int4Tiles | None = None,
) -> Tensor:
    """x (rows, K), weight (N, K) -> (rows, N), as `few_rows_linear`. `tiles`: in place of those chosen."""
    rows, total = len(x), len(weight)
    width, out = result_of(x, weight, is_gated, add_to)
    if tiles is None:
        tiles = fitting(chosen_tiles(rows, total, weight.size, x.dtype), shared_memory(x.device))
    splits = tiles.splits
    parts = out
    if splits > 1:
        parts = torch.empty(splits, rows, total, dtype=torch.float32, device=x.device)
    own_bias = weight.scales if bias is None else bias
    how = stored_how(bias, is_gated, is_gelu, add_to)
    _rows_kernel[(triton.cdiv(rows, tiles.rows), triton.cdiv(total, tiles.n), splits)](
        x,
        weight.values.view(torch.int16),
        weight.scales,
        weight.zeros,
        own_bias,
        parts,
        rows,
        width,
        K=weight.size,
        GROUP=weight.group,
        PACKED=PACKED,
        TILE_ROWS=tiles.rows,
        TILE_N=tiles.n,
        WARPS=tiles.warps,
        SPLITS=splits,
        IS_JOINED=is_joined(tiles),
        IS_GPU=x.is_cuda and x.dtype is torch.bfloat16,
        PRECISION=precision(x.dtype),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **how,
        **chain(x),
    )
    if splits > 1:
        grid = triton.cdiv(width, 256), rows
        _sum_kernel[grid](parts, own_bias, out, rows, width, SPLITS=splits, TILE=256, num_warps=2, **how, **chain(x))
    return out


def chosen_tiles(rows: int, total: int, size: int, dtype: torch.dtype, tiles: Int4Tiles | None = None) -> Int4Tiles:
    """Return the tiles for x (rows, size) and weights (total, size). `tiles`: their splits are chosen."""
    if tiles is None:
        tiles = next(own for most, own in TILES if rows <= most or most == MOST_ROWS)
        tiles = _EXACT_TILES if dtype is torch.float32 else tiles
    programs = triton.cdiv(rows, tiles.rows) * triton.cdiv(total, tiles.n)
    wanted = _PROGRAMS if tiles.rows <= 32 else _PROGRAMS // 2  # of more rows parts cost more than they save
    most = min(triton.cdiv(size, PACKED) // _LEAST_BLOCKS, _MOST_SPLITS)
    return tiles._replace(splits=max(1, min(triton.cdiv(wanted, programs), most)))


def fitting(tiles: Int4Tiles, shared_bytes: int) -> Int4Tiles:
    """Return how tiles are computed where a program has so much shared memory: 99 KiB on an L4, 227 on Hopper."""
    is_large = tiles.rows * tiles.n >= 128 * 128
    return tiles._replace(stages=2) if is_large and shared_bytes < _LARGE_BYTES else tiles


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes that a program may have on a GPU; of the interpreter as many as on any."""
    if device.type != "cuda":
        return _LARGE_BYTES
    found: int = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
    return found


def is_joined(tiles: Int4Tiles) -> bool:
    """Whether a block is one product: Hopper's instruction for four warps waits for each. Others read registers."""
    return tiles.rows > 8 and tiles.warps % 4 == 0


def plain_weight(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """Return (N, K) in `dtype`, rounded once."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.values.device)
    tile = 64
    _plain_kernel[(triton.cdiv(len(weight), tile), triton.cdiv(weight.size, PACKED))](
        weight.values.view(torch.int16),
        weight.scales,
        weight.zeros,
        out,
        len(weight),
        K=weight.size,
        GROUP=weight.group,
        PACKED=PACKED,
        TILE_N=tile,
        IS_GPU=out.is_cuda,
        num_warps=4,
    )
    return out
