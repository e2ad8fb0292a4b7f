"""What serve.py --dump-config-to says of a launch that is ready."""

import json
import stat
import time

import pytest

from tests.server.openai_served import LIMIT_S, PORTS

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def config(chat_deployment):
    deadline = time.monotonic() + LIMIT_S
    while (found := json.loads(chat_deployment.config.read_text()))["state"] != "ready":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_it_says_which_path_each_engine_s_steps_take(config, chat_deployment):
    worker = config["workers"]["decode"]
    (logged,) = {line.partition("step_paths ")[2] for line in chat_deployment.log.read_text().splitlines()} - {""}
    assert worker["step_paths"] == logged.strip().split(",")
    assert worker["num_blocks"] > 0 and worker["dtype"] and worker["life"] > 0


def test_it_says_what_runs_and_where(config, chat_deployment):
    assert config["versions"]["tritonserver"].count(".") == 2
    assert config["ports"] == {name: f"127.0.0.1:{port}" for name, port in PORTS.items()} | {
        "advertised_grpc": f"127.0.0.1:{PORTS['grpc']}"
    }
    assert config["options"]["http_port"] == {"value": PORTS["http"], "source": "--http-port"}
    assert stat.S_IMODE(chat_deployment.config.stat().st_mode) == 0o600
