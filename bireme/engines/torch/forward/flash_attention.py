"""Flash attention of prompts' chunks on a GPU: FA3 where its wheel works, torch's own otherwise.

FA3 takes half of the time of torch's kernels (FlashAttention 2) on Hopper. Its wheel (fa3-fwd) is optional and has
neither windows nor float16. It is compared with plain torch when an engine starts, on heads of the model's own shapes;
where it differs, or does not run, the log says so once and torch's kernels compute all.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bireme.engines.child.lost_device import raise_if_lost
from bireme.engines.torch.forward.attention import Extras, attend
from bireme.engines.torch.geometry import UNSCALED, KvScales, LayerGeometry
from bireme.engines.torch.step import PackedChunks
from bireme.engines.torch.storage import E4M3
from bireme.errors import one_line

logger = logging.getLogger("bireme.engines.torch")

_WHEEL = "fa3_fwd_interface"
_MOST_ERROR = 0.02  # of FA3's result against float32, relative; bfloat16's own is 0.003
_LARGEST_HEAD = 256


class PromptAttention(enum.StrEnum):
    """What attends to prompts' chunks that are launched kernel by kernel; names in the log and of a metric's label."""

    FA3 = enum.auto()
    TORCH = enum.auto()
    PACKED = enum.auto()  # kernels/packed_prefill.py: all that the others don't


@dataclass(frozen=True, slots=True)
class Heads:
    """A layer's, as far as kernels are chosen by them."""

    num_heads: int
    num_kv_heads: int
    size: int


@dataclass(frozen=True, slots=True)
class Fa3:
    """The wheel's function, and the heads of which it has been found right."""

    varlen: Callable[..., Tensor]  # its flash_attn_varlen_func
    heads: frozenset[Heads]

    def takes(self, query: Tensor, key: Tensor, window: int, longest_key: int) -> bool:
        """query (T, H, K), key (T, N, K). A window that hides nothing is none."""
        return (
            query.dtype is torch.bfloat16
            and (not window or longest_key <= window)
            and Heads(query.shape[1], key.shape[1], query.shape[2]) in self.heads
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, chunks: PackedChunks, scaling: float) -> Tensor:
        return self.varlen(
            query,
            key,
            value,
            chunks.query_begins,
            chunks.key_begins,
            chunks.longest_query,
            chunks.longest_key,
            softmax_scale=scaling,
            causal=True,  # from the lower right corner, as of torch's
        )


class FlashAttention:
    """Used by the engine's thread."""

    def __init__(self, has_torch: bool = False, fa3: Fa3 | None = None) -> None:
        """`has_torch`: torch's own runs on the device."""
        self._has_torch, self._fa3 = has_torch, fa3

    @property
    def names(self) -> list[PromptAttention]:
        """What there is for prompts, the most special first."""
        there = {PromptAttention.FA3: self._fa3 is not None, PromptAttention.TORCH: self._has_torch}
        return [*(name for name, is_there in there.items() if is_there), PromptAttention.PACKED]

    def attend(
        self,
        chunks: PackedChunks,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        window: int,
        extras: Extras,
        scales: KvScales = UNSCALED,
    ) -> Tensor | None:
        """Query (T, H, K), key (T, N, K) and value (T, N, K) are the chunks' own -> (T, H, K); None: not computed here.

        A chunk behind its prefix is causal from the lower right corner: flash attention's own rule. Of 8-bit floats its
        own keys and values are the pools', too: a token is attended to as whoever comes later finds it.
        """
        if not self._has_torch or not _is_plain(query, value, extras):
            return None
        if not chunks.is_fresh or keys.dtype is E4M3:
            shape = len(chunks.rows), key.shape[1], -1
            key, value = (_gathered(pool, chunks.rows, query.dtype).view(shape) for pool in (keys, values))
        scaling = extras.scaling * scales.keys
        if self._fa3 is not None and self._fa3.takes(query, key, window, chunks.longest_key):
            found = self._fa3.attend(query, key, value, chunks, scaling)
        else:
            found = _attend_by_torch(query, key, value, chunks, scaling, window)
        return found if scales.values == 1 else found * scales.values


def _attend_by_torch(
    query: Tensor, key: Tensor, value: Tensor, chunks: PackedChunks, scaling: float, window: int
) -> Tensor:
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        chunks.query_begins,
        chunks.key_begins,
        chunks.longest_query,
        chunks.longest_key,
        0.0,
        True,
        False,
        scale=scaling,
        window_size_left=window - 1 if window else None,
        window_size_right=0 if window else None,
    )[0]
    return out


def _gathered(pool: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return these rows of a pool in the dtype of queries, less their scale."""
    if pool.dtype is not E4M3:
        return pool.index_select(0, rows)
    return pool.view(torch.uint8).index_select(0, rows).view(E4M3).to(dtype)


def _is_plain(query: Tensor, value: Tensor, extras: Extras) -> bool:
    """What flash attention computes: 16-bit numbers, plain softmax."""
    size = query.shape[2]
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and extras.softcap is None
        and extras.sinks is None
        and size == value.shape[2]
        and size % 8 == 0
        and size <= _LARGEST_HEAD
    )


def import_fa3() -> Any:
    """Return the wheel's module; None: it is not installed. Takes a tenth of a second at first."""
    return importlib.import_module(_WHEEL) if importlib.util.find_spec(_WHEEL) is not None else None


def open_flash_attention(geometry: Iterable[LayerGeometry], num_heads: int, device: torch.device) -> FlashAttention:
    """Return it with FA3 where the device is Hopper's, the wheel is installed, and layers of bfloat16 agree.

    `num_heads`: of queries, 0: not known.
    """
    generation = capability(device)
    has_torch = generation >= (8, 0)
    if generation != (9, 0) or not num_heads:
        return FlashAttention(has_torch)
    wanted = {
        Heads(num_heads, layer.num_kv_heads, layer.key_size)
        for layer in geometry
        if layer.dtype is torch.bfloat16 and layer.key_size == layer.value_size
    }
    try:
        module = import_fa3() if wanted else None
        if module is None:
            return FlashAttention(has_torch)
        fa3 = Fa3(module.flash_attn_varlen_func, frozenset(wanted))
        for heads in sorted(wanted, key=lambda heads: heads.size):
            check_fa3(fa3, heads, device)
    except Exception as error:  # whatever is wrong with the wheel on this machine: torch's own kernels still run
        raise_if_lost(error, "the first calls of FlashAttention 3")
        logger.warning("fa3_off reason=%s: %s", type(error).__name__, one_line(error))
        return FlashAttention(has_torch)
    return FlashAttention(has_torch, fa3)


def capability(device: torch.device) -> tuple[int, int]:
    """Return a GPU's generation, (9, 0) for Hopper; (0, 0): it is none."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


# Tokens of each chunk, and of what it sees: prompts alone, then chunks behind prefixes, tiles that are not full.
_CHECKED = (((130, 130), (7, 7), (64, 64)), ((70, 200), (1, 129), (128, 300)))


@torch.inference_mode()  # type: ignore[untyped-decorator]
def check_fa3(fa3: Fa3, heads: Heads, device: torch.device) -> None:
    """Compare it with plain torch in float32. Raises RuntimeError."""
    random, scaling = torch.Generator(device).manual_seed(0), heads.size**-0.5
    for lengths in _CHECKED:
        own, seen = ([0, *itertools.accumulate(column)] for column in zip(*lengths, strict=True))
        # As a layer has them: parts of one product, with other rows' numbers between theirs.
        shape = seen[-1], heads.num_heads + 2 * heads.num_kv_heads, heads.size
        packed = torch.randn(shape, generator=random, device=device).to(torch.bfloat16)
        query, key, value = packed.split([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], 1)
        query = query[: own[-1]]
        query_begins, key_begins = (torch.tensor(ends, dtype=torch.int32, device=device) for ends in (own, seen))
        longest_query, longest_key = (max(column) for column in zip(*lengths, strict=True))
        chunks = PackedChunks(
            0, own[-1], query, query_begins, key_begins, longest_query, longest_key, is_fresh=own == seen
        )
        found = fa3.attend(query, key, value, chunks, scaling)
        if found.shape != query.shape or found.dtype is not query.dtype:
            raise RuntimeError(f"it returns {tuple(found.shape)} {found.dtype} of {tuple(query.shape)} {query.dtype}")
        for at, (num_tokens, num_seen) in enumerate(lengths):
            ours, theirs = slice(own[at], own[at + 1]), slice(seen[at], seen[at + 1])
            expected = _attend_plainly(query[ours], key[theirs], value[theirs], scaling)
            error = float((found[ours].float() - expected).norm() / expected.norm())
            if not error <= _MOST_ERROR:
                raise RuntimeError(f"{num_tokens} tokens that see {num_seen} are {error:.3g} off, with {heads}")


def _attend_plainly(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Return causal attention of one chunk, the last of what it sees -> (T, H, K) float32."""
    num_tokens, num_seen = len(query), len(key)
    positions = torch.arange(num_seen, device=query.device)
    mask = positions[None] <= positions[num_seen - num_tokens :, None]
    repeats = query.shape[1] // key.shape[1]
    key, value = (rows.repeat_interleave(repeats, 1) for rows in (key, value))
    query, key, value = (rows.float().transpose(0, 1)[None] for rows in (query, key, value))
    return attend(query, key, value, mask, Extras(scaling))[0].transpose(0, 1)
