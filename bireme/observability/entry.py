"""The readers of an entry's traces, as its recipe and environment ask for them: the place to add one."""

from __future__ import annotations

from bireme.config import Recipe
from bireme.discovery import run_folder
from bireme.metrics import Registry
from bireme.observability.request_log import RequestLog
from bireme.observability.traces import Traces


def open_traces(recipe: Recipe, metrics: Registry) -> Traces | None:
    """Return what traces the requests of this process; None where nobody reads any. Raises ConfigError."""
    traces = Traces(metrics)
    if recipe.observability.request_log.path:
        log = RequestLog.of(recipe, metrics, run_folder.deployment_key(run_folder.locate()))
        traces.subscribe(log.note, wants_all=True, close=log.close)
    return traces if traces.has_readers else None
