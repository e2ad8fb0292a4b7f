"""What tensorrtllm_backend's own clients send and read: end_to_end_grpc_client.py, the README's curl, genai-perf."""

import functools
import http.client
import json
import queue
import subprocess
import sys

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from bireme.config import CHECKOUT
from tests.server.triton_client import Client

pytestmark = pytest.mark.server

PROMPT = "two banks of oars"
MODELS = ("tokenizer", "decode", "completion", "tensorrt_llm_bls", "ensemble")


@pytest.fixture(scope="module")
def server(sample_model, start):
    sample_model("llama")
    override = json.dumps({"pipeline": {"tensorrtllm_backend_models": True}})
    return start("recipes/mocker", override=override, models=MODELS, env={"BIREME_CHECK_TENSORS": "1"})


@pytest.fixture(scope="module")
def expected(server):
    return Client(server.grpc).infer("completion", text_input=PROMPT, max_tokens=8)["text_output"]


def tensor(name, value):
    given = grpcclient.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
    given.set_data_from_numpy(value)
    return given


def request_of(prompt, streaming, more):
    """As its prepare_inputs: every value has the shape [1, 1], lists [1, n]; these six are always there."""
    text = np.array([[prompt]]).astype(object)
    values = {
        "text_input": text,
        "max_tokens": np.ones_like(text).astype(np.int32) * 8,
        "stream": np.array([[streaming]], dtype=bool),
        "beam_width": np.array([[1]], dtype=np.int32),
        "temperature": np.array([[1.0]], dtype=np.float32),
        "exclude_input_in_output": np.array([[False]], dtype=bool),
    }
    return values | more


def exchange(server, model, values, outputs=("text_output",)):
    """As its run_inference: one stream, stopped at once, then everything that has come is read."""
    results = queue.Queue()
    client = grpcclient.InferenceServerClient(server.grpc)
    callback = functools.partial(lambda into, result, error: into.put(error or result), results)
    client.start_stream(callback=callback)
    wanted = [grpcclient.InferRequestedOutput(name) for name in outputs]
    inputs = [tensor(name, value) for name, value in values.items()]
    client.async_stream_infer(model, inputs, outputs=wanted, request_id="1")
    client.stop_stream()
    found = list(results.queue)
    for result in found:
        if isinstance(result, InferenceServerException):
            raise result
    return found


def text_of(results, row=0, sequence=0):
    """As it reads them: text_output[0], and [0][0] of an index that is there."""

    def place(result, name):
        array = result.as_numpy(name)
        return 0 if array is None else array[0][0]

    chosen = [
        result
        for result in results
        if place(result, "batch_index") == row and place(result, "sequence_index") == sequence
    ]
    return "".join(result.as_numpy("text_output")[0].decode() for result in chosen)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_a_stream_of_deltas(server, expected, model):
    results = exchange(server, model, request_of(PROMPT, True, {}))
    assert text_of(results) == expected


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_one_answer_with_its_prompt(server, expected, model):
    results = exchange(server, model, request_of(PROMPT, False, {}))
    assert len(results) == 1 and text_of(results) == PROMPT + expected


def test_every_option_of_the_client_that_can_be_served(server):
    more = {
        "num_return_sequences": np.array([[1]], dtype=np.int32),
        "bad_words": np.array([["xyzzy", "plugh"]], dtype=object),
        "stop_words": np.array([["xyzzy"]], dtype=object),
        "repetition_penalty": np.array([[1.1]], dtype=np.float32),
        "presence_penalty": np.array([[0.5]], dtype=np.float32),
        "frequency_penalty": np.array([[0.5]], dtype=np.float32),
        "embedding_bias_words": np.array([["a", "b"]], dtype=object),
        "embedding_bias_weights": np.array([[1.0, -1.0]], dtype=np.float32),
        "end_id": np.array([[2]], dtype=np.int32),
        "pad_id": np.array([[2]], dtype=np.int32),
        "return_log_probs": np.array([[True]], dtype=bool),
    }
    outputs = ("text_output", "cum_log_probs", "output_log_probs")
    (result,) = exchange(server, "ensemble", request_of(PROMPT, False, more), outputs)
    assert result.as_numpy("cum_log_probs").shape == (1, 1)
    assert result.as_numpy("output_log_probs").shape == (1, 1, 8)


def test_several_sequences_name_themselves(server, expected):
    more = {"num_return_sequences": np.array([[2]], dtype=np.int32)}
    results = exchange(server, "ensemble", request_of(PROMPT, True, more), ("text_output", "sequence_index"))
    assert [text_of(results, sequence=at) for at in range(2)] == [expected, expected]


def test_a_batch_of_prompts_is_one_request(server, expected):
    rows = [request_of(prompt, False, {}) for prompt in (PROMPT, "a third oar")]
    values = {name: np.concatenate([row[name] for row in rows], axis=0) for name in rows[0]}
    results = exchange(server, "tensorrt_llm_bls", values, ("text_output", "batch_index"))
    assert text_of(results, row=0) == PROMPT + expected
    assert text_of(results, row=1).startswith("a third oar")


def test_what_is_not_served_is_refused_with_its_name_and_nothing_hangs(server):
    more = {"return_context_logits": np.array([[True]], dtype=bool)}
    with pytest.raises(InferenceServerException, match="INVALID_ARGUMENT: return_context_logits: True; .*generate"):
        exchange(server, "ensemble", request_of(PROMPT, False, more), ("text_output", "context_logits"))


def post(server, path, body):
    connection = http.client.HTTPConnection(server.http, timeout=30)
    connection.request("POST", path, json.dumps(body))
    text = connection.getresponse().read().decode()
    connection.close()
    return text


BODY = {"text_input": PROMPT, "max_tokens": 8, "bad_words": "", "stop_words": "", "pad_id": 2, "end_id": 2}


def test_the_readme_s_curl_gets_one_answer(server, expected):
    answer = json.loads(post(server, "/v2/models/ensemble/generate", BODY))
    assert answer["text_output"] == PROMPT + expected and answer["batch_index"] == 0


def test_the_readme_s_curl_streams(server, expected):
    text = post(server, "/v2/models/tensorrt_llm_bls/generate_stream", BODY | {"stream": True})
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert "".join(event["text_output"] for event in events) == expected


def test_show_config_finds_no_difference(server):
    command = [sys.executable, "tools/show_config.py", "--url", server.http, "tensorrt_llm_bls", "ensemble"]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT)
    assert "max_batch_size=64" in shown.stdout and shown.returncode == 0, shown.stdout + shown.stderr
