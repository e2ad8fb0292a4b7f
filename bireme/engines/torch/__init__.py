"""The embedded engine: transformers models on CPU or one GPU, with paged KV and continuous batching."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bireme.config import EngineConfig
    from bireme.engines.base import Engine, EngineContext
    from bireme.engines.video.base import VideoContext, VideoEngine


def create(context: EngineContext) -> Engine:
    """Make the engine; torch and transformers are imported here and not before."""
    if context.stage == "multimodal_encoder":
        return _encoder(context)
    if context.stage == "embedding":
        from bireme.engines.torch.embedding.text_embedding import TorchEmbeddingEngine

        return TorchEmbeddingEngine(context)
    from bireme.engines.torch.engine import TorchEngine

    return TorchEngine(context)


def prepare(model_path: str, config: EngineConfig) -> None:
    """Import what the engine's start does, the model's own module too; takes nothing of a GPU. Raises ConfigError."""
    import torch

    from bireme.engines.torch import engine, kernels  # noqa: F401
    from bireme.engines.torch.weights import checkpoint

    opened = checkpoint.open_checkpoint(model_path, load_format=config.load_format)
    checkpoint.model_class(opened)._model_mapping[type(opened.config)]
    if torch.cuda.is_available():
        torch.cuda.init()
        if kernels.is_usable(torch.device("cuda")):
            from bireme.engines.torch.forward import (  # noqa: F401
                flash_attention,
                fused_decoder,
                kernel_step,
                resident_decode,
            )

            kernels.prepare_compiler()
            with contextlib.suppress(Exception):  # the start says what is wrong with the wheel
                flash_attention.import_fa3()


def create_video(context: VideoContext) -> VideoEngine:
    """Make the video engine; diffusers is imported when it starts."""
    from bireme.engines.video.diffusion import DiffusionEngine

    return DiffusionEngine(context)


def _encoder(context: EngineContext) -> Engine:
    from bireme.errors import ConfigError

    try:
        from bireme.engines.torch.images.encoder_engine import EncoderEngine
        from bireme.engines.torch.weights.lean_imports import import_transformers
    except ModuleNotFoundError as error:
        raise ConfigError(f"multimodal_encoder needs {error.name}; pip install -e .[multimodal]") from error
    import_transformers()
    return EncoderEngine(context)
