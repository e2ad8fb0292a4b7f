"""A recipe for one model without a recipe folder: `serve.py --model MODEL [--disaggregated]`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bireme.engine_kinds import ENGINE_KINDS, EngineName
from bireme.errors import ConfigError
from bireme.gguf.folder import is_gguf
from bireme.gguf.head import SUFFIX

_OF_PARTS = re.compile(r"-\d{5}-of-\d{5}$")


def write_recipe(
    folder: Path,
    model: str,
    *,
    disaggregated: bool = False,
    engine: EngineName = "torch",
    chosen: Mapping[str, Mapping[str, Any]] | None = None,
) -> Path:
    """Write `folder`/<the model's name>/recipe.yaml; return its folder. Raises ConfigError.

    `chosen`: more keys of each stage's engine_config.
    """
    path = Path(model)
    if path.is_dir() or is_gguf(path):
        model = str(path.absolute() if is_gguf(path) else path.resolve())
    elif model.startswith((".", "/", "~")) or path.suffix == SUFFIX:
        raise ConfigError(f"--model {model}: no such folder or GGUF file")
    name = _OF_PARTS.sub("", Path(model).name.removesuffix(SUFFIX))
    recipe = folder / (re.sub(r"[^\w.-]+", "-", name).strip("-.") or "model")
    recipe.mkdir(parents=True, exist_ok=True)
    # JSON is YAML, and quotes what a model's path may hold.
    tree = _tree(model, disaggregated, engine)
    for stage, keys in (chosen or {}).items():
        tree["workers"][stage]["engine_config"] |= keys
    (recipe / "recipe.yaml").write_text(json.dumps(tree, indent=2), encoding="utf-8")
    return recipe


def _tree(model: str, disaggregated: bool, engine: EngineName) -> dict[str, Any]:
    stages = ("prefill", "decode") if disaggregated else ("decode",)
    workers = {stage: {"engine": engine, "engine_config": _config(stage, disaggregated, engine)} for stage in stages}
    return {"model": model, "workers": workers}


def _config(stage: str, disaggregated: bool, engine: EngineName) -> dict[str, Any]:
    config: dict[str, Any] = {"cache_transceiver_config": {"backend": "DEFAULT"}} if disaggregated else {}
    return config | dict(ENGINE_KINDS[engine].quick_config.get(stage, {}))
