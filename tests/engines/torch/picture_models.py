"""Tiny random vision-language models on disk with their image processors, and what transformers makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCAB, EOS, PLACEHOLDER, VISION_START, VISION_END = 512, 2, 5, 6, 7
WORDS = [list(range(first, first + count)) for first, count in ((20, 3), (40, 9), (60, 30), (100, 5))]  # of prompts
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def llava(folder: Path) -> Any:
    """16 tokens a picture, whatever its size."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, LlamaConfig, LlavaConfig
    from transformers import LlavaForConditionalGeneration as Model

    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=56, patch_size=14
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**TEXT),
        image_token_id=PLACEHOLDER,
        vision_feature_layer=-2,
        tie_word_embeddings=False,
    )
    processor = CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    return _save(Model, config, processor, folder)


def llava_next(folder: Path) -> Any:
    """The whole picture's 16 tokens and those of its tiles, by its shape."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaNextConfig, LlavaNextImageProcessor
    from transformers import LlavaNextForConditionalGeneration as Model

    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=56, patch_size=14
    )
    pinpoints = [[56, 112], [112, 56], [112, 112]]
    config = LlavaNextConfig(
        vision_config=vision,
        text_config=LlamaConfig(**TEXT),
        image_token_id=PLACEHOLDER,
        image_grid_pinpoints=pinpoints,
        vision_feature_layer=-2,
        tie_word_embeddings=False,
    )
    processor = LlavaNextImageProcessor(
        size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}, image_grid_pinpoints=pinpoints
    )
    return _save(Model, config, processor, folder)


def qwen2_5_vl(folder: Path) -> Any:
    """Tokens by size, positions in three dimensions, windows in the tower."""
    from transformers import Qwen2_5_VLConfig, Qwen2VLImageProcessor
    from transformers import Qwen2_5_VLForConditionalGeneration as Model

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        image_token_id=PLACEHOLDER, vision_start_token_id=VISION_START, vision_end_token_id=VISION_END,
        video_token_id=8, tie_word_embeddings=False,
    )  # fmt: skip
    processor = Qwen2VLImageProcessor(size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64})
    return _save(Model, config, processor, folder)


def _save(kind: Any, config: Any, processor: Any, folder: Path) -> Any:
    torch.manual_seed(0)
    model = kind(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = EOS, 0
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    _word_tokenizer().save_pretrained(folder)
    return model.requires_grad_(False)


def _word_tokenizer() -> Any:
    """One word a token, <0> to <511>, and nothing added: what TensorRT-LLM reads prompts with."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"<{at}>": at for at in range(VOCAB)}, unk_token="<3>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<0>", eos_token=f"<{EOS}>")


class PictureModel:
    """A folder, its model and its image processor: the oracle."""

    def __init__(self, folder: Path, make: Any) -> None:
        from transformers import AutoImageProcessor

        self.path = str(folder)
        self.module = make(folder)
        self.processor = AutoImageProcessor.from_pretrained(folder)
        self.is_qwen = make is qwen2_5_vl
        self._known: dict[Any, list[int]] = {}

    def prompt(self, *parts: list[int] | None) -> list[int]:
        """Return ids before expansion; None stands for a picture."""
        around = [VISION_START, PLACEHOLDER, VISION_END] if self.is_qwen else [PLACEHOLDER]
        return [token for part in parts for token in (around if part is None else part)]

    def generate(self, ids: list[int], pictures: list[np.ndarray], num_tokens: int) -> list[int]:
        """Return the greedy tokens after an expanded prompt; each question is computed once."""
        key = (tuple(ids), tuple((picture.shape, picture.tobytes()) for picture in pictures), num_tokens)
        if key not in self._known:
            self._known[key] = self._generate(ids, pictures, num_tokens)
        return self._known[key]

    def _generate(self, ids: list[int], pictures: list[np.ndarray], num_tokens: int) -> list[int]:
        row = torch.tensor([ids])
        inputs: dict[str, Any] = {"input_ids": row, "attention_mask": torch.ones_like(row)}
        if pictures:
            inputs |= self.processor(images=pictures, return_tensors="pt", input_data_format="channels_last")
        if self.is_qwen:
            inputs["mm_token_type_ids"] = (row == PLACEHOLDER).int()
        with torch.inference_mode():
            output = self.module.generate(
                **inputs, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        return output[0, len(ids) :].tolist()


def pixels(seed: int, height: int = 40, width: int = 60) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


def cases(model: PictureModel) -> list[tuple[list[int], list[np.ndarray]]]:
    """One picture first, in the middle, two pictures of different size, and none."""
    first, second = pixels(1), pixels(2, 90, 70)
    return [
        (model.prompt(None, WORDS[0]), [first]),
        (model.prompt(WORDS[2], None, WORDS[1]), [second]),
        (model.prompt(WORDS[3], None, WORDS[0], None, WORDS[1]), [second, first]),
        (model.prompt(WORDS[2]), []),
    ]
