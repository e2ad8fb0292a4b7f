"""Logits processors by name: bireme's own, those registered in code, and those of installed packages.

A package offers one by an entry point of the group `bireme.logits_processors` (name -> factory, see base.py).
"""

from __future__ import annotations

import difflib
import importlib.metadata
import inspect
import logging
from collections.abc import Sequence
from typing import Any, cast

from bireme.errors import BiremeError, ConfigError, RequestError
from bireme.logits.base import BaseLogitsProcessor, ProcessorContext, ProcessorFactory
from bireme.logits.processors import BUILT_IN
from bireme.messages import ProcessorCall

ENTRY_POINTS = "bireme.logits_processors"
logger = logging.getLogger("bireme.logits")
_registered: dict[str, ProcessorFactory] = {}
_entry_points: dict[str, importlib.metadata.EntryPoint] | None = None


def register(name: str, factory: ProcessorFactory) -> None:
    """Raises ConfigError when the name is taken."""
    if name in BUILT_IN or name in _registered:
        raise ConfigError(f"logits processor {name} exists already; choose another name")
    _registered[name] = factory


def unregister(name: str) -> None:
    _registered.pop(name, None)


def known() -> list[str]:
    return sorted({*BUILT_IN, *_registered, *_installed()})


def reads_token_ids(name: str) -> bool:
    """Whether it reads the tokens so far (default: it does). Raises RequestError for an unknown one."""
    return bool(getattr(_factory(name), "reads_token_ids", True))


def create(calls: Sequence[ProcessorCall], context: ProcessorContext) -> list[BaseLogitsProcessor]:
    """Make one sequence's processors. Raises RequestError naming processor and argument."""
    return [_create(call, context) for call in calls]


def _create(call: ProcessorCall, context: ProcessorContext) -> BaseLogitsProcessor:
    factory = _factory(call.name)
    try:
        inspect.signature(factory).bind(context, **call.args)
    except TypeError as error:
        raise RequestError(f"logits processor {call.name}: {error}; {_usage(factory)}") from error
    try:
        return factory(context, **call.args)
    except BiremeError:
        raise
    except (TypeError, ValueError) as error:
        raise RequestError(f"logits processor {call.name}: {error}") from error


def _factory(name: str) -> ProcessorFactory:
    factory = BUILT_IN.get(name) or _registered.get(name)
    if factory is not None:
        return factory
    entry_point = _installed().get(name)
    if entry_point is not None:
        return _load(name, entry_point)
    near = difflib.get_close_matches(name, known(), n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known())}"
    raise RequestError(f"logits processor {name} does not exist; {hint}")


def _load(name: str, entry_point: importlib.metadata.EntryPoint) -> ProcessorFactory:
    try:
        factory = cast(ProcessorFactory, entry_point.load())
    except Exception as error:  # an installed package's import may fail in any way
        raise ConfigError(f"logits processor {name}: {entry_point.value} can't be loaded: {error}") from error
    _registered[name] = factory
    logger.info("logits_processor_loaded name=%s from=%s", name, entry_point.value)
    return factory


def _installed() -> dict[str, importlib.metadata.EntryPoint]:
    global _entry_points
    if _entry_points is None:
        found = importlib.metadata.entry_points(group=ENTRY_POINTS)
        _entry_points = {point.name: point for point in found if point.name not in BUILT_IN}
    return _entry_points


def _usage(factory: Any) -> str:
    names = list(inspect.signature(factory).parameters)[1:]
    return f"its arguments: {', '.join(names) or 'none'}"
