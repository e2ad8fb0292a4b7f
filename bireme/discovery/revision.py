"""Which content a model's folder has: workers of unlike revisions hand each other no KV and take over no stream."""

from __future__ import annotations

import hashlib
from pathlib import Path

from bireme.config import Recipe
from bireme.errors import ConfigError

_WHOLE_BYTES = 1 << 20  # files up to here are read as a whole
_SAMPLE_BYTES, _NUM_SAMPLES = 64 << 10, 16  # of larger ones, evenly spaced, the first and the last among them
_SUFFIXES = frozenset((".json", ".jinja", ".model", ".txt", ".tiktoken", ".safetensors", ".bin", ".gguf"))


_TOGETHER = ("prefill", "decode", "multimodal_encoder")  # stages that hand each other KV and embeddings


def worker_revision(recipe: Recipe, stage: str) -> str:
    """Return that of a stage's workers; where stages that work together have models of their own, one of all of them.

    "": it is not known here.
    """
    stages = [name for name in _TOGETHER if name in recipe.workers] if stage in _TOGETHER else [stage]
    try:
        paths = [recipe.worker_model_path(name) for name in stages]
    except ConfigError:  # the host has other stages' workers alone
        return ""
    revisions = {path: model_revision(path) for path in paths}
    if len(revisions) == 1:
        return revisions[paths[0]]
    told = " ".join(f"{name}={revisions[path]}" for name, path in zip(stages, paths, strict=True))
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest() if all(revisions.values()) else ""


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
