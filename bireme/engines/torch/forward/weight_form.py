"""What a model's layers keep their weights in, decided before any is read.

| checkpoint | `quant_config.quant_algo` | on a GPU | on a CPU |
|---|---|---|---|
| plain | none | plain | plain |
| plain | one of 8-bit floats | rounded to it | refused |
| quantized, in a form that the fused decoder multiplies | none, or the checkpoint's own | stays | below |
| gpt-oss' MXFP4 | none | experts stay | dequantized |
| quantized otherwise | none | dequantized, and the log says why | below |
| quantized | `NO_QUANT` | dequantized | dequantized |
| quantized | another | refused | refused |
| `load_format: dummy`, `quantization_config` in config.json | as quantized | made up in that form | plain |

On a GPU only all projections of all layers in one form stay, or all experts. On a CPU all are dequantized at load, and
the packed decoder then takes the file's own in place of those that it multiplies (`kept_weights.py`). What is computed
in, `dtype`, decides nothing of this, but that float32 on a GPU keeps no 8-bit floats. The engine's KV names a form that
its own products round for: none is taken for another's.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from bireme.config import EngineConfig
from bireme.engines.torch import kernels
from bireme.engines.torch.forward.decoder_weights import why_not_fused
from bireme.engines.torch.geometry import DEQUANTIZE, NEWER_GPU, NO_FEW_BITS
from bireme.engines.torch.storage import FORMS, StoredAs, WeightForm
from bireme.engines.torch.weights.architectures import FAMILIES
from bireme.engines.torch.weights.checkpoint import Checkpoint, stored_as, with_kept_experts
from bireme.engines.torch.weights.kept_experts import METHOD
from bireme.engines.torch.weights.quantized.heads import Shards
from bireme.engines.torch.weights.quantized.kept import why_not_kept
from bireme.engines.torch.weights.quantized.methods import form_named
from bireme.engines.torch.weights.shared_weights import make_skeleton
from bireme.engines.torch.weights.stored_linear import fault_of_shapes, projections, why_not_dense
from bireme.errors import ConfigError
from bireme.settings import NO_QUANT

logger = logging.getLogger("bireme.engines.torch")
GROUP = 128  # of integers that are made up


def choose_form(checkpoint: Checkpoint, config: EngineConfig, device: torch.device) -> Checkpoint:
    """Return the checkpoint as it is to be read. Raises ConfigError."""
    algo = config.quant_config.quant_algo
    if algo == NO_QUANT:
        return checkpoint
    if not algo and (checkpoint.told or {}).get("quant_method") == METHOD:
        return with_kept_experts(checkpoint, config.dtype) if kernels.keeps_mxfp4(device) else checkpoint
    if checkpoint.quantization is not None or checkpoint.gguf is not None:
        return _kept(checkpoint, config, device)
    if not algo and not checkpoint.shards and (named := form_named(checkpoint.told or {})) is not None:
        return _made_up(checkpoint, config, device, named)
    if not algo:
        return checkpoint
    like = StoredAs(algo, GROUP, torch.float16) if FORMS[algo] is WeightForm.INT4_GROUPS else StoredAs(algo)
    if like.form is WeightForm.INT4_GROUPS and checkpoint.shards:
        raise _refused(algo, "integers of 4 bits are made with samples of text, and this checkpoint is plain")
    if why := kernels.why_no_few_bits(algo, device):
        raise _refused(algo, why, NEWER_GPU)
    skeleton, why = _open(checkpoint, config, device)
    if why := why or _fault(skeleton, like, device):
        raise _refused(algo, why)
    return stored_as(checkpoint, like)


def _kept(checkpoint: Checkpoint, config: EngineConfig, device: torch.device) -> Checkpoint:
    algo = config.quant_config.quant_algo
    own, names, why = _as_stored(checkpoint, config, device)
    named = own or form_named(checkpoint.told or {})
    if algo:
        _check_own(algo, named, why if own is None and kernels.is_usable(device) else "")
    if own is None:
        if kernels.is_usable(device):
            logger.info("weights_not_kept reason=%s", why)
        return checkpoint
    logger.info("weights_kept form=%s algo=%s tensors=%d", own.form, own.algo, len(names))
    return stored_as(checkpoint, own, names)


def _check_own(algo: str, named: StoredAs | None, why: str) -> None:
    """`named`: what the checkpoint is. `why` it can't stay so; empty: it may. Raises ConfigError."""
    if named is None or named.algo != algo:
        raise ConfigError(
            f"quant_config.quant_algo: {algo!r}; the checkpoint is quantized already, and is not rounded once more;"
            " remove it, or use an unquantized checkpoint"
        )
    if why:
        raise ConfigError(
            f"quant_config.quant_algo: {algo!r}; the checkpoint is so, and can't stay: {why}; {DEQUANTIZE}"
        )


def _as_stored(
    checkpoint: Checkpoint, config: EngineConfig, device: torch.device
) -> tuple[StoredAs | None, tuple[str, ...], str]:
    """Return the form that the projections stay in, their weights' names, and where there is none why."""
    if checkpoint.quantization is None:
        return None, (), "blocks of a GGUF file stay on CPUs alone"
    skeleton, why = _open(checkpoint, config, device)
    if why := why or why_not_dense(skeleton):
        return None, (), why
    names = tuple(f"{owner}.{name}.weight" for owner, _, names in projections(skeleton) for name in names)
    own, why = why_not_kept(checkpoint.quantization, names, Shards(dict(checkpoint.quantization.heads)))
    if own is not None and (why := _fault(skeleton, own, device)):
        own = None
    return own, names, why


def _made_up(checkpoint: Checkpoint, config: EngineConfig, device: torch.device, named: StoredAs) -> Checkpoint:
    skeleton, why = _open(checkpoint, config, device)
    if why := why or _fault(skeleton, named, device):
        logger.info("weights_are_plain named=%s reason=load_format is dummy, and %s", named.algo, why)
        return checkpoint
    return stored_as(checkpoint, named)


def _open(checkpoint: Checkpoint, config: EngineConfig, device: torch.device) -> tuple[Any, str]:
    """Return the model without its weights, and why no decoder multiplies these in few bits; empty: one does."""
    if not kernels.is_usable(device):
        return None, NO_FEW_BITS
    if checkpoint.name not in FAMILIES:
        return None, f"{checkpoint.name} is not one of {', '.join(sorted(FAMILIES))}"
    skeleton = make_skeleton(checkpoint, config.dtype)
    return skeleton, why_not_fused(skeleton)


def _fault(skeleton: Any, like: StoredAs, device: torch.device) -> str:
    """Return what speaks against weights of this form in this model on this device; empty: nothing."""
    if why := kernels.why_no_few_bits(like.algo, device) or fault_of_shapes(skeleton, like):
        return why
    is_float32 = next(skeleton.parameters()).dtype is torch.float32
    if like.form is not WeightForm.INT4_GROUPS and device.type == "cuda" and is_float32:
        return "dtype is float32, and a GPU's products of 8-bit floats are not as exact as that"
    return ""


def _refused(algo: str, why: str, remedy: str = "remove it, or use engine: trtllm") -> ConfigError:
    return ConfigError(f"quant_config.quant_algo: {algo!r} on engine torch: {why}; {remedy}")
