"""What a model folder says about pictures, read without transformers: for pipelines and engines alike."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bireme.config import Recipe
from bireme.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PictureModel:
    architecture: str
    placeholder: int  # the token that stands for a picture's embeddings
    merge_size: int = 0  # of models whose positions have three dimensions: patches a token, along one side; else 0


def picture_model(folder: str) -> PictureModel | None:
    """Return None for a model of text alone, and for a missing folder. Raises ConfigError."""
    try:
        tree = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except OSError:
        return None
    except ValueError as error:
        raise ConfigError(f"config.json is not valid JSON: {error}") from error
    vision: Any = tree.get("vision_config") if isinstance(tree, dict) else None
    if not isinstance(vision, dict):
        return None
    name = str((tree.get("architectures") or [tree.get("model_type")])[0])
    placeholder = tree.get("image_token_id", tree.get("image_token_index"))
    if placeholder is None and str(tree.get("model_type")) in _DEFAULT_PLACEHOLDERS:
        placeholder = _DEFAULT_PLACEHOLDERS[str(tree["model_type"])]  # transformers leaves defaults out of the file
    if not isinstance(placeholder, int):
        raise ConfigError(f"config.json ({name}): it has a vision_config but no image_token_id")
    return PictureModel(name, placeholder, _merge_size(tree, vision))


def picture_model_of(recipe: Recipe) -> PictureModel | None:
    """Return what the recipe's model takes; None also without a folder (a mocker)."""
    try:
        folder = recipe.model_path
    except ConfigError:
        return None
    decode = recipe.workers.get("decode")
    return picture_model(folder) if decode is not None and decode.kind.needs_model else None


_DEFAULT_PLACEHOLDERS = {"llava": 32000, "llava_next": 32000, "qwen2_5_vl": 151655}


def _merge_size(tree: dict[str, Any], vision: dict[str, Any]) -> int:
    return int(vision.get("spatial_merge_size", 2)) if str(tree.get("model_type")) == "qwen2_5_vl" else 0
