"""Products with 4-bit integers in groups (`storage.Int4Weight`): of few rows, and the plain weight for many.

The weights are the left operand of a tensor core's product, so that few rows waste none of it. `storage.packed` has
them in the order that its threads hold that operand in: of what a thread loads at once (16 bytes, of one row) nothing
is given to another thread. Two integers become bfloat16 by one instruction: they are put where 128 has the last bits
of its mantissa. Another takes 128 and the zero point off, which is exact. The scale is applied to a group's sum.

Where a matrix has too few rows to keep a GPU's multiprocessors busy, programs share its columns. The last of them that
is ready adds up what all have, always in the same order.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.engines.torch.kernels.launch import chain, start_next, wait
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
TILES = (  # by the most rows of x; measured on an H100 by `benchmarks/int4_products.py`
    (16, Int4Tiles(16, 64, 4, 6)),
    (32, Int4Tiles(32, 64, 4, 4)),
    (64, Int4Tiles(64, 64, 4, 3)),
    (MOST_ROWS, Int4Tiles(128, 64, 4, 3)),
)
# Of float32, whose products the compiler writes out, one multiplication at a time.
_EXACT_TILES = Int4Tiles(8, 32, 2, 3)
_LARGE_BYTES = 106_496  # of shared memory, that the largest of them need; with two stages 69,632
_PROGRAMS = 264  # that keep a GPU busy: two for each of an H100's multiprocessors
_LEAST_BLOCKS = 4  # of columns, for a program
_MOST_SPLITS = 8


@triton.jit  # type: ignore[untyped-decorator]
def planes(word, zeros, IS_GPU: tl.constexpr) -> tl.tuple:
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
def joined(a, b, c, d) -> tl.tensor:
    """Return four tiles (N, J) or (B, N, J) as one (N, 4 J) or (B, N, 4 J), side by side."""
    whole = tl.join(tl.join(a, c), tl.join(b, d))
    if len(a.shape) == 3:
        whole = tl.reshape(tl.permute(whole, (0, 1, 3, 4, 2)), [a.shape[0], a.shape[1], 4 * a.shape[2]])
    else:
        whole = tl.reshape(tl.permute(whole, (0, 2, 3, 1)), [a.shape[0], 4 * a.shape[1]])
    return whole


@triton.jit  # type: ignore[untyped-decorator]
def _stored_scales(scales, zeros, n, k, N, K: tl.constexpr, GROUP: tl.constexpr) -> tl.tuple:
    """Return the scales and zeros of rows n (N, 1) at inputs k (1, J) as they are stored."""
    group = tl.minimum(k // GROUP, K // GROUP - 1)  # of what is beyond K: any
    at = n.to(tl.int64) * (K // GROUP) + group
    return tl.load(scales + at, n < N, 0.0), tl.load(zeros + at, n < N, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _scales_and_zeros(scales, zeros, n, k, N, K: tl.constexpr, GROUP: tl.constexpr) -> tl.tuple:
    """Return the scales of rows n (N, 1) at inputs k (1, J), and 128 more than the zeros, as float32."""
    scale, zero = _stored_scales(scales, zeros, n, k, N, K, GROUP)
    return scale.to(tl.float32), zero.to(tl.float32) + 128


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
        part = tl.dot(joined(a, b, c, d), some, input_precision=PRECISION)
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
    out,  # (rows, N)
    parts,  # (tiles, SPLITS, TILE_ROWS, TILE_N) float32
    counters,  # (tiles,) zero, and zero again afterwards
    rows,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
    WARPS: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_JOINED: tl.constexpr,  # a product of a whole block, else four
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
    # As they are stored: to convert them is to wait for them, and they are loaded a block before they are needed.
    scale, zero = _stored_scales(scales, zeros, n_in_order, begin * PACKED + one, total, K, GROUP)
    wait(CHAINED, True)
    result = tl.zeros([TILE_N, TILE_ROWS], tl.float32)
    for block in range(begin, tl.minimum(begin + OWN, BLOCKS)):
        w = tl.load(at + block * J, is_n, 0)
        w = tl.reshape(w, [TILE_N // (16 * WARPS), 2, WARPS, 8, 4, 2, 2, 2])
        w = tl.reshape(tl.permute(w, (0, 2, 1, 3, 5, 6, 4, 7)), [TILE_N, J])
        first = block * PACKED
        if SHARING == 4:
            next_scale, next_zero = _stored_scales(scales, zeros, n_in_order, first + PACKED + one, total, K, GROUP)
            z = (zero.to(tl.float32) + 128).to(x.dtype.element_ty)
            a, b, c, d = planes(w, (z, z, z, z), IS_GPU)
            part = _product(a, b, c, d, x, m, rows, first, K, IS_JOINED, PRECISION)
            result += part * scale.to(tl.float32)
            scale, zero = next_scale, next_zero
        else:  # a plane has one group, or some
            k = first + tl.arange(0, J)[:, None]
            at_k = first + (one if SHARING else tl.arange(0, J)[None, :])
            sa, za = _scales_and_zeros(scales, zeros, n_in_order, at_k, total, K, GROUP)
            sb, zb = _scales_and_zeros(scales, zeros, n_in_order, at_k + J, total, K, GROUP)
            sc, zc = _scales_and_zeros(scales, zeros, n_in_order, at_k + 2 * J, total, K, GROUP)
            sd, zd = _scales_and_zeros(scales, zeros, n_in_order, at_k + 3 * J, total, K, GROUP)
            to = x.dtype.element_ty
            a, b, c, d = planes(w, (za.to(to), zb.to(to), zc.to(to), zd.to(to)), IS_GPU)
            if not SHARING:
                a, b = (a.to(tl.float32) * sa).to(to), (b.to(tl.float32) * sb).to(to)
                c, d = (c.to(tl.float32) * sc).to(to), (d.to(tl.float32) * sd).to(to)
                sa, sb, sc, sd = 1.0, 1.0, 1.0, 1.0
            result += tl.dot(a, _some(x, m, rows, k, K), input_precision=PRECISION) * sa
            result += tl.dot(b, _some(x, m, rows, k + J, K), input_precision=PRECISION) * sb
            result += tl.dot(c, _some(x, m, rows, k + 2 * J, K), input_precision=PRECISION) * sc
            result += tl.dot(d, _some(x, m, rows, k + 3 * J, K), input_precision=PRECISION) * sd
    start_next(CHAINED)
    first_n, is_last = tl.program_id(1) * TILE_N, True
    if SPLITS > 1:
        result, is_last = _added_up(result, parts, counters, is_in_order & (m < rows), SPLITS)
    if is_last:
        _store_tile(result, bias, out, first_n, n_in_order, m, rows, N, HAS_BIAS, IS_GATED, IS_GELU, IS_ADDED)


@triton.jit  # type: ignore[untyped-decorator]
def _added_up(result, parts, counters, is_there, SPLITS: tl.constexpr) -> tl.tuple:
    """Return what programs that share columns found in all, and whether this is the last of them: of others a part."""
    TILE_N: tl.constexpr = result.shape[0]
    TILE_ROWS: tl.constexpr = result.shape[1]
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    at = parts + tile.to(tl.int64) * (SPLITS * TILE_ROWS * TILE_N)
    at += tl.arange(0, TILE_ROWS)[None, :] * TILE_N + tl.arange(0, TILE_N)[:, None]
    tl.store(at + tl.program_id(2) * (TILE_ROWS * TILE_N), result, is_there)
    tl.debug_barrier()  # all threads' stores come before the count
    is_last = tl.atomic_add(counters + tile, 1) == SPLITS - 1
    if is_last:
        tl.store(counters + tile, 0)
        result = tl.zeros([TILE_N, TILE_ROWS], tl.float32)
        for split in tl.static_range(SPLITS):
            result += tl.load(at + split * (TILE_ROWS * TILE_N), is_there, 0.0, cache_modifier=".cg")
    return result, is_last


@triton.jit  # type: ignore[untyped-decorator]
def _store_tile(
    result,
    bias,
    out,
    first_n,  # of the weight's rows, gated: of gate and up together
    n,  # (TILE_N, 1), as `_tile_rows` has it in order
    m,  # (1, TILE_ROWS)
    rows,
    N,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    IS_ADDED: tl.constexpr,
) -> None:
    TILE_N: tl.constexpr = result.shape[0]
    TILE_ROWS: tl.constexpr = result.shape[1]
    gated = result
    if IS_GATED:
        both = tl.permute(tl.reshape(result, [TILE_N // 16, 2, 8, TILE_ROWS]), (0, 2, 3, 1))
        result, gated = tl.split(both)
        result = tl.reshape(result, [TILE_N // 2, TILE_ROWS])
        gated = tl.reshape(gated, [TILE_N // 2, TILE_ROWS])
        n = (first_n // 2 + tl.arange(0, TILE_N // 2))[:, None]
    to = out + m.to(tl.int64) * N + n
    store_result(result, gated, bias + n, n < N, to, (n < N) & (m < rows), HAS_BIAS, IS_GATED, IS_GELU, IS_ADDED)


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
    a, b, c, d = planes(w, (none, none, none, none), IS_GPU)
    k = block * PACKED + tl.arange(0, PACKED)[None, :]
    of = k
    if GROUP % PACKED == 0 or GROUP == K:  # all of the block is of one group
        of = block * PACKED + tl.arange(0, 1)[None, :]
    scale, zero = _scales_and_zeros(scales, zeros, n, of, N, K, GROUP)
    values = (joined(a, b, c, d).to(tl.float32) - (zero - 128)) * scale
    tl.store(out + n.to(tl.int64) * K + k, values.to(out.dtype.element_ty), (n < N) & (k < K))


def few_rows_int4(
    x: Tensor,
    weight: Int4Weight,
    is_gated: bool = False,
    is_gelu: bool = False,
    add_to: Tensor | None = None,
    bias: Tensor | None = None,
    tiles: Int4Tiles | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """x (rows, K), weight (N, K) -> (rows, N), as `few_rows_linear`.

    `tiles`: in place of those chosen. `counters`: of `make_counters`, which nothing else uses meanwhile.
    """
    rows, total = len(x), len(weight)
    width, out = result_of(x, weight, is_gated, add_to)
    if tiles is None:
        tiles = fitting(chosen_tiles(rows, total, weight.size, x.dtype), shared_memory(x.device))
    splits, grid = tiles.splits, (triton.cdiv(rows, tiles.rows), triton.cdiv(total, tiles.n))
    parts = done = out
    if splits > 1:
        parts = torch.empty(grid[0] * grid[1], splits, tiles.rows, tiles.n, dtype=torch.float32, device=x.device)
        is_enough = counters is not None and grid[0] * grid[1] <= len(counters)
        done = counters if is_enough else make_counters(x.device, grid[0] * grid[1])
    _rows_kernel[(*grid, splits)](
        x,
        weight.values.view(torch.int16),
        weight.scales,
        weight.zeros,
        weight.scales if bias is None else bias,
        out,
        parts,
        done,
        rows,
        width,
        K=weight.size,
        GROUP=weight.group,
        PACKED=PACKED,
        TILE_ROWS=tiles.rows,
        TILE_N=tiles.n,
        WARPS=tiles.warps,
        SPLITS=splits,
        IS_JOINED=tiles.rows > 8,
        IS_GPU=x.is_cuda and x.dtype is torch.bfloat16,
        PRECISION=precision(x.dtype),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **stored_how(bias, is_gated, is_gelu, add_to),
        **chain(x),
    )
    return out


def make_counters(device: torch.device, tiles: int = _PROGRAMS) -> Tensor:
    """Return what programs that share columns count with, of products one after the other: (tiles,) int32, zeros."""
    return torch.zeros(tiles, dtype=torch.int32, device=device)


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
    is_large = tiles.rows >= 128
    return tiles._replace(stages=2) if is_large and shared_bytes < _LARGE_BYTES else tiles


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes that a program may have on a GPU; of the interpreter as many as on any."""
    if device.type != "cuda":
        return _LARGE_BYTES
    found: int = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
    return found


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
