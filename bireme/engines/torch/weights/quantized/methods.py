"""The methods of quantization that are read: one row each, from config.json's `quantization_config` to its reader."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from bireme.conversion import convert
from bireme.engines.torch.storage import BLOCK, StoredAs
from bireme.engines.torch.weights.kv_schemes import is_of_kv_alone
from bireme.engines.torch.weights.quantized.bitsandbytes import read_4bit, read_int8
from bireme.engines.torch.weights.quantized.compressed_tensors import (
    named_by_scheme,
    read_compressed_tensors,
)
from bireme.engines.torch.weights.quantized.fp8 import read_fp8
from bireme.engines.torch.weights.quantized.heads import Head, Shards, read_heads, torch_dtype
from bireme.engines.torch.weights.quantized.integers import read_awq, read_gptq
from bireme.engines.torch.weights.quantized.mxfp4 import read_mxfp4
from bireme.engines.torch.weights.quantized.stored import TOLD, StoredTensor
from bireme.errors import ConfigError

logger = logging.getLogger("bireme.engines.torch")
_Told = dict[str, Any]  # a quantization_config
_Heads = Mapping[str, Head]
# Scales of activations, which this engine does not compute with, and of KV, which `kv_scales.py` reads where it does.
_IGNORED = (
    *(".input_scale", ".input_scale_ub", ".activation_scale", ".activation_scale_ub", ".output_scale"),
    *(".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_output_scale", ".input_zero_point"),
)
_REMEDY = "use a checkpoint in one of these forms or an unquantized one, or engine trtllm"


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table."""

    forms: str  # what it stores, for operators
    written_by: str
    read: Callable[[_Told, _Heads], list[StoredTensor]]


class _Fp8Config(msgspec.Struct):
    weight_block_size: tuple[int, int] | None = None
    fmt: str = "e4m3"


def _read_fp8(told: _Told, heads: _Heads) -> list[StoredTensor]:
    own = convert(told, _Fp8Config, TOLD)
    if own.fmt not in ("e4m3", "float8_e4m3fn"):
        raise ConfigError(f"{TOLD}.fmt: {own.fmt!r}; e4m3 is read")
    block = own.weight_block_size
    if block is not None and min(block) < 1:
        raise ConfigError(f"{TOLD}.weight_block_size: {list(block)}; two positive numbers, e.g. [128, 128]")
    return read_fp8(heads, block or "tensor", "weight_scale_inv")


def _read_fbgemm(told: _Told, heads: _Heads) -> list[StoredTensor]:
    return read_fp8(heads, "channel", "weight_scale")


def _read_modelopt(told: _Told, heads: _Heads) -> list[StoredTensor]:
    algorithm = str(told.get("quant_algo"))
    if algorithm != "FP8":
        raise ConfigError(f"quantization modelopt {algorithm}: the torch engine reads modelopt's FP8; {_REMEDY}")
    return read_fp8(heads, "tensor", "weight_scale")


def _read_mxfp4(told: _Told, heads: _Heads) -> list[StoredTensor]:
    return read_mxfp4(heads)


class _GptqConfig(msgspec.Struct):
    bits: int
    group_size: int
    desc_act: bool = False
    checkpoint_format: str = "gptq"
    is_marlin_format: bool = False
    dynamic: dict[str, Any] | None = None


def _read_gptq(told: _Told, heads: _Heads) -> list[StoredTensor]:
    own = convert(told, _GptqConfig, TOLD)
    added = {"gptq": 1, "gptq_v2": 0}.get(own.checkpoint_format)
    if own.bits not in (4, 8) or added is None or own.is_marlin_format:
        form = "marlin" if own.is_marlin_format else own.checkpoint_format
        raise ConfigError(f"{TOLD}: GPTQ of {own.bits} bits, {form!r}; 4 and 8 bits of gptq and gptq_v2 are read")
    if others := [rule for rule in own.dynamic or {} if not rule.startswith("-:")]:  # with -: modules are left out
        raise ConfigError(f"{TOLD}.dynamic: {others[0]!r} has weights of its own kind; one kind for all is read")
    return read_gptq(heads, own.bits, own.group_size, own.desc_act, added)


class _AwqConfig(msgspec.Struct):
    bits: int
    group_size: int
    version: str = "gemm"
    zero_point: bool = True


def _awq_config(told: _Told) -> _AwqConfig:
    older = {"w_bit": "bits", "q_group_size": "group_size"}
    return convert({older.get(key, key): value for key, value in told.items()}, _AwqConfig, TOLD)


def _read_awq(told: _Told, heads: _Heads) -> list[StoredTensor]:
    own = _awq_config(told)
    if own.bits != 4 or own.version.lower() != "gemm" or not own.zero_point:
        raise ConfigError(
            f"{TOLD}: AWQ of {own.bits} bits, version {own.version!r}, zero_point {own.zero_point}; 4 bits of version"
            " gemm with zero points are read"
        )
    return read_awq(heads, own.group_size)


class _BitsAndBytesConfig(msgspec.Struct):
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_storage: str = "uint8"


def _read_bitsandbytes(told: _Told, heads: _Heads) -> list[StoredTensor]:
    own = convert(told, _BitsAndBytesConfig, TOLD)
    if own.load_in_4bit == own.load_in_8bit:
        raise ConfigError(f"{TOLD}: one of load_in_4bit and load_in_8bit is to be true")
    if own.load_in_8bit:
        return read_int8(heads)
    if own.bnb_4bit_quant_storage != "uint8":
        raise ConfigError(f"{TOLD}.bnb_4bit_quant_storage: {own.bnb_4bit_quant_storage!r}; uint8 is read")
    return read_4bit(heads)


METHODS: dict[str, Method] = {  # by quantization_config.quant_method
    "fp8": Method("FP8, a scale a tensor or a block (128 x 128)", "DeepSeek, transformers", _read_fp8),
    "fbgemm_fp8": Method("FP8, a scale a row", "FBGEMM, transformers", _read_fbgemm),
    "compressed-tensors": Method(
        "FP8, 8 and 4 bits, a scale a tensor, row, group or block", "llm-compressor", read_compressed_tensors
    ),
    "modelopt": Method("FP8, a scale a tensor", "NVIDIA ModelOpt", _read_modelopt),
    "mxfp4": Method("MXFP4 experts", "gpt-oss", _read_mxfp4),
    "gptq": Method("4 and 8 bits in groups, act-order included", "GPTQModel, AutoGPTQ", _read_gptq),
    "awq": Method("4 bits in groups, gemm layout", "AutoAWQ", _read_awq),
    "bitsandbytes": Method("nf4, fp4, int8 a row", "bitsandbytes, transformers", _read_bitsandbytes),
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """What the weights of a checkpoint are stored as, checked against the heads of its files."""

    method: str
    heads: _Heads
    tensors: Mapping[str, StoredTensor]  # by the plain tensor's name
    plain: tuple[str, ...]  # stored as the model has them
    num_ignored: int  # scales of activations and of KV

    def split(self, names: Collection[str]) -> tuple[Quantization, dict[str, StoredTensor]]:
        """Return what is left without the weights of these names, and these."""
        rest = {name: tensor for name, tensor in self.tensors.items() if name not in names}
        return replace(self, tensors=rest), {name: self.tensors[name] for name in names}

    def plain_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that the tensors of the files take when they are plain."""
        own = sum(torch.Size(tensor.shape).numel() for tensor in self.tensors.values())
        floats = [head for name in self.plain if torch_dtype((head := self.heads[name]).dtype)]
        return int((own + sum(torch.Size(head.shape).numel() for head in floats)) * dtype.itemsize)

    def open(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return what reads each plain tensor when it is indexed with `...`, by name; nothing is read yet.

        The small parts have been read: raises ConfigError for scales that are no numbers.
        """
        shards = Shards(dict(self.heads))
        for tensor in self.tensors.values():
            tensor.check_values(shards)
        stored = [name for tensor in self.tensors.values() for name in tensor.parts.values()]
        read = sum(self.heads[name].num_bytes for name in (*stored, *self.plain))
        if not self.tensors:
            return {name: shards.slice(name) for name in self.plain}
        logger.info(
            "weights_dequantized method=%s tensors=%d plain=%d read_mib=%d model_mib=%d dtype=%s ignored_scales=%d",
            self.method,
            len(self.tensors),
            len(self.plain),
            read >> 20,
            self.plain_bytes(dtype) >> 20,
            str(dtype).removeprefix("torch."),
            self.num_ignored,
        )
        thread = ThreadPoolExecutor(1, "dequantize")
        found: dict[str, Any] = {name: shards.slice(name) for name in self.plain}
        return found | {name: _Dequantized(tensor, shards, dtype, thread) for name, tensor in self.tensors.items()}

    def open_parts(self) -> dict[str, Any]:
        """Return what reads each tensor as it is stored, by its name in the files. Raises ConfigError as `open`."""
        shards = Shards(dict(self.heads))
        for tensor in self.tensors.values():
            tensor.check_values(shards)
        names = [*self.plain, *(name for tensor in self.tensors.values() for name in tensor.parts.values())]
        num_bytes = sum(self.heads[name].num_bytes for name in names)
        logger.info("weights_kept form=%s tensors=%d model_mib=%d", self.method, len(self.tensors), num_bytes >> 20)
        return {name: shards.slice(name) for name in names}


class _Dequantized:
    """Stands for a plain tensor as safetensors' slices do: `[...]` reads it.

    On one thread, for the memory: transformers asks on several, and the C library keeps for each what it has used.
    """

    def __init__(self, tensor: StoredTensor, shards: Shards, dtype: torch.dtype, thread: ThreadPoolExecutor) -> None:
        self._tensor, self._shards, self._dtype, self._thread = tensor, shards, dtype, thread

    def __getitem__(self, _: Any) -> Tensor:
        return self._thread.submit(self._make).result()

    def _make(self) -> Tensor:
        return self._tensor.form.dequantize(self._tensor.read(self._shards), self._dtype)


def form_named(told: _Told) -> StoredAs | None:
    """Return the form that a quantization_config names, for weights that are made up; None: plain ones stand for it.

    Raises ConfigError for what is no such configuration.
    """
    if is_of_kv_alone(told):
        return None
    method = told.get("quant_method")
    if method == "fp8":
        block = convert(told, _Fp8Config, TOLD).weight_block_size
        algo = {None: "FP8", (BLOCK, BLOCK): "FP8_BLOCK_SCALES"}.get(block)
    elif method == "compressed-tensors":
        return named_by_scheme(told)
    elif method in ("gptq", "awq"):
        return _integers_named(str(method), told)
    else:
        algo = {"fbgemm_fp8": "FP8_PER_CHANNEL_PER_TOKEN"}.get(str(method))
        if method == "modelopt" and told.get("quant_algo") == "FP8":
            algo = "FP8"
    return None if algo is None else StoredAs(algo)


def _integers_named(method: str, told: _Told) -> StoredAs | None:
    if method == "awq":
        awq = _awq_config(told)
        return StoredAs("W4A16_AWQ", max(0, awq.group_size), torch.float16) if awq.bits == 4 else None
    gptq = convert(told, _GptqConfig, TOLD)
    return StoredAs("W4A16_GPTQ", max(0, gptq.group_size), torch.float16) if gptq.bits == 4 else None


def read_quantization(told: _Told | None, shards: tuple[Path, ...]) -> Quantization | None:
    """Return how the weights are stored; None: plain. `told`: the quantization_config. No data is read.

    Raises ConfigError for methods that are not read, and for files that are not what the configuration says.
    """
    heads = read_heads(shards)
    if told is None or is_of_kv_alone(told):
        if eights := [name for name, head in heads.items() if head.dtype.startswith("F8_")]:
            raise ConfigError(
                f"{eights[0]} is stored as {heads[eights[0]].dtype}, and config.json has no quantization_config that"
                " says what its scales are; add it, or use an unquantized checkpoint"
            )
        return None
    method = str(told.get("quant_method"))
    row = METHODS.get(method)
    if row is None:
        raise ConfigError(
            f"the checkpoint is quantized ({method}); the torch engine reads {', '.join(METHODS)}: {_REMEDY}"
        )
    used = {name: head for name, head in heads.items() if not name.endswith(_IGNORED)}
    tensors = {tensor.name: tensor for tensor in row.read(told, used)}
    if not tensors:
        raise ConfigError(
            f"quantization_config says {method}, and no weight of the files is stored so; remove it from config.json"
            " if the weights are plain"
        )
    stored = {name for tensor in tensors.values() for name in tensor.parts.values()}
    plain = tuple(name for name in used if name not in stored)
    _check_plain(used, plain, method)
    if twice := sorted(tensors.keys() & set(plain)):
        raise ConfigError(f"{twice[0]} is stored both plain and quantized; fetch the checkpoint again")
    return Quantization(method, heads, tensors, plain, len(heads) - len(used))


def _check_plain(heads: _Heads, names: Any, method: str) -> None:
    for name in names:
        if torch_dtype(heads[name].dtype) is None and heads[name].dtype not in ("I64", "BOOL"):
            raise ConfigError(
                f"{name} is stored as {heads[name].dtype}, which is no part of what {method} says; checkpoints that mix"
                " methods are not read: use one of a single method, or an unquantized one"
            )
