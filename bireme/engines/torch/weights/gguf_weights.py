"""Weights of a GGUF file, read when they are asked for and dequantized in portions, so that a load's peak is the model
and little more. Files are read, not mapped: one that is cut short meanwhile is an error and no signal.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bireme.engines.torch.weights.gguf_blocks import dequantize
from bireme.errors import ConfigError
from bireme.gguf.architectures import Weight, weights_of
from bireme.gguf.head import GgufHead, TensorInfo

logger = logging.getLogger("bireme.engines.torch")
_PORTION_VALUES = 1 << 20  # that are dequantized at once, at least a row
_SAMPLE_BYTES = 1 << 12


class GgufTensor:
    """A parameter that transformers reads as it does a slice of safetensors: whole, by `[...]`."""

    def __init__(self, weight: Weight, dtype: torch.dtype) -> None:
        self._weight, self._dtype = weight, dtype
        self.shape = torch.Size(weight.shape)

    def __getitem__(self, index: Any) -> Tensor:
        """Return it dequantized, in its dtype, in host memory. Raises ConfigError."""
        weight = self._weight
        whole = torch.empty(self.shape, dtype=self._dtype)
        rows = whole.view(-1, self.shape[-1]) if len(self.shape) > 1 else whole.view(1, -1)
        if weight.num_heads and len(self.shape) == 1:
            rows = whole.view(-1, 1)
        for places, raw, info in raw_rows(weight):
            values = dequantize(raw.view(-1, info.type.num_bytes), info.type.name).view(len(places), -1)
            rows[places] = (values + weight.offset).to(self._dtype)
        return whole


def raw_rows(weight: Weight) -> Iterator[tuple[Tensor, Tensor, TensorInfo]]:
    """Yield portions of a weight's rows as the file has them: places among the model's rows, bytes, and what they are.

    Places are int64 (rows,), bytes uint8 (rows, bytes of one). A vector is one row; one of a rotary projection, which
    is F32 always, as many as it has values. Raises ConfigError.
    """
    for part, info in enumerate(weight.parts):
        places = _places(weight, part)
        row_bytes = info.row_bytes if len(places) == info.num_rows else info.row_bytes // len(places)
        portion = max(1, _PORTION_VALUES * info.type.num_bytes // info.type.num_values // row_bytes)
        with info.path.open("rb", buffering=0) as file:
            for first in range(0, len(places), portion):
                some = places[first : first + portion]
                raw = torch.empty(len(some) * row_bytes, dtype=torch.uint8)
                if os.preadv(file.fileno(), [raw.numpy()], info.begin + first * row_bytes) != len(raw):
                    raise ConfigError(f"{info.path.name}: {info.name} is cut short; fetch the file again")
                yield some, raw.view(len(some), row_bytes), info


def _places(weight: Weight, part: int) -> Tensor:
    """Return where each row of a part belongs among the rows of the whole."""
    info = weight.parts[part]
    if weight.num_heads:  # (heads, half, 2) in the file, (heads, 2, half) in the model
        rows = info.shape[0]
        return torch.arange(rows).view(weight.num_heads, 2, -1).transpose(1, 2).reshape(-1)
    if len(weight.parts) == 1:
        return torch.arange(info.num_rows)
    heights = [each.shape[-2] for each in weight.parts]
    begin, height = sum(heights[:part]), heights[part]
    experts = torch.arange(info.num_rows // height).unsqueeze(1) * sum(heights)
    return (experts + begin + torch.arange(height)).reshape(-1)


def gguf_tensors(
    head: GgufHead, config: Mapping[str, Any], expected: Mapping[str, torch.Size], dtype: torch.dtype
) -> dict[str, GgufTensor]:
    """Return each parameter that the model expects, none of them read yet. Raises ConfigError where shapes differ."""
    weights = weights_of(head, config)
    if config["tie_word_embeddings"]:
        expected = {name: shape for name, shape in expected.items() if name != "lm_head.weight"}
    missing = sorted(expected.keys() - weights.keys())
    if missing:
        raise ConfigError(
            f"{head.name} lacks {len(missing)} tensors that the model needs, {missing[0]} among them; fetch it again"
        )
    for name, weight in weights.items():
        _check_shape(head, weight, expected.get(name))
    num_values = sum(math.prod(weight.shape) for weight in weights.values())
    logger.info(
        "gguf_dequantized file=%s types=%s file_mib=%d dtype=%s memory_mib=%d",
        head.name,
        ",".join(sorted({info.type.name for info in head.tensors.values()})),
        head.weight_bytes >> 20,
        str(dtype).removeprefix("torch."),
        num_values * dtype.itemsize >> 20,
    )
    return {name: GgufTensor(weight, dtype) for name, weight in weights.items()}


def _check_shape(head: GgufHead, weight: Weight, expected: torch.Size | None) -> None:
    """Raises ConfigError."""
    first, last = weight.parts[0], weight.parts[-1]
    if expected is None:
        raise ConfigError(f"{head.name}: {first.name} is no part of the model; take another file")
    heads = weight.num_heads
    if weight.shape != tuple(expected) or (heads and weight.shape[0] % (2 * heads)):
        raise ConfigError(
            f"{head.name}: {first.name} has shape {list(weight.shape)}, by its metadata it has {list(expected)};"
            " fetch the file again"
        )
    if last.shape[:1] + last.shape[2:] != first.shape[:1] + first.shape[2:]:
        raise ConfigError(f"{head.name}: {last.name} does not fit {first.name}; fetch the file again")


def gguf_digest(head: GgufHead) -> str:
    """Hash the files' heads, and samples of each tensor."""
    digest = hashlib.sha256()
    for path in head.paths:
        infos = [info for info in head.tensors.values() if info.path == path]
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            read = functools.partial(os.pread, file.fileno())
            digest.update(f"{size} ".encode() + read(min((info.begin for info in infos), default=size), 0))
            for info in infos:
                for at in (0, info.num_bytes // 2):
                    digest.update(read(min(info.num_bytes - at, _SAMPLE_BYTES), info.begin + at))
    return digest.hexdigest()
