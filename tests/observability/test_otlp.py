"""Traces to a collector, which may be away, slow, or refuse; and what of the environment counts."""

import builtins
import json
import logging
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from bireme.config import TracesConfig
from bireme.errors import ConfigError
from bireme.launch.ports import free_port
from bireme.metrics import Registry
from bireme.observability import otlp
from bireme.observability.otlp import OtlpExporter, traces_config
from bireme.request_trace import RequestTrace, SpanLink, parse_traceparent
from tests.observability.collector import Collector, attributes_of, flaws, is_root

CALLER = parse_traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(otlp, "_DELAY_MS", 20)
    monkeypatch.setattr(otlp, "_FLUSH_S", 0.5)


@pytest.fixture
def exporter_to(quick):
    made = []

    def make(endpoint, **fields):
        registry = Registry("frontend")
        exporter = OtlpExporter(TracesConfig(endpoint=endpoint, **fields), registry)
        made.append(exporter)
        return exporter, registry

    yield make
    for exporter in made:
        exporter.close()


def finished(num_spans=3, is_sampled=True, error=""):
    trace = RequestTrace("POST /v1/chat/completions", CALLER, is_sampled, time.monotonic(), tracestate="a=1")
    trace.root.attributes["http.response.status_code"] = 200
    for number in range(num_spans - 1):
        trace.end(trace.begin("attempt", number=number, candidates=[{"worker": "decode", "cost": 1.5}]))
    trace.finish(error)
    return trace


def dropped(registry):
    delta = registry.take_delta()
    return {labels[-1]: value for name, labels, value in delta.counters if "dropped" in name and value}


def test_a_trace_arrives_as_a_tree_that_hangs_below_its_caller(exporter_to):
    with Collector() as collector:
        exporter, _ = exporter_to(collector.endpoint, service_name="mine")
        trace = finished()
        trace.links.append(SpanLink("ab" * 16, 7))
        exporter.take(trace)
        spans = collector.trace(CALLER.trace_id)
    [root] = [span for span in spans if is_root(span)]
    assert flaws(spans) == [] and len(spans) == 3 and collector.services == {"mine"}
    assert (root.parent_span_id.hex(), root.trace_state) == ("b7ad6b7169203331", "a=1")
    assert (root.links[0].trace_id.hex(), root.links[0].span_id) == ("ab" * 16, b"\0\0\0\0\0\0\0\7")
    told = attributes_of(next(span for span in spans if span.name == "attempt"))
    assert told["bireme.number"] == 0 and json.loads(told["bireme.candidates"]) == [{"worker": "decode", "cost": 1.5}]


def test_an_endpoint_with_a_path_is_spoken_to_over_http(exporter_to):
    came = []

    class Door(BaseHTTPRequestHandler):
        def do_POST(self):
            data = self.rfile.read(int(self.headers["content-length"]))
            came.append((self.path, self.headers["content-type"], data))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Door) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        exporter, registry = exporter_to(f"http://127.0.0.1:{server.server_address[1]}/v1/traces")
        exporter.take(finished())
        exporter.close()
        server.shutdown()
    [(path, kind, data)] = came
    request = ExportTraceServiceRequest.FromString(data)
    assert (path, kind) == ("/v1/traces", "application/x-protobuf") and dropped(registry) == {}
    assert len(request.resource_spans[0].scope_spans[0].spans) == 3


@pytest.mark.parametrize(("status", "code"), [(200, 2), (503, 2), (499, 2), (400, 0), (404, 0)])
def test_a_caller_s_own_mistake_is_no_failure_of_the_span(exporter_to, status, code):
    with Collector() as collector:
        exporter, _ = exporter_to(collector.endpoint)
        trace = finished(1, error="INVALID_ARGUMENT: no")
        trace.root.attributes["http.response.status_code"] = status
        exporter.take(trace)
        [root] = collector.trace(CALLER.trace_id)
    assert root.status.code == code and attributes_of(root)["error.type"] == "INVALID_ARGUMENT"


def test_what_is_not_sampled_is_not_sent(exporter_to):
    with Collector() as collector:
        exporter, _ = exporter_to(collector.endpoint)
        exporter.take(finished(is_sampled=False))
        exporter.take(finished(1))
        assert len(collector.trace(CALLER.trace_id)) == 1


def test_the_end_sends_what_waits(exporter_to, monkeypatch):
    monkeypatch.setattr(otlp, "_DELAY_MS", 60_000)
    with Collector() as collector:
        exporter, registry = exporter_to(collector.endpoint)
        exporter.take(finished())
        exporter.close()
        assert len(collector.spans) == 3 and dropped(registry) == {}


@pytest.mark.parametrize("fault", ["away", "slow", "refuses"])
def test_a_collector_at_fault_costs_whole_traces_and_no_time(exporter_to, monkeypatch, fault, caplog):
    monkeypatch.setattr(otlp, "MAX_QUEUED_SPANS", 10)
    monkeypatch.setattr(otlp, "_BATCH", 10)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    caplog.set_level(logging.ERROR)
    with Collector() as collector:
        collector.delay_s = 2.0 if fault == "slow" else 0.0
        collector.refuse_with = grpc.StatusCode.PERMISSION_DENIED if fault == "refuses" else None
        exporter, registry = exporter_to(f"http://127.0.0.1:{free_port()}" if fault == "away" else collector.endpoint)
        exporter.take(finished())  # opens what is opened once
        began = time.monotonic()
        for _ in range(20):
            exporter.take(finished())
        assert time.monotonic() - began < 0.5
        began = time.monotonic()
        exporter.close()
        assert time.monotonic() - began < 2.0
    lost = dropped(registry)
    assert sum(lost.values()) == 21 * 3 and lost.get("queue_full", 0) % 3 == 0


def test_a_collector_that_comes_back_gets_what_follows(exporter_to, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    port = free_port()
    exporter, registry = exporter_to(f"http://127.0.0.1:{port}")
    exporter.take(finished())
    lost = {}
    until = time.monotonic() + 30
    while not lost.get("not_taken") and time.monotonic() < until:
        lost = dropped(registry)
        time.sleep(0.05)
    with Collector(port) as collector:
        exporter.take(finished(2))
        collector.wait(lambda: collector.spans or exporter.take(finished(2)))
    assert lost == {"not_taken": 3}


def test_without_its_packages_the_remedy_is_told(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'bireme\[otel\]'"):
        OtlpExporter(TracesConfig(endpoint="http://127.0.0.1:4317"), Registry("frontend"))


SET = TracesConfig(endpoint="http://collector:4317", sample_ratio=0.5)
ENDPOINT = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "other:4317"}


@pytest.mark.parametrize(
    ("config", "environment", "endpoint"),
    [
        (TracesConfig(), {}, ""),
        (TracesConfig(), ENDPOINT, ""),
        (TracesConfig(), {"OTEL_EXPORT_ENABLED": "1"}, "http://localhost:4317"),
        (TracesConfig(), {"OTEL_EXPORT_ENABLED": "true"} | ENDPOINT, "http://other:4317"),
        (SET, {}, "http://collector:4317"),
        (SET, ENDPOINT, "http://other:4317"),
        (SET, {"OTEL_EXPORT_ENABLED": "0"} | ENDPOINT, ""),
    ],
)
def test_the_environment_wins_over_the_recipe(config, environment, endpoint):
    found = traces_config(config, environment | {"OTEL_SERVICE_NAME": "mine"})
    assert (found.endpoint, found.service_name, found.sample_ratio) == (endpoint, "mine", config.sample_ratio)


@pytest.mark.parametrize(
    ("config", "environment"),
    [
        (TracesConfig(endpoint="ftp://collector"), {}),
        (TracesConfig(endpoint="http://"), {}),
        (TracesConfig(), {"OTEL_EXPORT_ENABLED": "perhaps"}),
    ],
)
def test_settings_that_mean_nothing_are_refused(config, environment):
    with pytest.raises(ConfigError):
        traces_config(config, environment)
