"""The language model of a vision-language checkpoint, as `Modules` knows it: ids or embeddings in, logits out.

Only the language model's attention is ours; the vision tower, if there is one, keeps its own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class VisionLanguageModel:
    """Wraps an unmodified transformers model of vision_models.FAMILIES."""

    def __init__(self, model: Any) -> None:
        self.whole = model
        self.config = model.config.get_text_config()
        self._inner = model.model.language_model

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.whole.lm_head.weight.dtype
        return dtype

    def set_attn_implementation(self, name: str) -> None:
        self.whole.set_attn_implementation({"text_config": name})

    def embed(self, ids: Tensor) -> Tensor:
        """Return (1, T, hidden), which the caller may change."""
        rows: Tensor = self._inner.get_input_embeddings()(ids)
        return rows

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        return_dict: bool = True,
        logits_to_keep: Any = 0,
    ) -> Any:
        states = self._inner(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            use_cache=use_cache,
            return_dict=return_dict,
        ).last_hidden_state
        return SimpleNamespace(logits=self.whole.lm_head(states[:, logits_to_keep]))

    __call__ = forward
