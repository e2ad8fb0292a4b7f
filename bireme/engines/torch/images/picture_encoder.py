"""The torch engine's ImageEncoder: a model's image processor, vision tower and projector."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from bireme.engines.torch.images.tensor_rows import TensorRows, layout_of
from bireme.engines.torch.images.vision_models import PreparedPicture, family_of
from bireme.engines.torch.weights.checkpoint import Checkpoint
from bireme.errors import ConfigError, RequestError, one_line
from bireme.kv.transfer.base import KvLayout
from bireme.multimodal.embedding_share import EmbeddingRows
from bireme.multimodal.encoding import EncodedRows
from bireme.multimodal.wire import Grid

_DOMAIN = b"bireme.embeddings.1\0"  # no other hash input begins like this
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_GRID = "image_grid_thw"


class PictureEncoder:
    """Used by the vision thread (`encode`) and the processors' threads."""

    def __init__(self, model: Any, checkpoint: Checkpoint, hidden_size: int, dtype: torch.dtype) -> None:
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.device = torch.device("cpu")  # where embeddings lie
        self._model = model
        self._family = family_of(checkpoint.config)
        self._processor = _image_processor(checkpoint)
        self._merge_size = int(getattr(checkpoint.config.vision_config, "spatial_merge_size", 1))
        self._needs_grid = hasattr(self._family, "_merged")
        self._digest = checkpoint.digest
        self._identity = f"{checkpoint.digest} {dtype} {self._processor.to_json_string()}".encode()

    @property
    def layout(self) -> KvLayout:
        return layout_of(self._digest, self.dtype, self.hidden_size)

    def begin_thread(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def name_of(self, content_hash: bytes) -> str:
        return self._name(b"picture", content_hash)

    def prepare(self, pixels: Any) -> PreparedPicture:
        # A copy: decoded pictures are read-only, and torch warns about such memory.
        return self._family.prepare(self._processor, pixels.copy())

    def encode(self, batch: Sequence[PreparedPicture]) -> list[EmbeddingRows]:
        with torch.inference_mode():
            features = self._family.features(self._model, batch)
            return [TensorRows(one.to(self.device, self.dtype).contiguous()) for one in features]

    def warm_up(self) -> None:
        """Encode one small picture, so that no request waits for kernels and lazy imports."""
        import numpy as np

        (rows,) = self.encode([self.prepare(np.zeros((56, 56, 3), np.uint8))])
        if rows.num_bytes != rows.num_tokens * self.layout.bytes_per_token:
            raise ConfigError(f"the projector makes embeddings of another size than the language model's: {rows}")

    def read_embeddings(self, content: bytes) -> EncodedRows:
        tensor, grid = self._parse(content)
        self._check(tensor, grid)
        rows = TensorRows(tensor.to(self.device, self.dtype).contiguous())
        return EncodedRows(self._name(b"embeddings", struct.pack("<Q", len(content)) + content), rows, grid)

    def write_embeddings(self, rows: Sequence[EmbeddingRows]) -> bytes:
        tensors = {f"image_{at}": one.tensor for at, one in enumerate(rows) if isinstance(one, TensorRows)}
        return bytes(save_tensors(tensors))

    def _name(self, kind: bytes, content: bytes) -> str:
        hasher = blake3(_DOMAIN + kind + struct.pack("<I", len(self._identity)) + self._identity)
        hasher.update(content)
        return hasher.hexdigest()

    def _parse(self, content: bytes) -> tuple[Tensor, Grid | None]:
        try:
            tensors = load_tensors(content)
        except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise RequestError("embeddings: not a safetensors file; save a tensor (tokens, hidden) with it") from error
        grid = tensors.pop(_GRID, None)
        if len(tensors) != 1:
            raise RequestError(f"embeddings: {len(tensors)} tensors in the file; send one, (tokens, hidden)")
        if grid is not None and (grid.numel() != 3 or grid.dtype not in (torch.int32, torch.int64)):
            raise RequestError(f"embeddings: {_GRID} is three integers: patches in time, height and width")
        return next(iter(tensors.values())), None if grid is None else _grid(grid)

    def _check(self, tensor: Tensor, grid: Grid | None) -> None:
        shape = tuple(tensor.shape)
        if len(shape) != 2 or shape[0] < 1 or shape[1] != self.hidden_size or tensor.dtype not in _FLOATS:
            raise RequestError(
                f"embeddings: {tensor.dtype} of shape {list(shape)}; this model takes float32, float16 or bfloat16"
                f" of shape [tokens, {self.hidden_size}]"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise RequestError("embeddings: they hold NaN or infinity; finite numbers are needed")
        if self._needs_grid != (grid is not None):
            verb = "needs" if self._needs_grid else "takes no"
            raise RequestError(f"embeddings: this model {verb} {_GRID} in the file")
        if grid is not None and not self._fits(grid, shape[0]):
            raise RequestError(f"embeddings: {shape[0]} tokens do not fit {_GRID} {list(grid)}")

    def _fits(self, grid: Grid, num_tokens: int) -> bool:
        side, (time, height, width) = self._merge_size, grid
        is_whole = min(grid) > 0 and height % side == 0 and width % side == 0
        return is_whole and time * height * width == num_tokens * side * side


def _grid(tensor: Tensor) -> Grid:
    time, height, width = (int(count) for count in tensor.reshape(-1))
    return time, height, width


def _image_processor(checkpoint: Checkpoint) -> Any:
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(checkpoint.folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # OS errors, validation errors of many kinds: all about one file
        text = f"the model's image processor (preprocessor_config.json) can't be read: {one_line(error)}"
        raise ConfigError(text) from error
