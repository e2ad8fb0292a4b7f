"""A picture's embeddings in this engine's form, and how they are read for a transfer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.kv.transfer.base import KvLayout
from bireme.multimodal.embedding_share import embedding_layout


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Embeddings in host memory."""

    tensor: Tensor  # (num_tokens, hidden), contiguous, CPU

    @property
    def num_tokens(self) -> int:
        return int(self.tensor.shape[0])

    @property
    def num_bytes(self) -> int:
        return int(self.tensor.nbytes)

    def read(self, first: int, last: int, data: memoryview) -> None:
        source = self.tensor[first:last].view(torch.uint8)
        torch.frombuffer(data, dtype=torch.uint8).view(source.shape).copy_(source)


def layout_of(digest: str, dtype: torch.dtype, hidden_size: int) -> KvLayout:
    row_bytes = hidden_size * torch.empty((), dtype=dtype).element_size()
    return embedding_layout(digest, str(dtype).removeprefix("torch."), row_bytes)
