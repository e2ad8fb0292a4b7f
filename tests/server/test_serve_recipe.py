"""serve.py on a real recipe, as a user runs it: endpoints, health, a killed stub, an orderly end."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from bireme.launch import free_ports, processes
from bireme.launch.run_folder import SHM

pytestmark = pytest.mark.server

LIMIT_S = 90
PORTS = free_ports(range(23370, 23380))
HEALTH_PORT = 23380


def call(port, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except OSError:
        return 0, {}
    finally:
        connection.close()


def complete():
    return call(PORTS.http, "/v2/models/completion/generate", {"text_input": "two banks of oars", "max_tokens": 4})


def ready():
    return call(HEALTH_PORT, "/health/ready")


@pytest.fixture(scope="module")
def served(sample_model, tmp_path_factory):
    sample_model("llama")
    log = tmp_path_factory.mktemp("serve") / "log"
    ports = [f"--{name}-port={getattr(PORTS, name)}" for name in ("http", "grpc", "metrics")]
    command = [sys.executable, "tools/serve.py", "recipes/mocker-disagg", *ports, f"--health-port={HEALTH_PORT}"]
    with log.open("wb") as stream:
        process = subprocess.Popen([*command, "--canary-interval=2"], stdout=stream, stderr=stream)
    process.log = log
    try:
        wait_for(process, lambda: ready()[0] == 200)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT_S)


def wait_for(process, condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.log.read_text()
        time.sleep(0.05)


def stub_of(process, model):
    server = next(pid for pid in processes.children(process.pid) if "tritonserver" in str(processes.command_line(pid)))
    return processes.stubs(server)[model][0]


def test_a_served_recipe_completes_and_prints_its_endpoints(served):
    status, answer = complete()
    assert status == 200 and len(answer["output_ids"]) == 4
    assert f"http=127.0.0.1:{PORTS.http} grpc=127.0.0.1:{PORTS.grpc}" in served.log.read_text()


def test_readiness_knows_each_engine(served):
    wait_for(served, lambda: ready()[1]["workers"]["decode"]["engine_up"])
    assert set(ready()[1]["workers"]) == {"prefill", "decode"}


def test_a_killed_decode_stub_is_noticed_and_serves_again(served):
    killed = stub_of(served, "decode")
    other = stub_of(served, "generate")
    os.kill(killed, signal.SIGKILL)
    wait_for(served, lambda: ready()[0] == 503)
    wait_for(served, lambda: ready()[0] == 200 and complete()[0] == 200)
    assert stub_of(served, "decode") != killed and stub_of(served, "generate") == other


def test_sigterm_ends_in_order_though_a_stub_was_lost(served):
    members = [(pid, processes.started_at(pid)) for pid in processes.descendants(served.pid)]
    run = re.search(r"/bireme-\d+/(\d+-\w+)/", " ".join(processes.command_line(stub_of(served, "decode"))))
    served.send_signal(signal.SIGTERM)
    assert served.wait(LIMIT_S) == 0, served.log.read_text()
    assert processes.survivors(members) == []
    assert not list(SHM.glob(f"bireme_{run.group(1)}_*"))
