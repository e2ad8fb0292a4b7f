"""serve.py at SIGTERM: streams under way end, new requests are refused, what Triton miscounts is not waited for."""

import json
import signal
import subprocess
import sys
import threading
import time

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from bireme.launch import free_ports

pytestmark = pytest.mark.server

LIMIT_S = 180
NUM_TOKENS = 80
SLOW = {"workers": {"decode": {"engine_config": {"mocker": {"step_ms": 100}}}}}  # longer than a bus's silence may last


@pytest.fixture(scope="module")
def launched(sample_model, tmp_path_factory):
    sample_model("llama")
    ports, log = free_ports(), tmp_path_factory.mktemp("end") / "log"
    options = [f"--{name}-port={getattr(ports, name)}" for name in ("http", "grpc", "metrics")]
    options += ["--health-port=0", "--openai-port=0", "--canary-interval=0", "--drain-timeout=600"]
    with log.open("wb") as stream:
        command = [sys.executable, "tools/serve.py", "recipes/mocker", "--override", json.dumps(SLOW), *options]
        process = subprocess.Popen(command, stdout=stream, stderr=stream)
    process.log, process.grpc = log, f"127.0.0.1:{ports.grpc}"
    try:
        wait_for(process, lambda: "ready seconds=" in log.read_text())
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(process, condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.log.read_text()
        time.sleep(0.05)


def send_malformed_and_cancel(address):
    """Ask `generate` for an output that it does not have, and cancel the stream once it has been refused."""
    request = service_pb2.ModelInferRequest(model_name="generate")
    text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(b"ahoy")
    request.outputs.add(name="no_such_output")
    ended = threading.Event()

    def requests():
        yield request
        ended.wait(LIMIT_S)

    with grpc.insecure_channel(address) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(requests())
        message = next(call).error_message
        call.cancel()
        ended.set()
    return message


@pytest.fixture(scope="module")
def ended(launched):
    """What became of a long stream and of a later request, the exit code and the log."""
    from tests.server.triton_client import Client

    for _ in range(5):  # on a busy machine Triton may be done with one before it is cancelled
        assert "no_such_output" in send_malformed_and_cancel(launched.grpc)
    client = Client(launched.grpc)
    stream = iter(client.stream("generate", text_input="two banks of oars", max_tokens=NUM_TOKENS, stream=True))
    answers = [next(stream)]
    launched.send_signal(signal.SIGTERM)
    wait_for(launched, lambda: "stopping" in launched.log.read_text())
    try:
        late = wait_until_refused(client)
    finally:
        answers += stream
    return answers, late, launched.wait(LIMIT_S), launched.log.read_text()


def wait_until_refused(client):
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            client.generate(text_input="ahoy", max_tokens=1)
        except InferenceServerException as error:
            return str(error)
    return "taken"


def test_a_long_stream_of_generate_ends_whole_after_sigterm(ended):
    answers = ended[0]
    assert sum(len(answer["output_ids"]) for answer in answers) == NUM_TOKENS, ended[3]
    assert answers[-1]["finish_reason"] == "length"


def test_a_request_that_comes_after_sigterm_is_refused_at_once(ended):
    assert "has no available versions" in ended[1]


def test_a_malformed_request_on_a_cancelled_stream_does_not_hold_up_the_end(ended):
    """Triton 2.51 counts it for ever and would wait the whole drain time-out for it."""
    _, _, code, log = ended
    assert code == 0
    assert "unload_stuck models=generate" in log
