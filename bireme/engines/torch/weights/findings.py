"""What an engine finds out of its model when it starts, kept for the worker's next life, which starts sooner with it.

The geometry of its attention, the memory of its largest step, and what its own modules compute of a prompt: a decoder
is compared with that in every life, and the modules run in the first alone. One safetensors file in the run folder. It
is of one configuration, set of weights and device; where it is of others, or can't be read, all is found out again.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from bireme.engines.torch.geometry import LayerGeometry
from bireme.errors import one_line

logger = logging.getLogger("bireme.engines.torch")
_FORMAT = 1


class _Header(msgspec.Struct):
    subject: str = ""  # hash of what it was found of
    geometry: list[tuple[int, int, int, int, str]] = []  # a layer's fields, but for `unknown`, of which it has none
    peak_bytes: int | None = None


class Findings:
    """Each is asked for with the way to find it out, which is gone where an earlier life has not."""

    def __init__(self, path: Path | None, *subject: Any) -> None:
        """`path`: None keeps nothing. `subject`: what the findings depend on."""
        self._path = path
        parts = " ".join(map(str, (_FORMAT, *subject)))
        self._header = _Header(hashlib.sha256(parts.encode()).hexdigest())
        self._logits: dict[str, Tensor] = {}
        self._is_new = False
        if path is not None:
            self._read(path)

    @property
    def are_there(self) -> bool:
        """An earlier life has found them."""
        return bool(self._header.geometry)

    def geometry(self, find: Callable[[], list[LayerGeometry]]) -> list[LayerGeometry]:
        """Return each layer's."""
        if not self._header.geometry:
            self._is_new = True
            self._header.geometry = [_plain(layer) for layer in find()]
        return [
            LayerGeometry(num_kv_heads, key_size, value_size, window, getattr(torch, dtype), ())
            for num_kv_heads, key_size, value_size, window, dtype in self._header.geometry
        ]

    def peak_bytes(self, find: Callable[[], int]) -> int:
        """Return what the largest step takes of a GPU beyond weights and pools."""
        if self._header.peak_bytes is None:
            self._is_new = True
            self._header.peak_bytes = find()
        return self._header.peak_bytes

    def logits(self, what: str, find: Callable[[], Tensor]) -> Tensor:
        """Return what the model's modules compute of an input of this name; not always on its device."""
        if what not in self._logits:
            self._is_new = True
            self._logits[what] = find().cpu()
        return self._logits[what]

    def doubt(self) -> None:
        """Forget the logits, of which a decoder's differ: they are computed anew in the next life."""
        self._logits.clear()
        self._is_new = True

    def keep(self) -> None:
        """Write what is new to the file."""
        if self._path is None or not self._is_new:
            return
        draft = self._path.with_name(f".{self._path.name}-{os.getpid()}")
        try:
            header = msgspec.json.encode(self._header).decode()
            save_file({what: logits.contiguous() for what, logits in self._logits.items()}, draft, {"found": header})
            draft.replace(self._path)
        except (OSError, safetensors.SafetensorError) as error:  # the disk is full
            draft.unlink(missing_ok=True)
            logger.warning("findings_not_kept reason=%s: the next start takes as long as this one", one_line(error))

    def _read(self, path: Path) -> None:
        try:
            with safetensors.safe_open(path, "pt") as file:
                header = msgspec.json.decode(file.metadata()["found"], type=_Header)
                if header.subject != self._header.subject:
                    return
                logits = {what: file.get_tensor(what) for what in file.keys()}
        except FileNotFoundError:
            return
        except (OSError, safetensors.SafetensorError, msgspec.MsgspecError, KeyError, TypeError) as error:
            logger.warning("findings_not_read reason=%s: they are made anew", one_line(error))
            return
        self._header, self._logits = header, logits
        logger.info("findings_read layers=%d logits=%s", len(header.geometry), ",".join(logits))


def _plain(layer: LayerGeometry) -> tuple[int, int, int, int, str]:
    dtype = str(layer.dtype).removeprefix("torch.")
    return layer.num_kv_heads, layer.key_size, layer.value_size, layer.window, dtype
