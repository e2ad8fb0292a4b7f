"""Another revision of a model: a copy with one tensor changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

_BYTES = {"F32": 4, "BF16": 2}


def changed_model(model: Path, folder: Path, tensor: str) -> Path:
    """Return `folder`, the copy, where every second value of a tensor has the other sign."""
    shutil.copytree(model, folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")  # of the values, behind the header
    about = json.loads(data[8:begin])[tensor]
    size, (first, end) = _BYTES[about["dtype"]], about["data_offsets"]
    for at in range(begin + first + size - 1, begin + end, 2 * size):
        data[at] ^= 0x80
    path.write_bytes(data)
    return folder
