"""A run of pytest in forks: what they tell, and what becomes of one that dies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
CONFIGURATION = """
from tests.forks import Forks

def pytest_configure(config):
    config.pluginmanager.register(Forks(config, 2, lambda nodeid: nodeid.partition("::")[0]))
"""
TESTS = """
import os, signal, warnings
import pytest

@pytest.fixture(scope="module")
def shared():
    yield os.getpid()
    with open("torn_down", "a") as file:
        print(os.getpid(), file=file)

def test_passes(shared, tmp_path): (tmp_path / "kept").write_text(str(os.getpid()))

def test_fails(shared):
    os.system("echo told by a child")
    assert shared == 0

def test_warns():
    class LocalWarning(UserWarning): pass
    warnings.warn("look out", LocalWarning)

def test_dies(): os.kill(os.getpid(), signal.SIGKILL)

def test_goes_on(shared, tmp_path): (tmp_path / "kept").write_text(str(os.getpid()))

def test_ends(shared): pass
"""

ONE_FORK = CONFIGURATION.replace("config, 2, ", "config, 1, waits=lambda nodeid: 'waits' in nodeid, together=")
SAYS_WHEN = """
import time

def say(name):
    with open("said", "a") as file:
        print(name, file=file)
"""

EXITS = """
import pytest

@pytest.fixture(scope="module")
def shared():
    yield
    open("torn_down_at_exit", "w").close()

def test_exits(shared): pytest.exit("seen enough", 7)

def test_never_begun(): pass
"""

# The tokenizers library does this on its pool whatever TOKENIZERS_PARALLELISM says.
THREADS = """
from tokenizers import Tokenizer, models, trainers
Tokenizer(models.Unigram()).train_from_iterator(["a text"], trainers.UnigramTrainer(vocab_size=9, show_progress=False))
"""


def run(folder, *options, cache="no:cacheprovider"):
    plain = ["-p", cache, "-p", "no:schemathesis"]  # which would be imported for 0.4 s of CPU
    command = [sys.executable, "-m", "pytest", *plain, "--basetemp=kept", *options]
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forks")
    (folder / "conftest.py").write_text(CONFIGURATION)
    (folder / "test_first.py").write_text(TESTS)
    (folder / "test_second.py").write_text("def test_passes(): pass")
    return folder


@pytest.fixture(scope="module")
def ran(folder):
    return run(folder)


def test_a_process_that_dies_fails_its_test_and_another_goes_on_after_it(folder, ran):
    assert (ran.returncode, "2 failed, 5 passed, 1 warning" in ran.stdout) == (1, True), ran.stdout
    assert "the process that ran test_first.py::test_dies ended with signal SIGKILL" in ran.stdout
    first, second = (path.read_text() for path in sorted(folder.glob("kept/*/*0/kept")))
    assert first != second


def test_failures_come_with_what_was_written_and_warnings_once(ran):
    assert "told by a child" in ran.stdout
    assert ran.stdout.count(" LocalWarning: look out") == 1


def test_what_tests_share_is_torn_down_once_after_the_last_of_them(folder, ran):
    *_, last = sorted(folder.glob("kept/*/test_goes_on0/kept"))
    assert (folder / "torn_down").read_text().split() == [last.read_text()]


def test_a_run_that_is_to_end_at_a_failure_does(folder, ran):
    stopped = run(folder, "-x", "test_first.py")
    assert (stopped.returncode, "1 failed, 1 passed" in stopped.stdout) == (1, True), stopped.stdout
    assert (folder / "torn_down").read_text().count("\n") == 2


def test_a_session_whose_time_is_over_ends_without_failures_of_tests_that_never_began(folder):
    ended = run(folder, "--session-timeout=0.01", "test_first.py")
    assert (ended.returncode, "session-timeout: 0.01 sec exceeded" in ended.stdout) == (1, True), ended.stdout
    assert "1 passed" in ended.stdout and "failed" not in ended.stdout


def test_a_test_that_exits_ends_the_session_as_it_says(folder):
    (folder / "test_exits.py").write_text(EXITS)
    ended = run(folder, "test_exits.py")
    assert (ended.returncode, "Exit: seen enough" in ended.stdout) == (7, True), ended.stdout
    assert "failed" not in ended.stdout and (folder / "torn_down_at_exit").exists()


def test_a_fork_begins_with_tests_that_wait_and_what_took_long_comes_first_the_next_time(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = .\n")
    (tmp_path / "conftest.py").write_text(ONE_FORK)
    for name, seconds in (("quick", 0), ("slow", 0.1), ("waits", 0)):
        (tmp_path / f"test_{name}.py").write_text(f"{SAYS_WHEN}\ndef test_it(): time.sleep({seconds}); say('{name}')")
    for _ in range(2):
        assert run(tmp_path, cache="cacheprovider").returncode == 0
    assert run(tmp_path, "-k", "quick or waits", cache="cacheprovider").returncode == 0
    assert run(tmp_path, cache="cacheprovider").returncode == 0
    first, later = ["waits", "quick", "slow"], ["waits", "slow", "quick"]
    assert (tmp_path / "said").read_text().split() == [*first, *later, "waits", "quick", *later]


def test_processes_of_pytest_xdist_besides_forks_are_refused(folder):
    refused = run(folder, "-n", "2", "test_second.py")
    assert (refused.returncode, "make unit JOBS=2" in refused.stderr) == (4, True), refused.stderr


def test_libraries_start_no_threads_whatever_the_shell_says():
    program = "import tests.conftest, numpy, os; print(len(os.listdir('/proc/self/task')))"
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "2"}
    told = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, env=environment, capture_output=True)
    assert told.stdout == b"1\n", told.stderr


def test_a_module_that_starts_threads_of_a_library_is_refused_by_name(folder):
    (folder / "test_threads.py").write_text(f"{THREADS}\ndef test_passes(): pass")
    refused = run(folder, "test_threads.py", "test_second.py")
    assert refused.returncode == 4, refused.stdout
    assert "test_threads.py starts a library's threads" in refused.stderr
