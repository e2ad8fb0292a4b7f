"""TensorRT-LLM's LLM API as an engine: several GPUs and nodes, its own KV transfer, its own batching."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bireme.engines.base import Engine, EngineContext
    from bireme.engines.video.base import VideoContext, VideoEngine


def create(context: EngineContext) -> Engine:
    """Make the engine; tensorrt_llm is imported when it starts."""
    if context.stage == "multimodal_encoder":
        from bireme.engines.trtllm.encoder import TrtllmEncoderEngine

        return TrtllmEncoderEngine(context)
    from bireme.engines.trtllm.engine import TrtllmEngine

    return TrtllmEngine(context)


def create_video(context: VideoContext) -> VideoEngine:
    """Make the video engine; tensorrt_llm is imported when it starts."""
    from bireme.engines.trtllm.visual_gen import VisualGenEngine

    return VisualGenEngine(context)
