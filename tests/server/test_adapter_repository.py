"""The checked-in model folders on a real tritonserver, as `tritonserver --model-repository ... ` loads them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from tritonclient.utils import InferenceServerException

from bireme.config import CHECKOUT
from bireme.launch import ServerStartError
from bireme.specs import MODELS
from tests.server.triton_client import Client, inputs_of
from tests.servers import start_server
from tools import show_config

pytestmark = pytest.mark.server
REPOSITORIES = (CHECKOUT / "model_repository", CHECKOUT / "ensembles")


@pytest.fixture(scope="module")
def server(sample_model):
    sample_model("llama")
    with start_server("recipes/mocker", repositories=REPOSITORIES, env={"BIREME_CHECK_TENSORS": "1"}) as running:
        yield running


@pytest.fixture
def client(server):
    return Client(server.grpc)


def events(server, model, body):
    request = urllib.request.Request(
        f"http://{server.http}/v2/models/{model}/generate_stream", json.dumps(body).encode()
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            text = response.read().decode()
    except urllib.error.HTTPError as error:
        text = error.read().decode()
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("model", MODELS)
def test_triton_uses_what_the_spec_says(server, model):
    config = server.admin.get_json(f"/v2/models/{model}/config")
    assert show_config.compare(config, MODELS[model]).differences == []


@pytest.mark.parametrize(
    ("model", "values"),
    [("prefill", {"input_ids": [1]}), ("multimodal_encoder", {"images": "x"}), ("video_diffusion", {"prompt": "x"})],
)
def test_a_worker_that_the_recipe_lacks_says_so(client, model, values):
    with pytest.raises(InferenceServerException, match=f"UNAVAILABLE: {model} is not in recipe mocker"):
        client.generate(model, **values) if MODELS[model].decoupled else client.infer(model, **values)


def test_a_pipeline_without_its_worker_says_so(client):
    with pytest.raises(InferenceServerException, match="UNAVAILABLE: video_diffusion is not in recipe mocker"):
        client.generate("video", request="{}")


def test_the_declarative_ensemble_streams_what_generate_says(server, client):
    expected = client.infer("completion", text_input="hello there", max_tokens=6)
    answers = events(server, "text_generation", {"text_input": "hello there", "max_tokens": 6})
    assert "".join(answer["text_output"] for answer in answers) == expected["text_output"]
    assert [answer["finish_reason"] for answer in answers[:-1]] == [""] * (len(answers) - 1)
    assert answers[-1]["finish_reason"] == "length"
    assert json.loads(answers[-1]["usage"])["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("body", "word"), [({"max_tokens": 6}, "text_input"), ({"text_input": "x", "max_tokens": -6}, "-6")]
)
def test_the_declarative_ensemble_refuses_with_the_step_s_error(server, body, word):
    (answer,) = events(server, "text_generation", body)
    assert "INVALID_ARGUMENT: " in answer["error"]
    assert word in answer["error"]


def test_show_config_finds_no_difference(server):
    done = subprocess.run(
        [sys.executable, "tools/show_config.py", "--url", server.http],
        cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_recipe_that_can_not_be_served_is_the_load_error_of_every_model(tmp_path):
    with (
        pytest.raises(ServerStartError) as caught,
        start_server(
            "recipes/mocker",
            repositories=REPOSITORIES,
            env={"BIREME_OVERRIDE": '{"pipelin": {}}'},
        ),
    ):
        pass
    text = str(caught.value)
    assert text.count("unknown key pipelin; did you mean pipeline?") == len(MODELS), text


def gauge(server, name, worker):
    line = next(
        (line for line in server.metrics_text().splitlines() if line.startswith(f'{name}{{worker="{worker}"}}')), ""
    )
    return float(line.rpartition(" ")[2] or 0)


def wait_for_idle(server):
    """Wait until neither the engine nor a stub works on anything; bus subscriptions close after a second."""
    deadline = time.monotonic() + 75
    names = [("bireme_requests_running", "decode"), ("bireme_streams", "generate"), ("bireme_streams", "completion")]
    while any(gauge(server, *name) for name in names):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.parametrize(
    ("model", "ask"), [("decode", {"input_ids": [1, 2]}), ("generate", {"text_input": "a", "stream": True})]
)
def test_a_client_that_cancels_frees_the_engine(server, client, model, ask):
    stream = client.stream(model, max_tokens=100_000, ignore_eos=True, **ask)
    assert next(iter(stream))
    stream.cancel()
    assert wait_for_idle(server)
    stream.close()


@pytest.mark.parametrize(
    ("model", "ask"), [("decode", {"input_ids": [1, 2]}), ("generate", {"text_input": "a", "stream": True})]
)
def test_an_http_client_that_leaves_frees_the_engine(server, model, ask):
    body = json.dumps({"max_tokens": 100_000, "ignore_eos": True, **ask}).encode()
    head = f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(tuple(server.http.rsplit(":", 1)), timeout=20) as connection:
        connection.sendall(head.encode() + body)
        received = b""
        while b"data: " not in received:
            received += connection.recv(65536)
        assert b"output_ids" in received
    assert wait_for_idle(server)


def test_a_unary_client_that_cancels_frees_the_engine(server, client):
    import tritonclient.grpc as grpcclient

    with grpcclient.InferenceServerClient(client.address) as raw:
        inputs = inputs_of("completion", {"text_input": "a", "max_tokens": 100_000, "ignore_eos": True})
        call = raw.async_infer("completion", inputs, callback=lambda result, error: None)
        deadline = time.monotonic() + 10
        while not gauge(server, "bireme_requests_running", "decode") and time.monotonic() < deadline:
            time.sleep(0.05)
        call.cancel()
        assert wait_for_idle(server)
