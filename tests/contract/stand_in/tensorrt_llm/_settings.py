"""Configuration classes: pydantic models with the contract's fields, which refuse any other."""

from __future__ import annotations

from typing import Any

import pydantic

from tensorrt_llm import _contract, _unions


def _model(name: str, fields: dict[str, Any], base: type[Any] | None = None) -> type[Any]:
    definitions: dict[str, Any] = {}
    for key, default in fields.items():
        definitions[key] = (Any, ... if default is _contract.REQUIRED else pydantic.Field(default))
    if base is not None:
        return pydantic.create_model(name, __base__=base, **definitions)
    return pydantic.create_model(
        name, __config__=pydantic.ConfigDict(extra="forbid", protected_namespaces=()), **definitions
    )


def _block(name: str, key: str, version_key: str = "") -> type[Any]:
    """Make a class of a table of the contract; texts about it (`rule`, ...) are no fields."""
    table = _contract.contract()[key]
    fields = dict(table[version_key] if version_key else table)
    if _contract.FROM_1_3:
        fields |= table.get("added_1_3", {})
        for gone in table.get("removed_1_3", ()):
            fields.pop(gone, None)
    if _contract.FROM_1_4:
        fields |= table.get("defaults_1_4", {})
    plain = {
        name: _contract.default_of(entry)
        for name, entry in fields.items()
        if name
        not in ("rule", "disable", "added_1_3", "removed_1_3", "window_rule", "late_1_3", "choices", "defaults_1_4")
    }
    return _model(name, plain)


KvCacheConfig = _block("KvCacheConfig", "kv_cache_config", "v1_2_1")
CacheTransceiverConfig = _block("CacheTransceiverConfig", "cache_transceiver_config")
CudaGraphConfig = _block("CudaGraphConfig", "cuda_graph_config")
MoeConfig = _block("MoeConfig", "moe_config")
AttentionDpConfig = _block("AttentionDpConfig", "attention_dp_config")
TorchCompileConfig = _block("TorchCompileConfig", "torch_compile_config")
LoraConfig = _block("LoraConfig", "lora_config")
PeftCacheConfig = _block("PeftCacheConfig", "peft_cache_config")
KvCacheConnectorConfig = _block("KvCacheConnectorConfig", "kv_connector_config")


def _dynamic_batch_config() -> type[Any]:
    """1.2 wants all three; 1.3 has defaults."""
    names = _contract.contract()["scheduler_config"]["dynamic_batch_config"]
    defaults = dict(zip(names, (True, False, 128), strict=True))
    return _model("DynamicBatchConfig", defaults if _contract.FROM_1_3 else dict.fromkeys(names, _contract.REQUIRED))


DynamicBatchConfig = _dynamic_batch_config()
_SCHEDULER = {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT", "context_chunking_policy": None}
_SCHEDULER["dynamic_batch_config"] = None
if _contract.FROM_1_3:
    _SCHEDULER["waiting_queue_policy"] = "fcfs"
SchedulerConfig = _model("SchedulerConfig", _SCHEDULER)

_NESTED = {
    "kv_cache_config": KvCacheConfig,
    "cache_transceiver_config": CacheTransceiverConfig,
    "scheduler_config": SchedulerConfig,
    "cuda_graph_config": CudaGraphConfig,
    "moe_config": MoeConfig,
    "attention_dp_config": AttentionDpConfig,
    "torch_compile_config": TorchCompileConfig,
    "lora_config": LoraConfig,
    "peft_cache_config": PeftCacheConfig,
    "kv_connector_config": KvCacheConnectorConfig,
}
_EXPLICIT = {
    name: parameter.default
    for name, parameter in _contract.constructor_signature().parameters.items()
    if name not in ("self", "kwargs")
}
_FACTORIES = ("kv_cache_config", "scheduler_config")


class _Coercing(pydantic.BaseModel):
    """Turns nested mappings into their classes, as pydantic does for typed fields."""

    model_config = pydantic.ConfigDict(extra="forbid", protected_namespaces=())

    @pydantic.model_validator(mode="before")
    @classmethod
    def _coerce(cls, values: Any) -> Any:
        values = dict(values)
        for name, kind in _NESTED.items():
            if isinstance(values.get(name), dict):
                values[name] = kind(**values[name])
            elif values.get(name) is None and name in _FACTORIES:
                values[name] = kind()
        if isinstance(values.get("scheduler_config"), SchedulerConfig):
            scheduler = values["scheduler_config"]
            if isinstance(scheduler.dynamic_batch_config, dict):
                scheduler.dynamic_batch_config = DynamicBatchConfig(**scheduler.dynamic_batch_config)
        if _contract.FROM_1_3 and values.get("sampler_type") == "TRTLLMSampler":
            raise ValueError("sampler_type: TRTLLMSampler was removed in 1.3.0rc26")
        _unions.take(values)
        return values


TorchLlmArgs = _model("TorchLlmArgs", _EXPLICIT | _contract.llm_arg_fields(), _Coercing)
_AUTO = _contract.contract()["autodeploy_llm_args"]
_OWN = {name: _contract.default_of(entry) for name, entry in _AUTO["own_fields"].items()}
_OWN["backend"] = "_autodeploy"
if not _contract.FROM_1_3:
    _OWN |= _AUTO["own_limits_1_2"]
AutoDeployLlmArgs = _model("LlmArgs", {**_EXPLICIT, **_contract.llm_arg_fields(), **_OWN}, _Coercing)


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
    """From 1.4 on `auto` is the Python one for NIXL, which DEFAULT is; C++ for the other backends."""
    config = args.cache_transceiver_config
    runtime = getattr(config, "transceiver_runtime", None)
    if runtime == "auto" and _contract.FROM_1_4:
        return config.backend in ("DEFAULT", "NIXL") and config.kv_transfer_timeout_ms is not None
    return bool(runtime == "PYTHON")


def check_transceiver(args: Any) -> None:
    """Raise what its creation, in the worker, raises."""
    config = args.cache_transceiver_config
    if config is not None and config.backend not in (None, "DEFAULT", "NIXL") and is_python_transceiver(args):
        raise ValueError(f"the Python transceiver has no backend {config.backend}; it needs NIXL")
