"""Bad input gets its code, value, limit and remedy; nothing hangs, nothing dies, others go on unharmed."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.server.shared_deployments import CONTEXT, LEASE_S
from tests.server.triton_client import Client
from tests.server.watch import is_idle, until

pytestmark = pytest.mark.server

PROMPT = list(range(400, 420))
PAIRS = {"torch": "torch_text_pair", "trtllm": "trtllm_text_pair"}
KINDS = {**PAIRS, "torch_aggregated": "torch_text", "trtllm_aggregated": "trtllm_text"}
disaggregated = pytest.mark.parametrize("server", PAIRS, indirect=True)


@pytest.fixture(scope="module", params=KINDS)
def server(request, shared):
    return shared(KINDS[request.param])


@pytest.fixture(scope="module", autouse=True)
def bystander(server):
    """One client that asks the same over and over beside all the bad input, and always gets the same."""
    client, stop, answers = Client(server.grpc), threading.Event(), []

    def ask():
        while not stop.is_set():
            answers.append(client.generate("generate", input_ids=PROMPT, max_tokens=30, stream=True)["output_ids"])

    thread = threading.Thread(target=ask)
    thread.start()
    yield
    stop.set()
    thread.join(60)
    assert answers
    assert all(answer == answers[0] for answer in answers)
    until(lambda: is_idle(server), 20, "nothing left behind")


def _refusal(server, model, **values):
    client = Client(server.grpc)
    with pytest.raises(InferenceServerException) as caught:
        if model in ("completion", "tokenizer", "prefill"):
            client.infer(model, **values)
        else:
            client.generate(model, **values)
    return str(caught.value)


BAD = {
    "prompt_longer_than_the_context": ({"input_ids": [400] * 600, "max_tokens": 5}, ["600", str(CONTEXT)]),
    "empty_ids": ({"input_ids": np.array([], np.int32), "max_tokens": 5}, ["0"]),
    "empty_text": ({"text_input": "", "max_tokens": 5}, ["text_input"]),
    "no_prompt": ({"max_tokens": 5}, ["text_input", "input_ids"]),
    "id_too_large": ({"input_ids": [400, 999_999], "max_tokens": 5}, ["999999"]),
    "negative_id": ({"input_ids": [400, -1], "max_tokens": 5}, ["-1"]),
    "zero_max_tokens": ({"input_ids": PROMPT, "max_tokens": 0}, ["max_tokens", "0"]),
    "negative_max_tokens": ({"input_ids": PROMPT, "max_tokens": -7}, ["max_tokens", "-7"]),
    "nan_temperature": ({"input_ids": PROMPT, "temperature": float("nan")}, ["temperature", "nan"]),
    "infinite_temperature": ({"input_ids": PROMPT, "temperature": float("inf")}, ["temperature", "inf"]),
    "negative_temperature": ({"input_ids": PROMPT, "temperature": -1.0}, ["temperature", "-1"]),
    "top_p_above_one": ({"input_ids": PROMPT, "top_p": 1.5}, ["top_p", "1.5"]),
    "negative_top_k": ({"input_ids": PROMPT, "top_k": -3}, ["top_k", "-3"]),
    "zero_repetition_penalty": ({"input_ids": PROMPT, "repetition_penalty": 0.0}, ["repetition_penalty"]),
    "beams": ({"input_ids": PROMPT, "beam_width": 4}, ["beam_width", "4"]),
    "too_many_copies": ({"input_ids": PROMPT, "num_return_sequences": 100_000}, ["num_return_sequences", "100000"]),
    "too_many_stops": ({"input_ids": PROMPT, "stop_words": ["x"] * 5000}, ["stop_words", "5000"]),
    "unknown_processor": ({"input_ids": PROMPT, "logits_processors": '[{"name": "temprature"}]'}, ["temprature"]),
    "processors_not_json": ({"input_ids": PROMPT, "logits_processors": "[{"}, ["logits_processors"]),
    "processor_argument_too_large": (
        {
            "input_ids": PROMPT,
            "logits_processors": json.dumps([{"name": "temperature", "args": {"temperature": 2**70}}]),
        },
        ["logits_processors", "64 bits"],
    ),
    "sampling_parameters_not_json": ({"text_input": "hi", "sampling_parameters": "{"}, ["sampling_parameters"]),
    "unknown_sampling_parameter": ({"text_input": "hi", "sampling_parameters": '{"temprature": 1}'}, ["temperature"]),
    "unknown_lora": ({"input_ids": PROMPT, "lora_name": "nope"}, ["nope"]),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("model", ["generate", "completion"])
def test_pipelines_refuse_with_code_value_and_field(server, model, name):
    _assert_is_refused(server, model, name)


def _assert_is_refused(server, model, name):
    values, words = BAD[name]
    message = _refusal(server, model, **values)
    assert "INVALID_ARGUMENT: " in message or "NOT_FOUND: " in message, message
    assert all(word in message for word in words), message


IDS_ONLY = [name for name, (values, _) in BAD.items() if "input_ids" in values and "num_return" not in str(values)]


@pytest.mark.parametrize("name", IDS_ONLY)
def test_decode_refuses_with_code_value_and_field(server, name):
    _assert_is_refused(server, "decode", name)


@disaggregated
@pytest.mark.parametrize("name", IDS_ONLY)
def test_prefill_refuses_with_code_value_and_field(server, name):
    _assert_is_refused(server, "prefill", name)


def test_a_huge_max_tokens_is_clamped_to_the_context(server):
    prompt = (PROMPT * CONTEXT)[: CONTEXT - 32]
    answer = Client(server.grpc).generate("generate", input_ids=prompt, max_tokens=2**31 - 1, ignore_eos=True)
    assert len(answer["output_ids"]) == 32
    assert answer["finish_reason"] == "length"


def _params(server):
    return str(Client(server.grpc).infer("prefill", input_ids=PROMPT, max_tokens=5)["disaggregated_params"])


@disaggregated
def test_forged_params_are_refused(server):
    params = _params(server)
    forged = params[:10] + ("A" if params[10] != "A" else "B") + params[11:]
    assert "INVALID_ARGUMENT" in _refusal(server, "decode", input_ids=PROMPT, disaggregated_params=forged)


def test_rubbish_in_place_of_params_is_refused(server):
    assert "INVALID_ARGUMENT" in _refusal(server, "decode", input_ids=PROMPT, disaggregated_params="rubbish")


@disaggregated
def test_params_of_another_prompt_are_refused(server):
    params = _params(server)
    message = _refusal(server, "decode", input_ids=[*PROMPT[:-1], 999], disaggregated_params=params)
    assert "INVALID_ARGUMENT" in message


@disaggregated
def test_replayed_params_are_refused(server):
    params = _params(server)
    client = Client(server.grpc)
    first = client.generate("decode", input_ids=PROMPT, max_tokens=5, disaggregated_params=params)
    assert len(first["output_ids"]) == 5
    assert "NOT_FOUND" in _refusal(server, "decode", input_ids=PROMPT, max_tokens=5, disaggregated_params=params)


@disaggregated
def test_params_whose_lease_is_gone_are_refused(server):
    params = _params(server)
    time.sleep(LEASE_S + 1)
    assert "NOT_FOUND" in _refusal(server, "decode", input_ids=PROMPT, max_tokens=5, disaggregated_params=params)


def test_abort_of_an_unknown_id_is_not_found(server):
    assert "NOT_FOUND" in _refusal(server, "decode", abort=True, request_id="nobody")


@disaggregated
def test_abort_of_an_unknown_id_is_not_found_on_prefill(server):
    assert "NOT_FOUND" in _refusal(server, "prefill", abort=True, request_id="nobody")


@pytest.mark.parametrize(
    "values",
    [
        {"commands": [1, 2, 3]},
        {"commands": [1, 2, 3], "consumer": "nobody"},
        {"consumer": "nobody"},
        {"subscribe": "x", "input_ids": PROMPT},
    ],
    ids=["no_consumer", "unknown_consumer", "no_commands", "both"],
)
def test_a_misused_bus_answers_with_an_error(server, values):
    message = _refusal(server, "decode", **values)
    assert "INVALID_ARGUMENT" in message or "NOT_FOUND" in message


def test_wrong_types_and_shapes_are_errors(server):
    with grpcclient.InferenceServerClient(server.grpc) as client:
        for name, array, data_type in (
            ("input_ids", np.array([[1, 2]], np.int32), "INT32"),
            ("input_ids", np.array([1.0], np.float32), "FP32"),
            ("no_such_tensor", np.array([1], np.int32), "INT32"),
            ("max_tokens", np.array([1, 2], np.int32), "INT32"),
        ):
            tensor = grpcclient.InferInput(name, list(array.shape), data_type)
            tensor.set_data_from_numpy(array)
            with pytest.raises(InferenceServerException):
                client.infer("completion", [tensor])


def _post(server, path, body):
    request = urllib.request.Request(f"http://{server.http}{path}", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("path", ["/v2/models/generate/generate", "/v2/models/generate/generate_stream"])
def test_plain_json_over_http_is_refused_with_the_same_text(server, path):
    status, text = _post(server, path, json.dumps({"text_input": "hi", "max_tokens": -1}).encode())
    assert status == 400
    assert "INVALID_ARGUMENT: max_tokens" in text
