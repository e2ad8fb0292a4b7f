"""A model's config.json and generation_config.json: vocabulary, context, end-of-sequence ids.

Read as JSON, without transformers, whose classes TensorRT-LLM does not share.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bireme.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a request must fit."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    max_seq_len: int


def read_facts(model: str, max_seq_len: int | None) -> ModelFacts:
    """`max_seq_len`: what the LLM says, None when it leaves it to the model. Raises ConfigError."""
    whole = _read(model, "config.json")
    assert whole is not None
    text = whole.get("text_config") or whole.get("llm_config") or whole
    vocab_size = text.get("vocab_size") or whole.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ConfigError(f"config.json of {Path(model).name}: no vocab_size; token ids could not be checked")
    longest = max_seq_len or text.get("max_position_embeddings") or text.get("model_max_length")
    if not isinstance(longest, int):
        raise ConfigError(f"max_seq_len: not set, and config.json of {Path(model).name} has no max_position_embeddings")
    return ModelFacts(vocab_size, _eos_ids(model, text, whole), longest)


def architectures(model: str) -> tuple[str, ...]:
    whole = _read(model, "config.json")
    return tuple((whole or {}).get("architectures") or ())


def _eos_ids(model: str, text: dict[str, Any], whole: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json's, which may be several, else config.json's."""
    generation = _read(model, "generation_config.json", is_needed=False) or {}
    for tree in (generation, text, whole):
        found = tree.get("eos_token_id")
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    return ()


def _read(model: str, name: str, is_needed: bool = True) -> dict[str, Any] | None:
    path = _find(model, name)
    if path is None or not path.exists():
        if is_needed:
            raise ConfigError(f"{name} is missing from {Path(model).name}; give a complete Hugging Face model folder")
        return None
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{name} of {Path(model).name} can't be read: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{name} of {Path(model).name}: a JSON object is expected, not {type(tree).__name__}")
    return tree


def _find(model: str, name: str) -> Path | None:
    folder = Path(model)
    if folder.is_dir():
        return folder / name
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(model, name))
    except EntryNotFoundError:
        return None
    except Exception as error:  # the hub's client raises its own, httpx's and OS errors
        raise ConfigError(
            f"model {model}: no such folder, and {name} could not be fetched from the hub ({type(error).__name__});"
            " give a local folder, or check the name and the network"
        ) from error
