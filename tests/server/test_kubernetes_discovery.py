"""Two launches of a Service, and a frontend without a server, find each other's workers by its EndpointSlices alone."""

import json
import os
import signal
import urllib.request

import pytest

from bireme.discovery.endpoint_slices import PORT_NAME
from tests.discovery.cluster_api import NAMESPACE, SERVICE, cluster_api, endpoint, endpoint_slice
from tests.server.two_servers import LIMIT_S, TwoServers
from tools import drain

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def servers(sample_model, tmp_path_factory):
    sample_model("llama")
    folder = tmp_path_factory.mktemp("cluster")
    (account := folder / "account").mkdir()
    with cluster_api(account) as api, pytest.MonkeyPatch.context() as environment:
        for name, value in (api.environment() | {"BIREME_KEY": "5a" * 32}).items():
            environment.setenv(name, value)
        service = f"{SERVICE}.{NAMESPACE}"
        running = TwoServers(folder, {"backend": "kubernetes", "service": service, "service_account": str(account)})
        for name, launch in (("a", running.a), ("b", running.b)):
            api.put(endpoint_slice(f"pair-{name}", launch.ports[PORT_NAME], endpoint("127.0.0.1", name)))
        running.api = api
        try:
            running.start()
            yield running
        finally:
            running.stop()


def health(launch):
    with urllib.request.urlopen(f"http://{launch.addresses['health']}/health/ready", timeout=LIMIT_S) as reply:
        return json.load(reply)


def test_requests_of_a_frontend_without_a_server_go_to_both(servers):
    assert servers.served_by(6) == {servers.decode_of(servers.a), servers.decode_of(servers.b)}
    for launch in (servers.a, servers.b):
        servers.until(lambda launch=launch: health(launch)["discovery"]["workers_elsewhere"] == 2)
        found = health(launch)["discovery"]
        assert found["backend"] == "kubernetes" and found["current"] and not found["unregistered"]


def test_only_launches_and_the_frontend_watch_the_api_server(servers):
    """Engines and pipelines ask their own launch."""
    assert sum(is_watch for is_watch, _ in servers.api.asked) == 3


def test_a_worker_that_is_drained_gets_nothing_new_until_it_is_put_back(servers):
    folder, name = str(servers.b.run_folder()), servers.decode_of(servers.b)
    assert drain.main(["decode", "--run-folder", folder]) == 0
    servers.until(lambda: servers.workers().get(name) == "draining")
    assert servers.served_by(4) == {servers.decode_of(servers.a)}
    assert drain.main(["decode", "--run-folder", folder, "--undo"]) == 0
    servers.until(lambda: servers.workers().get(name) == "ready")


def test_while_the_api_server_is_gone_requests_go_on_and_readiness_says_so(servers):
    servers.api.stop()
    servers.until(lambda: "API server" in health(servers.a)["discovery"]["reason"])
    assert health(servers.a)["status"] == "degraded"
    assert servers.served_by(4) == {servers.decode_of(servers.a), servers.decode_of(servers.b)}
    servers.api.start_again()
    servers.until(lambda: health(servers.a)["status"] == "ready")


def test_a_pod_that_is_told_to_end_takes_nothing_new_and_leaves(servers):
    os.kill(servers.b.pid, signal.SIGTERM)
    assert servers.b.wait(LIMIT_S) == 0
    servers.until(
        lambda: set(servers.workers()) == {servers.decode_of(servers.a), f"prefill@{servers.a.addresses['grpc']}"}
    )
    assert servers.served_by(2) == {servers.decode_of(servers.a)}
