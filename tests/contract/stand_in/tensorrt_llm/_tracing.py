"""A span for each request that has ended, below the caller's by its headers, where otlp_traces_endpoint is set."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


class Tracer:
    """Without OpenTelemetry's packages the LLM starts all the same, and tells none."""

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor

        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=True)))
        self._tracer = provider.get_tracer("trt.llm")

    def ended(self, result: Any, headers: Mapping[str, str] | None, began_ns: int) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        caller = TraceContextTextMapPropagator().extract(dict(headers or {}))
        span = self._tracer.start_span("llm_request", context=caller, kind=SpanKind.SERVER, start_time=began_ns)
        span.set_attribute("gen_ai.usage.prompt_tokens", len(result.prompt_token_ids))
        span.end(time.time_ns())
