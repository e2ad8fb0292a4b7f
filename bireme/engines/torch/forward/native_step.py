"""The layers of a decode step as one call of C++ (`native/step.cpp`), where all projections stay in blocks.

Of a small model, calls from Python take a third as long as the products of one row. With many rows they don't matter,
and what each thread does for itself would. Results are those of the single operations to the last bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bireme.engines.torch.forward.quantized_linear import QuantizedLinear
from bireme.engines.torch.step import TableStep

MOST_ROWS = 16
_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64


@dataclass(frozen=True, slots=True)
class StepLayer:
    """Of a dense decoder. Norms are float32."""

    norms: tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # attention's, MLP's, and what follows each
    linears: tuple[QuantizedLinear, ...]  # qkv, output, gate and up, down
    group: int  # of its window


class _Linear(ctypes.Structure):
    _fields_ = [("parts", _POINTER), ("count", _INTEGER), ("depth", _INTEGER), ("width", _INTEGER)]


class _DecoderLayer(ctypes.Structure):
    _fields_ = [
        ("norms", _POINTER * 4),
        ("linears", _Linear * 4),
        ("attention", _POINTER),
        ("group", _INTEGER),
    ]


class _Tokens(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("positions", "rows", "tables")),
        *((name, _INTEGER) for name in ("columns", "count", "decodes", "drafts")),
    ]


class NativeStep:
    def __init__(
        self,
        library: ctypes.CDLL,
        layers: Sequence[StepLayer],
        attention: Sequence[int],
        eps: float,
        is_gelu: bool,
        threads: int,
    ) -> None:
        """`attention`: addresses of the layers' structures, which the caller keeps."""
        self._layers = layers  # what is pointed at
        self._structures = (_DecoderLayer * len(layers))(*map(_structure, layers, attention))
        self._options = eps, is_gelu, threads
        name = str(layers[0].linears[0].dtype).removeprefix("torch.")
        self._decode: Any = library[f"decode_{name}"]
        self._decode.argtypes = [_POINTER, _INTEGER, _POINTER, _INTEGER, _INTEGER, _POINTER, ctypes.c_float]
        self._decode.argtypes += [ctypes.c_int, ctypes.c_int]

    def __call__(self, x: Tensor, positions: Tensor, groups: Sequence[TableStep]) -> None:
        """x (rows, hidden), the embeddings -> x, what the last layer makes of them. Fills the pools' rows."""
        rows = x.size(0)
        tokens = (_Tokens * len(groups))()
        for to, group in zip(tokens, groups, strict=True):
            pointers = positions.data_ptr(), group.rows.data_ptr(), group.tables.data_ptr()
            to.positions, to.rows, to.tables = pointers
            to.columns, to.count, to.decodes = group.tables.size(1), rows, rows
            to.drafts = group.has_drafts
        self._decode(self._structures, len(self._layers), x.data_ptr(), *x.size(), tokens, *self._options)


def _structure(layer: StepLayer, attention: int) -> _DecoderLayer:
    linears = [
        _Linear(ctypes.addressof(own.parts), len(own.parts), own.shape[1], own.shape[0]) for own in layer.linears
    ]
    norms = [0 if norm is None else norm.data_ptr() for norm in layer.norms]
    return _DecoderLayer((_POINTER * 4)(*norms), (_Linear * 4)(*linears), attention, layer.group)
