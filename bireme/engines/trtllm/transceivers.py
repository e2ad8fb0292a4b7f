"""Which models ask TensorRT-LLM for its Python transceiver, which moves KV by NIXL alone.

From late 1.3 on it obeys a model whatever the backend says, and `backend: UCX` fails when the transceiver is made. The
contract lists the architectures whose classes ask for it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from bireme.engines.trtllm.contract import contract

# Names of their checkpoints, for where the model itself is not at hand.
_NAMES = re.compile(
    r"deepseek-?(r1|v3|v4)|gemma-?[34]|glm-?5|gpt-?oss|kimi-?k2|llama-?[234]|nemotron-(h|3)|qwen3-next|qwen3\.5", re.I
)
_OF_OTHERS = re.compile(r"distill-qwen", re.I)


def is_python_by_model(model: str, release: str) -> bool:
    """Whether `transceiver_runtime: auto` is the Python one for a model: a folder, or a name on the hub."""
    section = contract()["python_transceiver"]
    if release < section["since"]:
        return False
    found = _architectures(Path(model))
    if found is not None:
        return not set(found).isdisjoint(section["architectures"])
    name = Path(model).name
    return bool(_NAMES.search(name)) and not _OF_OTHERS.search(name)


def _architectures(folder: Path) -> list[str] | None:
    try:
        tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = tree.get("architectures") if isinstance(tree, dict) else None
    return found if isinstance(found, list) else None
