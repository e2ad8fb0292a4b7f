"""In which order the rows of one transfer go, and how they lie in its shared-memory file where it has one.

Both sides compute the plan from the same four values, so no offsets are sent. A chunk is the unit of copying: after
each, other transfers get their turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bireme.errors import RequestError
from bireme.kv.transfer.base import KvLayout

CHUNK_BYTES = 16 << 20  # about 5 ms of copying; smaller ones spend more in the callbacks than in memcpy
STAGED_FACTOR = 2  # of it, where a GPU's rows pass through host memory: between two the wire rests a while
GPU_FACTOR = 64  # of it, where a GPU copies: 1 GiB takes half a millisecond on one, starting it 60 us


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of tokens [first, last) of one group, at [begin, end) of the file."""

    group: int
    first: int
    last: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    chunks: tuple[Chunk, ...]
    num_bytes: int
    num_tokens: int  # of the group that moves most


def plan_chunks(
    layout: KvLayout, firsts: Sequence[int], num_tokens: int, chunk_bytes: int = CHUNK_BYTES
) -> TransferPlan:
    """Split rows [firsts[group], num_tokens) of every group. Raises RequestError when `firsts` does not fit."""
    if len(firsts) != len(layout.groups):
        raise RequestError(f"firsts: {len(firsts)} entries; the KV layout has {len(layout.groups)} groups")
    if any(not 0 <= first <= num_tokens for first in firsts):
        raise RequestError(f"firsts: {list(firsts)}; each must lie between 0 and num_tokens {num_tokens}")
    chunks: list[Chunk] = []
    at = 0
    for index, (group, first) in enumerate(zip(layout.groups, firsts, strict=True)):
        row = group.bytes_per_token
        step = max(1, chunk_bytes // row) if row else 0
        for begin in range(first, num_tokens, step) if step else ():
            last = min(begin + step, num_tokens)
            chunks.append(Chunk(index, begin, last, at, at + (last - begin) * row))
            at += (last - begin) * row
    return TransferPlan(tuple(chunks), at, num_tokens - min(firsts, default=num_tokens))
