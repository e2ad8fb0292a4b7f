"""The embedded engine: transformers models on CPU or one GPU, with paged KV and continuous batching."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bireme.engines.base import Engine, EngineContext


def create(context: EngineContext) -> Engine:
    """Make the engine; torch and transformers are imported here and not before."""
    if context.stage == "multimodal_encoder":
        from bireme.engines.torch.encoder_engine import EncoderEngine

        return EncoderEngine(context)
    from bireme.engines.torch.engine import TorchEngine

    return TorchEngine(context)
