"""TensorRT-LLM's LLM API as an engine: several GPUs and nodes, its own KV transfer, its own batching."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bireme.engines.base import Engine, EngineContext


def create(context: EngineContext) -> Engine:
    """Make the engine; tensorrt_llm is imported when it starts."""
    from bireme.engines.trtllm.engine import TrtllmEngine

    return TrtllmEngine(context)
