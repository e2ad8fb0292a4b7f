"""What every part of an engine is made of, settled before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from bireme.config import EngineConfig
from bireme.engines.base import EngineContext
from bireme.engines.torch.geometry import EngineLimits, KvScales
from bireme.engines.torch.step import Post
from bireme.engines.torch.weights.checkpoint import Checkpoint, open_checkpoint
from bireme.engines.torch.weights.findings import Findings
from bireme.engines.torch.weights.kv_scales import read_kv_scales
from bireme.engines.torch.weights.limits import FP8, resolve_limits
from bireme.engines.torch.weights.shared_weights import weights_id


@dataclass(frozen=True, slots=True)
class Setup:
    context: EngineContext
    post: Post
    device: torch.device
    checkpoint: Checkpoint
    limits: EngineLimits
    findings: Findings
    kv_scales: tuple[KvScales, ...] | None = None  # a layer each, where KV is kept as 8-bit floats

    @property
    def config(self) -> EngineConfig:
        return self.context.config


ChooseForm = Callable[[Checkpoint, EngineConfig, torch.device], Checkpoint]


def settle(context: EngineContext, post: Post, choose_form: ChooseForm) -> Setup:
    """`choose_form`: what the weights stay in. Raises ConfigError."""
    config, device = context.config, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checkpoint = open_checkpoint(context.model_path, config.trust_remote_code, config.load_format)
    checkpoint = choose_form(checkpoint, config, device)
    limits = resolve_limits(config, checkpoint.text_config)
    kv_scales = read_kv_scales(checkpoint) if config.kv_cache_config.dtype == FP8 else None
    subject = weights_id(checkpoint, config.dtype, device), msgspec.json.encode(config)
    findings = Findings(context.findings_path, *subject)
    return Setup(context, post, device, checkpoint, limits, findings, kv_scales)
