"""What a launch opens to other hosts: the OpenAI port by --host, Triton's by their own names, never beside keys."""

import io

import pytest

from bireme.errors import ConfigError
from bireme.launch.console import Console
from bireme.launch.openings import warn_of_old_triton
from bireme.launch.ports import Hosts
from bireme.launch.run_folder import RunFolder
from tools import serve

ETCD = ("--discovery", "etcd://head:2379")
OPEN = "0.0.0.0"


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("BIREME_KEY", "ab" * 32)
    monkeypatch.delenv("BIREME_API_KEYS", raising=False)
    run_folder = RunFolder(tmp_path / "base")
    yield lambda *options: serve.settings_of(
        serve.parse(["recipes/mocker", "--openai-port", "9000", *options]), run_folder
    )
    run_folder.remove()


def test_host_opens_the_openai_port_alone(settings):
    opened = settings("--host", OPEN)
    assert opened.frontend.host == OPEN and opened.frontend.grpc == "127.0.0.1:8001"
    assert opened.hosts == Hosts() and opened.health_host == "127.0.0.1"


@pytest.mark.parametrize(
    ("option", "hosts"),
    [
        ("--triton-host", Hosts(OPEN, OPEN, OPEN)),
        ("--grpc-host", Hosts(grpc=OPEN)),
        ("--metrics-host", Hosts(metrics=OPEN)),
    ],
)
def test_triton_s_ports_are_opened_by_their_own_names(settings, option, hosts):
    opened = settings(option, OPEN)
    assert opened.hosts == hosts and opened.frontend.host == "127.0.0.1"


@pytest.mark.parametrize("option", ["--triton-host", "--grpc-host"])
def test_keys_beside_open_ports_that_ask_for_none_are_refused_unless_asked_for_by_name(settings, option):
    with pytest.raises(ConfigError, match=r"grpc \(0.0.0.0\) would answer other hosts without one.*--triton-without-k"):
        settings("--api-keys", "keys.yaml", option, OPEN)
    opened = settings("--api-keys", "keys.yaml", option, OPEN, "--triton-without-keys")
    assert opened.hosts.grpc == OPEN


def test_keys_of_the_environment_count_as_well(settings, monkeypatch):
    monkeypatch.setenv("BIREME_API_KEYS", "keys.yaml")
    with pytest.raises(ConfigError, match="API keys guard the OpenAI port alone"):
        settings("--triton-host", OPEN)


def test_keys_beside_open_metrics_or_an_open_openai_port_are_fine(settings):
    assert settings("--api-keys", "keys.yaml", "--metrics-host", OPEN, "--host", OPEN).hosts.opened == {}


def test_servers_that_share_discovery_name_their_network(settings):
    for host in (OPEN, "0", "::0"):
        with pytest.raises(ConfigError, match="--grpc-host 10.1.0.0/16"):
            settings(*ETCD, "--grpc-host", host)
    named = settings(*ETCD, "--grpc-host", "127.0.0.0/8", "--advertise", "node7")  # the network that this test has
    assert (named.hosts.grpc, named.advertise) == ("127.0.0.1", "node7:8001")


def test_a_server_that_others_find_and_can_t_reach_is_refused(settings):
    with pytest.raises(ConfigError, match="find this server in etcd and can't reach.*--advertise"):
        settings(*ETCD, "--host", OPEN)
    assert settings("--discovery", "etcd://127.0.0.1:2379").advertise == "127.0.0.1:8001"


@pytest.mark.parametrize(
    ("version", "hosts", "warns"),
    [
        ("2.51.0", Hosts(grpc=OPEN), True),
        ("2.70.0", Hosts(http=OPEN), True),
        ("2.71.0", Hosts(http=OPEN), False),
        ("2.51.0", Hosts(metrics=OPEN), False),
    ],
)
def test_an_old_triton_that_is_opened_warns_with_the_remedy(version, hosts, warns):
    console = Console(stream=(written := io.StringIO()))
    warn_of_old_triton(hosts, version, console)
    console.flush()
    assert ("old_triton_open" in written.getvalue()) == ("docker/Dockerfile.triton" in written.getvalue()) == warns


def test_in_a_cluster_other_pods_must_reach_grpc_and_the_records(settings, monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    cluster = ("--discovery", "kubernetes://mocker-workers")
    with pytest.raises(ConfigError, match="other hosts find this server in kubernetes and can't reach its gRPC port"):
        settings(*cluster)
    with pytest.raises(ConfigError, match=r"--health-host 127.0.0.1: other pods ask .* \$\(POD_IP\)"):
        settings(*cluster, "--advertise", "10.1.0.1")
    assert settings(*cluster, "--advertise", "10.1.0.1", "--health-host", OPEN).health_host == OPEN


def test_a_service_that_can_t_be_one_is_refused(settings):
    with pytest.raises(ConfigError, match="discovery.service: a/b; write a Service's NAME, or NAME.NAMESPACE"):
        settings("--discovery", "kubernetes://a/b", "--advertise", "10.1.0.1")
