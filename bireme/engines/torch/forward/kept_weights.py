"""Which weights stay as their file has them on a CPU, and their rows in the model's order: blocks of a GGUF file, and
integers of 4 bits in groups (AWQ, GPTQ, compressed-tensors)."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

import torch

from bireme.engines.torch.forward.quantized_linear import (
    BlockRows,
    GroupRows,
    StoredRows,
    why_no_panels,
)
from bireme.engines.torch.storage import WeightForm
from bireme.engines.torch.weights.checkpoint import Checkpoint
from bireme.engines.torch.weights.gguf_weights import raw_rows
from bireme.engines.torch.weights.kept_types import EMBEDDINGS, HEAD, LAYER, are_kept, names_of
from bireme.engines.torch.weights.quantized.heads import Shards
from bireme.engines.torch.weights.quantized.integers import Awq, CompressedIntegers, Gptq
from bireme.engines.torch.weights.quantized.kept import why_not_kept
from bireme.engines.torch.weights.quantized.methods import Quantization
from bireme.gguf.architectures import Weight, config_of, weights_of
from bireme.gguf.head import GgufHead

logger = logging.getLogger("bireme.engines.torch")


class KeptWeights(ABC):
    """Read when they are asked for; what is not kept is counted, and told at the end."""

    is_tied = False  # the head is the embeddings

    def __init__(self, name: str) -> None:
        self._name = name
        self._dequantized: Counter[str] = Counter()
        self._first: dict[str, str] = {}  # by what kept it from staying

    def of_layer(self, index: int) -> list[Sequence[StoredRows]]:
        """Return a dense layer's qkv, output, gate and up, and down, each in parts; of others nothing."""
        return [self._parts(names_of(index, names)) for names in LAYER]

    def of_head(self) -> Sequence[StoredRows]:
        return self._parts([EMBEDDINGS if self.is_tied else HEAD])

    def of_embeddings(self) -> Sequence[BlockRows]:
        return ()

    def tell(self, kept: Counter[str], num_bytes: int, instructions: str) -> None:
        """Log what was kept, and one line for each reason why weights were not."""
        forms = ",".join(f"{form}:{count}" for form, count in sorted(kept.items())) or "none"
        kept_mib = num_bytes >> 20
        logger.info("weights_kept file=%s forms=%s mib=%d by=%s", self._name, forms, kept_mib, instructions)
        for kind, count in sorted(self._dequantized.items()):
            logger.info("weights_dequantized type=%s count=%d first=%s", kind, count, self._first[kind])

    @abstractmethod
    def _parts(self, names: Sequence[str]) -> Sequence[StoredRows]:
        """Return the rows of weights that are one matrix, all or none."""

    def _note(self, name: str, kind: str) -> None:
        self._dequantized[kind] += 1
        self._first.setdefault(kind, name)


class KeptBlocks(KeptWeights):
    """Of a GGUF file."""

    def __init__(self, head: GgufHead) -> None:
        super().__init__(head.name)
        self._weights = weights_of(head, config_of(head))
        self.is_tied = HEAD not in self._weights
        for name, weight in self._weights.items():
            if len(weight.shape) > 2:  # experts
                self._note(name, weight.parts[0].type.name)

    def of_embeddings(self) -> Sequence[BlockRows]:
        return self._parts([EMBEDDINGS])

    def _parts(self, names: Sequence[str]) -> Sequence[BlockRows]:
        if are_kept(self._weights, names):
            return [_read(self._weights[name]) for name in names]
        if all(name in self._weights for name in names):
            for name in names:
                self._note(name, self._weights[name].parts[0].type.name)
        return ()


class KeptIntegers(KeptWeights):
    """Of a quantized checkpoint."""

    def __init__(self, quantization: Quantization) -> None:
        super().__init__(quantization.method)
        self._quantization, self._shards = quantization, Shards(dict(quantization.heads))

    def _parts(self, names: Sequence[str]) -> Sequence[GroupRows]:
        if not all(name in self._quantization.tensors for name in names):
            return ()
        found = [self._rows(name) for name in names]
        rows = [own for own in found if isinstance(own, GroupRows)]
        if len(rows) == len(names):
            return rows
        for name, own in zip(names, found, strict=True):
            self._note(name, own if isinstance(own, str) else "joined_with_these")
        return ()

    def _rows(self, name: str) -> GroupRows | str:
        """Return a weight's rows, or why it has no products here, in one word."""
        tensor = self._quantization.tensors[name]
        own, why = why_not_kept(self._quantization, [name], self._shards)
        if own is None or own.form is not WeightForm.INT4_GROUPS:
            return "act_order" if "act-order" in why else "other_form"
        assert isinstance(tensor.form, Gptq | Awq | CompressedIntegers)
        values, scales, zeros = tensor.form.unpacked(tensor.read(self._shards))
        halves = scales.half()
        if why_no_panels(values.shape, scales.shape[1]):
            return "other_groups"
        if not torch.equal(halves.to(scales.dtype), scales):
            return "scales_beyond_float16"
        wholes = torch.full(scales.shape, zeros) if isinstance(zeros, int) else zeros
        return GroupRows(values, halves, wholes)


def kept_weights(checkpoint: Checkpoint) -> KeptWeights | None:
    """Return those that may stay; None: the checkpoint has none of a form that stays."""
    if checkpoint.gguf is not None:
        return KeptBlocks(checkpoint.gguf)
    quantization = checkpoint.quantization
    forms = [] if quantization is None else [tensor.form for tensor in quantization.tensors.values()]
    if quantization is None or not any(isinstance(form, Gptq | Awq | CompressedIntegers) for form in forms):
        return None
    return KeptIntegers(quantization)


def _read(weight: Weight) -> BlockRows:
    info = weight.parts[0]
    blocks = torch.empty(info.num_rows, info.row_bytes, dtype=torch.uint8)
    for places, raw, _ in raw_rows(weight):
        blocks[places] = raw
    return BlockRows(info.type.name, blocks)
