"""The supported vision-language models, and how each turns pixels into embeddings.

A family is listed once tests have proved its outputs equal to transformers' generate; all others are refused by name. A
family scales a picture with the model's own image processor, counts its tokens, and runs the vision tower and projector
over a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bireme.engines.torch.architectures import architecture_of
from bireme.errors import ConfigError
from bireme.multimodal.wire import Grid

VISION_PARTS = ("vision_tower", "multi_modal_projector", "visual")  # attributes of the inner model


@dataclass(frozen=True, slots=True)
class PreparedPicture:
    """One picture as its image processor has made it."""

    pixels: Tensor  # LLaVA: (1, 3, height, width); Qwen2.5-VL: (patches, values of a patch); float32, CPU
    num_tokens: int
    grid: Grid | None = None


class VisionFamily(Protocol):
    def prepare(self, processor: Any, pixels: Any) -> PreparedPicture:
        """Scale and normalize one picture, (height, width, 3) uint8."""

    def features(self, model: Any, batch: Sequence[PreparedPicture]) -> list[Tensor]:
        """Return (num_tokens, hidden) for each picture."""


class Llava:
    """A CLIP or SigLIP tower of one input size: every picture has the same number of tokens."""

    def __init__(self, config: Any) -> None:
        vision = config.vision_config
        if vision.model_type not in ("clip_vision_model", "siglip_vision_model"):
            raise ConfigError(
                f"LlavaForConditionalGeneration: a {vision.model_type} vision tower is not supported by the torch"
                " engine (known: clip_vision_model, siglip_vision_model)"
            )
        self._size = int(vision.image_size)
        patches = (self._size // int(vision.patch_size)) ** 2
        has_class_token = vision.model_type == "clip_vision_model"
        drops_first = config.vision_feature_select_strategy == "default"
        self._num_tokens = patches + int(has_class_token) - int(drops_first)

    def prepare(self, processor: Any, pixels: Any) -> PreparedPicture:
        scaled = processor(images=[pixels], input_data_format="channels_last", return_tensors="pt")["pixel_values"]
        if tuple(scaled.shape[-2:]) != (self._size, self._size):
            raise ConfigError(
                f"the image processor made {tuple(scaled.shape[-2:])} pixels; the vision tower takes {self._size} x"
                f" {self._size}: crop_size or size in preprocessor_config.json is another model's"
            )
        return PreparedPicture(scaled.float(), self._num_tokens)

    def features(self, model: Any, batch: Sequence[PreparedPicture]) -> list[Tensor]:
        device, dtype = _place_of(model.model.vision_tower)
        pixels = torch.cat([picture.pixels for picture in batch]).to(device, dtype)
        return list(model.model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output)


class Qwen25Vl:
    """A tower over patches in any arrangement: tokens follow from the picture's size."""

    def __init__(self, config: Any) -> None:
        self._merged = int(config.vision_config.spatial_merge_size) ** 2

    def prepare(self, processor: Any, pixels: Any) -> PreparedPicture:
        scaled = processor(images=[pixels], input_data_format="channels_last", return_tensors="pt")
        time, height, width = (int(count) for count in scaled["image_grid_thw"][0])
        num_tokens = time * height * width // self._merged
        return PreparedPicture(scaled["pixel_values"].float(), num_tokens, (time, height, width))

    def features(self, model: Any, batch: Sequence[PreparedPicture]) -> list[Tensor]:
        device, dtype = _place_of(model.model.visual)
        pixels = torch.cat([picture.pixels for picture in batch]).to(device, dtype)
        grids = torch.tensor([picture.grid for picture in batch], device=device)
        return list(model.model.get_image_features(pixels, grids, return_dict=True).pooler_output)


FAMILIES: dict[str, type[Llava] | type[Qwen25Vl]] = {
    "LlavaForConditionalGeneration": Llava,
    "Qwen2_5_VLForConditionalGeneration": Qwen25Vl,
}


def is_picture_model(name: str) -> bool:
    return name in FAMILIES


def family_of(config: Any) -> VisionFamily:
    """Return the family of a transformers config whose architecture has been checked. Raises ConfigError."""
    return FAMILIES[architecture_of(config)](config)


def _place_of(module: Any) -> tuple[torch.device, torch.dtype]:
    parameter = next(module.parameters())
    return parameter.device, parameter.dtype
