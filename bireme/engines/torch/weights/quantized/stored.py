"""A weight as a checkpoint stores it, apart from what is made of it.

A `StoredForm` is geometry alone: bits, groups, order. A `StoredTensor` says which stored tensors are the parts of one
weight in this form. Who keeps weights as they are stored reads the parts; who does not, dequantizes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bireme.engines.torch.weights.quantized.heads import Head, Shards
from bireme.errors import ConfigError

TOLD = "quantization_config"  # of config.json, in errors
SCALES = ("F32", "BF16", "F16")


class StoredForm(Protocol):
    """How one weight is stored. `parts` are its stored tensors by their roles."""

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the weight as the model has it: computed in float32, rounded once to `dtype`."""

    def fault(self, parts: Mapping[str, Tensor]) -> str | None:
        """Return what is wrong with the values of the parts but `data`; None: nothing."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A weight of the model and what it is stored as."""

    name: str  # in the model's checkpoint, were it plain
    shape: tuple[int, ...]  # of the plain tensor
    form: StoredForm
    parts: Mapping[str, str]  # role -> name in the files; `data` holds the quantized values

    def read(self, shards: Shards) -> dict[str, Tensor]:
        return {role: shards.read(name) for role, name in self.parts.items()}

    def check_values(self, shards: Shards) -> None:
        """Raises ConfigError for scales that are no numbers, and for indices that point nowhere."""
        small = {role: shards.read(name) for role, name in self.parts.items() if role != "data"}
        for role, tensor in small.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
                raise ConfigError(f"{self.parts[role]}: it holds NaN or inf; quantize or fetch the checkpoint again")
        if "shape" in small and tuple(small["shape"].tolist()) != self.shape:
            raise ConfigError(
                f"{self.parts['shape']} says {small['shape'].tolist()}, and the weight has {list(self.shape)};"
                " quantization_config is another checkpoint's, or a file is damaged"
            )
        if fault := self.form.fault(small):
            raise ConfigError(f"{self.name}: {fault}; quantize or fetch the checkpoint again")


def group_size_of(name: str, size: int, length: int) -> int:
    """Return the inputs that share a scale; -1: all. Raises ConfigError where groups don't divide the inputs."""
    if size == -1:
        return length
    if size < 1 or length % size:
        raise ConfigError(
            f"{name}: group size {size} does not divide its {length} inputs; quantization_config is another"
            " checkpoint's, or the checkpoint needs a group size that divides them"
        )
    return size


def expect(name: str, head: Head, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], why: str) -> None:
    """Raises ConfigError where a stored tensor is none of these. `why`: what the shape follows from."""
    if head.dtype not in dtypes:
        raise ConfigError(f"{name} is stored as {head.dtype}; {' or '.join(dtypes)} is read here")
    if head.shape not in shapes:
        raise ConfigError(
            f"{name} has the shape {list(head.shape)}, and {why} asks for {' or '.join(str(list(s)) for s in shapes)};"
            " quantization_config is another checkpoint's, or a file is damaged"
        )


def part(heads: Mapping[str, Head], name: str, of: str) -> Head:
    """Return a stored tensor that another one needs. Raises ConfigError where the files lack it."""
    head = heads.get(name)
    if head is None:
        raise ConfigError(f"{name} is missing: {of} can't be read without it; fetch the checkpoint again")
    return head
