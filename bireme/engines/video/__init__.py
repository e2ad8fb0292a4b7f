"""Engines that make videos and pictures, the process in which one runs, and the stub's side of it."""

from __future__ import annotations

import importlib

from bireme.engines.video.base import VideoContext, VideoEngine
from bireme.errors import ConfigError


def create_video_engine(name: str, context: VideoContext) -> VideoEngine:
    """Make the engine that a recipe names; only its own libraries are imported. Raises ConfigError."""
    if name == "mocker":
        from bireme.engines.video.mocker import MockVideoEngine

        return MockVideoEngine(context)
    if name == "torch":
        from bireme.engines.video.diffusion import DiffusionEngine

        return DiffusionEngine(context)
    module = importlib.import_module(f"bireme.engines.{name}")
    if not hasattr(module, "create_video"):
        raise ConfigError(f"workers.video_diffusion.engine: {name} makes no videos in this build; use torch")
    engine: VideoEngine = module.create_video(context)
    return engine
