"""What a folder's safetensors files hold, by the tensors' names in their heads: nothing of the tensors is read."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bireme.errors import ConfigError
from bireme.launch.footprint.decoder_shape import Parameters

_MOST_HEAD_BYTES = 100_000_000  # the format's own bound
_MOST_FILES = 10_000
_NOT_KEPT = re.compile(r"rotary_emb|inv_freq|masked_bias|\.attn\.bias$")  # of older checkpoints: no class has them
_EMBEDDINGS = re.compile(r"(embed_tokens|embed_in|wte|tok_embeddings)\.weight$")
_HEAD = re.compile(r"(lm_head|embed_out)\.weight$")
_LAYER = re.compile(r"(?:layers|h)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class WeightFiles:
    parameters: Parameters
    num_bytes: int  # in the files
    dtypes: frozenset[str]  # of matrices, as the files name them: BF16, F32


def read_weight_files(folder: Path, is_tied: bool, num_layers: int) -> WeightFiles | None:
    """Return what an engine loads of them; None: there are none. Raises ConfigError for a head that lies."""
    counts: Counter[str] = Counter()
    dtypes = set()
    for path in _files(folder):
        for name, (dtype, shape, size) in _tensors(path).items():
            if (part := _part_of(name, shape, num_layers)) is None:
                continue
            counts[part] += math.prod(shape)
            counts["bytes"] += size
            if part == "products":
                dtypes.add(dtype)
    if not counts["bytes"]:
        return None
    head = 0 if is_tied else counts["head"]
    parameters = Parameters(counts["embeddings"], head, counts["products"], counts["rest"])
    return WeightFiles(parameters, counts["bytes"], frozenset(dtypes))


def _part_of(name: str, shape: list[int], num_layers: int) -> str | None:
    """Return the field of Parameters that it counts for; None: no class loads it."""
    layer = _LAYER.search(name)
    if _NOT_KEPT.search(name) or (layer and int(layer.group(1)) >= num_layers and "visi" not in name):
        return None
    if _EMBEDDINGS.search(name):
        return "embeddings"
    if _HEAD.search(name):
        return "head"
    return "products" if len(shape) > 1 else "rest"


def _files(folder: Path) -> list[Path]:
    """Return those that the engine reads: of both forms the whole one."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return []
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        found = sorted({Path(str(name)).name for name in names})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index.name}: no weight_map can be read in it: {error!r}") from error
    if len(found) > _MOST_FILES:
        raise ConfigError(f"{index.name}: {len(found)} files; {_MOST_FILES} at most")
    return [folder / name for name in found]


def _tensors(path: Path) -> dict[str, tuple[str, list[int], int]]:
    """Return dtype, shape and bytes of each tensor. Raises ConfigError."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _MOST_HEAD_BYTES):
                raise ConfigError(f"{path.name} is corrupted: a head of {length} bytes in a file of {size}")
            tree = json.loads(file.read(length))
        entries = {name: entry for name, entry in tree.items() if name != "__metadata__"}
        return {name: _entry(entry, size - 8 - length) for name, entry in entries.items()}
    except FileNotFoundError as error:
        raise ConfigError(f"{path.name} is missing from the model folder; fetch the checkpoint again") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path.name} is corrupted: its head can't be read: {error!r}") from error


def _entry(entry: Any, size: int) -> tuple[str, list[int], int]:
    """Raises ValueError, KeyError and TypeError for what no tensor is."""
    begin, end = entry["data_offsets"]
    shape = entry["shape"]
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)) or not begin <= end <= size:
        raise ValueError(f"a tensor of shape {shape} at {begin} to {end} of {size} bytes")
    if math.prod(shape) > 8 * (end - begin):  # of one bit or more each
        raise ValueError(f"a tensor of shape {shape} in {end - begin} bytes")
    return str(entry["dtype"]), shape, end - begin
