"""The readers of an entry's traces, as its recipe and environment ask for them: the place to add one."""

from __future__ import annotations

from bireme.config import Recipe
from bireme.metrics import Registry
from bireme.observability.traces import Traces


def open_traces(recipe: Recipe, metrics: Registry) -> Traces | None:
    """Return what traces the requests of this process; None where nobody reads any. Raises ConfigError."""
    traces = Traces(metrics)
    return traces if traces.has_readers else None
