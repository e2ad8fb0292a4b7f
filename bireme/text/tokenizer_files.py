"""What a model's folder says of the text around its tokenizer: special tokens and chat templates, and a digest of all
that an entry makes prompts with. Read without the tokenizer's own library.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bireme.config import Recipe
from bireme.errors import ConfigError
from bireme.text.embedding_files import LIMITS, PROMPTS

TOKENIZER = "tokenizer.json"
FILES = (TOKENIZER, "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_texts(folder: Path, chat_template: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return special tokens by role, and chat templates by name. Raises ConfigError.

    `chat_template`: a Jinja file in place of the model's own templates; "": none is.
    """
    config = _json(folder / FILES[1]) if (folder / FILES[1]).exists() else {}
    special = {name: text for name in _NAMED if (text := _token_text(config.get(name)))}
    return special, _own_template(chat_template) if chat_template else _templates(folder, config)


def text_revision(recipe: Recipe) -> str:
    """Return a digest of what an entry tokenizes and renders with, the same on each host; "": that is not known here.

    An entry's prompts are right for workers of the same digest alone.
    """
    try:
        folder, model = Path(recipe.tokenizer_path), Path(recipe.model_path)
        tokenizer = (folder / TOKENIZER).read_bytes()
        texts = read_texts(folder, recipe.chat_template)
        of_model = [_json(path) if (path := model / name).exists() else {} for name in (PROMPTS, LIMITS, "config.json")]
    except (OSError, ConfigError):
        return ""
    prompts, limits, config = of_model
    told = [hashlib.blake2b(tokenizer).hexdigest(), *texts, prompts, limits, _pictures(config)]
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=8).hexdigest()


def _pictures(config: Mapping[str, Any]) -> list[Any]:
    """Return what places pictures in a prompt; multimodal/model_config.py reads it."""
    if not isinstance(vision := config.get("vision_config"), dict):
        return []
    names = ("model_type", "image_token_id", "image_token_index")
    return [*map(config.get, names), vision.get("spatial_merge_size")]


def _own_template(path: str) -> dict[str, str]:
    try:
        return {"default": Path(path).read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat.template: {path} can't be read ({error}); name a Jinja file in UTF-8") from error


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return template sources by name; a model with one has it as `default`."""
    found = config.get("chat_template")
    if (folder / "chat_template.json").exists():
        found = _json(folder / "chat_template.json").get("chat_template", found)
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    templates = {"default": found} if isinstance(found, str) else dict(found or {})
    if (folder / "chat_template.jinja").exists():
        templates["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates


def _token_text(value: Any) -> str:
    """A special token is a string, or an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _json(file: Path) -> dict[str, Any]:
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} can't be read: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: a JSON object is expected, not {type(tree).__name__}")
    return tree
