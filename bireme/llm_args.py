"""TensorRT-LLM's engine YAML: kept whole for the engine, and reduced to the settings that bireme itself reads.

Nothing is checked here: bireme/engines/trtllm/config.py knows the contract; this layer only says where each key goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# TensorRT-LLM's defaults where ours differ: an unset key must mean the same here as in the engine.
DEFAULTS: dict[str, Any] = {"guided_decoding_backend": None, "enable_chunked_prefill": False}

# Keys whose value may be the name of a YAML file: its content replaces it, so that the recipe travels whole.
FILES = (("moe_config", "load_balancer"),)
# Keys whose value may be a model folder, as `model` in recipe.yaml may.
FOLDERS = (("speculative_config", "speculative_model"), ("speculative_config", "speculative_model_dir"))


def inline(tree: Mapping[str, Any], folder: Path, read: Callable[[Path], Any], find: Callable[[str], str]) -> None:
    """Replace the names of files in the recipe's folder, and of models, by contents and full paths. Changes `tree`."""
    for path in FILES:
        if name := _name_at(tree, path):
            tree[path[0]][path[1]] = read(folder / name)
    for path in FOLDERS:
        if name := _name_at(tree, path):
            tree[path[0]][path[1]] = find(name)


def _name_at(tree: Mapping[str, Any], path: tuple[str, str]) -> str:
    block = tree.get(path[0])
    value = block.get(path[1]) if isinstance(block, dict) else None
    return value if isinstance(value, str) else ""


def split(tree: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return an engine_config block: the keys of `known` that the YAML sets, and the whole YAML as `llm_args`.

    `known` maps each key that bireme reads to None, a block's key to such a mapping. A null is left out: it stands for
    TensorRT-LLM's default.
    """
    return DEFAULTS | _cut(tree, known) | {"llm_args": dict(tree)}


def _cut(tree: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    result = {}
    for key, inner in known.items():
        value = tree.get(key)
        if value is None:
            continue
        result[key] = _cut(value, inner) if inner is not None and isinstance(value, Mapping) else value
    return result
