"""Unary models through the adapter, on a real tritonserver: gRPC infer, HTTP infer and generate."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.server


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.loads(response.read())


def test_tensors_come_back_unchanged(client):
    result = client.infer("echo", values={"text_in": ["ahoy", "", "ümlaut"], "tokens_in": [0, -1, 2**31 - 1]})
    assert result.as_numpy("text_out").tolist() == [b"ahoy", b"", "ümlaut".encode()]
    assert result.as_numpy("tokens_out").tolist() == [0, -1, 2**31 - 1]


def test_empty_tensors_come_back_empty(client):
    assert client.infer("echo", values={"tokens_in": []}).as_numpy("tokens_out").tolist() == []


def test_the_stage_sees_request_id_timeout_and_parameters(client):
    result = client.infer(
        "echo", values={"text_in": "x"}, request_id="r1", timeout=1_500_001, parameters={"depth": 3, "name": "n"}
    )
    assert result.as_numpy("about").tolist() == [b"r1|1501|[('depth', 3), ('name', 'n')]|[]"]


def test_only_requested_outputs_come_back(client):
    import tritonclient.grpc as grpcclient

    wanted = [grpcclient.InferRequestedOutput("about")]
    result = client.infer("echo", values={"text_in": "x"}, outputs=wanted)
    assert [output.name for output in result.get_response().outputs] == ["about"]
    assert result.as_numpy("about").tolist() == [b"|0|[]|['about']"]


def test_http_generate_answers_with_json(server):
    answer = post(f"http://{server.http}/v2/models/echo/generate", {"text_in": "ahoy", "tag": 4})
    assert answer["text_out"] == "ahoy"
    assert "('tag', 4)" in answer["about"]


def test_64_requests_of_100_ms_run_side_by_side(client):
    with ThreadPoolExecutor(64) as pool:
        list(pool.map(lambda _: client.infer("echo", values={"text_in": "warm"}), range(64)))
        began = time.perf_counter()
        list(pool.map(lambda _: client.infer("echo", values={"text_in": "x", "delay_ms": 100}), range(64)))
        took = time.perf_counter() - began
    assert took < 64 * 0.1 / 2  # one after the other they would take 6.4 s


def test_a_stage_without_an_answer_is_an_error_not_a_hang(client):
    with pytest.raises(InferenceServerException, match="INTERNAL: the model ended the request without an answer"):
        client.infer("silent", values={"any": 1})


@pytest.mark.parametrize(
    ("how", "message", "status"),
    [
        ("request", "INVALID_ARGUMENT: max_tokens: -1; at least 1", "StatusCode.INVALID_ARGUMENT"),
        ("lost", "UNAVAILABLE: engine lost: the engine died", "StatusCode.UNAVAILABLE"),
        ("full", "RESOURCE_EXHAUSTED: queue", "StatusCode.UNAVAILABLE"),
        ("missing", "NOT_FOUND: no lease 7", "StatusCode.NOT_FOUND"),
        ("value", "INTERNAL: ValueError: odd", "StatusCode.INTERNAL"),
        ("exit", "INTERNAL: SystemExit: 3", "StatusCode.INTERNAL"),
        ("interrupt", "INTERNAL: KeyboardInterrupt", "StatusCode.INTERNAL"),
        ("cancel_self", "CANCELLED: the request was cancelled", "StatusCode.CANCELLED"),
        ("wrong_type", "INTERNAL: unary_failing.tokens: float32", "StatusCode.INTERNAL"),
        ("wrong_name", "INTERNAL: unary_failing has no output tokenz", "StatusCode.INTERNAL"),
        ("tensors_raises", "INTERNAL: RuntimeError: no tensors today", "StatusCode.INTERNAL"),
    ],
)
def test_an_error_has_its_code_in_text_and_status(client, how, message, status):
    with pytest.raises(InferenceServerException) as caught:
        client.infer("unary_failing", values={"how": how})
    assert message in caught.value.message()
    assert caught.value.status() == status


def test_an_error_after_the_answer_is_only_logged(client):
    assert client.infer("unary_failing", values={"how": "late"}).as_numpy("tokens").tolist() == [7]


def test_http_infer_has_the_status_of_the_error(server):
    body = {"inputs": [{"name": "how", "datatype": "BYTES", "shape": [1], "data": ["missing"]}]}
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(f"http://{server.http}/v2/models/unary_failing/infer", body)
    assert caught.value.code == 404
    assert "NOT_FOUND: no lease 7" in caught.value.read().decode()


@pytest.mark.parametrize(
    "payload", [b"\xff\xff\xff\xff", b"\x05\x00\x00\x00ab", b"\x01", b"", b"\x01\x00\x00\x00a\x01\x00\x00\x00b"]
)
def test_a_malformed_string_tensor_is_refused_and_the_model_lives(server, client, payload):
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    request = service_pb2.ModelInferRequest(model_name="echo", raw_input_contents=[payload])
    request.inputs.add(name="text_in", datatype="BYTES", shape=[1])
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=20)
    assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)
    assert client.infer("echo", values={"text_in": "x"}).as_numpy("text_out").tolist() == [b"x"]


@pytest.mark.parametrize(
    ("name", "data_type", "shape"),
    [("nonsense", "INT32", [1]), ("tokens_in", "FP32", [1]), ("delay_ms", "INT32", [2]), ("delay_ms", "INT32", [1, 1])],
)
def test_unknown_and_misshapen_tensors_are_refused(client, name, data_type, shape):
    import numpy as np
    import tritonclient.grpc as grpcclient

    tensor = grpcclient.InferInput(name, shape, data_type)
    tensor.set_data_from_numpy(np.zeros(shape, np.float32 if data_type == "FP32" else np.int32))
    with grpcclient.InferenceServerClient(client.address) as raw, pytest.raises(InferenceServerException) as caught:
        raw.infer("echo", [tensor], client_timeout=20)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
