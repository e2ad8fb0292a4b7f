"""How an engine is made: each kind's package bireme/engines/<name> has `create` and `create_video`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bireme.config import stage_of
from bireme.engine_kinds import ENGINE_KINDS
from bireme.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from bireme.config import EngineConfig
    from bireme.engines.base import Engine, EngineContext
    from bireme.engines.child.process import EngineProcess
    from bireme.engines.video.base import VideoContext, VideoEngine
    from bireme.engines.video.process import VideoProcess


def process_of(worker: str) -> Callable[[str, int], EngineProcess | VideoProcess]:
    """Import what runs the worker's engine; return what makes it of its endpoint and the life's number."""
    if stage_of(worker) == "video_diffusion":
        from bireme.engines.video.process import VideoProcess

        return lambda endpoint, life: VideoProcess(worker, endpoint, life, create_video_engine)
    from bireme.engines.child.process import EngineProcess

    return lambda endpoint, life: EngineProcess(worker, endpoint, life, create_engine)


def create_engine(name: str, context: EngineContext) -> Engine:
    """Make the engine that a recipe names; only its own libraries are imported. Raises ConfigError."""
    engine: Engine = _package(name).create(context)
    return engine


def prepare(name: str, model_path: str, config: EngineConfig) -> None:
    """Load what an engine of this kind needs of libraries, as its start does. Raises ConfigError, ImportError."""
    if hasattr(package := _package(name), "prepare"):
        package.prepare(model_path, config)


def create_video_engine(name: str, context: VideoContext) -> VideoEngine:
    """Make the video engine that a recipe names; only its own libraries are imported. Raises ConfigError."""
    engine: VideoEngine = _package(name).create_video(context)
    return engine


def _package(name: str) -> Any:
    if name not in ENGINE_KINDS:
        raise ConfigError(f"engine: {name!r}; known engines: {', '.join(ENGINE_KINDS)}")
    return importlib.import_module(f"bireme.engines.{name}")
