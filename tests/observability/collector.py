"""A collector of traces in this process: opentelemetry-proto's own TraceService, over gRPC, and a tree's checks."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Use as a context manager. `refuse_with`: a status code for every export; `delay_s`: of each answer."""

    def __init__(self, port: int = 0) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.refuse_with: grpc.StatusCode | None = None
        self.delay_s = 0.0
        self.num_exports = 0
        self._lock = threading.Lock()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Collector:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait(5)

    def Export(self, request: Any, context: Any) -> Any:  # the service's own name
        self.num_exports += 1
        time.sleep(self.delay_s)
        if self.refuse_with is not None:
            context.abort(self.refuse_with, "not now")
        with self._lock:
            for resource in request.resource_spans:
                self.services |= {
                    one.value.string_value for one in resource.resource.attributes if one.key == "service.name"
                }
                for scope in resource.scope_spans:
                    self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def traces(self) -> dict[str, list[Any]]:
        """Return the spans that have come, by trace id."""
        found: dict[str, list[Any]] = defaultdict(list)
        with self._lock:
            for span in self.spans:
                found[span.trace_id.hex()].append(span)
        return found

    def wait(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        until = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < until, f"{len(self.spans)} spans have come"
            time.sleep(0.02)

    def trace(self, trace_id: str) -> list[Any]:
        """Return a trace's spans, once its root has come."""
        self.wait(lambda: any(is_root(span) for span in self.traces()[trace_id]))
        return self.traces()[trace_id]


def is_root(span: Any) -> bool:
    return bool(span.kind == span.SPAN_KIND_SERVER)


def attributes_of(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def flaws(spans: list[Any]) -> list[str]:
    """Return what keeps the spans of one trace from being a whole tree with one root."""
    known = {span.span_id: span for span in spans}
    roots = [span for span in spans if is_root(span)]
    found = [] if len(roots) == 1 else [f"{len(roots)} roots"]
    if len(known) != len(spans):
        found.append("a span came twice")
    for span in spans:
        if is_root(span):
            continue
        parent = known.get(span.parent_span_id)
        if parent is None:
            found.append(f"{span.name} hangs nowhere")
        elif not (
            parent.start_time_unix_nano
            <= span.start_time_unix_nano
            <= span.end_time_unix_nano
            <= parent.end_time_unix_nano
        ):
            found.append(f"{span.name} is not within {parent.name}")
    return found
