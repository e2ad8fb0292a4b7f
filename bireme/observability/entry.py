"""The readers of an entry's traces, as its recipe and environment ask for them: the place to add one."""

from __future__ import annotations

import os

from bireme.config import Recipe
from bireme.discovery import run_folder
from bireme.metrics import Registry
from bireme.observability.otlp import OtlpExporter, traces_config
from bireme.observability.request_log import RequestLog
from bireme.observability.timelines import Timelines
from bireme.observability.traces import Traces


def open_timelines(recipe: Recipe) -> Timelines | None:
    """Return where timelines are kept; for an entry that shows them. None: none are wanted."""
    config = recipe.observability.timelines
    return Timelines(config.max_entries, config.max_bytes) if config.max_entries else None


def open_traces(recipe: Recipe, metrics: Registry, timelines: Timelines | None = None) -> Traces | None:
    """Return what traces the requests of this process; None where nobody reads any. Raises ConfigError."""
    config = traces_config(recipe.observability.traces, os.environ)
    traces = Traces(metrics, config.sample_ratio if config.endpoint else None)
    if config.endpoint:
        exporter = OtlpExporter(config, metrics)
        traces.subscribe(exporter.take, close=exporter.close)
    if recipe.observability.request_log.path:
        log = RequestLog.of(recipe, metrics, run_folder.deployment_key(run_folder.locate()))
        traces.subscribe(log.note, wants_all=True, wants_details=False, close=log.close)
    if timelines is not None:
        traces.subscribe(timelines.keep, wants_all=True, wants_token_times=True, running=timelines)
    return traces if traces.has_readers else None
