"""A model folder, checked before transformers sees it, so that errors are named, then loaded.

safetensors, or a GGUF file (gguf_weights.py); what they store in few bits is dequantized on the way (`quantized/`).
Messages name files by their name in the folder, never by path.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from bireme.engines.torch.storage import StoredAs
from bireme.engines.torch.weights import dtypes
from bireme.engines.torch.weights.architectures import architecture_of, check_architecture, is_picture_model
from bireme.engines.torch.weights.gguf_weights import gguf_digest, gguf_tensors
from bireme.engines.torch.weights.kept_experts import METHOD, keep_experts, make_up_experts, why_experts_not_kept
from bireme.engines.torch.weights.lean_imports import without_compiler, without_symbols
from bireme.engines.torch.weights.quantized.heads import Shards
from bireme.engines.torch.weights.quantized.kept import fill_with
from bireme.engines.torch.weights.quantized.methods import Quantization, read_quantization
from bireme.engines.torch.weights.quantized.stored import StoredTensor
from bireme.engines.torch.weights.stored_linear import empty_projections, store_projections
from bireme.errors import ConfigError, one_line
from bireme.gguf.architectures import config_of
from bireme.gguf.folder import gguf_files, is_gguf, model_folder
from bireme.gguf.head import GgufHead, read_head

logger = logging.getLogger("bireme.engines.torch")
_SAMPLE_BYTES = 1 << 12
_OF_DECODERS = (torch.bfloat16, torch.float32)
_MODELOPT = "hf_quant_config.json"
_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder whose files can be read and whose architecture is supported."""

    folder: Path
    config: Any  # transformers' PretrainedConfig, of the plain model: without quantization_config
    shards: tuple[Path, ...]  # none: load_format dummy
    digest: str  # hex; different weights, form of them or configuration: different digest
    stored_as: StoredAs | None = None  # what the layers' projections are in once they are read; None: plain
    plain: frozenset[str] = frozenset()  # names of projections that stay so where the others are `stored_as`
    quantization: Quantization | None = None  # of what is dequantized when it is read; None: no weight is
    kept: Mapping[str, StoredTensor] = field(default_factory=dict)  # the projections that stay as the files have them
    gguf: GgufHead | None = None  # of the shards, where they are GGUF files
    told: dict[str, Any] | None = None  # quantization_config as it stands
    keeps_experts: bool = False  # as the files have them, MXFP4; the model is the same

    @property
    def name(self) -> str:
        return architecture_of(self.config)

    @property
    def text_config(self) -> Any:
        return self.config.get_text_config()


def open_checkpoint(model: str, trust_remote_code: bool = False, load_format: str = "auto") -> Checkpoint:
    """Check a model folder (or fetch a hub id). Raises ConfigError naming the file and what is wrong with it.

    load_format dummy: config.json is all that is needed.
    """
    checkpoint = read_checkpoint(model, trust_remote_code, load_format)
    check_architecture(checkpoint.config)
    return checkpoint


def read_checkpoint(model: str, trust_remote_code: bool = False, load_format: str = "auto") -> Checkpoint:
    """Check a model folder's files as `open_checkpoint` does, of whatever architecture."""
    if trust_remote_code:
        raise ConfigError(
            "trust_remote_code: true is not supported by the torch engine; it runs no code of a checkpoint"
        )
    folder = _resolve(model)
    config = _read_config(folder)
    told = _take_quantization(folder, config)
    shards = () if load_format == "dummy" else _shards(folder)
    head = _read_gguf(shards, config)
    for shard in shards if head is None else ():
        _check_shard(shard)
    quantization = read_quantization(told, shards) if shards and head is None else None
    digest = files_digest(folder, shards, head)
    return Checkpoint(folder, config, shards, digest, quantization=quantization, gguf=head, told=told)


def load_model(checkpoint: Checkpoint, dtype: str, device: torch.device) -> Any:
    """Return the transformers model on the device, in eval mode, its weights complete. Raises ConfigError."""
    return read_model(checkpoint, dtype, device).to(device)


def model_class(checkpoint: Checkpoint) -> Any:
    """Return the Auto class that makes the checkpoint's model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if is_picture_model(checkpoint.name) else AutoModelForCausalLM


def stored_as(
    checkpoint: Checkpoint, form: StoredAs, names: Collection[str] = (), plain: frozenset[str] = frozenset()
) -> Checkpoint:
    """Return the checkpoint as one whose projections are stored so: another model, whose KV is not the first one's.

    `names`: of the weights that stay what the files have; none: all are rounded from plain ones. `plain`: projections
    that are neither.
    """
    parts = " ".join([checkpoint.digest, str(form), *sorted(plain)])
    made = replace(checkpoint, digest=hashlib.sha256(parts.encode()).hexdigest(), stored_as=form, plain=plain)
    if checkpoint.quantization is None or not names:
        return made
    rest, kept = checkpoint.quantization.split(names)
    return replace(made, quantization=rest, kept=kept)


def with_kept_experts(checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    """Return the checkpoint as one whose experts stay MXFP4 where they are; the log says why they don't."""
    if (checkpoint.told or {}).get("quant_method") != METHOD:
        return checkpoint
    num_layers = int(checkpoint.text_config.num_hidden_layers)
    stored = None if checkpoint.quantization is None else checkpoint.quantization.tensors.keys()
    computed = choose_dtype(dtype, checkpoint.config)
    why = "" if computed in _OF_DECODERS else f"{computed} has no decoder of experts in MXFP4"
    if why := why or why_experts_not_kept(checkpoint.name, num_layers, stored):
        logger.info("weights_not_kept reason=%s", why)
        return checkpoint
    return replace(checkpoint, keeps_experts=True)


def read_model(checkpoint: Checkpoint, dtype: str, device: torch.device) -> Any:
    """Return the model of `load_model`, its weights still in host memory, but for those in few bits.

    A checkpoint without shards (load_format dummy) gets random weights, made on the device.
    """
    model = _read_plain(checkpoint, dtype, device)
    if checkpoint.stored_as is not None:
        fill = None
        if checkpoint.kept and checkpoint.quantization is not None:
            fill = partial(_fill, checkpoint.kept, Shards(dict(checkpoint.quantization.heads)))
        store_projections(model, checkpoint.stored_as, device, fill, checkpoint.plain)
    return model


def _fill(kept: Mapping[str, StoredTensor], shards: Shards, name: str, _: Any, to: Any) -> None:
    fill_with(kept, shards, name, to)


def _read_plain(checkpoint: Checkpoint, dtype: str, device: torch.device) -> Any:
    kind, own = model_class(checkpoint), choose_dtype(dtype, checkpoint.config)
    if not checkpoint.shards:
        torch.manual_seed(0)
        with device:
            return _make_up(kind, checkpoint, own).eval().requires_grad_(False)
    model, report = from_pretrained(kind, checkpoint, checkpoint.config, own)
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        raise ConfigError(
            f"the weights lack {len(missing)} tensors that the model needs, {missing[0]} among them;"
            " the checkpoint is incomplete or config.json is another model's"
        )
    mismatched = list(report.get("mismatched_keys", ()))
    if mismatched:
        raise ConfigError(f"weights and config.json disagree on a tensor's shape: {mismatched[0]}")
    return model.eval().requires_grad_(False)


def _make_up(kind: Any, checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    config = checkpoint.config
    if not checkpoint.keeps_experts:
        return kind.from_config(config, dtype=dtype)
    few = copy.deepcopy(config)  # plain experts would take four times their memory for a while
    few.num_local_experts = 1
    model = kind.from_config(few, dtype=dtype)
    make_up_experts(model, config.num_local_experts)
    few.num_local_experts = config.num_local_experts  # its modules hold this configuration
    return model


def from_pretrained(kind: Any, checkpoint: Checkpoint, config: Any, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Return an Auto class's model, and which of its weights are missing or have another shape. Raises ConfigError."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # it would fill the log, as would its tables of what is wrong:
    transformers_logging.set_verbosity_error()  # the caller reports that, as an error
    source: Path | None = checkpoint.folder
    stored: dict[str, Any] | None = None  # what gives each tensor when transformers asks for it
    if checkpoint.quantization is not None or checkpoint.gguf is not None:
        source, kind = None, kind._model_mapping[type(config)]  # an Auto class would look for the name of a model
    if checkpoint.quantization is not None:
        keeps = checkpoint.keeps_experts
        stored = checkpoint.quantization.open_parts() if keeps else checkpoint.quantization.open(dtype)
    if checkpoint.kept or checkpoint.keeps_experts:
        without = partial(empty_projections, plain=checkpoint.plain)
        kind = _changed(kind, keep_experts if checkpoint.keeps_experts else without)
    try:
        # torch's own functions for tensors without memory are marked for the compiler when they are called.
        with without_compiler(), without_symbols():
            if checkpoint.gguf is not None:
                stored = _gguf_tensors(kind, checkpoint.gguf, config, dtype)
            model, report = kind.from_pretrained(
                source,
                state_dict=stored,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported by name
            )
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(f"the weights could not be loaded: {one_line(error)}") from error
    return model, report


def _changed(kind: Any, change: Callable[[Any], None]) -> Any:
    """Return the class of a model that is changed when it has been made, before its weights are read."""

    def __init__(self: Any, *args: Any, **settings: Any) -> None:
        kind.__init__(self, *args, **settings)
        change(self)
        self.__class__ = kind

    return type(kind.__name__, (kind,), {"__init__": __init__, "__module__": kind.__module__})


def _gguf_tensors(kind: Any, head: GgufHead, config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Return what gives each tensor of a class's model. Raises ConfigError, before anything is read, for another's."""
    with torch.device("meta"):
        model = kind(config)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    return gguf_tensors(head, config_of(head), expected, dtype)


def choose_dtype(name: str, config: Any) -> torch.dtype:
    """Return the dtype of the weights, by the rules of `dtypes.choose`. Raises ConfigError."""
    own = str(getattr(config, "dtype", None)).removeprefix("torch.")
    gpu = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return getattr(torch, dtypes.choose(name, own, gpu))


def eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the ids that end a sequence: generation_config.json's, else config.json's."""
    path = checkpoint.folder / "generation_config.json"
    ids = _read_json(path).get("eos_token_id") if path.exists() else None
    if ids is None:
        ids = getattr(checkpoint.text_config, "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(int(token) for token in ids) if isinstance(ids, list | tuple) else (int(ids),)


def _resolve(model: str) -> Path:
    folder = Path(model)
    if folder.is_dir() or is_gguf(folder):
        return model_folder(folder)
    if model.startswith(("/", ".")) or model.count("/") > 1:
        raise ConfigError(f"model folder {model} does not exist; check `model` in recipe.yaml")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(_FILES)))
    except Exception as error:  # the hub's client raises its own, httpx's and OS errors
        raise ConfigError(
            f"model {model}: no such folder, and it could not be fetched from the hub ({type(error).__name__}:"
            f" {one_line(error)}); give a local folder, or check the name and the network"
        ) from error


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    raw = _read_json(folder / "config.json")
    if "auto_map" in raw and "model_type" not in raw:
        raise ConfigError("config.json: the model needs its own code (auto_map), which the torch engine does not run")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # validation errors of many kinds, all about this one file
        name = (raw.get("architectures") or [raw.get("model_type")])[0]
        raise ConfigError(f"config.json ({name}): {one_line(error)}") from error


def _take_quantization(folder: Path, config: Any) -> dict[str, Any] | None:
    """Take quantization_config out of a model's configuration; ModelOpt's older exports have a file of their own."""
    told = None
    for part in (config.get_text_config(), config):
        own = vars(part).pop("quantization_config", None)
        told = own if own is not None else told
    if told is None and (folder / _MODELOPT).exists():
        own = _read_json(folder / _MODELOPT).get("quantization") or {}
        if not isinstance(own, dict):
            raise ConfigError(f"{_MODELOPT}: quantization is {type(own).__name__}; a JSON object is expected")
        told = {"quant_method": "modelopt"} | own
    if told is not None and not isinstance(told, dict):
        raise ConfigError(f"config.json: quantization_config is {type(told).__name__}; a JSON object is expected")
    return told


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path.name} is missing from the model folder") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path.name}: a JSON object is expected, not {type(tree).__name__}")
    return tree


def _shards(folder: Path) -> tuple[Path, ...]:
    """Return the files that transformers reads: of both forms it takes the whole one."""
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if whole.exists():
        if index.exists():
            logger.warning("index_ignored folder=%s reason=model.safetensors is there", folder)
        return (whole,)
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index.name}: no weight_map in it")
        return tuple(folder / name for name in sorted({Path(str(name)).name for name in weight_map.values()}))
    if files := gguf_files(folder):
        return files
    raise ConfigError(
        "model.safetensors is missing from the model folder (nor is there an index of shards, or a GGUF file);"
        " only weights as safetensors and GGUF are read"
    )


def _read_gguf(shards: tuple[Path, ...], config: Any) -> GgufHead | None:
    """Return the head of shards that are GGUF files; None: they are others. Raises ConfigError."""
    if not shards or not is_gguf(shards[0]):
        return None
    head = read_head(shards[0])
    told = config_of(head)["model_type"]
    if told != config.model_type:
        raise ConfigError(
            f"{head.name} is of model type {told}, config.json of {config.model_type}; name the file alone"
        )
    return head


def _check_shard(shard: Path) -> None:
    try:
        with safe_open(shard, framework="pt") as tensors:
            next(iter(tensors.keys()), None)
    except FileNotFoundError as error:
        raise ConfigError(f"{shard.name} is missing from the model folder; fetch the checkpoint again") from error
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{shard.name} is corrupted: {one_line(error)}; fetch the checkpoint again") from error


def files_digest(folder: Path, shards: tuple[Path, ...], gguf: GgufHead | None = None) -> str:
    """Hash the configuration, and of each shard its head and samples of each tensor: whole files would take minutes."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    if (folder / _MODELOPT).exists():
        digest.update((folder / _MODELOPT).read_bytes())
    if gguf is not None:
        digest.update(gguf_digest(gguf).encode())
    for shard in shards if gguf is None else ():
        with shard.open("rb", buffering=0) as file:
            length = int.from_bytes(file.read(8), "little")
            head = file.read(length)
            digest.update(f"{shard.name} {shard.stat().st_size} ".encode() + head)
            for name, entry in sorted(msgspec.json.decode(head).items()):
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    for at in (begin, (begin + end) // 2):
                        digest.update(os.pread(file.fileno(), min(end - at, _SAMPLE_BYTES), 8 + length + at))
    return digest.hexdigest()
