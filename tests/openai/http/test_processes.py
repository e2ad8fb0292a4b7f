"""Several processes behind one port: started, counted together, revived, ended together."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from bireme.config import MetricsConfig, Recipe, WorkerEntry
from bireme.launch.ports import free_port
from bireme.launch.processes import children
from bireme.metric_aliases import aliases_of_frontend
from bireme.metrics import MetricDelta, Registry
from bireme.openai.http.members import Member, shared_socket
from bireme.openai.keys import ApiKeys, KeyEntry
from bireme.openai.metrics_page import MetricsPage

LIMIT_S = 120


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=LIMIT_S) as reply:
        return reply.read().decode()


def wait_for(condition):
    deadline = time.monotonic() + LIMIT_S
    while True:
        with contextlib.suppress(OSError):
            if found := condition():
                return found
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def group():
    """Two processes that need no tritonserver to live, and their port."""
    port = free_port()
    command = [sys.executable, "-m", "bireme.openai", "--recipe", "recipes/tiny-chat", "--grpc", "127.0.0.1:1"]
    kept = json.dumps({"observability": {"timelines": {"max_entries": 10}}})
    process = subprocess.Popen(
        [*command, "--port", str(port), "--processes", "2", "--log-level", "warning"],
        env={**os.environ, "BIREME_OVERRIDE": kept},
    )
    wait_for(lambda: get(port, "/health/live") and len(listeners(port)) == 2)
    yield process, port
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0


def listeners(port):
    """Return the sockets that listen on a port."""
    with open("/proc/net/tcp") as table:
        return [line for line in table if f":{port:04X} 00000000:0000 0A" in line]


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_processes_share_the_port_of_a_name(monkeypatch, family):
    address = {socket.AF_INET: ("127.0.0.1", 0), socket.AF_INET6: ("::1", 0, 0, 0)}[family]
    found = [(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", address)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    port = free_port()
    with shared_socket("host.example", port) as one, shared_socket("host.example", port) as other:
        assert one.family == other.family == family and one.getsockname()[:2] == (address[0], port)


def num_counted(port):
    found = re.search(
        r'bireme_http_requests_total\{[^}]*path="/health/live",status="200"[^}]*\} ([\d.]+)', get(port, "/metrics")
    )
    return float(found.group(1)) if found else 0.0


def test_whoever_is_asked_shows_the_counts_of_all(group):
    _, port = group
    before = num_counted(port)
    for _ in range(40):  # each a connection of its own
        get(port, "/health/live")
    assert {num_counted(port) for _ in range(10)} == {before + 40}


def test_whoever_is_watched_shows_the_live_state_of_all(group):
    _, port = group
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/live", timeout=LIMIT_S) as events:
        state = json.loads(events.readline().removeprefix(b"data: "))
    assert state["processes"] == {"count": 2, "answered": 2} and state["models"][0]["name"] == "tiny-chat"


def test_whoever_is_asked_finds_the_timeline_of_a_request(group):
    _, port = group
    url, headers = (
        f"http://127.0.0.1:{port}/v1/completions",
        {"x-request-id": "mine", "content-type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(
            urllib.request.Request(url, b'{"model": "nobody", "prompt": "hi"}', headers), timeout=LIMIT_S
        )
    for _ in range(10):  # each a connection of its own
        found = json.loads(get(port, "/v1/requests/mine/timeline"))
        assert (found["state"], "model_not_found" in found["error"]) == ("failed", True)


@pytest.mark.flaky(reruns=1)
def test_one_that_dies_is_started_again(group):
    process, port = group
    victim = children(process.pid)[0]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: victim not in children(process.pid) and len(listeners(port)) == 2)
    assert get(port, "/health/live") == '{"status":"live"}'


def test_ctrl_c_in_a_terminal_reaches_the_parent_alone(group):
    """A terminal signals a process group. Members would get it twice, from the parent too, and end without draining."""
    process, _ = group
    members = children(process.pid)
    assert len(members) == 2
    assert os.getpgid(process.pid) not in {os.getpgid(member) for member in members}


def test_a_wrong_option_ends_all_at_once(tmp_path):
    command = [sys.executable, "-m", "bireme.openai", "--recipe", str(tmp_path), "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2 and "recipe.yaml" in done.stderr


async def test_totals_of_another_process_are_added(tmp_path):
    registries = [Registry("frontend"), Registry("frontend")]
    pages = [MetricsPage(registry) for registry in registries]
    for registry in registries:
        registry.add("bireme_requests_total", 2, "stop")
        registry.observe("bireme_request_seconds", 0.1)
        registry.set("bireme_http_requests_active", 3)
    server = await Member(1, 2, tmp_path).tell(pages[1].totals)
    text = pages[0].text(await Member(0, 2, tmp_path).ask_totals()).decode()
    server.close()
    assert 'bireme_requests_total{outcome="stop",worker="frontend"} 4.0' in text
    assert 'bireme_http_requests_active{worker="frontend"} 6.0' in text
    assert 'bireme_request_seconds_count{worker="frontend"} 2.0' in text


async def test_other_names_are_added_and_what_all_processes_say_is_not(tmp_path):
    recipe = Recipe(
        model="m",
        workers={"decode": WorkerEntry(engine="mocker")},
        name="galley",
        metrics=MetricsConfig(aliases=("dynamo",)),
    )
    own = [Registry("frontend"), Registry("frontend")]
    pages = [MetricsPage(one, {one: aliases_of_frontend(recipe, "frontend")}) for one in own]
    for registry in own:
        registry.count_end("stop", 0.1)
        registry.set("bireme_model_requests_active", 3, "galley")
    same = aliases_of_frontend(recipe, "frontend").translate(
        MetricDelta([], [("bireme_engine_max_seq_len", ("frontend",), 512.0)], [])
    )
    server = await Member(1, 2, tmp_path).tell(pages[1].totals)
    text = pages[0].text(await Member(0, 2, tmp_path).ask_totals(), levels=[same]).decode()
    server.close()
    assert 'dynamo_frontend_requests_total{model="galley",status="success"} 2.0' in text
    assert 'dynamo_frontend_request_duration_seconds_count{model="galley"} 2.0' in text
    assert 'dynamo_frontend_active_requests{model="galley"} 6.0' in text
    assert 'dynamo_frontend_model_context_length{model="galley"} 512.0' in text


async def test_a_process_that_does_not_answer_is_left_out(tmp_path):
    assert await Member(0, 3, tmp_path).ask_totals() == []


def test_a_keys_limits_are_divided(tmp_path):
    entry = KeyEntry(name="a", sha256="0" * 64, max_concurrent_requests=3)
    keys = ApiKeys((entry,), Member(0, 2, tmp_path).share_of)
    tenant = keys._tenants[0][1]
    tenant.begin()
    tenant.begin()
    with pytest.raises(Exception, match="2 requests of this key"):
        tenant.begin()
