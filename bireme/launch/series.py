"""The few series of Triton's /metrics page by which health is judged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_SAMPLE = re.compile(r"^(bireme_\w+)(?:\{([^}]*)\})? (\S+)")
# series -> its fields below, each with the label that decides and its values
_FIELDS: Mapping[str, Sequence[tuple[str, str, Sequence[str]]]] = {
    "bireme_engine_up": [("engine_up", "", ())],
    "bireme_kv_publisher_up": [("publishes", "", ())],
    "bireme_engine_step_seconds_count": [("steps", "", ())],
    "bireme_requests_running": [("queued", "", ())],
    "bireme_requests_waiting": [("queued", "", ())],
    "bireme_streams": [("streams", "", ())],
    "bireme_http_requests_active": [("active", "", ())],
    "bireme_requests_total": [
        ("served", "outcome", ("stop", "length", "tool_calls")),
        ("failed", "outcome", ("UNAVAILABLE", "INTERNAL", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")),
    ],
    "bireme_kv_transfer_bytes_total": [("imported", "direction", ("import",))],
    "bireme_kv_leases": [
        ("leases", "state", ("reserved", "exported", "claimed")),
        ("transfers", "state", ("claimed",)),
    ],
}
_FLAGS = ("engine_up", "publishes")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(slots=True)
class WorkerSeries:
    """None: the worker has not published the series."""

    engine_up: bool | None = None
    publishes: bool | None = None  # its KV events and load get out
    steps: float | None = None  # engine steps so far
    queued: float = 0.0  # requests running or waiting
    streams: float = 0.0  # requests that the stub has not fully answered
    active: float = 0.0  # HTTP requests that the frontend works on
    leases: float = 0.0  # of KV, that have not ended
    transfers: float = 0.0  # of these, that decode copies
    served: float = 0.0  # requests that ended well
    failed: float = 0.0  # requests that faults of the deployment have ended
    imported: float = 0.0  # bytes of KV imported from others


def worker_series(text: str) -> dict[str, WorkerSeries]:
    """Return worker -> figures out of Prometheus' text format."""
    workers: dict[str, WorkerSeries] = {}
    for name, labels, value in samples(text):
        _take(workers, name, labels, value)
    return workers


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, labels and value of our own series. Raises ValueError for a value that is no number."""
    for line in text.splitlines():
        if match := _SAMPLE.match(line):
            yield match.group(1), dict(_LABEL.findall(match.group(2) or "")), float(match.group(3))


def total(series: Mapping[str, WorkerSeries], names: Sequence[str]) -> WorkerSeries | None:
    """Return a model's stubs together; None: none has any.

    Only of a pipeline, which has no engine: its requests are what counts.
    """
    found = [series[name] for name in names if name in series]
    if len(found) < 2:
        return found[0] if found else None
    return WorkerSeries(streams=sum(one.streams for one in found), served=sum(one.served for one in found))


def _take(workers: dict[str, WorkerSeries], name: str, labels: dict[str, str], value: float) -> None:
    if "worker" not in labels:
        return
    series = workers.setdefault(labels["worker"], WorkerSeries())
    for field, label, counted in _FIELDS.get(name, ()):
        if field in _FLAGS:
            setattr(series, field, value >= 1)
        elif not label or labels.get(label) in counted:
            setattr(series, field, (getattr(series, field) or 0.0) + value)
