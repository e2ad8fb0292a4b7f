"""An engine with a timing model instead of a model, and one that makes videos of nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bireme.engines.base import Engine, EngineContext
    from bireme.engines.video.base import VideoContext, VideoEngine


def create(context: EngineContext) -> Engine:
    from bireme.engines.mocker.engine import MockEngine

    return MockEngine(context)


def create_video(context: VideoContext) -> VideoEngine:
    from bireme.engines.video.mocker import MockVideoEngine

    return MockVideoEngine(context)
