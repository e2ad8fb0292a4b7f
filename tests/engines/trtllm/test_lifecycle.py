"""The LLM's end and its health: bounded, and told by its processes as well."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from bireme.engines.trtllm import lifecycle, processes
from bireme.engines.trtllm.arguments import Arguments
from bireme.engines.trtllm.engine import TrtllmEngine
from bireme.engines.trtllm.lifecycle import LlmMonitor
from bireme.errors import ConfigError, UnavailableError
from tests.engines.engine_fixtures import wait_for


class Llm:
    def __init__(self, check=lambda: True):
        self._check_health = check


def watch(llm):
    reasons = []
    monitor = LlmMonitor(llm, reasons.append, interval_s=0.02)
    monitor.start()
    return monitor, reasons


def test_a_healthy_llm_is_left_alone():
    monitor, reasons = watch(Llm())
    time.sleep(0.2)
    monitor.stop()
    assert reasons == []


def test_a_failed_check_is_told_once():
    monitor, reasons = watch(Llm(lambda: False))
    wait_for(lambda: reasons, 5)
    time.sleep(0.1)
    assert len(reasons) == 1
    monitor.stop()


def test_a_check_that_raises_says_why():
    def check():
        raise RuntimeError("rank 3 is gone")

    _, reasons = watch(Llm(check))
    wait_for(lambda: reasons, 5)
    assert "rank 3 is gone" in reasons[0]


def test_a_check_that_never_answers_is_a_failure(monkeypatch):
    monkeypatch.setattr(lifecycle, "HEALTH_TIMEOUT_S", 0.1)
    stuck = threading.Event()
    _, reasons = watch(Llm(stuck.wait))
    wait_for(lambda: reasons, 5)
    assert "no answer to a health check" in reasons[0]
    stuck.set()


def test_a_release_without_the_private_check_is_not_called_ill():
    monitor, reasons = watch(object())
    time.sleep(0.1)
    assert monitor._thread.is_alive()  # it goes on looking after the processes
    monitor.stop()
    assert reasons == []


@pytest.mark.flaky(reruns=1)
def test_a_killed_worker_process_is_noticed_although_the_check_says_yes():
    code = "import time; time.sleep(60)  # as `python -m mpi4py.futures.server` does"
    child = subprocess.Popen([sys.executable, "-c", code])
    wait_for(lambda: child.pid in processes.workers_below(), 10)
    monitor, reasons = watch(Llm())
    child.kill()
    wait_for(lambda: reasons, 5)
    assert f"worker process {child.pid}" in reasons[0]
    child.wait()
    monitor.stop()


@pytest.mark.flaky(reruns=1)
def test_workers_are_killed_with_their_engine_and_nobody_else():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)  # mpi4py"])
    wait_for(lambda: child.pid in processes.workers_below(), 10)
    members = processes.workers_below()
    assert processes.kill({child.pid: members[child.pid] + 1}) == 0  # the number was used again by another
    assert processes.kill({child.pid: members[child.pid]}) == 1
    assert child.wait(10) == -9
    assert processes.kill(members) == 0


@pytest.mark.flaky(reruns=1)
def test_other_children_are_not_watched():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert child.pid not in processes.workers_below()
    child.kill()
    child.wait()


def test_a_shutdown_in_time_is_told_from_one_that_blocks():
    class Slow:
        def __init__(self):
            self.may_end = threading.Event()

        def shutdown(self):
            self.may_end.wait(10)

    slow = Slow()
    assert not lifecycle.shut_down([slow], 0.1)
    slow.may_end.set()
    assert lifecycle.shut_down([slow], 5)


def test_an_encoder_beside_the_llm_takes_nothing_of_the_llm_s_time_to_shut_down():
    both = threading.Barrier(2)
    llms = [SimpleNamespace(shutdown=lambda: both.wait(10)) for _ in range(2)]  # each waits for the other
    exits = []
    engine = TrtllmEngine(None, exits.append)
    engine._loaded = SimpleNamespace(llms=llms, iterations=SimpleNamespace(stop=lambda: None))
    engine.stop()
    engine._loop.close()
    assert exits == [] and not both.broken


WORKER_FAULTS = [(ValueError("no config.json"), ConfigError), (RuntimeError("CUDA out of memory"), UnavailableError)]


@pytest.mark.parametrize(("cause", "kind"), WORKER_FAULTS)
def test_a_worker_that_could_not_load_says_model_and_reason(monkeypatch, cause, kind):
    def fail(**values):
        raise RuntimeError("Executor worker returned error") from cause

    monkeypatch.setattr(lifecycle, "choose_classes", dict)  # of the package, which is not here
    with pytest.raises(kind, match=f"could not load org/model: Executor worker returned error: {cause}"):
        lifecycle.make_llm(SimpleNamespace(version="1.2.1", llm=fail), Arguments("pytorch", {"model": "org/model"}))


def test_a_look_that_the_system_has_no_room_for_is_no_death(monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)  # mpi4py"])
    wait_for(lambda: child.pid in processes.workers_below(), 10)
    members = processes.workers_below()
    monkeypatch.setattr(processes, "workers_below", lambda: members)
    read, errors = processes._fields, [OSError(errno.EMFILE, "too many open files"), RuntimeError("no thread")]

    def refuse(pid):
        if errors:
            raise errors.pop()
        return read(pid)

    monkeypatch.setattr(processes, "_fields", refuse)
    monitor, reasons = watch(Llm())
    wait_for(lambda: not errors, 5)
    time.sleep(0.1)
    assert reasons == []
    child.kill()
    wait_for(lambda: reasons, 5)
    assert f"worker process {child.pid} of TensorRT-LLM has ended" in reasons[0]
    child.wait()
