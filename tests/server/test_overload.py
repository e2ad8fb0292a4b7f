"""A launch that is asked for several times what it can do refuses the rest, and stays ready."""

from __future__ import annotations

import collections
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.test_served_recipes import post, serving

pytestmark = pytest.mark.server

SECONDS = 20  # of load, and of canaries, one a second
NUM_TOKENS, STEP_MS, SLOTS = 20, 50, 2  # two workers answer four requests a second
RATE = 16.0
ENGINE = {"max_batch_size": SLOTS, "max_num_tokens": 64, "mocker": {"step_ms": STEP_MS}}


@pytest.fixture
def launch(tmp_path, sample_model):
    sample_model("llama")
    override = {
        "workers": {"decode": {"engine": "mocker", "replicas": 2, "engine_config": ENGINE}},
        "router": {"busy": [{"max_waiting_tokens": 30}]},
    }
    with serving("mocker", tmp_path / "log", "--override", json.dumps(override)) as served:
        yield served


def ask_at_a_rate(port, statuses, is_over):
    """Ask RATE times a second, whatever has been answered; count the answers' statuses."""
    body = {"model": "mocker", "prompt": "The oars of the upper bank move.", "max_tokens": NUM_TOKENS}
    began = time.monotonic()
    with ThreadPoolExecutor(128) as pool:
        number = 0
        while not is_over.wait(max(0.0, began + number / RATE - time.monotonic())):
            number += 1
            pool.submit(lambda: statuses.update([post(port, "/v1/completions", body)[0]]))


def test_busy_workers_refuse_and_no_look_finds_the_launch_not_ready(launch):
    statuses, looks, is_over = collections.Counter(), collections.Counter(), threading.Event()
    load = threading.Thread(target=ask_at_a_rate, args=(launch.ports["openai"], statuses, is_over))
    load.start()
    try:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            looks[launch.report()["status"]] += 1
            time.sleep(0.5)
    finally:
        is_over.set()
        load.join()
    assert statuses[503] > statuses[200] > 0 and set(statuses) == {200, 503}
    assert 'way=openai error="decode: all 2 workers are busy' in launch.log.read_text()  # a canary was refused, too
    assert set(looks) == {"ready"}, launch.log.read_text()
