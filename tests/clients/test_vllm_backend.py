"""vllm_backend's own tests, as they are, against `generate`: `make test-vllm CHECKOUT=../vllm_backend`."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.clients import opt_stand_in
from tests.clients.conftest import PROGRAMS, Client
from tests.server.openai_served import five_ports, served
from tools import clients

CHECKOUT = Path(os.environ.get("VLLM_BACKEND", ""))
LIMIT_S = 1200  # 1,458 cases, each with a connection of its own
ALL = ()
pytestmark = pytest.mark.skipif(
    not (CHECKOUT / "ci" / "common" / "test_util.py").is_file(),
    reason="VLLM_BACKEND names no checkout of https://github.com/triton-inference-server/vllm_backend",
)


@pytest.fixture(scope="module")
def vllm_opt(tmp_path_factory):
    """The launch that serves the stand-in for facebook/opt-125m: (ports, its log)."""
    folder = tmp_path_factory.mktemp("vllm_backend")
    ports, log = five_ports(), folder / "log"
    with served(f"--model={opt_stand_in.make(folder / 'opt')}", log, ports=ports):
        yield ports, log


@pytest.fixture
def outcomes(vllm_opt, tmp_path):
    """A function: the path of a file of tests, and names of some -> how many ran, and why those failed that did."""
    ports, log = vllm_opt
    grpc, http = (f"127.0.0.1:{ports[name]}" for name in ("grpc", "http"))
    environment = clients.environment("vllm_backend")
    client = Client(
        environment, tmp_path, url="", triton_http=http, triton_grpc=grpc, model="generate", limit_s=LIMIT_S
    )

    def run(file, names):
        shutil.copytree(CHECKOUT / "ci", tmp_path / "ci", dirs_exist_ok=True)
        client.out = (tmp_path / "ci" / file).parent
        shutil.copy(log, client.out / "request_cancellation_server.log")  # where that test looks for vLLM's lines
        client.run("python", str(PROGRAMS / "vllm_backend_ci.py"), Path(file).name, *names)
        found = json.loads((client.out / "outcomes.json").read_text())
        return found["ran"], found["failed"]

    return run


@pytest.mark.client("vllm_backend")
@pytest.mark.parametrize(
    ("file", "names", "num_tests"),
    [
        ("L0_additional_outputs_vllm/additional_outputs_test.py", ALL, 1458),
        (
            "L0_backend_vllm/enabled_stream/enabled_stream_test.py",
            ("test_vllm_model_enabled_stream", "test_vllm_model_enabled_stream_exclude_input_in_output_default"),
            2,
        ),
        ("L0_backend_vllm/vllm_backend/vllm_backend_test.py", ("test_exclude_input_in_output_*",), 3),
    ],
    ids=["additional_outputs", "enabled_stream", "exclude_input"],
)
def test_what_vllm_backend_tests_of_its_answers_holds(outcomes, file, names, num_tests):
    """vllm_backend's tests of its answers, its outputs and its streams"""
    assert outcomes(file, names) == (num_tests, {})


@pytest.mark.client("vllm_backend")
@pytest.mark.parametrize(
    ("file", "name", "ends_at"),
    [
        (
            "L0_backend_vllm/enabled_stream/enabled_stream_test.py",
            "test_vllm_model_enabled_stream_exclude_input_in_output_false",
            "INVALID_ARGUMENT: When streaming, `exclude_input_in_output` = False is not allowed.",
        ),
        (
            "L0_backend_vllm/request_cancellation/request_cancellation_test.py",
            "test_request_cancellation",
            "'[vllm] Cancelling the request' not found in",
        ),
        ("L0_check_health_vllm/check_health_test.py", "test_vllm_is_healthy", "This protocol is restricted"),
    ],
    ids=["error", "cancellation", "repository_index"],
)
def test_what_differs_on_purpose_differs_there_alone(outcomes, file, name, ends_at):
    """vllm_backend's tests that want its errors' words, its log lines or the repository's index, up to there"""
    _, failed = outcomes(file, (name,))
    assert ends_at in failed[name]
