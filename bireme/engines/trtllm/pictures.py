"""Pictures into TensorRT-LLM's prefill: embeddings as `multimodal_embedding_handles`, in the way of every release.

A handle names a tensor of ours, made for one request; TensorRT-LLM's worker opens it once, and it lives until the first
token. The prompt goes with it as text, one placeholder a picture: the input processors expand it themselves, and take
ids beside handles in no release for every model. What that text would be read as is compared with the prompt's ids
before, and what was made of it after. `multimodal_hashes` are the pictures' own, so that only the same picture finds
its blocks: without them 1.2.1 makes random ones. Models with positions in three dimensions need these as handles with
every request, also of text alone, and on decode. That gets neither embeddings nor hashes, and a salt keeps the blocks
of other pictures apart there (disaggregation.salt_of).
"""

from __future__ import annotations

import importlib
import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bireme.engines.base import EngineContext
from bireme.engines.torch.images.embedding_pool import start_share
from bireme.engines.torch.images.picture_store import PictureStore, pictures_of
from bireme.engines.torch.images.tensor_rows import layout_of
from bireme.engines.torch.step import SequencePictures
from bireme.engines.torch.weights.architectures import is_picture_model
from bireme.engines.torch.weights.checkpoint import choose_dtype, open_checkpoint
from bireme.engines.trtllm import lifecycle, model_files
from bireme.engines.trtllm.api import Api
from bireme.engines.trtllm.encoder import HandleEncoder, check_processes, first_device, make_multimodal_encoder
from bireme.engines.trtllm.request_state import GenerateArguments, RequestState
from bireme.errors import BiremeError, RequestError
from bireme.multimodal.model_config import PictureModel, picture_model
from bireme.multimodal.mrope import Positions, rope_positions
from bireme.multimodal.wire import OpenedItem

logger = logging.getLogger("bireme.engines.trtllm")
_HASH = struct.Struct(">8i")  # 256 bits, as TensorRT-LLM spells a picture's hash
Ready = Callable[[RequestState, BiremeError | None], None]


@dataclass(slots=True)
class Tower:
    encoder: HandleEncoder
    llm: Any  # MultimodalEncoder, to be shut down


def takes_pictures(context: EngineContext, backend: str) -> bool:
    """Else it is served as a model of text."""
    names = model_files.architectures(context.model_path)
    return context.share is not None and backend == "pytorch" and any(map(is_picture_model, names))


def load_tower(context: EngineContext) -> Tower | None:
    """Before the LLM, which takes the memory that is left. None: another worker has it. Raises ConfigError."""
    check_processes()
    if not context.hosts_encoder:
        return None
    llm = make_multimodal_encoder(context)
    return Tower(HandleEncoder(llm, open_checkpoint(context.model_path), context), llm)


def make_intake(
    context: EngineContext, api: Api, llm: Any, tower: Tower | None, post: Callable[..., Any]
) -> PictureIntake | None:
    """None: this release takes no embeddings for the model, as its reader of prompts says; no tower is left then."""
    if getattr(getattr(llm, "input_processor", None), "support_mm_disagg", False):
        return PictureIntake(context, api, llm, tower, post)
    logger.warning("pictures_not_taken reason=this release of TensorRT-LLM takes no embeddings for the model")
    if tower is not None:
        lifecycle.shut_down([tower.llm])
    return None


class PictureIntake:
    """What an engine for pictures has beside its LLM. Used on the event loop's thread, but for `check` and `of`."""

    def __init__(
        self, context: EngineContext, api: Api, llm: Any, tower: Tower | None, post: Callable[..., Any]
    ) -> None:
        checkpoint = open_checkpoint(context.model_path)
        described = picture_model(context.model_path)
        assert described is not None and context.share is not None, "takes_pictures has looked"
        self.model: PictureModel = described
        self.tower = tower
        dtype = choose_dtype(context.config.dtype, checkpoint.config)
        hidden_size = int(checkpoint.text_config.hidden_size)
        layout = layout_of(checkpoint.digest, dtype, hidden_size)
        device = start_share(context, layout, dtype, hidden_size, first_device())
        held = context.config.multimodal_config.max_held_bytes
        self._store = PictureStore(context.share, post, device, dtype, hidden_size, held)
        self._container = importlib.import_module("tensorrt_llm._torch.shared_tensor").SharedTensorContainer
        self._api, self._tokenizer = api, llm.tokenizer

    def of(self, items: tuple[OpenedItem, ...], num_prompt: int) -> SequencePictures | None:
        """Raises ResourceExhaustedError when there is no room for their embeddings."""
        pictures = pictures_of(items, num_prompt, self.model.merge_size)
        if pictures is not None:
            self._store.check(pictures)
        return pictures

    def fetch(self, state: RequestState, ready: Ready) -> None:
        """`ready` is called once, unless the request has ended before."""
        self._store.fetch(state, ready)

    def release(self, state: RequestState) -> None:
        """TensorRT-LLM has them, or will not want them."""
        state.call.shared = []
        self._store.release(state)

    def complete(self, call: GenerateArguments, pictures: SequencePictures | None = None) -> None:
        """Raises RequestError."""
        fields: dict[str, Any] = {}
        if pictures is not None and pictures.is_to_be_computed:
            call.inputs = {"prompt": self._text(call.prompt, pictures.items)}
            fields["multimodal_embedding_handles"] = [self._handle(call, rows) for rows in pictures.rows]
            fields["multimodal_hashes"] = [hash_numbers(item.hash) for item in pictures.items]
        if self.model.merge_size:
            positions, delta = _positions(pictures, len(call.prompt))
            fields["mrope_position_ids_handle"] = self._handle(call, torch.from_numpy(positions)[:, None].contiguous())
            fields["mrope_position_deltas_handle"] = self._handle(call, torch.tensor([[delta]], dtype=torch.int32))
        if not fields:
            return
        params = call.more.get("disaggregated_params")
        if params is None:
            params = call.more["disaggregated_params"] = self._api.disaggregated_params(
                request_type="context_and_generation"
            )
        for name, value in fields.items():
            setattr(params, name, value)

    def check_made(self, state: RequestState) -> None:
        """Raises BiremeError: TensorRT-LLM has made another prompt of a text."""
        made = getattr(state.result, "prompt_token_ids", None)
        if state.call.inputs is not None and made is not None and len(made) != len(state.call.prompt):
            raise BiremeError(
                f"TensorRT-LLM made {len(made)} tokens of a prompt with pictures that has {len(state.call.prompt)};"
                " serve the model with engine: torch"
            )

    def _handle(self, call: GenerateArguments, tensor: Any) -> dict[str, Any]:
        """Until the request lets go of it."""
        container = self._container.from_tensor(tensor)
        call.shared.append((container, tensor))
        handle: dict[str, Any] = container.dump_to_dict()
        return handle

    def _text(self, prompt: list[int], items: Sequence[OpenedItem]) -> str:
        """Return the text that TensorRT-LLM reads as these ids; its tokenizer may put a first id there itself."""
        short = _one_place_each(prompt, items)
        for ids in (short, short[1:]):
            text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if self._tokenizer(text, return_tensors="pt").input_ids[0].tolist() == short:
                return text
        raise RequestError(
            "prompt: TensorRT-LLM takes a prompt with pictures as text, and would read the text of this one as other"
            " tokens; send another text, or serve the model with engine: torch"
        )


def hash_numbers(picture: str) -> list[int]:
    """Return a picture's hash as TensorRT-LLM has it.

    The first 8 bytes go backwards: its KV events name a picture by them as a number, and so does a router's hash of a
    block (hashing.MediaSpan), with the other end first.
    """
    digest = bytes.fromhex(picture)
    return list(_HASH.unpack(digest[7::-1] + digest[8:]))


def _one_place_each(prompt: list[int], items: Sequence[OpenedItem]) -> list[int]:
    short, at = [], 0
    for item in items:
        short += prompt[at : item.position + 1]
        at = item.position + item.num_tokens
    return short + prompt[at:]


def _positions(pictures: SequencePictures | None, num_tokens: int) -> tuple[Positions, int]:
    """Return (3, num_tokens), and how far generated tokens run behind."""
    if pictures is None:
        return rope_positions(num_tokens, (), 1), 0
    return np.ascontiguousarray(pictures.positions(0, num_tokens)), pictures.delta
