"""The engine process as a program: tied to its parent, stopped politely, run by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import zmq

from bireme.engines.stub.environment import engine_environment
from bireme.messages import CONTROL, STUB, Commands, Hello, Ping, Pong, decode_control, encode, frame, split
from tests.engines.engine_fixtures import wait_for


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Stub:
    """The other end of an engine process's sockets."""

    def __init__(self, folder):
        self.endpoint = f"ipc://{folder}/e"
        self.context = zmq.Context()
        self.commands, self.frames = self.context.socket(zmq.PUSH), self.context.socket(zmq.PULL)
        self.commands.bind(self.endpoint + ".c")
        self.frames.bind(self.endpoint + ".s")

    def read(self, timeout_s=20.0):
        assert self.frames.poll(timeout_s * 1000), "no frame"
        consumer, payload = split(self.frames.recv())
        assert consumer == CONTROL
        return decode_control(payload)

    def ping(self, number):
        self.commands.send(frame(STUB, encode(Commands(1, [Ping(number)]))))

    def close(self):
        self.context.destroy(0)


@pytest.fixture
def stub(tmp_path):
    stub = Stub(tmp_path)
    yield stub
    stub.close()


@pytest.fixture
def run_worker(tmp_path, stub):
    processes: list[subprocess.Popen] = []

    def run(recipe, *arguments):
        command = [
            sys.executable,
            "-m",
            "bireme.engines.worker",
            "--worker",
            "decode",
            "--endpoint",
            stub.endpoint,
        ]
        environment = engine_environment(recipe, "decode", tmp_path)
        process = subprocess.Popen([*command, *arguments], env=environment, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def test_by_hand_it_says_hello_and_ends_with_zero_on_sigterm(run_worker, make_recipe, stub):
    process = run_worker(make_recipe())
    hello = stub.read()
    assert isinstance(hello, Hello)
    assert (hello.error, hello.life) == ("", 1)
    process.terminate()
    _, log = process.communicate(timeout=10)
    assert process.returncode == 0
    assert "engine_stopped life=1" in log


def test_pings_are_answered_while_it_loads(run_worker, make_recipe, stub):
    run_worker(make_recipe(load_ms=60_000))
    stub.ping(1)
    pong = stub.read()
    assert isinstance(pong, Pong)
    assert (pong.number, pong.step, pong.num_running) == (1, 0, 0)


def test_sigterm_ends_it_at_once_while_it_loads(run_worker, make_recipe, stub):
    process = run_worker(make_recipe(load_ms=60_000))
    stub.ping(1)
    stub.read()
    process.terminate()
    assert process.wait(10) == -signal.SIGTERM


def test_a_failed_load_says_hello_with_the_error(run_worker, make_recipe, stub):
    process = run_worker(make_recipe(vocab_size=0))
    hello = stub.read()
    assert isinstance(hello, Hello)
    assert hello.error.startswith("FAILED_PRECONDITION: mocker: no tokenizer.json")
    assert process.wait(10) == 78


def test_a_worker_whose_parent_is_gone_does_not_start(run_worker, make_recipe):
    process = run_worker(make_recipe(), "--parent", "1")
    _, log = process.communicate(timeout=10)
    assert process.returncode == 1
    assert "parent 1 has died" in log


@pytest.mark.flaky(reruns=1)
def test_the_engine_dies_with_its_stub(make_recipe, tmp_path):
    make_recipe()
    folder = tmp_path / "run"
    program = f"""
        import logging, time
        from pathlib import Path
        from bireme.recipe_files import load_recipe
        from bireme.engines.stub.client import EngineClient
        from bireme.metrics import Registry
        recipe = load_recipe({str(tmp_path)!r}, override="")
        client = EngineClient(recipe, "decode", Registry(), logging.getLogger(), Path({str(folder)!r}))
        client.start()
        print(client.pid, flush=True)
        time.sleep(60)
    """
    folder.mkdir()
    stub = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    pid = int(stub.stdout.readline())
    assert is_alive(pid)
    stub.kill()
    stub.communicate()
    wait_for(lambda: not is_alive(pid), 5)


@pytest.mark.flaky(reruns=1)
def test_a_stub_whose_server_has_died_ends_itself_and_its_engine(make_recipe, tmp_path):
    make_recipe()
    folder = tmp_path / "run"
    folder.mkdir()
    stub_program = f"""
        import functools, logging, os, time
        from pathlib import Path
        from bireme.own_process import watch_parent
        from bireme.recipe_files import load_recipe
        from bireme.engines.stub.client import EngineClient
        from bireme.metrics import Registry
        watch_parent(functools.partial(os._exit, 1))
        recipe = load_recipe({str(tmp_path)!r}, override="")
        client = EngineClient(recipe, "decode", Registry(), logging.getLogger(), Path({str(folder)!r}))
        client.start()
        print(os.getpid(), client.pid, flush=True)
        time.sleep(60)
    """
    server_program = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {textwrap.dedent(stub_program)!r}])"
    )
    server = subprocess.Popen([sys.executable, "-c", server_program], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in server.stdout.readline().split()]
    assert all(map(is_alive, pids))
    server.kill()
    server.stdout.close()
    server.wait()
    wait_for(lambda: not any(map(is_alive, pids)), 5)


def test_nothing_heavy_is_imported_before_the_parent_is_known():
    heavy = {"numpy", "torch", "zmq", "msgspec"}
    program = f"import bireme.engines.worker, sys; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.flaky(reruns=1)
def test_a_stack_dump_can_be_asked_for(run_worker, make_recipe, stub):
    process = run_worker(make_recipe())
    stub.read()
    os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.2)
    process.terminate()
    _, log = process.communicate(timeout=10)
    assert "engine-io" in log or "Thread 0x" in log
