"""What a step of the packed decoder does between its matrix products, on a CPU: in C++ or in plain torch.

Shapes: T tokens, H query heads, N key/value heads, K head size, I width of the MLP. All take and return the model's
dtype and compute in float32.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bireme.engines.torch import native
from bireme.engines.torch.forward.attention import Extras, PagedStep, attend_chunk
from bireme.engines.torch.forward.native_step import NativeStep, StepLayer
from bireme.engines.torch.forward.quantized_linear import QuantizedLinear, StoredRows, instructions
from bireme.engines.torch.geometry import Rotary
from bireme.engines.torch.step import GroupStep, TableStep

logger = logging.getLogger("bireme.engines.torch")


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What attention of a layer reads, writes and does."""

    rotary: Rotary
    keys: Tensor  # (pool rows, N K)
    values: Tensor
    num_heads: int
    block_size: int
    window: int  # 0: none
    scaling: float
    softcap: float = 0.0  # 0: none
    sinks: Tensor | None = None  # (H,) float32

    @property
    def size(self) -> int:
        return int(self.rotary.cos_sin.shape[1])

    @property
    def num_kv_heads(self) -> int:
        return int(self.keys.shape[1]) // self.size

    @property
    def extras(self) -> Extras:
        return Extras(self.scaling, self.softcap or None, self.sinks)


_TILE_ROWS, _TILE_COLUMNS = 16, 32  # of AMX: outputs of a panel, x's columns
DecoderLinear = Callable[[Tensor, Tensor | None], Tensor]  # x (T, in), rows to add to (T, out) or None -> (T, out)


class DecoderOps(Protocol):
    uses_tables: bool  # a step comes as TableStep; else as GroupStep
    instructions: str  # of products with quantized weights

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, add_to: Tensor | None = None) -> Tensor:
        """x (T, hidden), weight (hidden,) float32 -> (T, hidden), plus `add_to` (T, hidden)."""

    def gate(self, gate_up: Tensor, is_gelu: bool = False) -> Tensor:
        """gate_up (T, 2 I) -> silu(gate) * up (T, I), or with tanh's approximation of GELU."""

    def attend(self, layer: int, qkv: Tensor, positions: Tensor, group: GroupStep | TableStep) -> Tensor:
        """qkv (T, (H + 2 N) K), which is overwritten -> (T, H K). Norms and turns heads, fills the pools' rows."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> DecoderLinear | None:
        """Return products of the model's dtype with a copy of `weight` (out, in), of bfloat16; None: there are none."""

    def quantized(self, parts: Sequence[StoredRows], bias: Tensor | None) -> QuantizedLinear | None:
        """Return the same of weights that stay as their file has them. Raises ValueError for odd shapes."""

    def step(self, layers: Sequence[StepLayer], eps: float, is_gelu: bool) -> NativeStep | None:
        """Return a whole step of few rows; None: there is none."""


def choose_ops() -> Callable[[list[AttentionLayer]], DecoderOps]:
    """Return what makes a model's operations: those in C++ where they can be compiled."""
    try:
        library, seconds = native.load()
    except native.NativeUnavailableError as error:
        logger.warning("native_off reason=%s: attention copies each step's whole context", error)
        return PlainOps
    if seconds:
        logger.info("native_compiled s=%.1f", seconds)
    return functools.partial(NativeOps, library=library)


class PlainOps:
    uses_tables, instructions = False, "none"

    def __init__(self, layers: list[AttentionLayer]) -> None:
        self._layers = layers

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, add_to: Tensor | None = None) -> Tensor:
        normed = F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
        return normed if add_to is None else normed.add_(add_to)

    def gate(self, gate_up: Tensor, is_gelu: bool = False) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return (F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)) * up

    def attend(self, layer: int, qkv: Tensor, positions: Tensor, group: GroupStep | TableStep) -> Tensor:
        assert isinstance(group, GroupStep)
        own = self._layers[layer]
        size, rotary = own.size, own.rotary
        heads = qkv.view(len(qkv), -1, size).float()
        query, key, value = heads.split([own.num_heads, own.num_kv_heads, own.num_kv_heads], 1)
        if rotary.q_norm is not None and rotary.k_norm is not None:
            query = F.rms_norm(query, (size,), rotary.q_norm, rotary.eps)
            key = F.rms_norm(key, (size,), rotary.k_norm, rotary.eps)
        cos, sin = rotary.cos_sin[positions].chunk(2, -1)
        cos, sin = torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]
        query, key = (part * cos + part.roll(size // 2, -1) * sin for part in (query, key))
        query, key, value = (part.to(qkv.dtype).transpose(0, 1)[None] for part in (query, key, value))
        step = PagedStep([own.keys], [own.values], [group], own.block_size)
        return step.attend(0, query, key, value, own.extras).flatten(2)[0]

    def linear(self, weight: Tensor, bias: Tensor | None) -> DecoderLinear | None:
        return None

    def quantized(self, parts: Sequence[StoredRows], bias: Tensor | None) -> QuantizedLinear | None:
        return None

    def step(self, layers: Sequence[StepLayer], eps: float, is_gelu: bool) -> NativeStep | None:
        return None


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm", "cos_sin", "sinks", "keys", "values")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "size", "block_size", "window")),
        *((name, ctypes.c_float) for name in ("eps", "scaling", "softcap")),
    ]


class NativeOps:
    """Calls `native/decoder.cpp`; has torch's threads, since the OpenMP library is the same."""

    uses_tables = True

    def __init__(self, layers: list[AttentionLayer], library: ctypes.CDLL) -> None:
        self._layers, self._library, self._threads = layers, library, torch.get_num_threads()
        self.instructions = instructions(library)
        self._structures = [_structure(layer) for layer in layers]
        name = str(layers[0].keys.dtype).removeprefix("torch.")
        pointer, integer, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
        self._rms_norm, self._gate, self._attend = (
            library[f"{function}_{name}"] for function in ("rms_norm", "gate", "attend")
        )
        self._rms_norm.argtypes = [pointer] * 4 + [integer, integer, number, flag]
        self._gate.argtypes = [pointer, pointer, integer, integer, flag, flag]
        self._attend.argtypes = [pointer] * 3 + [integer, integer, flag, pointer, integer, pointer, pointer, flag]
        self._is_tiled = name == "bfloat16"
        self._multiply = library[f"multiply_{name}"] if not self._is_tiled or library["has_tiles"]() else None
        if self._multiply is not None:
            self._multiply.argtypes = [pointer] * 5 + [integer] * 3 + [flag]
        self._num_lanes = int(library["num_lanes"]())

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, add_to: Tensor | None = None) -> Tensor:
        out, other = torch.empty_like(x), 0 if add_to is None else add_to.data_ptr()
        self._rms_norm(x.data_ptr(), weight.data_ptr(), other, out.data_ptr(), *x.size(), eps, self._threads)
        return out

    def gate(self, gate_up: Tensor, is_gelu: bool = False) -> Tensor:
        rows, width = gate_up.size(0), gate_up.size(1) // 2
        out = gate_up.new_empty(rows, width)
        self._gate(gate_up.data_ptr(), out.data_ptr(), rows, width, is_gelu, self._threads)
        return out

    def attend(self, layer: int, qkv: Tensor, positions: Tensor, group: GroupStep | TableStep) -> Tensor:
        assert isinstance(group, TableStep)
        own, count = self._layers[layer], qkv.size(0)
        out = qkv.new_empty(count, own.num_heads * own.size)
        self._attend(
            qkv.data_ptr(),
            positions.data_ptr(),
            group.rows.data_ptr(),
            count,
            group.num_decodes,
            group.has_drafts,
            group.tables.data_ptr(),
            group.tables.size(1),
            out.data_ptr(),
            ctypes.addressof(self._structures[layer]),
            self._threads,
        )
        if group.chunks:
            heads = qkv.view(1, count, -1, own.size).transpose(1, 2)
            query, key, value = heads.split([own.num_heads, own.num_kv_heads, own.num_kv_heads], 1)
            for chunk in group.chunks:
                found = attend_chunk(chunk, query, key, value, own.keys, own.values, own.extras)
                out[chunk.begin : chunk.end] = found.flatten(2)[0]
        return out

    def linear(self, weight: Tensor, bias: Tensor | None) -> DecoderLinear | None:
        (width, depth), product = weight.shape, self._multiply
        if product is None or self._is_tiled and depth % _TILE_COLUMNS:
            return None
        panels = self._tiles(weight) if self._is_tiled else self._panels(weight)

        def multiply(x: Tensor, add_to: Tensor | None) -> Tensor:
            rows = x.size(0)
            out = x.new_empty(rows, width)
            others = (0 if bias is None else bias.data_ptr()), (0 if add_to is None else add_to.data_ptr())
            pointers = x.data_ptr(), panels.data_ptr(), *others, out.data_ptr()
            product(*pointers, rows, depth, width, self._threads)
            return out

        return multiply

    def quantized(self, parts: Sequence[StoredRows], bias: Tensor | None) -> QuantizedLinear | None:
        return QuantizedLinear(parts, bias, self._library, self._layers[0].keys.dtype, self._threads)

    def step(self, layers: Sequence[StepLayer], eps: float, is_gelu: bool) -> NativeStep | None:
        attention = [ctypes.addressof(structure) for structure in self._structures]
        return NativeStep(self._library, layers, attention, eps, is_gelu, self._threads)

    def _panels(self, weight: Tensor) -> Tensor:
        padded = F.pad(weight, (0, 0, 0, -len(weight) % (2 * self._num_lanes)))
        return padded.view(-1, 2, self._num_lanes, weight.size(1)).permute(0, 3, 2, 1).contiguous()

    def _tiles(self, weight: Tensor) -> Tensor:
        padded = F.pad(weight, (0, 0, 0, -len(weight) % (2 * _TILE_ROWS)))
        return padded.view(-1, _TILE_ROWS, weight.size(1) // 2, 2).transpose(1, 2).contiguous()


def _structure(layer: AttentionLayer) -> _Layer:
    rotary = layer.rotary
    norms = [0 if norm is None else norm.data_ptr() for norm in (rotary.q_norm, rotary.k_norm)]
    return _Layer(
        *norms,
        rotary.cos_sin.data_ptr(),
        0 if layer.sinks is None else layer.sinks.data_ptr(),
        layer.keys.data_ptr(),
        layer.values.data_ptr(),
        layer.num_heads,
        layer.num_kv_heads,
        layer.size,
        layer.block_size,
        layer.window,
        rotary.eps,
        layer.scaling,
        layer.softcap,
    )
