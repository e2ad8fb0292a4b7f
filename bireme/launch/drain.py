"""The models of a server that is to end: new requests are refused, running ones end, then each model is unloaded.

Only then Triton is told to exit: at SIGTERM it refuses what a pipeline says to decode about a running stream. 2.51 also
counts requests that no model has; so the stubs are asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from bireme.errors import BiremeError
from bireme.launch.admin import AdminClient
from bireme.launch.console import Console

_LOOK_S = 0.4  # longer than the stubs' figures take to reach /metrics
_LOOKS = 2  # without a request, one after the other: between two workers a request is with neither
_UNLOAD_S = 10.0  # a stub's own end takes at most 9 s


def drain(
    admin: AdminClient,
    pipelines: Sequence[str],
    workers: Sequence[str],
    busy_models: Callable[[], Sequence[str]],
    console: Console,
    timeout_s: float,
) -> bool:
    """Return whether all is unloaded, so that Triton ends by itself."""
    try:
        _unload(admin, pipelines)
        busy = _wait_idle(busy_models, timeout_s)
        if busy:
            console.event("drain_timeout", "warning", busy=",".join(busy), drain_timeout_s=timeout_s)
            return False
        _unload(admin, workers)
        stuck = _wait_unloaded(admin)
    except BiremeError:  # the server is gone, or was told to exit
        return False
    if stuck:
        console.event(
            "unload_stuck", "warning", models=",".join(stuck),
            reason="Triton counts requests of theirs though none is under way; the server is ended without them",
        )  # fmt: skip
    return not stuck


def _unload(admin: AdminClient, models: Sequence[str]) -> None:
    for model in models:
        admin.unload(model)


def _wait_idle(busy_models: Callable[[], Sequence[str]], timeout_s: float) -> Sequence[str]:
    """Return the models that have requests after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    num_idle = 0
    while True:
        busy = busy_models()
        num_idle = 0 if busy else num_idle + 1
        if num_idle == _LOOKS or time.monotonic() >= deadline:
            return busy
        time.sleep(_LOOK_S)


def _wait_unloaded(admin: AdminClient) -> list[str]:
    deadline = time.monotonic() + _UNLOAD_S
    while True:
        loaded = sorted(name for name, (state, _) in admin.index().items() if state in ("READY", "UNLOADING"))
        if not loaded or time.monotonic() >= deadline:
            return loaded
        time.sleep(0.1)
