"""One model on two tritonservers that share a folder: spread, drain, a server that leaves, a frontend of its own."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

from benchmarks.chaos.launch import Launch
from benchmarks.chaos.topologies import Topology
from bireme.config import CHECKOUT
from bireme.launch import free_port
from tools import drain

pytestmark = pytest.mark.server
LIMIT_S = 180
MODEL = "mocker-disagg"
SETTINGS = {"router": {"mode": "round_robin"}}


def topology(name):
    return Topology(
        name=name,
        recipe=f"recipes/{MODEL}",
        model="models/tiny-llama",
        served_name=MODEL,
        replicas={"prefill": 1, "decode": 1},
        engine_config={"mocker": {"step_ms": 20, "prefill_ms": 10}},
        settings=SETTINGS,
    )


class Servers:
    """Two launches, and a frontend that has none."""

    def __init__(self, folder):
        self.shared, self.log, self.port = folder / "shared", folder / "frontend.log", free_port()
        arguments = ("--discovery", str(self.shared), "--canary-interval=0")
        self.a, self.b = (Launch(topology(name), folder, arguments=arguments, has_frontend=False) for name in "ab")
        self.frontend = None

    def start(self):
        starting = [threading.Thread(target=launch.start) for launch in (self.a, self.b)]
        for thread in starting:
            thread.start()
        for thread in starting:
            thread.join()
        command = [sys.executable, "-m", "bireme.openai", "--recipe", f"recipes/{MODEL}", "--port", str(self.port)]
        command += ["--discovery", str(self.shared)]
        with self.log.open("wb") as log:
            environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "BIREME_OVERRIDE": json.dumps(SETTINGS)}
            self.frontend = subprocess.Popen(command, cwd=CHECKOUT, env=environment, stdout=log, stderr=log)
        self.until(lambda: len(self.workers()) == 4)

    def stop(self):
        if self.frontend is not None:
            self.frontend.terminate()
            self.frontend.wait(LIMIT_S)
        for launch in (self.a, self.b):
            launch.remove()

    def get(self, path, body=None):
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
            return json.load(reply)

    def workers(self):
        """Return worker id -> state, as the frontend has it; {} while it does not answer."""
        try:
            return self.get("/health/ready")["models"][MODEL]
        except OSError:
            return {}

    def decode_of(self, launch):
        return f"decode@{launch.addresses['grpc']}"

    def ask(self, length=4):
        body = {"model": MODEL, "prompt": "the oars of the upper bank", "max_tokens": length}
        return self.get("/v1/completions", body | {"bireme": {"ignore_eos": True}})["choices"][0]["text"]

    def served_by(self, count):
        """Return the decode workers that served a number of requests of the frontend's."""
        before = self.counts()
        texts = {self.ask() for _ in range(count)}
        assert len(texts) == 1
        return {name for name, number in self.counts().items() if number > before.get(name, 0) and "decode" in name}

    def counts(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=LIMIT_S) as page:
            lines = [line for line in page.read().decode().splitlines() if line.startswith("bireme_routed_total{")]
        return {line.split('target="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}

    def until(self, condition):
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.1)


@pytest.fixture(scope="module")
def servers(sample_model, tmp_path_factory):
    sample_model("llama")
    running = Servers(tmp_path_factory.mktemp("two"))
    try:
        running.start()
        yield running
    finally:
        running.stop()


def test_the_model_is_listed_once_and_requests_spread(servers):
    assert [model["id"] for model in servers.get("/v1/models")["data"]] == [MODEL]
    assert servers.served_by(6) == {servers.decode_of(servers.a), servers.decode_of(servers.b)}


def test_a_pipeline_of_one_server_uses_the_other_s_workers(servers):
    url = f"http://{servers.a.addresses['http']}/v2/models/completion/generate"
    used, texts = set(), set()
    for _ in range(6):
        body = json.dumps({"text_input": "the oars of the lower bank", "max_tokens": 4}).encode()
        with urllib.request.urlopen(url, body, timeout=LIMIT_S) as reply:
            answer = json.load(reply)
        texts.add(answer["text_output"])
        used.add(json.loads(answer["usage"])["decode_worker"])
    assert used == {"decode", servers.decode_of(servers.b)} and len(texts) == 1


def test_a_worker_that_is_drained_gets_nothing_new_until_it_is_put_back(servers):
    folder, name = str(servers.b.run_folder()), servers.decode_of(servers.b)
    assert drain.main(["decode", "--run-folder", folder]) == 0
    servers.until(lambda: servers.workers().get(name) == "draining")
    assert servers.served_by(4) == {servers.decode_of(servers.a)}
    assert drain.main(["decode", "--run-folder", folder, "--undo"]) == 0
    servers.until(lambda: servers.workers().get(name) == "ready")
    assert name in servers.served_by(4)


def test_a_server_that_is_told_to_end_takes_nothing_new_and_ends_what_it_has(servers):
    expected = servers.ask(100)
    answers = []
    asking = [threading.Thread(target=lambda: answers.append(servers.ask(100))) for _ in range(4)]
    for thread in asking:
        thread.start()
    os.kill(servers.b.pid, signal.SIGTERM)
    for thread in asking:
        thread.join()
    assert answers == [expected] * 4
    assert servers.b.wait(LIMIT_S) == 0 and servers.b.left_over() == []
    servers.until(
        lambda: set(servers.workers()) == {servers.decode_of(servers.a), f"prefill@{servers.a.addresses['grpc']}"}
    )
    assert servers.served_by(2) == {servers.decode_of(servers.a)}
