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

from bireme.engines.torch.weights.architectures import architecture_of
from bireme.errors import ConfigError
from bireme.multimodal.wire import Grid

VISION_PARTS = ("vision_tower", "multi_modal_projector", "image_newline", "visual")  # attributes of the inner model


@dataclass(frozen=True, slots=True)
class PreparedPicture:
    """One picture as its image processor has made it."""

    # LLaVA: (1, 3, height, width), LLaVA-NeXT: one and its tiles; Qwen2.5-VL: (patches, values of a patch).
    pixels: Tensor  # float32, CPU
    num_tokens: int
    grid: Grid | None = None
    size: tuple[int, int] | None = None  # of the picture itself: height, width


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
                f"{architecture_of(config)}: a {vision.model_type} vision tower is not supported by the torch"
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


class LlavaNext:
    """A CLIP or SigLIP tower over the whole picture and over tiles of it: tokens follow from its size."""

    def __init__(self, config: Any) -> None:
        Llava(config)  # refuses other towers
        vision = config.vision_config
        self._tile = int(vision.image_size)
        self._side = self._tile // int(vision.patch_size)
        self._pinpoints = config.image_grid_pinpoints

    def prepare(self, processor: Any, pixels: Any) -> PreparedPicture:
        scaled = processor(images=[pixels], input_data_format="channels_last", return_tensors="pt")["pixel_values"][0]
        if tuple(scaled.shape[-2:]) != (self._tile, self._tile):
            raise ConfigError(
                f"the image processor made tiles of {tuple(scaled.shape[-2:])} pixels; the vision tower takes"
                f" {self._tile} x {self._tile}: crop_size in preprocessor_config.json is another model's"
            )
        size = (int(pixels.shape[0]), int(pixels.shape[1]))
        return PreparedPicture(scaled.float(), self._num_tokens(size), size=size)

    def features(self, model: Any, batch: Sequence[PreparedPicture]) -> list[Tensor]:
        device, dtype = _place_of(model.model.vision_tower)
        pixels = torch.nn.utils.rnn.pad_sequence([picture.pixels for picture in batch], batch_first=True)
        sizes = torch.tensor([picture.size for picture in batch])
        return list(model.model.get_image_features(pixels.to(device, dtype), sizes, return_dict=True).pooler_output)

    def _num_tokens(self, size: tuple[int, int]) -> int:
        """The whole picture's, the tiles' without those of padding, and one at the end of each row of these."""
        from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape, unpad_image

        rows, columns = get_anyres_image_grid_shape(size, self._pinpoints, self._tile)
        shown = torch.empty(1, rows * self._side, columns * self._side, device="meta")
        _, height, width = unpad_image(shown, size).shape
        return int(self._side**2 + height * (width + 1))


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


FAMILIES: dict[str, type[Llava] | type[LlavaNext] | type[Qwen25Vl]] = {
    "LlavaForConditionalGeneration": Llava,
    "LlavaNextForConditionalGeneration": LlavaNext,
    "Qwen2_5_VLForConditionalGeneration": Qwen25Vl,
}


def family_of(config: Any) -> VisionFamily:
    """Return the family of a transformers config whose architecture has been checked. Raises ConfigError."""
    return FAMILIES[architecture_of(config)](config)


def _place_of(module: Any) -> tuple[torch.device, torch.dtype]:
    parameter = next(module.parameters())
    return parameter.device, parameter.dtype
