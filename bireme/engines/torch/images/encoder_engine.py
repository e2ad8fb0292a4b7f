"""The engine of a multimodal_encoder worker: the vision tower alone, behind the interface of every engine."""

from __future__ import annotations

import logging
import time

import torch

from bireme.engines.base import AdmittedRequest, Emit, EngineContext, EngineProgress, RequestKey
from bireme.engines.torch.images.embedding_pool import start_share
from bireme.engines.torch.images.encode_jobs import EncodeJobs
from bireme.engines.torch.images.encode_side import EncodeSide
from bireme.engines.torch.images.picture_encoder import PictureEncoder
from bireme.engines.torch.images.vision_tower import load_vision_tower
from bireme.engines.torch.weights.architectures import is_picture_model
from bireme.engines.torch.weights.checkpoint import Checkpoint, choose_dtype, open_checkpoint
from bireme.errors import ConfigError
from bireme.kv.blocks.events import KvEvent
from bireme.messages import Capacity
from bireme.multimodal.model_config import picture_model

logger = logging.getLogger("bireme.engines.torch")


class EncoderEngine(EncodeSide):
    """A PictureEngine that makes no tokens."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context

    def start(self, emit: Emit) -> Capacity:
        began = time.monotonic()
        context = self._context
        torch.set_num_threads(context.num_threads)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        checkpoint = open_checkpoint(context.model_path, context.config.trust_remote_code)
        if not is_picture_model(checkpoint.name):
            raise ConfigError(f"{checkpoint.name}: it has no vision tower; remove workers.multimodal_encoder")
        model = load_vision_tower(checkpoint, context.config.dtype, device)
        encoder = make_encoder(model, checkpoint, context.config.dtype)
        encoder.device = start_share(context, encoder.layout, encoder.dtype, encoder.hidden_size, device)
        self._jobs = EncodeJobs(context, encoder, emit)
        load_s = time.monotonic() - began
        context.metrics.set("bireme_engine_load_seconds", load_s)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        logger.info("encoder_loaded model=%s parameters=%d load_s=%.1f", checkpoint.name, num_parameters, load_s)
        return capacity_of(context, checkpoint, encoder, load_s)

    def submit(self, key: RequestKey, admitted: AdmittedRequest) -> None:
        raise AssertionError("the gate lets no prompts through to an engine without vocabulary")

    def abort(self, key: RequestKey) -> None:
        assert self._jobs is not None
        self._jobs.service.abort(key)

    def drain(self) -> None:
        self._is_draining = True

    def progress(self) -> EngineProgress:
        if self._jobs is None:
            return EngineProgress(0, 0.0, 0, 0)
        service = self._jobs.service
        return EngineProgress(service.num_steps, service.step_began_at, 0, service.num_pending)

    def kv_events(self) -> list[KvEvent]:
        return []

    def stop(self) -> None:
        if self._jobs is not None:
            self._jobs.service.stop()


def make_encoder(model: object, checkpoint: Checkpoint, dtype: str) -> PictureEncoder:
    hidden_size = int(checkpoint.text_config.hidden_size)
    return PictureEncoder(model, checkpoint, hidden_size, choose_dtype(dtype, checkpoint.config))


def capacity_of(context: EngineContext, checkpoint: Checkpoint, encoder: PictureEncoder, load_s: float) -> Capacity:
    pictures = picture_model(context.model_path)
    return Capacity(
        max_seq_len=0,
        max_batch_size=context.config.multimodal_config.max_batch_images,
        max_num_tokens=0,
        max_queue_size=context.config.scheduler_config.max_queue_size,
        tokens_per_block=0,
        num_blocks=0,
        vocab_size=0,
        load_s=load_s,
        dtype=str(encoder.dtype).removeprefix("torch."),
        image_token_id=pictures.placeholder if pictures else None,
        encodes_images=True,
    )
