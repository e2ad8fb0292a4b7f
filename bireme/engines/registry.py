"""Which engines there are, and how one is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bireme.errors import ConfigError

if TYPE_CHECKING:
    from bireme.engines.base import Engine, EngineContext


def create_engine(name: str, context: EngineContext) -> Engine:
    """Make the engine that a recipe names; only its own libraries are imported. Raises ConfigError."""
    if name == "mocker":
        from bireme.engines.mocker.engine import MockEngine

        return MockEngine(context)
    if name not in ("torch", "trtllm"):
        raise ConfigError(f"engine: {name!r}; known engines: torch, trtllm, mocker")
    import importlib

    module = importlib.import_module(f"bireme.engines.{name}")
    if not hasattr(module, "create"):
        raise ConfigError(f"engine: {name} is not part of this build; use torch or mocker")
    engine: Engine = module.create(context)
    return engine
