"""What every part of an engine is made of, settled before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch

from bireme.config import EngineConfig
from bireme.engines.base import EngineContext
from bireme.engines.torch.geometry import EngineLimits
from bireme.engines.torch.step import Post
from bireme.engines.torch.weights.checkpoint import Checkpoint, open_checkpoint, rounded
from bireme.engines.torch.weights.findings import Findings
from bireme.engines.torch.weights.limits import resolve_limits
from bireme.engines.torch.weights.shared_weights import weights_id


@dataclass(frozen=True, slots=True)
class Setup:
    context: EngineContext
    post: Post
    device: torch.device
    checkpoint: Checkpoint
    limits: EngineLimits
    findings: Findings

    @property
    def config(self) -> EngineConfig:
        return self.context.config


def settle(context: EngineContext, post: Post) -> Setup:
    """Raises ConfigError."""
    config, device = context.config, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checkpoint = open_checkpoint(context.model_path, config.trust_remote_code, config.load_format)
    checkpoint = rounded(checkpoint, config.quant_config.quant_algo)
    limits = resolve_limits(config, checkpoint.text_config)
    subject = weights_id(checkpoint, config.dtype, device), msgspec.json.encode(config)
    return Setup(context, post, device, checkpoint, limits, Findings(context.findings_path, *subject))
