"""An engine's metrics, as its pongs bring them, in the registry of the process that publishes them."""

from __future__ import annotations

from bireme.metrics import Labels, MetricDelta, Registry, decode_delta


class EngineSeries:
    """Used on the supervisor's thread."""

    def __init__(self, metrics: Registry) -> None:
        self._metrics = metrics
        self._gauges: set[tuple[str, Labels]] = set()

    def take(self, delta: bytes) -> None:
        """Take what a pong brought, if anything."""
        if delta:
            changed = decode_delta(delta)
            self._gauges |= {(name, tuple(labels)) for name, labels, _ in changed.gauges}
            self._metrics.merge(changed)

    def end(self) -> None:
        """The engine is gone: nothing runs in it."""
        self._metrics.merge(MetricDelta([], [(name, labels, 0.0) for name, labels in self._gauges], []))
