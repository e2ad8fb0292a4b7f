"""What the launches of recipes listen on is what docs/security.md says, as the kernel tells it."""

import os
import re
from collections import Counter

import pytest

from bireme.config import CHECKOUT
from bireme.launch import free_port, processes
from bireme.launch.console import Console
from bireme.launch.deployment import Deployment
from bireme.launch.run_folder import RunFolder
from tests.kv.transfer.needs import needs_nixl
from tests.listening import family, tcp_listeners, unix_listeners
from tools import serve

pytestmark = pytest.mark.server

# Each option names an address of its own, so that a socket shows which of them it obeys.
HOSTS = {
    "--host": "127.0.0.2",
    "--triton-host": "127.0.0.3",
    "--grpc-host": "127.0.0.4",
    "--metrics-host": "127.0.0.5",
    "--health-host": "127.0.0.6",
    "kv_events.host": "127.0.0.7",
    "--admin-host": "127.0.0.8",
    "UCX_NET_DEVICES": "127.0.0.1",  # lo
    "every address": "0.0.0.0",
}
ADMIN = ("--admin-port", str(free_port()), "--admin-key-file", "KEY_FILE")
PORTS = ("openai", "http", "grpc", "metrics", "health")
NIXL = '{"engine_config": {"cache_transceiver_config": {"backend": "NIXL"}}}'
BY_NIXL = ("--override", f'{{"workers": {{"prefill": {NIXL}, "decode": {NIXL}}}}}')
SHARED = ("--discovery", "SHARED", "--advertise", "localhost")  # a name: it may be of any network
CASES = {
    "disaggregated": (ADMIN, ("--admin-port",)),
    "events": (("--set", "kv_events.host=127.0.0.7", "--set", "workers.decode.replicas=2"), ("kv_events.host",)),
    "nixl": (BY_NIXL, ()),
    "nixl-shared": ((*BY_NIXL, *SHARED), ("NIXL between hosts",)),
}


def table(conditions):
    """Return {(process, port, address)} of the table's rows that hold always, or under one of the conditions."""
    page = (CHECKOUT / "docs" / "security.md").read_text()
    part = page.partition("## What listens")[2].partition("\n## ")[0]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:5]] for line in part.splitlines() if line.startswith("|")]
    return {(process, port, HOSTS[host]) for process, port, host, when in rows[2:] if when in ("always", *conditions)}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=needs_nixl if "nixl" in name else ()) for name in CASES]
)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def before():
    """What this process listens on for pytest's plugins."""
    return tcp_listeners([os.getpid()])


@pytest.fixture(scope="module")
def launch(before, case, sample_model, tmp_path_factory):
    sample_model("llama")
    folder = tmp_path_factory.mktemp(case)
    shared = folder / "shared"
    shared.mkdir(mode=0o700)
    (folder / "key").write_text("k" * 16)
    places = {"SHARED": str(shared), "KEY_FILE": str(folder / "key")}
    options = [places.get(word, word) for word in CASES[case][0]]
    hosts = [f"{option}={host}" for option, host in HOSTS.items() if option.startswith("--")]
    ports = [f"--{name}-port={free_port()}" for name in PORTS]
    run_folder = RunFolder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIREME_KEY", "ab" * 32)
        if "shared" in case:
            patch.setenv("UCX_NET_DEVICES", "lo")
        settings = serve.settings_of(serve.parse(["recipes/tiny", *options, *hosts, *ports]), run_folder)
        with Deployment(settings, Console("warning"), run_folder) as launch:
            yield launch
            launch.kill()


def role(pid):
    words = " ".join(processes.command_line(pid))
    if pid == os.getpid():
        return "serve.py"
    return next(name for name, sign in ROLES.items() if sign in words)


ROLES = {"frontend": "-m bireme.openai", "engine": "-m bireme.engines.worker", "tritonserver": "bin/tritonserver "}


def test_a_launch_listens_where_the_page_says_and_nowhere_else(before, launch, case):
    settings = launch.settings
    named = {getattr(settings.ports, name): f"--{name}-port" for name in ("http", "grpc", "metrics")}
    named |= {settings.health_port: "--health-port", settings.frontend.port: "--openai-port"}
    named |= {settings.admin.port: "--admin-port"} if settings.admin else {}
    found = {address: pid for address, pid in tcp_listeners(family(os.getpid())).items() if address not in before}
    sockets = Counter((role(pid), named.get(port, "any"), address) for (address, port), pid in found.items())
    assert set(sockets) == table(CASES[case][1])
    assert all(count == 1 for (_, port, _), count in sockets.items() if port != "any")


def test_its_unix_sockets_lie_in_the_run_folder(launch):
    paths = unix_listeners(family(os.getpid()))
    assert paths and not [path for path in paths if not re.match(f"{launch.run_folder.path}/[^/]+$", path)]
    assert launch.run_folder.path.stat().st_mode & 0o77 == 0
