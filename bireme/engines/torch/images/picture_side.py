"""What an engine for pictures has beside its language model: embeddings to fetch, and perhaps the vision tower."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bireme.engines.torch.images.picture_store import PictureStore
from bireme.engines.torch.images.tensor_rows import layout_of
from bireme.engines.torch.images.vision_language import VisionLanguageModel
from bireme.engines.torch.images.vision_tower import drop_vision_tower
from bireme.engines.torch.weights.architectures import is_picture_model
from bireme.engines.torch.weights.setup import Setup
from bireme.errors import ConfigError
from bireme.multimodal.model_config import picture_model

if TYPE_CHECKING:
    from bireme.engines.torch.images.picture_encoder import PictureEncoder


@dataclass(frozen=True, slots=True)
class PictureSide:
    language_model: Any
    store: PictureStore | None = None  # None: a model of text alone
    placeholder: int | None = None
    merge_size: int = 0  # of models with positions in three dimensions
    encoder: PictureEncoder | None = None  # None: another worker has the vision tower, or there is none


def open_pictures(setup: Setup, model: Any) -> PictureSide:
    """Raises ConfigError. The vision tower is dropped where another worker encodes."""
    context, checkpoint = setup.context, setup.checkpoint
    if not is_picture_model(checkpoint.name):
        return PictureSide(model)
    try:
        from bireme.engines.torch.images.embedding_pool import start_share  # and with it numba
        from bireme.engines.torch.images.encoder_engine import make_encoder
    except ModuleNotFoundError as error:
        raise ConfigError(f"{checkpoint.name}: pictures need {error.name}; pip install -e .[multimodal]") from error
    described = picture_model(str(checkpoint.folder))
    if described is None:
        raise ConfigError(f"{checkpoint.name}: config.json has no vision_config; fetch the checkpoint again")
    if setup.limits.may_preempt and context.stage == "decode" and context.transfer is not None:
        raise ConfigError(
            "scheduler_config.capacity_scheduler_policy: MAX_UTILIZATION computes preempted prompts again, and a"
            " decode worker has no pictures to do that with; set GUARANTEED_NO_EVICT"
        )
    if context.share is None:
        raise ConfigError(f"{checkpoint.name}: models that take pictures are served from a local folder; download it")
    dtype, hidden_size = model.lm_head.weight.dtype, int(checkpoint.text_config.hidden_size)
    encoder = None
    if context.hosts_encoder:
        encoder = make_encoder(model, checkpoint, setup.config.dtype)
    else:
        drop_vision_tower(model)
    start_share(context, layout_of(checkpoint.digest, dtype, hidden_size), dtype, hidden_size, setup.device)
    held = setup.config.multimodal_config.max_held_bytes
    store = PictureStore(context.share, setup.post, setup.device, dtype, hidden_size, held)
    return PictureSide(VisionLanguageModel(model), store, described.placeholder, described.merge_size, encoder)
