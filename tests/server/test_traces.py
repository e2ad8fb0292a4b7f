"""Traces of real servers, two of one model: each entry's tree, whole, at a collector; engines die and clients leave."""

import asyncio
import contextlib
import json
import urllib.request

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from bireme.request_trace import new_trace_id
from tests.observability.collector import Collector, attributes_of, flaws, is_root
from tests.server.traced_requests import ask_many, kill_process, missing
from tests.server.triton_client import inputs_of
from tests.server.two_servers import LIMIT_S, MODEL, TwoServers

pytestmark = pytest.mark.server
PREFILLED = {"prefill", "prefill_chunk", "transfer", "generate"}


@pytest.fixture(scope="module")
def collector():
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def servers(collector, sample_model, tmp_path_factory):
    sample_model("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORT_ENABLED", "1")
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.endpoint)
        patch.setenv("OTEL_SERVICE_NAME", "bireme-test")
        running = TwoServers(tmp_path_factory.mktemp("traced"))
        try:
            running.start()
            yield running
        finally:
            running.stop()


def caller():
    trace_id = new_trace_id()
    return trace_id, f"00-{trace_id}-00f067aa0ba902b7-01"


def post(url, body, headers=()):
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"} | dict(headers)
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
        return dict(reply.headers), reply.read()


def check(spans, entry):
    [root] = [span for span in spans if is_root(span)]
    assert flaws(spans) == [] and root.name == entry and root.parent_span_id.hex() == "00f067aa0ba902b7"
    return {span.name for span in spans}


def test_a_chat_is_one_tree_from_its_caller_to_both_engines(servers, collector):
    trace_id, traceparent = caller()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "row"}], "max_tokens": 8, "stream": True}
    headers, _ = post(f"http://127.0.0.1:{servers.port}/v1/chat/completions", body, {"traceparent": traceparent})
    spans = collector.trace(trace_id)
    assert check(spans, "POST /v1/chat/completions") > PREFILLED | {"route", "tokenize", "deliver"}
    assert headers["traceresponse"].startswith(f"00-{trace_id}-") and "bireme-test" in collector.services
    [transfer] = [attributes_of(span) for span in spans if span.name == "transfer"]
    assert transfer["bireme.bytes"] > 0 and transfer["bireme.way"] in ("mapped", "shm")
    [route] = [attributes_of(span) for span in spans if span.name == "route"]
    assert len(json.loads(route["bireme.candidates"])) == 4


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
def test_a_request_parameter_names_the_caller_on_tritons_http(servers, collector, path):
    trace_id, traceparent = caller()
    body = {"text_input": "row", "max_tokens": 4, "parameters": {"traceparent": traceparent}}
    post(f"http://{servers.a.addresses['http']}/v2/models/generate/{path}", body | {"traceparent": traceparent})
    assert check(collector.trace(trace_id), "generate") > PREFILLED | {"route", "tokenize"}


def test_a_header_names_the_caller_on_tritons_http(servers, collector):
    trace_id, traceparent = caller()
    tensors = [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["row"]}]
    tensors += [{"name": "max_tokens", "datatype": "INT32", "shape": [1], "data": [4]}]
    url = f"http://{servers.a.addresses['http']}/v2/models/completion/infer"
    post(url, {"inputs": tensors}, {"Traceparent": traceparent})
    assert check(collector.trace(trace_id), "completion") > PREFILLED


def test_metadata_names_the_caller_on_grpc(servers, collector):
    client = grpcclient.InferenceServerClient(servers.a.addresses["grpc"])
    trace_id, traceparent = caller()
    told = {"traceparent": traceparent, "tracestate": "rojo=1"}
    client.infer("completion", inputs_of("completion", {"text_input": "row", "max_tokens": 4}), headers=told)
    spans = collector.trace(trace_id)
    assert check(spans, "completion") > PREFILLED and {span.trace_state for span in spans} == {"rojo=1"}


def test_workers_that_a_gateway_calls_itself_have_a_tree_each(servers, collector):
    client = grpcclient.InferenceServerClient(servers.a.addresses["grpc"])
    trace_id, traceparent = caller()
    ids = np.arange(10, 60, dtype=np.int32)
    values = {"input_ids": ids, "max_tokens": 4}
    first = client.infer("prefill", inputs_of("prefill", values), headers={"traceparent": traceparent})
    assert "spans" not in {output.name for output in first.get_response().outputs}
    assert check(collector.trace(trace_id), "prefill") == {"prefill", "queue", "prefill_chunk"}


def test_a_tracestate_that_is_huge_and_a_traceparent_that_is_none_cost_nothing(servers):
    url = f"http://127.0.0.1:{servers.port}/v1/completions"
    body = {"model": MODEL, "prompt": "row", "max_tokens": 2}
    for headers in ({"traceparent": "00-junk"}, {"traceparent": caller()[1], "tracestate": "a=" + "1" * 8000}):
        assert post(url, body, headers)[1]


def check_all(servers, collector, count):
    """Ask so many; return how many trees are whole, of how many that were migrated and of how many that were left.

    A client may leave before its request has got through: what the frontend has logged was asked.
    """
    killed = []

    def kill():
        launch = (servers.a, servers.b)[len(killed) % 2]
        killed.append(launch.roles().get("decode.engine"))
        if killed[-1] is not None:
            kill_process(killed[-1])

    jobs = asyncio.run(ask_many(f"http://127.0.0.1:{servers.port}", MODEL, count + count // 10, kill))
    asked = [job for job in jobs if job.trace_id in servers.log.read_text()]
    assert len(asked) >= count and not [job for job in jobs if job.status and job not in asked]

    def lacking():
        traces = collector.traces()
        return {job.trace_id: found for job in asked if (found := missing(job, traces[job.trace_id]))}

    with contextlib.suppress(AssertionError):  # what is lacking is told below
        collector.wait(lambda: not lacking())  # a batch that is sent again comes after later ones
    assert lacking() == {}, f"{len(lacking())} of {len(asked)}: {list(lacking().items())[:5]}"
    traces = collector.traces()
    trees = [traces[job.trace_id] for job in asked]
    moved = [spans for spans in trees if sum("engine lost" in span.status.message for span in spans)]
    cancelled = [spans for spans in trees if any("CANCELLED" in span.status.message for span in spans)]
    print(f"trees: {len(asked)}, all whole; {len(moved)} lost an engine, {len(cancelled)} were left by their client")
    return len(asked), len(moved), len(cancelled)


def test_trees_are_whole_whoever_leaves_or_dies(servers, collector):
    whole, num_moved, num_cancelled = check_all(servers, collector, 50)
    assert whole >= 50 and num_moved > 0 and num_cancelled > 0


@pytest.mark.soak
def test_a_thousand_trees_are_whole(servers, collector):
    whole, num_moved, num_cancelled = check_all(servers, collector, 1000)
    assert whole >= 1000 and num_moved > 5 and num_cancelled > 50
