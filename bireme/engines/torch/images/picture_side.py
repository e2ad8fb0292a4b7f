"""What an engine for pictures has beside its language model: embeddings to fetch, and perhaps the vision tower."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bireme.engines.base import EngineContext
from bireme.engines.torch.geometry import EngineLimits
from bireme.engines.torch.images.embedding_pool import start_share
from bireme.engines.torch.images.encoder_engine import make_encoder
from bireme.engines.torch.images.picture_encoder import PictureEncoder
from bireme.engines.torch.images.picture_store import PictureStore
from bireme.engines.torch.images.tensor_rows import layout_of
from bireme.engines.torch.images.vision_language import VisionLanguageModel
from bireme.engines.torch.images.vision_tower import drop_vision_tower
from bireme.engines.torch.step import Post
from bireme.engines.torch.weights.checkpoint import Checkpoint
from bireme.errors import ConfigError
from bireme.multimodal.model_config import picture_model


@dataclass(slots=True)
class PictureSide:
    language_model: VisionLanguageModel
    placeholder: int
    merge_size: int
    store: PictureStore
    encoder: PictureEncoder | None  # None: another worker has the vision tower


def make_picture_side(
    context: EngineContext, checkpoint: Checkpoint, model: Any, device: torch.device, post: Post, limits: EngineLimits
) -> PictureSide:
    """Raises ConfigError. The vision tower is dropped where another worker encodes."""
    described = picture_model(str(checkpoint.folder))
    if described is None:
        raise ConfigError(f"{checkpoint.name}: config.json has no vision_config; fetch the checkpoint again")
    if limits.may_preempt and context.stage == "decode" and context.transfer is not None:
        raise ConfigError(
            "scheduler_config.capacity_scheduler_policy: MAX_UTILIZATION computes preempted prompts again, and a"
            " decode worker has no pictures to do that with; set GUARANTEED_NO_EVICT"
        )
    if context.share is None:
        raise ConfigError(f"{checkpoint.name}: models that take pictures are served from a local folder; download it")
    dtype, hidden_size = model.lm_head.weight.dtype, int(checkpoint.text_config.hidden_size)
    encoder = None
    if context.hosts_encoder:
        encoder = make_encoder(model, checkpoint, context.config.dtype)
    else:
        drop_vision_tower(model)
    start_share(context, layout_of(checkpoint.digest, dtype, hidden_size), dtype, hidden_size, device)
    held = context.config.multimodal_config.max_held_bytes
    store = PictureStore(context.share, post, device, dtype, hidden_size, held)
    return PictureSide(VisionLanguageModel(model), described.placeholder, described.merge_size, store, encoder)
