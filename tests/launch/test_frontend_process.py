"""The frontend of a launch is started again whatever went wrong with starting it."""

import io
import os
import signal
import threading
import time
from unittest.mock import Mock

import pytest

from bireme.errors import ConfigError
from bireme.launch.console import Console
from bireme.launch.frontend import FrontendProcess, FrontendSettings
from bireme.launch.ports import free_port
from bireme.launch.processes import children

LIMIT_S = 120
# Answers as a frontend does, and nothing else: what is tested is who starts it.
STAND_IN = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """What the frontend is started with; a test may change it. Python finds the stand-in in the working directory."""
    package = tmp_path / "bireme"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "openai.py").write_text(STAND_IN)
    monkeypatch.chdir(tmp_path)
    return {}


@pytest.fixture
def log():
    return io.StringIO()


@pytest.fixture
def frontend(environment, log):
    settings = FrontendSettings(
        recipe="r", grpc="127.0.0.1:1", port=free_port(), drain_timeout_s=1, environment=environment
    )
    with FrontendProcess(settings, Console(stream=log)) as process:
        yield process


def until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.flaky(reruns=1)
def test_a_killed_frontend_is_started_again_and_the_door_tells_when(frontend):
    before = frontend.pid
    os.kill(before, signal.SIGKILL)
    until(lambda: frontend.problems() == {"frontend": f"process {before} has ended"})
    until(lambda: frontend.door.problem)
    until(lambda: frontend.pid != before and not frontend.door.problem)


@pytest.mark.flaky(reruns=1)
def test_a_stopped_frontend_is_told_at_once_and_replaced(frontend):
    before = frontend.pid
    os.kill(before, signal.SIGSTOP)
    until(lambda: frontend.problems() == {"frontend": f"process {before} is stopped"})
    until(lambda: frontend.pid != before and not frontend.door.problem)


@pytest.mark.flaky(reruns=1)
def test_a_start_that_fails_is_tried_again(frontend, environment, log):
    before = frontend.pid
    environment["BROKEN"] = "\0"  # no process can be started with this, as with no descriptor or memory left
    os.kill(before, signal.SIGKILL)
    until(lambda: "turn_failed thread=frontend" in log.getvalue() and frontend.door.problem)
    del environment["BROKEN"]
    until(lambda: frontend.pid != before and not frontend.door.problem)


def test_a_frontend_that_nobody_could_listen_to_is_ended(environment, log, monkeypatch):
    """No thread is left for its lines: nothing would know of it."""
    settings = FrontendSettings(
        recipe="r", grpc="127.0.0.1:1", port=free_port(), drain_timeout_s=1, environment=environment
    )
    before = set(children(os.getpid()))
    frontend = FrontendProcess(settings, Console(stream=log))
    monkeypatch.setattr(threading, "Thread", Mock(side_effect=RuntimeError("can't start new thread")))
    with pytest.raises(ConfigError, match="can't start new thread"):
        frontend.spawn()
    assert set(children(os.getpid())) == before
