"""Which weights of a GGUF file stay in its blocks on a CPU, and their rows in the model's order."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import torch

from bireme.engines.torch.forward.quantized_linear import FORMS, StoredRows
from bireme.engines.torch.weights.gguf_weights import raw_rows
from bireme.gguf.architectures import Weight, config_of, weights_of
from bireme.gguf.head import GgufHead

logger = logging.getLogger("bireme.engines.torch")
_LAYER = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class KeptBlocks:
    """Read when they are asked for; what is not kept is counted, and told at the end."""

    def __init__(self, head: GgufHead) -> None:
        self._head, self._weights = head, weights_of(head, config_of(head))
        self._dequantized: Counter[str] = Counter()
        self._first: dict[str, str] = {}  # by type

    @property
    def is_tied(self) -> bool:
        return _HEAD not in self._weights

    def of_layer(self, index: int) -> list[Sequence[StoredRows]]:
        """Return a dense layer's qkv, output, gate and up, and down, each in parts; of others nothing."""
        return [self._parts([f"model.layers.{index}.{name}.weight" for name in names]) for names in _LAYER]

    def of_head(self) -> Sequence[StoredRows]:
        return self._parts([_EMBEDDINGS if self.is_tied else _HEAD])

    def of_embeddings(self) -> Sequence[StoredRows]:
        return self._parts([_EMBEDDINGS])

    def tell(self, kept: Counter[str], num_bytes: int, instructions: str) -> None:
        """Log what was kept, and one line for each type of which weights were not."""
        forms = ",".join(f"{form}:{count}" for form, count in sorted(kept.items())) or "none"
        kept_mib = num_bytes >> 20
        logger.info("weights_kept file=%s forms=%s mib=%d by=%s", self._head.name, forms, kept_mib, instructions)
        for name, weight in self._weights.items():
            if len(weight.shape) > 2:  # experts
                self._note(name, weight)
        for kind, count in sorted(self._dequantized.items()):
            logger.info("weights_dequantized type=%s count=%d first=%s", kind, count, self._first[kind])

    def _parts(self, names: Sequence[str]) -> Sequence[StoredRows]:
        weights = {name: self._weights[name] for name in names if name in self._weights}
        if len(weights) < len(names):
            return ()
        if all(_is_kept(weight) for weight in weights.values()):
            return [_read(weight) for weight in weights.values()]
        for name, weight in weights.items():
            self._note(name, weight)
        return ()

    def _note(self, name: str, weight: Weight) -> None:
        kind = weight.parts[0].type.name
        self._dequantized[kind] += 1
        self._first.setdefault(kind, name)


def _is_kept(weight: Weight) -> bool:
    return len(weight.parts) == 1 and len(weight.shape) == 2 and weight.parts[0].type.name in FORMS


def _read(weight: Weight) -> StoredRows:
    info = weight.parts[0]
    blocks = torch.empty(info.num_rows, info.row_bytes, dtype=torch.uint8)
    for places, raw, _ in raw_rows(weight):
        blocks[places] = raw
    return StoredRows(info.type.name, blocks)
