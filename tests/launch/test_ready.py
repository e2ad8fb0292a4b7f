"""When a launch is ready and says so, whatever its start met with; its tritonserver and frontend are stand-ins."""

import contextlib
import http.server
import io
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from bireme.launch import deployment
from bireme.launch.console import Console
from bireme.launch.deployment import Deployment, DeploymentSettings
from bireme.launch.frontend import FrontendProcess, FrontendSettings
from bireme.launch.installation import Installation
from bireme.launch.run_folder import RunFolder
from bireme.launch.tritonserver import ServerDiedError
from bireme.recipe_files import load_recipe

LIMIT_S = 20


class StandInServer:
    http = grpc = metrics = "127.0.0.1:1"
    pid, returncode = 1, -6

    def __init__(self):
        self._ended = threading.Event()
        self.wait = self._ended.wait

    @property
    def is_running(self):
        return not self._ended.is_set()

    def tail(self, lines):
        return ""

    def kill(self):
        self._ended.set()

    def stop(self, timeout_s):
        self.kill()
        return 0


class Launch(Deployment):
    """Ready as soon as its frontend's door is open."""

    num_deaths = 0  # of servers while they load, from the first

    def _start_server(self):
        self._server = StandInServer()
        if self.num_deaths:
            self.num_deaths -= 1
            self._server.kill()
            raise ServerDiedError("tritonserver exited with code -6")
        self._monitor = SimpleNamespace(report=self._report, stop=lambda: None)

    def _report(self):
        return {"status": "not_ready" if self._frontend and self._frontend.door.problem else "ready"}


class Answering(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def frontend(monkeypatch):
    """The settings of one that answers, from a thread of this process."""
    process = SimpleNamespace(
        pid=1, exit_code=None, signal=lambda number: None, wait=lambda timeout_s: True, reap=lambda: 0
    )
    monkeypatch.setattr(FrontendProcess, "_spawn", lambda self: process)
    monkeypatch.setattr(FrontendProcess, "roles", lambda self: {})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield FrontendSettings(recipe="r", grpc="127.0.0.1:1", port=server.server_address[1])
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def log():
    return io.StringIO()


@pytest.fixture
def make_launch(monkeypatch, tmp_path, log):
    monkeypatch.setattr(deployment, "check_all", lambda *_: Installation(Path("tritonserver")))

    def make(**settings):
        recipe = load_recipe("recipes/mocker")
        return Launch(
            DeploymentSettings(recipe=recipe, health_port=0, **settings), Console(stream=log), RunFolder(tmp_path)
        )

    return make


@contextlib.contextmanager
def started(launch):
    thread = threading.Thread(target=launch.start, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    try:
        assert not thread.is_alive(), launch.health()
        yield
    finally:
        launch.server.kill()
        launch.stop()


def ready_lines(log):
    return log.getvalue().count("serve  | ready seconds=")


def test_a_server_that_dies_in_its_first_load_does_not_keep_the_launch_from_waiting_for_its_frontend(
    make_launch, frontend, log
):
    launch = make_launch(frontend=frontend)
    launch.num_deaths = 2
    with started(launch):
        assert launch.health()["status"] == "ready" and ready_lines(log) == 1
        assert log.getvalue().index("frontend_ready") < log.getvalue().index("| ready")


def test_a_thread_that_the_system_had_no_room_for_does_not_keep_the_launch_from_being_ready(
    make_launch, monkeypatch, log
):
    start, failures = threading.Thread.start, iter([RuntimeError("can't start new thread")])

    def start_if_there_is_room(thread):
        if thread.name == "run-folder" and (error := next(failures, None)):
            raise error
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_if_there_is_room)
    with started(make_launch()):
        assert "thread_not_started thread=run-folder" in log.getvalue() and ready_lines(log) == 1


def test_a_server_that_dies_later_is_ready_again_and_told_so(make_launch, frontend, log):
    launch = make_launch(frontend=frontend)
    with started(launch):
        supervisor = threading.Thread(target=launch.supervise)
        supervisor.start()
        launch.server.kill()
        deadline = time.monotonic() + LIMIT_S
        while ready_lines(log) < 2:
            assert time.monotonic() < deadline, log.getvalue()
            time.sleep(0.01)
        assert supervisor.is_alive()
        launch.request_stop()
        supervisor.join(LIMIT_S)
