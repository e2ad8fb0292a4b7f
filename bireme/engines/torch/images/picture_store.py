"""Embeddings for the sequences of an engine that takes pictures, whichever engine: TensorRT-LLM has one as well.

They are fetched before the sequence joins the queue, and freed when its prompt has been computed (or at its end, if it
may have to be computed again). The bytes of all sequences together are bounded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from bireme.engines.torch.images.tensor_rows import TensorRows
from bireme.engines.torch.step import Post, SequencePictures
from bireme.errors import BiremeError, ResourceExhaustedError
from bireme.multimodal.embedding_share import EmbeddingShare, Fetched
from bireme.multimodal.mrope import rope_positions
from bireme.multimodal.wire import OpenedItem

logger = logging.getLogger("bireme.engines.torch")


class PicturedSequence(Protocol):
    """A request, as its engine has it."""

    pictures: SequencePictures | None


Ready = Callable[[Any, BiremeError | None], None]  # with the sequence


class PictureStore:
    """Gets embeddings for sequences; used on the engine's thread but for `check`."""

    def __init__(
        self,
        share: EmbeddingShare,
        post: Post,
        device: torch.device,
        dtype: torch.dtype,
        hidden_size: int,
        max_held_bytes: int,
    ) -> None:
        self._share, self._post = share, post
        self._device, self._dtype, self._hidden_size = device, dtype, hidden_size
        self._max_held_bytes = max_held_bytes
        self._lock = threading.Lock()
        self.held_bytes = 0

    def check(self, pictures: SequencePictures) -> None:
        """Raise ResourceExhaustedError when there is no room for its embeddings. From any thread."""
        need = self._num_bytes(pictures)
        if self.held_bytes + need > self._max_held_bytes:
            raise ResourceExhaustedError(
                f"images: {self.held_bytes} bytes of embeddings are held and this request needs {need};"
                f" multimodal_config.max_held_bytes is {self._max_held_bytes}; try again later"
            )

    def fetch(self, sequence: PicturedSequence, ready: Ready) -> None:
        """Get the embeddings of all its pictures; `ready` is called once, on the engine's thread."""
        pictures = sequence.pictures
        assert pictures is not None
        self._hold(pictures, self._num_bytes(pictures))
        wanted = [(at, item.handle) for at, item in enumerate(pictures.items) if item.handle is not None]
        pictures.num_missing = len(wanted)
        for at, handle in wanted:
            fetch = self._share.fetch(handle, partial(self._arrived, sequence, at, ready))
            if fetch is not None:
                pictures.fetches.append(fetch)

    def release(self, sequence: PicturedSequence) -> None:
        pictures = sequence.pictures
        if pictures is None or not pictures.held_bytes:
            return
        for fetch in pictures.fetches:
            fetch.cancel()
        pictures.fetches, pictures.rows = [], [None] * len(pictures.items)
        self._hold(pictures, 0)

    def _num_bytes(self, pictures: SequencePictures) -> int:
        size = self._hidden_size * int(torch.empty((), dtype=self._dtype).element_size())
        return size * sum(item.num_tokens for item in pictures.items if item.handle is not None)

    def _hold(self, pictures: SequencePictures, num_bytes: int) -> None:
        with self._lock:
            self.held_bytes += num_bytes - pictures.held_bytes
            pictures.held_bytes = num_bytes

    def _arrived(self, sequence: PicturedSequence, at: int, ready: Ready, result: Fetched | BiremeError) -> None:
        """On the transfer's thread, or at once."""
        self._post(partial(self._take, sequence, at, ready, result))

    def _take(self, sequence: PicturedSequence, at: int, ready: Ready, result: Fetched | BiremeError) -> None:
        pictures = sequence.pictures
        assert pictures is not None
        if not pictures.held_bytes or not pictures.num_missing:
            return  # it has ended, or failed with another picture
        if isinstance(result, BiremeError):
            pictures.num_missing = 0
            ready(sequence, result)
            return
        try:
            pictures.rows[at] = self._tensor(result)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            logger.warning("embeddings_not_taken reason=%s", reason)
            pictures.num_missing = 0
            is_passing = isinstance(error, torch.OutOfMemoryError)
            ready(
                sequence, (ResourceExhaustedError if is_passing else BiremeError)(f"images: their embeddings: {reason}")
            )
            return
        pictures.num_missing -= 1
        if not pictures.num_missing:
            pictures.fetches = []
            ready(sequence, None)

    def _tensor(self, fetched: Fetched) -> Tensor:
        if isinstance(fetched, bytearray):
            rows = torch.frombuffer(fetched, dtype=self._dtype).view(-1, self._hidden_size)
        else:
            assert isinstance(fetched, TensorRows)
            rows = fetched.tensor
        return rows.to(self._device)


def pictures_of(items: tuple[OpenedItem, ...], num_prompt: int, merge_size: int) -> SequencePictures | None:
    """Return None for a request without pictures."""
    if not items:
        return None
    rope = rope_positions(num_prompt, items, merge_size) if merge_size else None
    return SequencePictures(items, rope, [None] * len(items))
