"""A deployment on a real tritonserver: what dies comes back, what is wrong is told, nothing is left behind."""

import contextlib
import fcntl
import http.client
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from bireme.config import CHECKOUT
from bireme.discovery.pulse import pulse_path
from bireme.launch import free_port, processes
from bireme.launch.loading import LoadingStubs
from bireme.launch.run_folder import SHM, default_base
from tests.launch import galley

pytestmark = [pytest.mark.server, pytest.mark.flaky(reruns=1)]

HTTP, GRPC, METRICS, HEALTH = (free_port() for _ in range(4))
LIMIT_S = 180  # of any wait: a hang fails the test, the time itself is no claim
LAUNCHES = []


class Served:
    """galley.py as a process, looked at from outside."""

    def __init__(self, folder, log):
        LAUNCHES.append(self)
        self.log = log
        self.before = leftovers()
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", galley.__name__, folder, *map(str, (HTTP, GRPC, METRICS, HEALTH))],
                cwd=CHECKOUT, stdout=stream, stderr=stream,
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # under nohup it would be ignored
            )  # fmt: skip

    def health(self, path="/health/ready"):
        connection = http.client.HTTPConnection("127.0.0.1", HEALTH, timeout=5)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except OSError:
            return 0, {}
        finally:
            connection.close()

    def status(self):
        return self.health()[1].get("status")

    def wait_for(self, condition):
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def server_pid(self):
        found = [
            pid for pid in processes.children(self.process.pid) if "tritonserver" in str(processes.command_line(pid))
        ]
        return found[0] if found else 0

    def stub_pid(self, model):
        return processes.stubs(self.server_pid())[model][0]

    def run_folder(self):
        return next(default_base().glob(f"{self.process.pid}-*"))

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)


def leftovers():
    return {str(path) for folder in (SHM, default_base()) if folder.is_dir() for path in folder.iterdir()}


def mine(served):
    """Return what carries the launch's pid (others may run on the machine)."""
    return [path for path in leftovers() - served.before if f"{served.process.pid}-" in path]


@contextlib.contextmanager
def serving(tmp_path):
    served = Served(galley.build(tmp_path / "checkout"), tmp_path / "log")
    try:
        served.wait_for(lambda: served.status() == "ready")
        yield served
    finally:
        if served.process.poll() is None:
            served.process.send_signal(signal.SIGTERM)
            served.process.wait(LIMIT_S)


@pytest.fixture(autouse=True)
def _nothing_outlives_a_failed_test():
    """All launches share their ports."""
    num_before = len(LAUNCHES)
    yield
    for launch in LAUNCHES[num_before:]:
        if launch.process.poll() is None:
            members = [(pid, processes.started_at(pid)) for pid in processes.descendants(launch.process.pid)]
            launch.process.kill()
            launch.process.wait()
            processes.wait_gone(members, LIMIT_S)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("served")) as served:
        yield served


def test_health_says_each_worker_and_that_it_is_live(served):
    status, report = served.health()
    assert status == 200 and set(report["workers"]) == {"decode", "decode_1"} and report["paths"]["completion"]["ready"]
    assert served.health("/health/live") == (200, {"live": True})
    assert served.health("/elsewhere")[0] == 404


def test_a_killed_stub_is_replaced_and_the_others_stay(served):
    other, killed = served.stub_pid("decode_1"), served.stub_pid("decode")
    os.kill(killed, signal.SIGKILL)
    served.wait_for(lambda: served.status() == "degraded")
    served.wait_for(lambda: served.status() == "ready")
    assert served.stub_pid("decode") != killed and served.stub_pid("decode_1") == other
    assert served.health()[1]["workers"]["decode"]["stub_restarts"] == 1


def test_a_launch_that_ran_out_of_descriptors_still_heals_when_it_has_some_again(served):
    pid, killed = served.process.pid, served.stub_pid("decode")
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        served.wait_for(lambda: "thread=stub-watchdog" in served.log.read_text())
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    served.wait_for(lambda: served.status() == "ready")
    assert served.stub_pid("decode") == killed  # not to be seen is not to be dead
    os.kill(killed, signal.SIGKILL)
    served.wait_for(lambda: processes.stubs(served.server_pid()).get("decode", [killed]) != [killed])
    served.wait_for(lambda: served.status() == "ready")


def test_a_server_that_died_while_the_launch_was_out_of_descriptors_is_started_when_it_has_some(served):
    pid, killed = served.process.pid, served.server_pid()
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        os.kill(killed, signal.SIGKILL)
        served.wait_for(lambda: served.log.read_text().count("server_start_failed") >= 2)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    served.wait_for(lambda: served.server_pid() not in (0, killed) and served.status() == "ready")


def test_a_failing_canary_makes_a_worker_not_ready_until_it_works_again(served):
    fault = served.run_folder() / "fault-decode_1"
    fault.write_text("fail")
    served.wait_for(lambda: not served.health()[1]["workers"]["decode_1"]["ready"])
    assert "told to fail" in served.health()[1]["workers"]["decode_1"]["reason"]
    fault.unlink()
    served.wait_for(lambda: served.status() == "ready")


def test_a_stub_that_never_answers_is_killed_and_replaced(served):
    hung = served.stub_pid("decode_1")
    os.kill(hung, signal.SIGSTOP)
    served.wait_for(lambda: not processes.is_alive(hung))
    served.wait_for(lambda: served.status() == "ready")
    assert served.stub_pid("decode_1") != hung


def test_a_stub_whose_loop_no_longer_turns_is_told_and_replaced(served):
    silent = served.stub_pid("tokenizer")
    fault = served.run_folder() / "fault-tokenizer"
    fault.write_text("silence")
    served.wait_for(lambda: "no sign of life" in served.health()[1]["models"]["tokenizer"]["reason"])
    fault.unlink()
    served.wait_for(lambda: not processes.is_alive(silent))
    served.wait_for(lambda: served.status() == "ready")
    assert served.stub_pid("tokenizer") != silent


def test_a_killed_server_is_started_again(served):
    killed = served.server_pid()
    os.kill(killed, signal.SIGKILL)
    served.wait_for(lambda: served.server_pid() not in (0, killed) and served.status() == "ready")
    told = [line for line in served.log.read_text().splitlines() if "server_died" in line][-1]
    assert "code=-9" in told and "Non-graceful" not in told


def test_a_stub_that_dies_in_its_load_and_is_not_noticed_is_lost_after_a_while():
    stubs = LoadingStubs(os.getpid(), {"decode": "decode"}, "")
    child = subprocess.Popen(["true"])
    while processes.state(child.pid) != "Z":
        time.sleep(0.01)
    assert not LoadingStubs(os.getpid(), {"decode": "decode"}, "").is_one_lost(["decode"], 0.0)
    assert [stubs.is_one_lost(["decode"], now) for now in (0.0, 9.0, 11.0)] == [False, False, True]
    child.wait()
    assert not stubs.is_one_lost(["decode"], 12.0)


def test_stubs_whose_start_triton_does_not_see_are_ended_after_a_while(tmp_path):
    program, prefix = tmp_path / "generate/1/model.py", f"bireme_test_{os.getpid()}_"
    program.parent.mkdir(parents=True)
    program.write_text("import time; time.sleep(60)")
    stubs = LoadingStubs(os.getpid(), {"generate": "generate", "generate_1": "generate"}, prefix)
    names = ("generate_0_0", "generate_0_1")
    with contextlib.ExitStack() as opened:
        first, second = [
            subprocess.Popen(["triton_python_backend_stub", program, name], executable=sys.executable) for name in names
        ]
        opened.callback(first.wait), opened.callback(second.wait)
        opened.callback(second.kill), opened.callback(first.kill)
        while not all(processes.stub_name(processes.command_line(child.pid)) for child in (first, second)):
            time.sleep(0.01)  # it has none for a moment
        for now, child in ((0.0, first), (30.0, second)):  # one has started, the other has not: the load goes on
            assert not stubs.end_given_up(["generate"], now)
            pulse_path(prefix, child.pid).touch()
            opened.callback(pulse_path(prefix, child.pid).unlink)
        assert not stubs.end_given_up(["generate"], 60.0)
        assert not stubs.end_given_up(["chat"], 81.0) and not stubs.end_given_up(["generate"], 82.0)
        assert [stubs.end_given_up(["generate"], now) for now in (101.0, 103.0)] == [[], ["generate"]]
        assert [first.wait(), second.wait()] == [-signal.SIGKILL] * 2
        assert stubs.given_up == {"generate"} and not stubs.end_given_up(["generate"], 130.0)


@pytest.mark.soak
def test_a_stub_that_gets_no_cpu_while_it_starts_does_not_keep_the_launch(tmp_path):
    """Triton gives it up and waits for its end, or aborts, or sees nothing: by the moment."""
    checkout = galley.build(tmp_path / "checkout")
    for number in range(12):
        launch = Served(checkout, tmp_path / f"launch{number}.log")
        launch.wait_for(lambda launch=launch: "tokenizer" in processes.stubs(launch.server_pid()))
        stub = launch.stub_pid("tokenizer")
        time.sleep(0.05 + 0.03 * number)
        os.kill(stub, signal.SIGSTOP)
        time.sleep(4)
        with contextlib.suppress(ProcessLookupError):
            os.kill(stub, signal.SIGCONT)
        launch.wait_for(lambda launch=launch: launch.status() == "ready")
        assert launch.stop() == 0


def test_a_replacement_that_dies_as_soon_as_it_is_there_costs_the_server_and_not_the_launch(served):
    server, tries = served.server_pid(), 0
    while served.server_pid() == server:
        assert (tries := tries + 1) <= 10, "no stub was killed early enough to be missed by Triton"
        killed = served.stub_pid("tokenizer")
        before = set(processes.children(server))
        os.kill(killed, signal.SIGKILL)
        while not (new := set(processes.children(server)) - before):
            pass  # Triton waits for ever for one that is killed in its first 10 ms
        os.kill(min(new), signal.SIGKILL)
        served.wait_for(partial(is_lost_or_replaced, served, killed))
        served.wait_for(lambda: served.server_pid() and served.status() == "ready")
    assert "load_lost" in served.log.read_text()


def is_lost_or_replaced(served, killed):
    (pid, *_) = processes.stubs(served.server_pid()).get("tokenizer") or [0]
    return "load_lost" in served.log.read_text() or (pid not in (0, killed) and served.status() == "ready")


def test_a_taken_port_is_said_with_its_holder_and_code_2(tmp_path, served):
    second = Served(galley.build(tmp_path / "checkout"), tmp_path / "second.log")
    assert second.process.wait(LIMIT_S) == 2
    assert f"port {HTTP} of 127.0.0.1 is taken by pid {served.server_pid()}" in second.log.read_text()
    assert mine(second) == []


def test_sigterm_ends_with_code_0_and_leaves_nothing(tmp_path, served):
    members = [(pid, processes.started_at(pid)) for pid in processes.descendants(served.process.pid)]
    assert served.stop() == 0, served.log.read_text()
    assert processes.survivors(members) == []
    assert mine(served) == []


def test_a_lost_terminal_ends_it_in_good_order(tmp_path):
    with serving(tmp_path) as served:
        assert served.stop(signal.SIGHUP) == 0, served.log.read_text()
    assert "stopped code=0" in served.log.read_text() and mine(served) == []


def test_a_log_that_nobody_reads_holds_up_neither_start_nor_healing_nor_the_end(tmp_path):
    reads, writes = os.pipe()
    os.write(writes, b"\n" * fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096))  # full from the beginning
    served = Served(galley.build(tmp_path / "checkout"), Path(f"/dev/fd/{writes}"))
    try:
        served.wait_for(lambda: served.status() == "ready")
        os.kill(served.stub_pid("decode"), signal.SIGKILL)
        served.wait_for(lambda: served.health()[1]["workers"]["decode"]["stub_restarts"] == 1)
        assert served.stop() == 0
    finally:
        served.process.kill()
        served.process.wait()
        os.close(reads)
        os.close(writes)


def test_a_killed_launcher_takes_the_server_along_and_the_next_one_sweeps(tmp_path):
    with serving(tmp_path) as served:
        members = list(processes.descendants(served.process.pid))
        server = served.server_pid()
        served.process.kill()
        served.process.wait()
        assert processes.wait_gone([server], LIMIT_S)
    again = Served(tmp_path / "checkout", tmp_path / "again.log")
    again.wait_for(lambda: again.status() == "ready")
    assert processes.wait_gone(members, LIMIT_S) and mine(served) == []
    assert again.stop() == 0


def test_a_model_that_does_not_load_ends_with_code_1_and_its_reason(tmp_path):
    checkout = galley.build(tmp_path / "checkout")
    model = checkout / "model_repository" / "decode" / "1" / "model.py"
    model.write_text(model.read_text().replace('self.name = args["model_name"]', 'raise ValueError("no oars")'))
    served = Served(checkout, tmp_path / "log")
    assert served.process.wait(LIMIT_S) == 1
    assert "model decode:" in served.log.read_text() and "no oars" in served.log.read_text()
    assert mine(served) == []


def test_a_launch_ends_whose_stub_is_killed_as_soon_as_it_is_there(tmp_path):
    launch = Served(galley.build(tmp_path / "checkout"), tmp_path / "log")
    launch.wait_for(lambda: launch.server_pid() and processes.stubs(launch.server_pid()).get("tokenizer"))
    os.kill(launch.stub_pid("tokenizer"), signal.SIGKILL)
    assert launch.process.wait(LIMIT_S) == 1
    assert re.search("loading .*tokenizer: a stub died|is not healthy", launch.log.read_text())


def test_a_server_that_dies_while_it_loads_is_started_again(tmp_path):
    checkout = galley.build(tmp_path / "checkout")
    model, wreck = checkout / "model_repository" / "decode" / "1" / "model.py", tmp_path / "wreck"
    once = f'os.path.exists("{wreck}") or (open("{wreck}", "w").close(), os.kill(os.getppid(), 9))'
    line = 'self.name = args["model_name"]'
    model.write_text(model.read_text().replace(line, f"{line}\n        {once}"))
    served = Served(checkout, tmp_path / "log")
    # Not by SIGABRT: printing its stacks, tritonserver was seen to hang and serve on.
    served.wait_for(lambda: "server_died code=-9" in served.log.read_text())
    served.wait_for(lambda: served.status() == "ready")
    assert served.stop() == 0 and mine(served) == []


def test_sigterm_while_a_model_loads_does_not_wait_for_it(tmp_path):
    checkout = galley.build(tmp_path / "checkout")
    model = checkout / "model_repository" / "decode" / "1" / "model.py"
    model.write_text(model.read_text().replace('self.name = args["model_name"]', "time.sleep(600)"))
    served = Served(checkout, tmp_path / "log")
    # Triton may or may not load the other models meanwhile: what counts is that decode is under way.
    served.wait_for(lambda: "loading models=decode" in served.log.read_text())
    assert served.status() == "starting"
    assert served.stop() == 0 and mine(served) == []


def test_the_shared_memory_of_models_is_shut_while_all_of_them_load(tmp_path):
    checkout = galley.build(tmp_path / "checkout")
    for model in checkout.glob("model_repository/*/1/model.py"):
        model.write_text(model.read_text().replace('self.name = args["model_name"]', "time.sleep(600)"))
    served = Served(checkout, tmp_path / "log")
    served.wait_for(lambda: "loading models=" in served.log.read_text())
    regions = [path for path in SHM.glob(f"bireme_{served.run_folder().name}_*") if "pulse" not in path.name]
    served.wait_for(lambda: regions and not any(path.stat().st_mode & 0o077 for path in regions))
    assert served.stop() == 0


def test_a_second_signal_ends_at_once_with_code_3(tmp_path):
    with serving(tmp_path) as served:
        (served.run_folder() / "fault-decode").write_text("hang")
        address = ("127.0.0.1", HTTP)
        connection = http.client.HTTPConnection(*address)
        connection.request("POST", "/v2/models/decode/generate_stream", json.dumps({"max_tokens": 1}))
        # The canary hangs as well: the request has arrived. A probe that got no answer says nothing.
        served.wait_for(lambda: served.status() in ("not_ready", "degraded"))
        members = [(pid, processes.started_at(pid)) for pid in processes.descendants(served.process.pid)]
        served.process.send_signal(signal.SIGTERM)
        served.wait_for(lambda: served.status() == "stopping")
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(LIMIT_S) == 3
        connection.close()
    assert processes.survivors(members) == [] and mine(served) == []
