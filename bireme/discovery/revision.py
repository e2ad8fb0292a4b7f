"""Which content a model's folder has: workers of unlike revisions hand each other no KV and take over no stream."""

from __future__ import annotations

import hashlib
from pathlib import Path

_WHOLE_BYTES = 1 << 20  # files up to here are read as a whole
_SAMPLE_BYTES, _NUM_SAMPLES = 64 << 10, 16  # of larger ones, evenly spaced, the first and the last among them
_SUFFIXES = frozenset((".json", ".jinja", ".model", ".txt", ".tiktoken", ".safetensors", ".bin", ".gguf"))


def model_revision(model: str) -> str:
    """Return a digest of names, sizes and content, the same on each host; "" for what is no folder or can't be read.

    Of weights parts are read: other weights of the same sizes differ in those as well.
    """
    folder = Path(model)
    digest = hashlib.blake2b(digest_size=8)
    try:
        files = [path for path in sorted(folder.iterdir()) if path.suffix in _SUFFIXES and path.is_file()]
        for path in files:
            _take(digest, path)
    except OSError:
        return ""
    return digest.hexdigest() if files else ""


def _take(digest: hashlib.blake2b, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name}\0{size}\0".encode())
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            digest.update(file.read())
            return
        for at in range(_NUM_SAMPLES):
            file.seek((size - _SAMPLE_BYTES) * at // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
