"""An operator acts on a running launch by its admin door: bounds, log level, drain, and when it may be ended."""

import http.client
import json
import threading
import time
import urllib.error
import urllib.request

import pytest

from bireme.errors import BiremeError
from bireme.launch import free_port
from bireme.launch.admin_client import DoorClient
from tests.server.openai_served import five_ports, served

pytestmark = pytest.mark.server
KEY = "the-operator-s-own-key"
LIMIT_S, ENDLESS = 60, 100_000
OVERRIDE = (
    "workers.decode.replicas=2",
    "workers.decode.engine_config.mocker.step_ms=20",
    "router.mode=least_loaded",
)


@pytest.fixture(scope="module")
def launch(sample_model, tmp_path_factory):
    sample_model("llama")
    folder = tmp_path_factory.mktemp("admin")
    (folder / "key").write_text(KEY)
    ports, admin = five_ports(), free_port()
    options = [word for setting in OVERRIDE for word in ("--set", setting)]
    options += [f"--admin-port={admin}", f"--admin-key-file={folder / 'key'}"]
    with served("recipes/mocker", folder / "log", *options, ports=ports) as running:
        running.door = DoorClient(f"http://127.0.0.1:{admin}", KEY)
        running.ports = ports
        wait_for(lambda: running.door.status()["status"] == "ready")
        yield running


def wait_for(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def complete(launch, **fields):
    body = {"model": "mocker", "prompt": "One day", "max_tokens": 1} | fields
    request = urllib.request.Request(f"{launch.url}/v1/completions", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
        return json.load(reply)


def generate(launch, **fields):
    url = f"http://127.0.0.1:{launch.ports['http']}/v2/models/generate/generate"
    body = {"text_input": "One day", "max_tokens": 1} | fields
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=LIMIT_S) as reply:
        return json.load(reply)


def is_refused(ask, launch):
    try:
        ask(launch)
    except urllib.error.HTTPError as error:
        return "are busy (router.busy)" in error.read().decode()
    return False


class Stream:
    """A completion that never ends by itself, `n` times at once."""

    def __init__(self, launch, n=1):
        body = {"model": "mocker", "prompt": "One day", "max_tokens": ENDLESS, "n": n, "stream": True}
        self._connection = http.client.HTTPConnection("127.0.0.1", launch.ports["openai"], timeout=LIMIT_S)
        body = json.dumps(body | {"ignore_eos": True})
        self._connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        self._reply = self._connection.getresponse()

    def goes_on(self):
        """Return whether what it makes from now on comes."""
        self._reply.read1(1 << 20)
        return all(self._reply.readline().startswith((b"data: {", b"\n")) for _ in range(50))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._reply.close()
        self._connection.close()


def test_bounds_of_busy_workers_are_set_in_frontend_and_pipelines_and_taken_back(launch):
    with Stream(launch, n=2) as held:
        wait_for(lambda: all(one["in_flight_requests"] for one in launch.door.status()["workers"].values()))
        launch.door.post("/busy", rules=[{"max_kv_usage": 1e-9}])
        wait_for(lambda: is_refused(complete, launch))
        wait_for(lambda: is_refused(generate, launch))
        assert held.goes_on()  # bounds are for new requests alone
        launch.door.post("/busy", rules=None)
        wait_for(lambda: not is_refused(complete, launch))
        wait_for(lambda: not is_refused(generate, launch))
        assert held.goes_on()


def test_a_log_level_reaches_every_process_and_is_taken_back(launch):
    who = ("frontend", "generate", "tokenizer", "decode", "decode_1")
    for level, told in (("debug", "debug"), (None, "info")):
        launch.door.post("/log-level", level=level)
        wait_for(lambda text=f"log_level level={told}": {_source(line) for line in _lines(launch, text)} >= set(who))
    wait_for(lambda: sum("engine[" in line for line in _lines(launch, "log_level level=info")) == 2)


def _lines(launch, text):
    return [line for line in launch.log.read_text().splitlines() if text in line]


def _source(line):
    return line.split("|")[0].split()[-1]


def test_of_two_workers_one_can_drain_and_the_last_one_is_refused(launch):
    launch.door.post("/drain", worker="decode_1")
    wait_for(lambda: launch.door.status()["workers"]["decode_1"]["state"] == "draining")
    with pytest.raises(BiremeError, match="decode is the last of decode"):
        launch.door.post("/drain", worker="decode")
    assert complete(launch)["choices"]
    launch.door.post("/undrain", worker="decode_1")
    wait_for(lambda: launch.door.status()["workers"]["decode_1"]["state"] == "ready")


def test_a_drained_launch_answers_what_it_has_and_may_then_be_ended(launch):
    answers = []
    running = threading.Thread(target=lambda: answers.append(complete(launch, max_tokens=100, ignore_eos=True)))
    running.start()
    viewer = urllib.request.urlopen(f"{launch.url}/v1/live", timeout=LIMIT_S)
    with Stream(launch) as held:
        wait_for(lambda: answers or launch.door.status()["in_flight_requests"] == 2)
        launch.door.post("/drain")
        wait_for(lambda: readiness(launch.ports["openai"]) == readiness(launch.ports["health"]) == (503, "draining"))
        status = launch.door.status()
        assert not status["safe_to_delete"] and "requests are under way" in status["reasons"][0]
        assert held.goes_on()
    wait_for(lambda: launch.door.status()["safe_to_delete"])
    running.join(LIMIT_S)
    assert answers[0]["usage"]["completion_tokens"] == 100
    assert viewer.read().endswith(b"data: [DONE]\n\n")  # who watches keeps no launch from its end
    launch.door.post("/undrain")
    wait_for(lambda: readiness(launch.ports["openai"])[0] == readiness(launch.ports["health"])[0] == 200)


def readiness(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health/ready")
        response = connection.getresponse()
        return response.status, json.loads(response.read())["status"]
    finally:
        connection.close()
