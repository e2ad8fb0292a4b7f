"""A draft model: checked against the target and loaded before there are pools, then opened over pools of its own."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bireme.config import EngineConfig
from bireme.engines.torch.forward.forward import Forward
from bireme.engines.torch.forward.opening import StepModel, open_forward, open_model
from bireme.engines.torch.forward.warmup import warm_up
from bireme.engines.torch.forward.weight_form import choose_form
from bireme.engines.torch.geometry import LayerGroup, group_layers
from bireme.engines.torch.pools.kv_store import KvStore
from bireme.engines.torch.weights.architectures import is_picture_model
from bireme.engines.torch.weights.checkpoint import Checkpoint, load_model, open_checkpoint
from bireme.engines.torch.weights.findings import Findings
from bireme.engines.torch.weights.limits import draft_config, longest_sequence
from bireme.engines.torch.weights.setup import Setup
from bireme.errors import ConfigError
from bireme.kv.blocks.block_manager import BlockManager, GroupSpec
from bireme.settings import DRAFT_MODELS

logger = logging.getLogger("bireme.engines.torch")
_KEY = "speculative_config.speculative_model"
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model with its weights, before it has pools."""

    setup: Setup
    model: StepModel
    groups: tuple[LayerGroup, ...]  # all of them under the block ids of the target's first group

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """Return what a token's keys and values take, a layer each."""
        return tuple(size for group in self.groups for size in group.row_bytes)

    def peak_beside(self, step: int) -> int:
        """Return what the largest step takes of a GPU beyond weights and pools. `step`: that of the model alone.

        Raises ConfigError.
        """
        return max(step, self.model.peak_bytes(self.setup))

    def open(self, num_blocks: int) -> Forward:
        """Allocate its pools and return what computes its steps. `num_blocks`: of the target's first group."""
        setup, model, limits = self.setup, self.model, self.setup.limits
        size = limits.tokens_per_block
        store = KvStore(model.geometry, self.groups, [num_blocks] * len(self.groups), size, setup.device)
        specs = [GroupSpec(group.window, num_blocks) for group in self.groups]
        of_start = BlockManager(specs, size, enable_reuse=False)  # for the first passes alone: blocks are the target's
        forward = open_forward(setup, model, store, of_start, is_shared=False)
        warm_up(forward, of_start, store, limits)
        logger.info(
            "draft_model_loaded model=%s weights=%s kv_mib=%d max_seq_len=%d",
            setup.checkpoint.name,
            forward.form,
            store.num_bytes >> 20,
            limits.max_seq_len,
        )
        return forward


def load_draft(setup: Setup, target: StepModel) -> LoadedDraft | None:
    """Return the draft model that the settings name; None: they name none, or this engine makes no drafts.

    Raises ConfigError.
    """
    speculation, context = setup.config.speculative_config, setup.context
    if speculation is None or speculation.decoding_type not in DRAFT_MODELS or context.stage == "prefill":
        return None
    config = draft_config(setup.config)
    name = speculation.speculative_model or ""
    checkpoint = _open(name, config, setup, target)
    own = replace(
        setup,
        context=replace(context, model_path=str(checkpoint.folder), config=config, findings_path=None),
        checkpoint=checkpoint,
        limits=_own_limits(setup, checkpoint),
        findings=Findings(None),
        kv_scales=None,
    )
    try:
        weights = load_model(checkpoint, config.dtype, setup.device)
        model = open_model(own, weights, takes_pictures=False, has_grid_positions=False)
    except ConfigError as error:
        raise ConfigError(f"{_KEY}: {name}: {error}") from error
    widest = group_layers(target.geometry)[0].window
    if widest:  # earlier blocks are let go of
        narrow = [replace(layer, window=min(layer.window or widest, widest)) for layer in model.geometry]
        model = replace(model, geometry=narrow)
    return LoadedDraft(own, model, group_layers(model.geometry))


def _own_limits(setup: Setup, checkpoint: Checkpoint) -> Any:
    asked = setup.limits.max_seq_len
    own = min(asked, longest_sequence(checkpoint.text_config) or asked)
    if own < asked:
        logger.info("drafts_limited reason=the draft model was made for %d tokens: none beyond these", own)
    return replace(setup.limits, max_seq_len=own, max_draft_len=0)  # it verifies no drafts


def _open(name: str, config: EngineConfig, setup: Setup, target: StepModel) -> Checkpoint:
    """Return its checkpoint, once it is known to speak the target's tokens. Raises ConfigError."""
    try:
        checkpoint = open_checkpoint(name, load_format=config.load_format)
        if is_picture_model(checkpoint.name):
            raise ConfigError(f"{checkpoint.name} takes pictures; a draft model reads text alone, name another")
        vocab_size = int(checkpoint.text_config.vocab_size)
        if vocab_size != target.vocab_size:
            raise ConfigError(
                f"its vocabulary has {vocab_size} tokens, the model's {target.vocab_size}; a draft model has the same"
                " tokenizer and vocabulary, name another"
            )
        _check_tokenizer(checkpoint.folder, setup.checkpoint.folder)
        return choose_form(checkpoint, config, setup.device)
    except ConfigError as error:
        raise ConfigError(f"{_KEY}: {name}: {error}") from error


def _check_tokenizer(folder: Path, of_target: Path) -> None:
    """Raise ConfigError where one token is another in the two; a folder without tokenizer.json says nothing."""
    own, wanted = _tokens(folder), _tokens(of_target)
    if own is None or wanted is None or own == wanted:
        return
    differing = sorted(token for token in own.keys() | wanted.keys() if own.get(token) != wanted.get(token))
    token = differing[0]
    raise ConfigError(
        f"another tokenizer: {len(differing)} tokens differ, {token!r} is {own.get(token)} here and"
        f" {wanted.get(token)} in the model's {_TOKENIZER}; name a draft model of the same tokenizer"
    )


def _tokens(folder: Path) -> dict[str, int] | None:
    """Return each token's id; None: there is no tokenizer.json. Raises ConfigError."""
    try:
        tree = json.loads((folder / _TOKENIZER).read_text(encoding="utf-8"))
        words = tree["model"]["vocab"]
        found = dict(words) if isinstance(words, dict) else {word[0]: at for at, word in enumerate(words)}
        return found | {token["content"]: token["id"] for token in tree.get("added_tokens", ())}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ConfigError(f"{_TOKENIZER} can't be read: {type(error).__name__}: {error}") from error
