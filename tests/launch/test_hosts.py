"""A whole launch on an address that is not IPv4: each of its ports is asked, by itself and by a client."""

import http.client
import json
import time

import pytest

from bireme.launch import free_port
from bireme.launch.console import Console
from bireme.launch.deployment import Deployment
from bireme.launch.doors import get
from bireme.launch.ports import own_host
from bireme.launch.run_folder import RunFolder
from bireme.launch.tritonserver import address
from tools import serve

pytestmark = pytest.mark.server

LIMIT_S = 120


@pytest.fixture(params=["::1", "localhost"])
def launch(request, ipv6):
    ports = [f"--{name}-port={free_port()}" for name in ("http", "grpc", "metrics", "health", "openai")]
    hosts = [f"--{name}={request.param}" for name in ("host", "triton-host", "health-host")]
    options = serve.parse(["recipes/mocker", *hosts, *ports, "--canary-interval", "0.5"])
    run_folder = RunFolder()
    with Deployment(serve.settings_of(options, run_folder), Console("warning"), run_folder) as launch:
        yield launch


def test_a_launch_serves_on_an_ipv6_address_and_on_a_name(launch):
    host, settings = own_host(launch.settings.frontend.host), launch.settings
    assert json.loads(get(address(host, launch.health_port), "/health/ready", 5.0))["status"] == "ready"
    connection = http.client.HTTPConnection(host, settings.frontend.port, timeout=LIMIT_S)
    request = {"model": "mocker", "prompt": "Row on", "max_tokens": 4}
    connection.request("POST", "/v1/completions", json.dumps(request), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    assert answer["usage"]["completion_tokens"] == 4
    deadline = time.monotonic() + LIMIT_S
    while not has_looked_everywhere(launch.health()):
        assert time.monotonic() < deadline, launch.health()
        time.sleep(0.1)
    assert launch.health()["status"] == "ready"


def has_looked_everywhere(report):
    """Whether each path had its canary, and the page of metrics was read."""
    return all(path["canaries"] for path in report["paths"].values()) and report["workers"]["decode"]["steps"]
