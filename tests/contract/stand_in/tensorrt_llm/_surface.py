"""Makes the package's modules: each name that the contract's `imports` lists, where this profile has it."""

from __future__ import annotations

import sys
import types
from typing import Any

from tensorrt_llm import _contract, _encoder, _llm, _metrics, _other_callers, _results, _settings, _unions, _values

_SINCE_1_3 = ("ConversationParams", "DisaggScheduleStyle")
_DEAD = "EngineDeadError"
_DEAD_IN = ("tensorrt_llm.executor", "tensorrt_llm.executor.utils")
_SOURCES = (_values, _settings, _unions, _results, _metrics, _encoder)


def install() -> str:
    """Fill sys.modules; return the version."""
    version = _contract.VERSIONS[_contract.PROFILE]
    for module_name, names in _contract.contract()["imports"].items():
        module = _module(module_name)
        for name in names:
            if (value := _find(module_name, name)) is not None:
                setattr(module, name, value)
    if _contract.FROM_1_3:
        for module_name in _DEAD_IN:
            setattr(_module(module_name), _DEAD, _values.EngineDeadError)
        _install_visual_gen()
    for module_name, names in _other_callers.IMPORTS.items():
        module = _module(module_name)
        for name in names:
            setattr(module, name, vars(_other_callers)[name])
    version_module = _module("tensorrt_llm.version")
    version_module.__dict__["__version__"] = version
    return version


def _install_visual_gen() -> None:
    from tensorrt_llm import _visual_gen

    for module_name, names in _contract.contract()["visual_gen"]["imports"].items():
        module = _module(module_name)
        for name in names:
            if name in vars(_visual_gen):
                setattr(module, name, vars(_visual_gen)[name])


def _find(module: str, name: str) -> Any:
    if name in _SINCE_1_3 and not _contract.FROM_1_3:
        return None
    if name == "LLM":
        return _llm.AutoDeployLLM if module.endswith("auto_deploy") else _llm.LLM
    if name == "BaseLLM":
        return _llm.BaseLLM
    if module == "tensorrt_llm._utils":
        return {"global_mpi_rank": lambda: 0, "global_mpi_size": lambda: 1}.get(name)
    return next((vars(source)[name] for source in _SOURCES if name in vars(source)), None)


def _module(name: str) -> types.ModuleType:
    """Return the module, made with its parents if it is missing."""
    if name in sys.modules:
        return sys.modules[name]
    module = types.ModuleType(name)
    module.__path__ = []  # a package: more may lie below it
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    setattr(_module(parent), child, module)
    return module
