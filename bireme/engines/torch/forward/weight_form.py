"""What a model's layers keep their weights in, decided before any is read.

| checkpoint | `quant_config.quant_algo` | on a GPU | on a CPU |
|---|---|---|---|
| plain | none | plain | plain |
| plain | one of 8-bit floats | rounded to it, but for `exclude_modules` | refused |
| quantized, in a form that the fused decoder multiplies | none, or the checkpoint's own | stays | below |
| gpt-oss' MXFP4 | none | experts stay | dequantized |
| quantized otherwise | none | dequantized, and the log says why | below |
| quantized | `NO_QUANT` | dequantized | dequantized |
| quantized | another | refused | refused |
| `load_format: dummy`, `quantization_config` in config.json | as quantized | made up in that form | plain |

On a GPU all projections that are quantized are in one form, or none stays; others may be plain beside them, by what
the files have, or of a plain checkpoint by `quant_config.exclude_modules`. A matrix of several projections (queries,
keys and values; gate and up) is plain as a whole: what the files have quantized of it is dequantized. Experts stay all
or none. On a CPU all are dequantized at load, and the packed decoder then takes the file's own in place of those that
it multiplies (`kept_weights.py`). What is computed in, `dtype`, decides nothing of this, but that float32 on a GPU
keeps no 8-bit floats. The engine's KV names a form that its own products round for, and what is plain: none is taken
for another's.
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
from bireme.engines.torch.weights.kv_schemes import is_of_kv_alone
from bireme.engines.torch.weights.plain_modules import KEY, excluded, named_plain, plain_among, why_not_excluded
from bireme.engines.torch.weights.quantized.heads import Shards
from bireme.engines.torch.weights.quantized.kept import why_not_kept
from bireme.engines.torch.weights.quantized.methods import form_named
from bireme.engines.torch.weights.shared_weights import make_skeleton
from bireme.engines.torch.weights.stored_linear import fault_of_shapes, stored_projections, why_not_dense
from bireme.errors import ConfigError
from bireme.settings import NO_QUANT

logger = logging.getLogger("bireme.engines.torch")
GROUP = 128  # of integers that are made up


def choose_form(checkpoint: Checkpoint, config: EngineConfig, device: torch.device) -> Checkpoint:
    """Return the checkpoint as it is to be read. Raises ConfigError."""
    algo, told = config.quant_config.quant_algo, checkpoint.told or {}
    is_quantized = checkpoint.gguf is not None or checkpoint.quantization is not None
    _check_excluded(checkpoint, config, is_quantized)
    if algo == NO_QUANT:
        return checkpoint
    if not algo and told.get("quant_method") == METHOD:
        return with_kept_experts(checkpoint, config.dtype) if kernels.keeps_mxfp4(device) else checkpoint
    if is_quantized:
        return _kept(checkpoint, config, device)
    if not algo and not checkpoint.shards and (named := form_named(told)) is not None:
        return _made_up(checkpoint, config, device, named)
    return _rounded(checkpoint, config, device, algo) if algo else checkpoint


def _rounded(checkpoint: Checkpoint, config: EngineConfig, device: torch.device, algo: str) -> Checkpoint:
    like = StoredAs(algo, GROUP, torch.float16) if FORMS[algo] is WeightForm.INT4_GROUPS else StoredAs(algo)
    if like.form is WeightForm.INT4_GROUPS and checkpoint.shards:
        raise _refused(algo, "integers of 4 bits are made with samples of text, and this checkpoint is plain")
    if why := kernels.why_no_few_bits(algo, device):
        raise _refused(algo, why, NEWER_GPU)
    skeleton, why = _open(checkpoint, config, device)
    if why := why or why_not_dense(skeleton):
        raise _refused(algo, why)
    plain = excluded(config.quant_config.exclude_modules, _num_layers(checkpoint))
    if why := _fault(skeleton, like, device, plain):
        raise _refused(algo, why)
    return stored_as(checkpoint, like, plain=plain)


def _check_excluded(checkpoint: Checkpoint, config: EngineConfig, is_quantized: bool) -> None:
    """Raises ConfigError for modules that can't be left out of what is rounded."""
    asked, told = config.quant_config, checkpoint.told
    is_quantized = is_quantized or (told is not None and not is_of_kv_alone(told))
    if refused := why_not_excluded(asked.exclude_modules, asked.quant_algo, is_quantized, _num_layers(checkpoint)):
        raise ConfigError(f"{KEY}: {refused[0]!r}; {refused[1]}")


def _kept(checkpoint: Checkpoint, config: EngineConfig, device: torch.device) -> Checkpoint:
    algo = config.quant_config.quant_algo
    own, names, plain, why = _as_stored(checkpoint, config, device)
    named = own or form_named(checkpoint.told or {})
    if algo:
        _check_own(algo, named, why if own is None and kernels.is_usable(device) else "")
    if own is None:
        if kernels.is_usable(device):
            logger.info("weights_not_kept reason=%s", why)
        return checkpoint
    logger.info("weights_kept form=%s algo=%s tensors=%d plain=%d", own.form, own.algo, len(names), len(plain))
    return stored_as(checkpoint, own, names, plain)


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
) -> tuple[StoredAs | None, tuple[str, ...], frozenset[str], str]:
    """Return the form that projections stay in, their weights' names, which others are plain, and where there is no
    form why.
    """
    quantization, nothing = checkpoint.quantization, frozenset[str]()
    if quantization is None:
        return None, (), nothing, "blocks of a GGUF file stay on CPUs alone"
    skeleton, why = _open(checkpoint, config, device)
    if why := why or why_not_dense(skeleton):
        return None, (), nothing, why
    stored_names = quantization.tensors.keys()
    plain = plain_among(_num_layers(checkpoint), lambda name: f"{name}.weight" not in stored_names)
    stored = stored_projections(skeleton, plain)
    names = tuple(f"{owner}.{name}.weight" for owner, _, names in stored for name in names)
    own, why = why_not_kept(quantization, names, Shards(dict(quantization.heads)))
    if own is not None and (why := _fault(skeleton, own, device, plain)):
        own = None
    return own, names, plain, why


def _made_up(checkpoint: Checkpoint, config: EngineConfig, device: torch.device, named: StoredAs) -> Checkpoint:
    skeleton, why = _open(checkpoint, config, device)
    plain = named_plain(checkpoint.told or {}, _num_layers(checkpoint))
    if why := why or _fault(skeleton, named, device, plain):
        logger.info("weights_are_plain named=%s reason=load_format is dummy, and %s", named.algo, why)
        return checkpoint
    return stored_as(checkpoint, named, plain=plain)


def _num_layers(checkpoint: Checkpoint) -> int:
    return int(checkpoint.text_config.num_hidden_layers)


def _open(checkpoint: Checkpoint, config: EngineConfig, device: torch.device) -> tuple[Any, str]:
    """Return the model without its weights, and why no decoder multiplies these in few bits; empty: one does."""
    if not kernels.is_usable(device):
        return None, NO_FEW_BITS
    if checkpoint.name not in FAMILIES:
        return None, f"{checkpoint.name} is not one of {', '.join(sorted(FAMILIES))}"
    skeleton = make_skeleton(checkpoint, config.dtype)
    return skeleton, why_not_fused(skeleton)


def _fault(skeleton: Any, like: StoredAs, device: torch.device, plain: frozenset[str] = frozenset()) -> str:
    """Return what speaks against weights of this form in this model on this device; empty: nothing."""
    if why := kernels.why_no_few_bits(like.algo, device) or fault_of_shapes(skeleton, like, plain):
        return why
    is_float32 = next(skeleton.parameters()).dtype is torch.float32
    if like.form is not WeightForm.INT4_GROUPS and device.type == "cuda" and is_float32:
        return "dtype is float32, and a GPU's products of 8-bit floats are not as exact as that"
    return ""


def _refused(algo: str, why: str, remedy: str = "remove it, or use engine: trtllm") -> ConfigError:
    return ConfigError(f"quant_config.quant_algo: {algo!r} on engine torch: {why}; {remedy}")
