"""Three launches in one discovery: two generations whose shares follow a weight, and one with other prompts."""

import json
import random
import shutil
import threading
import urllib.request
from collections import Counter

import pytest

from benchmarks.chaos.cluster import wait_for
from benchmarks.chaos.launch import Launch
from benchmarks.chaos.topologies import Topology
from bireme.kv.routing.generations import choose
from bireme.launch import free_port
from bireme.launch.admin_client import DoorClient

pytestmark = pytest.mark.server
KEY = "the-operator-s-own-key"
LIMIT_S = 180
SESSIONS = [f"session {number}" for number in range(40)]


class Generations:
    """Launch `old` with the frontend, `new` beside it with other weights and a door, `odd` with another template."""

    def __init__(self, folder, model):
        for name in ("new", "odd"):
            shutil.copytree(model, folder / f"tiny-{name}")
        (folder / "tiny-new" / "model.safetensors").write_bytes(b"other weights")
        (folder / "tiny-odd" / "chat_template.jinja").write_text("{{ messages }}")
        (folder / "key").write_text(KEY)
        door = free_port()
        self.door = DoorClient(f"http://127.0.0.1:{door}", KEY)
        shared = ("--canary-interval=0", "--discovery", str(folder / "shared"))
        new = ("--generation=1", "--weight=0", f"--admin-port={door}", f"--admin-key-file={folder / 'key'}")
        self.old = self._launch("old", folder, shared, has_frontend=True)
        self.new = self._launch("new", folder, (*shared, *new, "--set", f"model={folder / 'tiny-new'}"))
        self.odd = self._launch("odd", folder, (*shared, "--generation=2", "--set", f"model={folder / 'tiny-odd'}"))

    @staticmethod
    def _launch(name, folder, arguments, has_frontend=False):
        engine = {"mocker": {"step_ms": 1}}
        topology = Topology(name, "recipes/mocker", "models/tiny-llama", "mocker", {"decode": 1}, engine_config=engine)
        return Launch(topology, folder, arguments=arguments, has_frontend=has_frontend)

    def __enter__(self):
        starting = [threading.Thread(target=one.start) for one in (self.old, self.new, self.odd)]
        for thread in starting:
            thread.start()
        for thread in starting:
            thread.join()
        return self

    def __exit__(self, *_):
        for one in (self.old, self.new, self.odd):
            one.remove()

    def health(self):
        with urllib.request.urlopen(f"http://{self.old.addresses['health']}/health/ready", timeout=LIMIT_S) as page:
            return json.load(page)

    def worker_of(self, session):
        body = {"model": "mocker", "prompt": "One day", "max_tokens": 1}
        body["bireme"] = {"session_id": session, "return_timing": True}
        request = urllib.request.Request(
            f"http://{self.old.addresses['openai']}/v1/completions", json.dumps(body).encode()
        )
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
            return json.load(reply)["bireme"]["timing"][0]["decode_worker"]

    def served(self):
        names = {"decode": 0, f"decode@{self.new.addresses['grpc']}": 1}
        return {session: names[self.worker_of(session)] for session in SESSIONS}

    def counted(self):
        with urllib.request.urlopen(f"http://{self.old.addresses['openai']}/metrics", timeout=LIMIT_S) as page:
            lines = [line for line in page.read().decode().splitlines() if line.startswith("bireme_routed_generations")]
        return {line.split('generation="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


@pytest.fixture(scope="module")
def generations(sample_model, tmp_path_factory):
    with Generations(tmp_path_factory.mktemp("generations"), sample_model("llama")) as running:
        wait_for(lambda: running.health()["discovery"]["workers_elsewhere"] == 1, LIMIT_S, "the new one does not join")
        yield running


def test_the_newest_generation_s_share_follows_its_weight(generations):
    assert set(generations.served().values()) == {0}
    for weight in (0.3, 1.0, 0.0, None):
        told = generations.door.post("/weight", weight=weight)
        assert told == {"generation": 1, "weight": weight or 0.0}
        expected = {name: choose({0: 1.0, 1: weight or 0.0}, name, random.Random()) for name in SESSIONS}
        wait_for(lambda expected=expected: generations.served() == expected, LIMIT_S, f"weight {weight}: other shares")
    counted = generations.counted()
    assert set(counted) == {"0", "1"} and min(counted.values()) > len(SESSIONS)
    assert (
        0.15 < Counter(choose({0: 1.0, 1: 0.3}, name, random.Random()) for name in SESSIONS)[1] / len(SESSIONS) < 0.45
    )


def test_one_that_makes_other_prompts_is_refused_by_name(generations):
    name = f"decode@{generations.odd.addresses['grpc']}"
    wait_for(lambda: name in generations.health()["discovery"]["refused"], LIMIT_S, "it is not refused")
    health = generations.health()
    assert "tiny-odd makes other prompts than tiny-llama here (text revision" in health["discovery"]["refused"][name]
    assert health["status"] == "degraded" and health["generation"] == 0


def test_status_tells_generation_and_weight(generations):
    status = generations.door.status()
    assert (status["generation"], status["weight"], status["shares"]) == (1, 0.0, {"1": 0.0, "0": 1.0})
