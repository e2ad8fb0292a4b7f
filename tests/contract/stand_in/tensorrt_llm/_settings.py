"""Configuration classes: pydantic models with the contract's fields, which refuse any other."""

from __future__ import annotations

import functools
import json
import operator
from pathlib import Path
from typing import Any

import pydantic

from tensorrt_llm import _classes, _contract, _unions

KvCacheConfig = _classes.block("KvCacheConfig")
CacheTransceiverConfig = _classes.block("CacheTransceiverConfig")
CudaGraphConfig = _classes.block("CudaGraphConfig")
MoeConfig = _classes.block("MoeConfig")
AttentionDpConfig = _classes.block("AttentionDpConfig")
TorchCompileConfig = _classes.block("TorchCompileConfig")
LoraConfig = _classes.block("LoraConfig")
PeftCacheConfig = _classes.block("PeftCacheConfig")
KvCacheConnectorConfig = _classes.block("KvCacheConnectorConfig")
DynamicBatchConfig = _classes.block("DynamicBatchConfig")
SchedulerConfig = _classes.block("SchedulerConfig")
_EXPLICIT = {
    name: (Any, parameter.default)
    for name, parameter in _contract.constructor_signature().parameters.items()
    if name not in ("self", "kwargs")
}
_FACTORIES = {"kv_cache_config": KvCacheConfig, "scheduler_config": SchedulerConfig}


class _Coercing(_classes.Strict):
    """What the real one checks before the fields' own types."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _coerce(cls, values: Any) -> Any:
        values = dict(values)
        for name, kind in _FACTORIES.items():
            if values.get(name) is None:
                values[name] = kind()
        if _contract.FROM_1_3 and values.get("sampler_type") == "TRTLLMSampler":
            raise ValueError("sampler_type: TRTLLMSampler was removed in 1.3.0rc26")
        _unions.take(values)
        return values


def _arguments() -> dict[str, tuple[Any, Any]]:
    """TorchLlmArgs' fields, with the defaults that were read."""
    read = _contract.contract()["torch_llm_args"]["v1_2_1"]
    fields = _classes.fields("LlmArgs") | _EXPLICIT
    for name, (_, _, classes) in _unions.FIELDS.items():
        fields[name] = (functools.reduce(operator.or_, classes.values()) | None, None)
    return {
        name: (kind | None if name in read and kind is not Any else kind, _contract.default_of(read[name]))
        if name in read
        else (kind, default)
        for name, (kind, default) in fields.items()
    }


TorchLlmArgs = _classes.model("TorchLlmArgs", _arguments(), _Coercing)
_AUTO = _contract.contract()["autodeploy_llm_args"]
_OWN = {name: _contract.default_of(entry) for name, entry in _AUTO["own_fields"].items()} | {"backend": "_autodeploy"}
if not _contract.FROM_1_3:
    _OWN |= _AUTO["own_limits_1_2"]
_DEPLOYED = _arguments() | {name: (Any, default) for name, default in _OWN.items()}
AutoDeployLlmArgs = _classes.model("LlmArgs", _DEPLOYED, _Coercing)


def check_autodeploy(args: Any, given: dict[str, Any]) -> None:
    """AutoDeploy shards by world_size alone."""
    for name in _AUTO["reject_if_not_default"]:
        if name in given and given[name] != _default(name):
            raise ValueError(_AUTO["reject_message"])
    if (args.max_beam_width or 1) > 1:
        raise ValueError("max_beam_width: AutoDeploy has no beam search")


def _default(name: str) -> Any:
    field = AutoDeployLlmArgs.model_fields.get(name)
    return field.default if field else None


def is_python_transceiver(args: Any) -> bool:
    """`auto` is what the model asks for, whatever the backend; else the Python one for NIXL, which DEFAULT is."""
    config = args.cache_transceiver_config
    runtime = getattr(config, "transceiver_runtime", None)
    if runtime != "auto":
        return bool(runtime == "PYTHON")
    asks = json.loads((Path(args.model) / "config.json").read_text()).get("architectures") or ()
    if set(asks) & set(_contract.contract()["python_transceiver"]["architectures"]):
        return True
    return config.backend in ("DEFAULT", "NIXL") and config.kv_transfer_timeout_ms is not None


def check_transceiver(args: Any) -> None:
    """Raise what its creation, in the worker, raises."""
    config = args.cache_transceiver_config
    if config is not None and config.backend not in (None, "DEFAULT", "NIXL") and is_python_transceiver(args):
        raise ValueError(f"the Python transceiver has no backend {config.backend}; it needs NIXL")
