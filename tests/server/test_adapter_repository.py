"""The checked-in model folders on a real tritonserver, as `tritonserver --model-repository ... ` loads them."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
import show_config
from triton_client import Client
from tritonclient.utils import InferenceServerException

from bireme.config import CHECKOUT
from bireme.launch import ServerStartError, free_ports, start_server
from bireme.specs import MODELS

pytestmark = pytest.mark.server
PORTS = range(23100, 23200)
REPOSITORIES = (CHECKOUT / "model_repository", CHECKOUT / "ensembles")


@pytest.fixture(scope="module")
def server(sample_model):
    sample_model("llama")
    with start_server(
        "recipes/mocker", ports=free_ports(PORTS), repositories=REPOSITORIES, env={"BIREME_CHECK_TENSORS": "1"}
    ) as running:
        yield running


@pytest.fixture
def client(server):
    return Client(server.grpc)


def events(server, model: str, body: dict) -> list[dict]:
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


@pytest.mark.parametrize("model", ["chat", "video"])
def test_a_pipeline_of_a_later_version_says_so(client, model):
    with pytest.raises(InferenceServerException, match=f"UNAVAILABLE: {model} is not served by this version"):
        client.generate(model, request="{}")


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
            ports=free_ports(PORTS),
            repositories=REPOSITORIES,
            env={"BIREME_OVERRIDE": '{"pipelin": {}}'},
        ),
    ):
        pass
    text = str(caught.value)
    assert text.count("unknown key pipelin; did you mean pipeline?") == len(MODELS), text
