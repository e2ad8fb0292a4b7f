"""A GGUF file as a model folder: config.json and the tokenizer's files, made of its metadata, and a link to the file.

Made on first use, in $XDG_CACHE_HOME/bireme/gguf (~/.cache/bireme/gguf); a file that has changed gets another folder.
All that reads model folders then reads GGUF files, weights alone are read otherwise.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from pathlib import Path

from bireme.errors import ConfigError
from bireme.gguf.architectures import config_of
from bireme.gguf.head import SUFFIX, part_paths, read_head
from bireme.private_files import make_folder

_FORMAT = 1  # of what is made; another one makes folders anew
_HASHED_BYTES = 16 << 20  # heads are shorter


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX and path.is_file()


def gguf_files(folder: Path) -> tuple[Path, ...]:
    """Return the GGUF file in a model folder, all parts of it; (): there is none. Raises ConfigError for several."""
    found = sorted(folder.glob(f"*{SUFFIX}"))
    if found and (parts := part_paths(found[0])) != tuple(found):
        other = next(path for path in found if path not in parts)
        raise ConfigError(f"the model folder has {found[0].name} and {other.name}; name the file itself as `model`")
    return tuple(found)


def model_folder(file: Path) -> Path:
    """Return the folder of a file, or of the file that it is a part of; a folder is its own. Raises ConfigError."""
    if file.is_dir():
        return file.resolve()
    paths = [path.resolve() for path in part_paths(file)]
    try:
        states = [path.stat() for path in paths]
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; check `model` in recipe.yaml") from error
    return _made(tuple(map(str, paths)), tuple((state.st_size, state.st_mtime_ns) for state in states))


@functools.lru_cache(maxsize=16)
def _made(paths: tuple[str, ...], states: tuple[tuple[int, int], ...]) -> Path:
    digest = hashlib.blake2b(f"{_FORMAT} {paths} {states}".encode(), digest_size=10)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "bireme", "gguf")
    try:
        for path in paths:
            with open(path, "rb", buffering=0) as file:
                digest.update(file.read(_HASHED_BYTES))
        folder = cache / digest.hexdigest()
        if not folder.is_dir():
            make_folder(cache)
            with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=cache) as scratch:
                _fill(Path(scratch, "model"), [Path(path) for path in paths])
                try:
                    os.rename(Path(scratch, "model"), folder)
                except OSError:
                    if not folder.is_dir():  # else another process was faster
                        raise
    except OSError as error:
        raise ConfigError(
            f"{Path(paths[0]).name}: its model folder can't be made: {error}; set XDG_CACHE_HOME to a folder that can"
            " be written"
        ) from error
    return folder


def _fill(folder: Path, paths: list[Path]) -> None:
    from bireme.gguf.tokenizer import text_files

    head = read_head(paths[0])
    config = config_of(head)
    files = {"config.json": json.dumps(config, indent=1)} | text_files(head, config["vocab_size"])
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text, encoding="utf-8")
    for path in paths:
        (folder / path.name).symlink_to(path)
