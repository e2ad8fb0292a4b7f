"""The model repository of one launch: a folder a worker, with its whole configuration and a link to its code.

Triton can't choose an instance by cost, so each replica is a model: `decode`, `decode_1`, ... share one folder's code.
"""

from __future__ import annotations

import compileall
import re
from collections.abc import Iterable
from pathlib import Path

from bireme.config import CHECKOUT, WORKER_STAGES, Recipe, is_wanted, missing_worker, stage_of
from bireme.errors import ConfigError
from bireme.launch.model_configs import whole_config
from bireme.specs import MODELS, ModelSpec

REPOSITORIES = ("model_repository", "ensembles")


def link_models(folder: Path, recipe: Recipe, checkout: Path = CHECKOUT) -> tuple[str, ...]:
    """Fill `folder` with the recipe's models; return their names. Raises ConfigError."""
    sources = _model_folders(checkout)
    folder.mkdir(parents=True, exist_ok=True)
    models, pipelines = used_models(recipe, checkout)
    for name in (*models, *pipelines):
        source = sources[stage_of(name)]
        _compile(source)
        _link(folder / name, source, MODELS.get(source.name), len(recipe.instances(name)))
    return (*models, *pipelines)


def _link(model: Path, source: Path, spec: ModelSpec | None, num_instances: int) -> None:
    if spec is None:  # a declarative ensemble has its whole configuration
        model.symlink_to(source)
        return
    model.mkdir()
    (model / "1").symlink_to(source / "1")
    (model / "config.pbtxt").write_text(whole_config((source / "config.pbtxt").read_text(), spec, num_instances))


def _has_steps(model: Path, recipe: Recipe) -> bool:
    """Whether this server has a declarative ensemble's workers: Triton would load them with it."""
    steps = re.findall(r'^\s*model_name\s*:\s*"(\w+)"', (model / "config.pbtxt").read_text(), re.MULTILINE)
    return all(recipe.workers[step].replicas for step in steps if step in recipe.workers)


def _compile(model: Path) -> None:
    """Byte code that the first load writes would be a new version to Triton."""
    compileall.compile_dir(model / "1", maxlevels=0, quiet=2)


def used_models(recipe: Recipe, checkout: Path = CHECKOUT) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (models, pipelines); pipelines load last."""
    models = [
        name
        for stage in _names(checkout / REPOSITORIES[0])
        if not missing_worker(stage, recipe)
        for name in (recipe.replicas(stage) if stage in WORKER_STAGES else (stage,))
    ]
    pipelines = [
        name
        for name in _names(checkout / REPOSITORIES[1])
        if is_wanted(name, recipe) and not missing_worker(name, recipe)
        if _has_steps(checkout / REPOSITORIES[1] / name, recipe)
    ]
    return tuple(models), tuple(pipelines)


def python_models(folder: Path, models: Iterable[str]) -> tuple[str, ...]:
    """Those that run in a stub."""
    return tuple(model for model in models if (folder / model / "1" / "model.py").is_file())


def _model_folders(checkout: Path) -> dict[str, Path]:
    found = {name: checkout / part / name for part in REPOSITORIES for name in _names(checkout / part)}
    if not found:
        raise ConfigError(f"no model folders in {checkout}/{{{','.join(REPOSITORIES)}}}; run from a bireme checkout")
    return found


def _names(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("*/config.pbtxt"))
