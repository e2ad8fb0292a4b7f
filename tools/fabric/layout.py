"""How many bytes of KV a recipe's model has for a token, out of its config.json: no weights are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bireme.config import Recipe
from bireme.errors import ConfigError
from bireme.kv.transfer.base import GroupLayout, KvLayout

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
_OVERRIDE = "; name the bytes with --kv-bytes-per-token"


def recipe_layout(recipe: Recipe) -> KvLayout:
    """Raises ConfigError."""
    path = Path(recipe.worker_model_path("decode")) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: can't be read: {error}{_OVERRIDE}") from error
    return model_layout(config, str(path))


def model_layout(config: Mapping[str, Any], name: str) -> KvLayout:
    """Return what an engine's layout would be, layers of one window a group. Raises ConfigError."""
    config = config.get("text_config") or config
    try:
        row_bytes, num_layers = _row_bytes(config), config["num_hidden_layers"]
    except KeyError as error:
        raise ConfigError(f"{name}: {error} is not there{_OVERRIDE}") from error
    windows = _windows(config, num_layers)
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


def _row_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of one token's keys and values in one layer."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    size = _BYTES.get(dtype, 2)
    if latent := config.get("kv_lora_rank"):  # keys and values are one vector
        return int(latent + config["qk_rope_head_dim"]) * size
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * int(config.get("num_key_value_heads") or heads) * int(head_dim) * size


def _windows(config: Mapping[str, Any], num_layers: int) -> list[int]:
    """Return each layer's; 0: it sees all."""
    window = int(config.get("sliding_window") or 0)
    if kinds := config.get("layer_types"):
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    if config.get("use_sliding_window") is False:
        return [0] * num_layers
    return [window] * num_layers
