"""What sentence-transformers' files beside an embedding model say of its texts: prompts, longest text, case.

config_sentence_transformers.json   {"prompts": {"query": "Instruct: ...", "document": ""}, "default_prompt_name"}
sentence_bert_config.json           {"max_seq_length": 256, "do_lower_case": false}
tokenizer_config.json               {"model_max_length": 256}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bireme.errors import ConfigError, RequestError

SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
PROMPTS, LIMITS, TOKENIZER = "config_sentence_transformers.json", "sentence_bert_config.json", "tokenizer_config.json"
_NO_LIMIT = 1 << 31  # tokens


@dataclass(frozen=True, slots=True)
class EmbeddingTexts:
    """How a text is written before it is encoded."""

    prompts: Mapping[str, str] = field(default_factory=dict)  # by name; each comes before the text
    default: str = ""  # name of the prompt of a request that names none; "": none
    lowercases: bool = False
    similarity: str = "cosine"  # of two embeddings, one of SIMILARITIES

    def whole(self, text: str, prompt_name: str | None = None) -> str:
        """Return the text with its prompt. Raises RequestError for a name that is not there."""
        name = self.default if prompt_name is None else prompt_name
        if name and name not in self.prompts:
            known = ", ".join(self.prompts) or "it has none, remove the field"
            raise RequestError(f"prompt_name: {name[:80]}; prompts of this model: {known}")
        whole = self.prompts.get(name, "") + text
        return whole.lower() if self.lowercases else whole


def read_texts(path: str) -> EmbeddingTexts:
    """Read a model folder's files; one that is no folder (a hub id) has none. Raises ConfigError."""
    folder = Path(path)
    config = _object(folder, PROMPTS)
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ConfigError(f"{PROMPTS}: prompts: names with texts are expected")
    default = config.get("default_prompt_name") or ""
    if default and default not in prompts:
        raise ConfigError(f"{PROMPTS}: default_prompt_name: {default}; not among prompts ({', '.join(prompts)})")
    similarity = str(config.get("similarity_fn_name") or "cosine")
    if similarity not in SIMILARITIES:
        raise ConfigError(f"{PROMPTS}: similarity_fn_name: {similarity}; one of {', '.join(SIMILARITIES)}")
    return EmbeddingTexts(
        prompts=prompts,
        default=str(default),
        lowercases=bool(_object(folder, LIMITS).get("do_lower_case")),
        similarity=similarity,
    )


def max_seq_length_of(folder: Path) -> int | None:
    """Return the longest text in tokens, as the files say; None: they do not. Raises ConfigError.

    Newer folders say it in the tokenizer's file alone, where a number beyond all texts stands for none.
    """
    limit = _object(folder, LIMITS).get("max_seq_length")
    if limit is None:
        limit = _object(folder, TOKENIZER).get("model_max_length")
        return int(limit) if isinstance(limit, (int, float)) and 1 <= limit < _NO_LIMIT else None
    if not isinstance(limit, int) or limit < 1:
        raise ConfigError(f"{LIMITS}: max_seq_length: {limit!r}; at least 1")
    return limit


def read_json(path: Path) -> Any:
    """Raises ConfigError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path.parent.name}/{path.name} can't be read: {error}; fetch the checkpoint again"
        ) from error


def _object(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / name).exists():
        return {}
    tree = read_json(folder / name)
    if not isinstance(tree, dict):
        raise ConfigError(f"{name}: a JSON object is expected")
    return tree
