"""How many bytes of KV a recipe's model has for a token, out of its config.json: no weights are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bireme.config import Recipe
from bireme.errors import ConfigError
from bireme.kv.transfer.base import GroupLayout, KvLayout
from bireme.sizing.model_shapes import kv_row_bytes, windows_of

_OVERRIDE = "; name the bytes with --kv-bytes-per-token"


def recipe_layout(recipe: Recipe) -> KvLayout:
    """Raises ConfigError."""
    path = Path(recipe.worker_model_path("decode")) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: can't be read: {error}{_OVERRIDE}") from error
    cache = recipe.workers["decode"].engine_config.kv_cache_config
    return model_layout(config, str(path), 1 if cache.dtype == "fp8" else None)


def model_layout(config: Mapping[str, Any], name: str, value_bytes: int | None = None) -> KvLayout:
    """Return what an engine's layout would be, layers of one window a group. Raises ConfigError.

    `value_bytes`: of a key's or value's number; None: as the model's own type has.
    """
    config = config.get("text_config") or config
    try:
        row_bytes, windows = kv_row_bytes(config, value_bytes), windows_of(config)
    except KeyError as error:
        raise ConfigError(f"{name}: {error} is not there{_OVERRIDE}") from error
    order = sorted(set(windows), key=lambda window: -window if window else -float("inf"))
    groups = tuple(GroupLayout(window, (row_bytes,) * windows.count(window)) for window in order)
    return KvLayout("check_fabric", "uint8", groups)


def plain_layout(bytes_per_token: int) -> KvLayout:
    """As many bytes a token, in as many layers as give rows of usual size."""
    num_layers = next(count for count in (32, 16, 8, 4, 2, 1) if bytes_per_token % (2 * count) == 0 or count == 1)
    return KvLayout("check_fabric", "uint8", (GroupLayout(0, (bytes_per_token // num_layers,) * num_layers),))


def moved_bytes(layout: KvLayout, num_tokens: int) -> int:
    """Return what a prompt of so many tokens moves: of layers with a window no more than that."""
    return sum(group.bytes_per_token * min(num_tokens, group.window or num_tokens) for group in layout.groups)
