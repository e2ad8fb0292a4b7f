"""The first kernel of a decode step: takes in what the host says of each row, and finds the tokens' embeddings."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SLOT, POSITION, TOKEN, BLOCKS = range(4)  # columns of `steps`; from BLOCKS on a column and a block for each group
TAKE_LAST = -1  # in place of a token: the one that the step before chose
FIRST_DRAFTED = -2  # in place of a token: the first that was drafted; the others count down from it
NO_BLOCK = -1  # in place of a column


@triton.jit(do_not_specialize_on_alignment=["steps", "last", "drafted"])  # type: ignore[untyped-decorator]
def _begin_kernel(
    steps,  # (R, 3 + 2 * groups)
    tables,  # (groups, slots, columns)
    last,  # (slots,)
    drafted,  # (D,)
    embeddings,  # (V, W)
    out,  # (R, W)
    table_stride,
    group_stride,
    scale,
    W: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    IS_SCALED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own = steps + row * (3 + 2 * GROUPS)
    slot, token = tl.load(own).to(tl.int64), tl.load(own + 2)
    for group in tl.static_range(GROUPS):
        column, block = tl.load(own + 3 + 2 * group), tl.load(own + 4 + 2 * group)
        if column >= 0:
            tl.store(tables + group * group_stride + slot * table_stride + column, block)
    if token < -1:
        token = tl.maximum(0, tl.load(drafted + (-2 - token)))
    elif token < 0:
        token = tl.maximum(0, tl.load(last + slot))
    for begin in range(0, W, TILE):
        at = begin + tl.arange(0, TILE)
        embedding = tl.load(embeddings + token.to(tl.int64) * W + at, at < W)
        if IS_SCALED:
            embedding = (embedding.to(tl.float32) * scale).to(embedding.dtype)
        tl.store(out + row * W + at, embedding, at < W)


def begin_step(
    steps: Tensor, tables: Tensor, last: Tensor, embeddings: Tensor, scale: float = 1.0, drafted: Tensor | None = None
) -> Tensor:
    """steps (R, 3 + 2 * groups) int32 -> embeddings (R, W) of the rows' tokens; takes new blocks into `tables`.

    The embeddings are multiplied by `scale`. `drafted` (D,) int32: tokens that rows may name by their places there.
    """
    width = embeddings.shape[1]
    out = torch.empty(len(steps), width, dtype=embeddings.dtype, device=embeddings.device)
    _begin_kernel[(len(steps),)](
        steps,
        tables,
        last,
        last if drafted is None else drafted,
        embeddings,
        out,
        tables.stride(1),
        tables.stride(0),
        scale,
        W=width,
        GROUPS=len(tables),
        TILE=min(1024, triton.next_power_of_2(width)),
        IS_SCALED=scale != 1,
    )
    return out
