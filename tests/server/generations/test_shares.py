"""Two generations' shares of new requests follow a weight, and a launch that makes other prompts has none."""

import json
import random
from collections import Counter

import pytest

from bireme.kv.routing.generations import choose
from tests.server.generations.rolling_turns import wait_for

pytestmark = pytest.mark.server
SESSIONS = [f"session {number}" for number in range(40)]


@pytest.fixture(scope="module", autouse=True)
def started(generations):
    """Whatever was asked for before."""
    for launch in (generations.old, generations.new):
        launch.door.post("/undrain")
        launch.door.post("/weight", weight=None)


def health(launch):
    return json.loads(launch.call("GET", "/health/ready", at="health")[1])


def served(generations):
    """Return the generation of each session's request."""
    names = {"decode": 0, f"decode@127.0.0.1:{generations.new.ports['grpc']}": 1}
    found = {}
    for session in SESSIONS:
        body = {"model": "mocker", "prompt": "One day", "max_tokens": 1}
        body["bireme"] = {"session_id": session, "return_timing": True}
        status, answer = generations.old.call("POST", "/v1/completions", body)
        assert status == 200, answer
        found[session] = names[json.loads(answer)["bireme"]["timing"][0]["decode_worker"]]
    return found


def counted(launch):
    page = launch.call("GET", "/metrics")[1].decode()
    lines = [line for line in page.splitlines() if line.startswith("bireme_routed_generations")]
    return {line.split('generation="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


def test_the_newest_generation_s_share_follows_its_weight(generations):
    wait_for(lambda: set(served(generations).values()) == {0})
    for weight in (0.3, 1.0, 0.0, None):
        told = generations.new.door.post("/weight", weight=weight)
        assert told == {"generation": 1, "weight": weight or 0.0}
        expected = {name: choose({0: 1.0, 1: weight or 0.0}, name, random.Random()) for name in SESSIONS}
        wait_for(lambda expected=expected: served(generations) == expected)
    found = counted(generations.old)
    assert set(found) == {"0", "1"} and min(found.values()) > len(SESSIONS)
    assert (
        0.15 < Counter(choose({0: 1.0, 1: 0.3}, name, random.Random()) for name in SESSIONS)[1] / len(SESSIONS) < 0.45
    )


def test_one_that_makes_other_prompts_is_refused_by_name(generations):
    name = f"decode@127.0.0.1:{generations.odd.ports['grpc']}"
    wait_for(lambda: name in health(generations.old)["discovery"]["refused"])
    found = health(generations.old)
    assert "tiny-odd makes other prompts than tiny-llama here (text revision" in found["discovery"]["refused"][name]
    assert found["status"] == "degraded" and found["generation"] == 0


def test_status_tells_generation_weight_and_shares(generations):
    status = generations.new.door.status()
    assert (status["generation"], status["weight"], status["shares"]) == (1, 0.0, {"1": 0.0, "0": 1.0})
