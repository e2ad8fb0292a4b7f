"""Sampled traces to a collector, by OpenTelemetry's own exporters (extra `otel`).

    trace ends -> `take`: its spans in OpenTelemetry's form, into the batch processor's queue   on the entry's loop
    every 2 s, or with 512 spans -> one export, with the exporter's retries                      on a thread

The queue holds MAX_QUEUED_SPANS. A trace that does not fit, because the collector is away or too slow, is dropped as a
whole and counted: a request never waits, and a tree that arrives is complete. The exporter reads OpenTelemetry's other
variables itself (OTEL_EXPORTER_OTLP_TRACES_HEADERS, _CERTIFICATE, _TIMEOUT, _COMPRESSION, OTEL_RESOURCE_ATTRIBUTES).
"""

from __future__ import annotations

import importlib.util
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from bireme import __version__
from bireme.config import Recipe, TracesConfig
from bireme.errors import ConfigError
from bireme.metrics import Registry
from bireme.request_trace import RequestTrace, Span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

DEFAULT_ENDPOINT = "http://localhost:4317"
MAX_QUEUED_SPANS = 8192  # a few MiB
_BATCH, _DELAY_MS = 512, 2000
_FLUSH_S = 3.0  # at the end of the process
_SAMPLED = 1
_HTTP_PATH = "/v1/traces"
_CALLS = frozenset({"prefill", "decode", "embed", "video"})  # of other processes
_REMEDY = "pip install 'bireme[otel]', or turn traces off (observability.traces.endpoint, OTEL_EXPORT_ENABLED)"


def traces_config(config: TracesConfig, environment: Mapping[str, str]) -> TracesConfig:
    """Return the settings as the environment changes them. Raises ConfigError."""
    endpoint = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "") or config.endpoint
    match environment.get("OTEL_EXPORT_ENABLED", "").strip().lower():
        case "1" | "true":
            endpoint = endpoint or DEFAULT_ENDPOINT
        case "0" | "false":
            endpoint = ""
        case "":
            endpoint = config.endpoint and endpoint  # an endpoint alone, meant for others, turns nothing on
        case other:
            raise ConfigError(f"OTEL_EXPORT_ENABLED: {other!r}; 1 or 0")
    name = environment.get("OTEL_SERVICE_NAME", "") or config.service_name
    return TracesConfig(endpoint=_checked(endpoint), sample_ratio=config.sample_ratio, service_name=name)


def has_traces(recipe: Recipe, environment: Mapping[str, str]) -> bool:
    """Raises ConfigError."""
    return bool(traces_config(recipe.observability.traces, environment).endpoint)


def engine_endpoint(recipe: Recipe, environment: Mapping[str, str]) -> str:
    """Return where an engine may send spans of its own, as entries do; "": nowhere, or not by gRPC."""
    endpoint = traces_config(recipe.observability.traces, environment).endpoint
    return "" if _is_http(endpoint) else endpoint


def check_traces(recipe: Recipe, environment: Mapping[str, str]) -> list[str]:
    """Return what keeps this installation from sending the traces that it is asked for."""
    try:
        if has_traces(recipe, environment) and importlib.util.find_spec("opentelemetry.exporter.otlp") is None:
            return [f"traces: OpenTelemetry's exporter is not installed; {_REMEDY}"]
    except ModuleNotFoundError:  # of a package above it
        return [f"traces: OpenTelemetry is not installed; {_REMEDY}"]
    except ConfigError as error:
        return [str(error)]
    return []


def _checked(endpoint: str) -> str:
    if not endpoint:
        return ""
    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"traces endpoint: {endpoint!r}; send http://host:4317 (gRPC), or http://host:4318{_HTTP_PATH}"
        )
    return url


class OtlpExporter:
    """`take` is a reader of traces; `close` sends what waits, within a bound."""

    def __init__(self, config: TracesConfig, metrics: Registry) -> None:
        """Raises ConfigError where the extra is missing."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope

            exporter = _exporter_of(config.endpoint)
        except ImportError as error:
            raise ConfigError(f"traces: {error}; {_REMEDY}") from error
        logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)  # a retry is nobody's business
        self._metrics = metrics
        self._exporter = _Counting(exporter, metrics)
        self._processor = BatchSpanProcessor(
            self._exporter,  # type: ignore[arg-type]  # has all that is asked of it
            max_queue_size=MAX_QUEUED_SPANS,
            schedule_delay_millis=_DELAY_MS,
            max_export_batch_size=_BATCH,
        )
        facts = {"service.name": config.service_name, "service.version": __version__, "bireme.process": metrics.worker}
        self._resource = Resource.create(facts)
        self._scope = InstrumentationScope("bireme", __version__)
        self._num_taken = 0
        metrics.start("bireme_trace_spans_exported_total")
        for reason in ("queue_full", "not_taken"):
            metrics.start("bireme_trace_spans_dropped_total", labels=(reason,))

    def take(self, trace: RequestTrace) -> None:
        if not trace.is_sampled:
            return
        num_waiting = self._num_taken - self._exporter.num_done
        if num_waiting + len(trace.spans) > MAX_QUEUED_SPANS:
            self._metrics.add("bireme_trace_spans_dropped_total", len(trace.spans), "queue_full")
            return
        self._num_taken += len(trace.spans)
        for span in self._spans(trace):
            self._processor.on_end(span)

    def close(self) -> None:
        """Send what waits; what a collector has not taken in time is lost."""
        flush = threading.Thread(target=self._processor.shutdown, name="traces-flush", daemon=True)
        flush.start()
        flush.join(_FLUSH_S)
        self._exporter.end()
        if lost := self._num_taken - self._exporter.num_done:
            self._metrics.add("bireme_trace_spans_dropped_total", lost, "shutdown")

    def _spans(self, trace: RequestTrace) -> list[ReadableSpan]:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

        trace_id, flags, state = int(trace.trace_id, 16), TraceFlags(_SAMPLED), None
        if trace.tracestate:
            state = TraceState.from_header([trace.tracestate])

        def context(span_id: int, is_remote: bool = False) -> SpanContext:
            return SpanContext(trace_id, span_id, is_remote, flags, state)

        def kind(span: Span) -> SpanKind:
            if span is trace.root:
                return SpanKind.SERVER
            return SpanKind.CLIENT if span.name in _CALLS else SpanKind.INTERNAL

        links = [
            Link(SpanContext(int(link.trace_id, 16), link.span_id, True, TraceFlags(_SAMPLED))) for link in trace.links
        ]
        failed = StatusCode.ERROR
        return [
            ReadableSpan(
                name=span.name,
                context=context(span.span_id),
                parent=context(span.parent_id, span is trace.root) if span.parent_id else None,
                resource=self._resource,
                attributes=_attributes(span),
                links=links if span is trace.root else (),
                kind=kind(span),
                status=Status(failed, span.error) if _has_failed(span) else Status(),
                start_time=span.start_us * 1000,
                end_time=span.end_us * 1000,
                instrumentation_scope=self._scope,
            )
            for span in trace.spans
        ]


def _is_http(endpoint: str) -> bool:
    return bool(urlsplit(endpoint).path.strip("/"))


def _exporter_of(endpoint: str) -> SpanExporter:
    """Return the exporter that speaks gRPC, or with a path in the endpoint HTTP."""
    if _is_http(endpoint):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=endpoint)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

    return GrpcExporter(endpoint=endpoint)


class _Counting:
    """An exporter that tells how many spans have left the queue for good; used on the processor's thread."""

    def __init__(self, exporter: SpanExporter, metrics: Registry) -> None:
        self._exporter, self._metrics = exporter, metrics
        self.num_done = 0
        self._is_ended = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        from opentelemetry.sdk.trace.export import SpanExportResult

        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if not self._is_ended:  # else they are counted as left
                self.num_done += len(spans)
                self._count(len(spans), result is SpanExportResult.SUCCESS)
        return result

    def _count(self, num_spans: int, are_taken: bool) -> None:
        if are_taken:
            self._metrics.add("bireme_trace_spans_exported_total", num_spans)
        else:
            self._metrics.add("bireme_trace_spans_dropped_total", num_spans, "not_taken")

    def shutdown(self) -> None:
        self.end()

    def end(self) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True


def _has_failed(span: Span) -> bool:
    """Whether it counts as failed: a request that was the caller's own mistake does not."""
    status = span.attributes.get("http.response.status_code", 500)
    return bool(span.error) and not 400 <= status < 499


def _attributes(span: Span) -> dict[str, Any]:
    """Return them as OpenTelemetry has them: names of others have a dot, and what is nested is JSON."""
    named = {name if "." in name else f"bireme.{name}": _flat(value) for name, value in span.attributes.items()}
    return named | {"error.type": span.error.partition(":")[0]} if span.error else named


def _flat(value: Any) -> str | int | float | bool:
    return value if isinstance(value, (str, int, float, bool)) else json.dumps(value, default=str)
