"""How a prompt's pictures come in: the input processors of models whose embeddings others may compute.

They read a text and expand its placeholders: ids beside handles are not looked at. The tokens that stand for embeddings
are beyond the vocabulary in 1.2, and the placeholder itself since. Without hashes 1.2 makes random ones, and later
releases know a picture's blocks by their tokens alone.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorrt_llm import _contract
from tensorrt_llm._encoder import SharedTensorContainer

# LlavaForConditionalGeneration is of these tests alone: the real package has no such model.
_ARCHITECTURES = (
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
)


@dataclass
class Media:
    """What goes to the worker beside a prompt: handles, which it opens once."""

    embeddings: list[Any] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # of each picture's first token
    lengths: list[int] = field(default_factory=list)
    hashes: list[list[int]] | None = None
    mrope: tuple[Any, Any] | None = None  # positions (3, 1, tokens), delta (1, 1)

    def open(self) -> None:
        """In the worker. Raises FileNotFoundError for a handle whose tensor is gone, or was opened before."""
        self.embeddings = [_open(handle) for handle in self.embeddings]
        if self.mrope is not None:
            self.mrope = (_open(self.mrope[0]), _open(self.mrope[1]))


def _open(handle: Any) -> Any:
    return SharedTensorContainer.from_dict(handle).get_local_view()


class DefaultInputProcessor:
    """Of a model that reads text alone."""


class PictureInputProcessor:
    support_mm_disagg = True

    def __init__(self, tree: dict[str, Any], tokenizer: Any) -> None:
        text = tree["text_config"]
        self._hidden_size, self._tokenizer = text["hidden_size"], tokenizer
        self._image_token = tree.get("image_token_id", tree.get("image_token_index"))
        vocab_size = text.get("vocab_size") or tree.get("vocab_size")
        self._stand_for = self._image_token if _contract.FROM_1_3 else vocab_size + 1

    def expand(self, inputs: dict[str, Any], handles: Any) -> tuple[list[int], list[int], list[int]]:
        """Return the prompt, and each picture's position and length in it."""
        text = inputs.get("prompt")
        if not text:
            raise ValueError("Text prompt is required but not provided")
        if not isinstance(handles, list):
            raise TypeError("mm_handles must be a list")
        assert all(handle["tensor_size"][1] == self._hidden_size for handle in handles), (
            "Multimodal embedding hidden size must match model hidden size"
        )
        ids = self._tokenizer(text, return_tensors="pt").input_ids[0].tolist()
        assert ids.count(self._image_token) == len(handles), "Number of images must match number of mm_handles"
        prompt: list[int] = []
        positions, lengths = [], [handle["tensor_size"][0] for handle in handles]
        for token in ids:
            if token == self._image_token:
                positions.append(len(prompt))
                prompt += [self._stand_for] * lengths[len(positions) - 1]
            else:
                prompt.append(token)
        return prompt, positions, lengths


def make_input_processor(folder: Path, tokenizer: Any) -> Any:
    tree = json.loads((folder / "config.json").read_text())
    if set(tree.get("architectures") or ()) & set(_ARCHITECTURES):
        return PictureInputProcessor(tree, tokenizer)
    return DefaultInputProcessor()


def read(
    args: Any, get_processor: Callable[[], Any], inputs: Any, disaggregated: Any
) -> tuple[list[int], Media] | None:
    """Return the prompt and media of a request with handles; None for any other."""
    if disaggregated is None or disaggregated.multimodal_embedding_handles is None:
        return None
    if args.backend == "_autodeploy":
        raise ValueError("Multimodal disaggregated inference (encode -> prefill) is not supported with AutoDeploy")
    processor = get_processor()
    if not getattr(processor, "support_mm_disagg", False):
        raise ValueError("Multimodal disaggregated inference is not supported for this model")
    if disaggregated.request_type == "generation_only":
        raise ValueError("Generation-only mode should not need multimodal parameters")
    handles = disaggregated.multimodal_embedding_handles
    prompt, positions, lengths = processor.expand(inputs if isinstance(inputs, dict) else {}, handles)
    hashes = disaggregated.multimodal_hashes
    if hashes is None and not _contract.FROM_1_3:
        hashes = [[secrets.randbelow(2**31) for _ in range(8)] for _ in handles]
    return prompt, Media(list(handles), positions, lengths, hashes, mrope_of(disaggregated))


def mrope_of(disaggregated: Any) -> tuple[Any, Any] | None:
    if disaggregated is None or disaggregated.mrope_position_ids_handle is None:
        return None
    assert disaggregated.mrope_position_deltas_handle is not None
    return disaggregated.mrope_position_ids_handle, disaggregated.mrope_position_deltas_handle
