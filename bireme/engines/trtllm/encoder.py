"""The engine of a multimodal_encoder worker on TensorRT-LLM: its MultimodalEncoder in place of our vision tower.

Jobs, cache and leases are the torch engine's. MultimodalEncoder answers with handles of tensors in its worker process;
each is opened once, here, and its rows go to shared memory, because a handle serves one reader on one host while our
leases are cancelled, counted and timed.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bireme.engines.base import Emit, EngineContext
from bireme.engines.torch.images.embedding_pool import start_share
from bireme.engines.torch.images.encode_jobs import EncodeJobs
from bireme.engines.torch.images.encoder_engine import EncoderEngine, capacity_of
from bireme.engines.torch.images.picture_encoder import PictureEncoder
from bireme.engines.torch.images.tensor_rows import TensorRows
from bireme.engines.torch.weights.checkpoint import Checkpoint, choose_dtype, open_checkpoint
from bireme.engines.trtllm import lifecycle, model_files
from bireme.engines.trtllm.api import BACKENDS, set_log_level
from bireme.engines.trtllm.config import llm_arguments
from bireme.engines.trtllm.launchers import drop_launchers
from bireme.errors import BiremeError, ConfigError
from bireme.messages import Capacity
from bireme.multimodal.embedding_share import EmbeddingRows
from bireme.multimodal.model_config import picture_model
from bireme.multimodal.wire import Grid
from bireme.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("bireme.engines.trtllm")

WITHOUT_ENCODER = ("Llama4ForConditionalGeneration",)  # no encoder that stands alone
_ARGUMENTS = frozenset(  # of MultimodalEncoder, of those that an engine YAML may have
    "model trust_remote_code tensor_parallel_size dtype max_batch_size max_num_tokens model_kwargs".split()
)
_SINGLE_PROCESS = "TLLM_WORKER_USE_SINGLE_PROCESS"


@dataclass(frozen=True, slots=True)
class WholePicture:
    """As MultimodalEncoder takes it; our own image processor has counted its tokens."""

    image: Any  # PIL.Image
    num_tokens: int
    grid: Grid | None


class TrtllmEncoderEngine(EncoderEngine):
    """The torch engine's, around MultimodalEncoder."""

    def start(self, emit: Emit) -> Capacity:
        began, context = time.monotonic(), self._context
        self._encoder = self._monitor = None
        _check(context)  # before the checkpoint, whose error would not say what to do
        checkpoint = open_checkpoint(context.model_path)
        self._encoder = make_multimodal_encoder(context)
        encoder = HandleEncoder(self._encoder, checkpoint, context)
        encoder.device = start_share(context, encoder.layout, encoder.dtype, encoder.hidden_size, first_device())
        self._jobs = EncodeJobs(context, encoder, emit)
        self._monitor = lifecycle.LlmMonitor(self._encoder, lifecycle.leave)
        self._monitor.start()
        load_s = time.monotonic() - began
        context.metrics.set("bireme_engine_load_seconds", load_s)
        logger.info("encoder_loaded model=%s load_s=%.1f", checkpoint.name, load_s)
        return capacity_of(context, checkpoint, encoder, load_s)

    def stop(self) -> None:
        super().stop()
        if self._monitor is not None:
            self._monitor.stop()
        if self._encoder is not None and not lifecycle.shut_down([self._encoder]):
            logger.warning("encoder_shutdown_abandoned limit_s=%g", lifecycle.SHUTDOWN_S)


class HandleEncoder(PictureEncoder):
    """The torch engine's encoder with another tower: `encode` alone differs."""

    def __init__(self, encoder: Any, checkpoint: Checkpoint, context: EngineContext) -> None:
        dtype = choose_dtype(context.config.dtype, checkpoint.config)
        super().__init__(None, checkpoint, int(checkpoint.text_config.hidden_size), dtype)
        self._encoder = encoder
        self._container = importlib.import_module("tensorrt_llm._torch.shared_tensor").SharedTensorContainer
        self._prompt = _placeholder_text(context.model_path)

    def prepare(self, pixels: Any) -> Any:
        from PIL import Image

        counted = super().prepare(pixels)
        return WholePicture(Image.fromarray(pixels), counted.num_tokens, counted.grid)

    def encode(self, batch: Sequence[Any]) -> list[EmbeddingRows]:
        inputs = [{"prompt": self._prompt, "multi_modal_data": {"image": [one.image]}} for one in batch]
        results = self._encoder.generate(inputs, use_tqdm=False)
        return [self._rows(result, one.num_tokens) for result, one in zip(results, batch, strict=True)]

    def _rows(self, result: Any, num_tokens: int) -> TensorRows:
        """Each handle is opened once. Raises BiremeError when they are not what was counted."""
        tensors: list[torch.Tensor] = [
            self._container.from_dict(handle).get_local_view() for handle in handles_of(result)
        ]
        if len(tensors) != 1 or tuple(tensors[0].shape) != (num_tokens, self.hidden_size):
            shapes = [tuple(tensor.shape) for tensor in tensors]
            raise BiremeError(
                f"MultimodalEncoder made embeddings of shape {shapes} for a picture of {num_tokens} tokens of"
                f" {self.hidden_size}; serve multimodal_encoder with engine: torch"
            )
        # A copy in any case: on a GPU the tensor is TensorRT-LLM's own, mapped.
        return TensorRows(tensors[0].to(self.device, self.dtype, copy=True).contiguous())


def first_device() -> torch.device:
    """Of TensorRT-LLM's first worker."""
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def handles_of(result: Any) -> list[dict[str, Any]]:
    """1.2 sets them on the result after its outputs have been filled."""
    for holder in (result, *result.outputs):
        params = getattr(holder, "disaggregated_params", None)
        if found := getattr(params, "multimodal_embedding_handles", None):
            return list(found)
    legacy = getattr(result, "mm_embedding_handle", None)
    return [legacy] if legacy else []


def make_multimodal_encoder(context: EngineContext) -> Any:
    """Raises ConfigError."""
    _check(context)
    set_log_level(os.environ)
    drop_launchers(os.environ)
    try:
        package = importlib.import_module(BACKENDS["pytorch"])
        kind = package.MultimodalEncoder
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"engine: trtllm needs a tensorrt_llm with MultimodalEncoder ({error}); use the image of"
            " docker/Dockerfile.trtllm, or engine: torch for multimodal_encoder"
        ) from error
    given = llm_arguments(context.config, context.model_path, context.stage, package.__version__)
    if context.stage != "multimodal_encoder":  # beside an LLM, whose number this is
        given.pop("max_num_tokens", None)
    try:
        return kind(**{name: value for name, value in given.items() if name in _ARGUMENTS})
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"TensorRT-LLM {package.__version__} refuses the encoder's arguments: {error}") from error


def _check(context: EngineContext) -> None:
    found = set(model_files.architectures(context.model_path)) & set(WITHOUT_ENCODER)
    if found:
        raise ConfigError(f"{found.pop()}: TensorRT-LLM has no encoder of its own for it; serve it aggregated")
    check_processes()


def check_processes() -> None:
    """Raise ConfigError where TensorRT-LLM's worker would be this process."""
    if os.environ.get(_SINGLE_PROCESS) == "1":
        raise ConfigError(f"{_SINGLE_PROCESS}=1: handles can't be opened by the process that made them; leave it out")


def _placeholder_text(model: str) -> str:
    pictures = picture_model(model)
    assert pictures is not None, "open_checkpoint and the share have seen its vision_config"
    return load_tokenizer(model).decode([pictures.placeholder], skip_special_tokens=False)
