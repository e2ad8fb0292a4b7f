"""A picture's embeddings in this engine's form, and as a transfer sees them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.kv.transfer.base import KvLayout
from bireme.kv.transfer.memory import HostMemory
from bireme.multimodal.embedding_share import embedding_layout


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Embeddings in host memory, or a GPU's where they go from GPU to GPU (embedding_pool.py)."""

    tensor: Tensor  # (num_tokens, hidden), contiguous

    @property
    def num_tokens(self) -> int:
        return int(self.tensor.shape[0])

    @property
    def num_bytes(self) -> int:
        return int(self.tensor.nbytes)

    @property
    def memory(self) -> HostMemory:
        return HostMemory([[self.tensor.cpu().view(torch.uint8).numpy()]])


def layout_of(digest: str, dtype: torch.dtype, hidden_size: int) -> KvLayout:
    row_bytes = hidden_size * torch.empty((), dtype=dtype).element_size()
    return embedding_layout(digest, str(dtype).removeprefix("torch."), row_bytes)
