"""An embedding model as its folder describes it: sentence-transformers' modules around a transformers model.

modules.json names them: Transformer, Pooling (1_Pooling/config.json says how), Normalize. Without that file texts are
pooled by the mean of their tokens, as sentence-transformers does. What else a folder may ask for (Dense, several
poolings at once, a prompt left out of the pooling) is refused by name: embeddings that differ from the model's own
would pass unseen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bireme.config import EngineConfig
from bireme.engines.torch.weights.architectures import architecture_of
from bireme.engines.torch.weights.checkpoint import Checkpoint, choose_dtype, from_pretrained, read_checkpoint
from bireme.errors import ConfigError
from bireme.text.embedding_files import max_seq_length_of, read_json

logger = logging.getLogger("bireme.engines.torch")
# Those whose embeddings are proved equal to sentence-transformers' way, tests/engines/torch/test_text_embedding.py.
FAMILIES = ("bert", "roberta", "xlm-roberta", "mpnet", "distilbert", "modernbert", "qwen2", "qwen3", "llama", "mistral")
_OFFSET_FAMILIES = ("roberta", "xlm-roberta", "mpnet")  # their positions begin behind the padding token's id
_DEFAULT_NUM_TOKENS = 16_384  # in one pass, padding included
_DEFAULT_BATCH_SIZE = 256
Pool = Callable[[Tensor, Tensor], Tensor]  # hidden states (texts, length, size), mask (texts, length) -> (texts, size)


def _mean(hidden: Tensor, mask: Tensor) -> Tensor:
    return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def _max(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden.masked_fill(mask[..., None] == 0, -torch.inf).amax(1)


def _last(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden[torch.arange(len(hidden), device=hidden.device), mask.sum(1).long() - 1]


def _first(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden[:, 0]


_POOLINGS: dict[str, Pool] = {"cls": _first, "mean": _mean, "max": _max, "lasttoken": _last}
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, slots=True)
class EmbeddingRules:
    """What a folder says of how embeddings are made of the hidden states."""

    pooling: str = "mean"
    normalizes: bool = False


def read_rules(folder: Path) -> EmbeddingRules:
    """Raises ConfigError for what would be left out."""
    if not (folder / "modules.json").exists():
        logger.info("embedding_rules modules.json=missing pooling=mean normalize=false")
        return EmbeddingRules()
    modules = read_json(folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ConfigError("modules.json: a list of modules is expected; fetch the checkpoint again")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConfigError(
            f"modules.json: {', '.join(kinds)}; Transformer, Pooling and perhaps Normalize are served, in this order"
        )
    if modules[0].get("path"):
        raise ConfigError(f"modules.json: the Transformer lies in {modules[0]['path']}; move its files into the folder")
    config = read_json(folder / str(modules[1].get("path", "1_Pooling")) / "config.json")
    return EmbeddingRules(_pooling_of(config), kinds[-1] == "Normalize")


def _pooling_of(config: Any) -> str:
    if not isinstance(config, dict):
        raise ConfigError("the Pooling module's config.json: a JSON object is expected")
    if config.get("include_prompt") is False:
        raise ConfigError("the Pooling module's config.json: include_prompt false is not served")
    named = config.get("pooling_mode")
    chosen = [named] if isinstance(named, str) else named or []
    flags = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    chosen = [*chosen, *(_FLAGS.get(flag, flag) for flag in flags)]
    if len(chosen) != 1 or chosen[0] not in _POOLINGS:
        raise ConfigError(
            f"the Pooling module's config.json: {', '.join(chosen) or 'no pooling_mode'}; one of {', '.join(_POOLINGS)}"
            " is served"
        )
    return str(chosen[0])


class TextEmbeddingModel:
    """Texts of token ids to embeddings. Used on one thread."""

    def __init__(self, path: str, config: EngineConfig, device: torch.device) -> None:
        """Raises ConfigError."""
        checkpoint = read_checkpoint(path, config.trust_remote_code, config.load_format)
        family = str(checkpoint.config.model_type)
        if family not in FAMILIES:
            raise ConfigError(
                f"{family}: its embeddings have not been proved equal to sentence-transformers'"
                f" (known: {', '.join(FAMILIES)})"
            )
        self.rules = read_rules(checkpoint.folder)
        self.max_seq_len = _max_seq_len(config, checkpoint, family)
        self.max_num_tokens = config.max_num_tokens or max(_DEFAULT_NUM_TOKENS, self.max_seq_len)
        self.max_batch_size = config.max_batch_size or _DEFAULT_BATCH_SIZE
        if self.max_num_tokens < self.max_seq_len:
            raise ConfigError(
                f"max_num_tokens: {self.max_num_tokens}; a text of max_seq_len {self.max_seq_len} tokens must fit;"
                " raise it, or lower max_seq_len"
            )
        self.dtype = choose_dtype(config.dtype, checkpoint.config)
        self._model = _load(checkpoint, self.dtype, device)
        self._device, self._pool = device, _POOLINGS[self.rules.pooling]
        self._padding = int(getattr(checkpoint.config, "pad_token_id", None) or 0)
        self.name = architecture_of(checkpoint.config)
        self.size = int(checkpoint.config.hidden_size)
        self.vocab_size = int(checkpoint.config.vocab_size)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters())

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def embed(self, texts: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.float32]:
        """Return (texts, size), neither shortened nor normalized. Padding is on the right: positions begin with 0, and
        a causal model sees none of it.
        """
        ids = np.full((len(texts), max(map(len, texts))), self._padding, np.int64)
        mask = np.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, : len(text)], mask[row, : len(text)] = text, 1
        device_mask = torch.from_numpy(mask).to(self._device)
        hidden = self._model(
            input_ids=torch.from_numpy(ids).to(self._device), attention_mask=device_mask, **self._options
        ).last_hidden_state
        pooled: npt.NDArray[np.float32] = self._pool(hidden.float(), device_mask.float()).cpu().numpy()
        return pooled

    @property
    def _options(self) -> dict[str, Any]:
        return {"use_cache": False} if getattr(self._model.config, "use_cache", None) is not None else {}

    def finish(self, rows: npt.NDArray[np.float32], dimensions: int) -> npt.NDArray[np.float32]:
        """Return the first `dimensions` of each row, of length 1 where the model's are."""
        rows = rows[:, :dimensions]
        if self.rules.normalizes:
            lengths: npt.NDArray[np.float32] = np.linalg.norm(rows, axis=1, keepdims=True)
            rows = rows / np.maximum(lengths, np.float32(1e-12))
        return np.ascontiguousarray(rows, "<f4")


def _load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModel

    if not checkpoint.shards:
        torch.manual_seed(0)
        model = AutoModel.from_config(checkpoint.config, dtype=dtype)
    else:
        model, report = from_pretrained(AutoModel, checkpoint, checkpoint.config, dtype)
        # A head that only classification uses; checkpoints of embedding models are often without it.
        missing = [name for name in sorted(report.get("missing_keys", ())) if not name.startswith("pooler.")]
        if wrong := missing + sorted(map(str, report.get("mismatched_keys", ()))):
            raise ConfigError(
                f"the weights lack tensors of the model, or have them in another shape: {wrong[0]}; the checkpoint is"
                " incomplete or config.json is another model's"
            )
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    return model.to(device).eval().requires_grad_(False)


def _max_seq_len(config: EngineConfig, checkpoint: Checkpoint, family: str) -> int:
    """Return the tokens of a text at most: what the folder says, else what the model has positions for."""
    positions = int(checkpoint.config.max_position_embeddings)
    if family in _OFFSET_FAMILIES:
        positions -= int(checkpoint.config.pad_token_id) + 1
    asked = config.max_seq_len
    if asked is not None and asked > positions:
        raise ConfigError(f"max_seq_len: {asked}; the model has {positions} positions; lower it")
    return asked or min(positions, max_seq_length_of(checkpoint.folder) or positions)
