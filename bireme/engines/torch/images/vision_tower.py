"""The vision tower and projector of a checkpoint, alone: the language model's weights are never read.

The model is built from a configuration whose language model has no layers and a vocabulary of one token, and loaded by
transformers itself, which knows the names of tensors, buffers and dtypes.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from bireme.engines.torch.images.vision_models import VISION_PARTS
from bireme.engines.torch.weights.checkpoint import Checkpoint, choose_dtype, from_pretrained
from bireme.errors import ConfigError


def load_vision_tower(checkpoint: Checkpoint, dtype: str, device: torch.device) -> Any:
    """Return the conditional-generation model with only its vision parts. Raises ConfigError."""
    from transformers import AutoModelForImageTextToText

    config = _without_language(checkpoint.config)
    model, report = from_pretrained(
        AutoModelForImageTextToText, checkpoint, config, choose_dtype(dtype, checkpoint.config)
    )
    missing = [name for name in sorted(report.get("missing_keys", ())) if is_vision(name)]
    wrong = [name for name in sorted(map(str, report.get("mismatched_keys", ()))) if is_vision(name)]
    if missing or wrong:
        raise ConfigError(
            f"the weights lack tensors of the vision tower, or have them in another shape: {(missing + wrong)[0]};"
            " the checkpoint is incomplete or config.json is another model's"
        )
    model.model.language_model = None
    model.lm_head = None
    return model.to(device).eval().requires_grad_(False)


def drop_vision_tower(model: Any) -> None:
    for part in VISION_PARTS:
        if getattr(model.model, part, None) is not None:
            setattr(model.model, part, None)


def is_vision(name: str) -> bool:
    return any(part in name for part in VISION_PARTS)


def _without_language(config: Any) -> Any:
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = []
    return config
