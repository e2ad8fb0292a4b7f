"""A child that begins as a fork is to itself, and to who has started it, as one that begins as an interpreter."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from tests import warm_children
from tests.warm_children import WarmChildren

TOLD = """
import atexit, json, os, signal, sys
atexit.register(lambda: print("ended", file=sys.stderr))
print(json.dumps({
    "parent": os.getppid(), "name": __name__, "arguments": sys.argv[1:], "folder": os.getcwd(), "path": sys.path[0],
    "environment": dict(os.environ), "session": os.getsid(0) == os.getpid(), "group": os.getpgid(0),
    "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd")),
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "input": sys.stdin.read(),
    "modules": "json.tool" in sys.modules,
}))
sys.exit(%s)
"""
WAITS = "import sys, time; print('begun', flush=True); time.sleep(600)"


@pytest.fixture
def warm(monkeypatch, tmp_path):
    """Have children that run `program.py` here begin as forks."""
    monkeypatch.setitem(
        warm_children.KINDS, os.path.relpath(tmp_path / "program.py", warm_children.CHECKOUT), ["json.tool"]
    )
    before, warm = subprocess.Popen._execute_child, WarmChildren()
    warm.install()
    yield warm
    warm.remove()
    assert subprocess.Popen._execute_child is before


@pytest.fixture
def is_warm(warm):
    """Return whether this child would begin as a fork."""
    return lambda *words, **options: warm.kind_of([sys.executable, *words], **options) is not None


def run(tmp_path, program, *arguments, **options):
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, str(tmp_path / "program.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize("own_session", [False, True])
def test_it_has_what_it_was_given_and_nothing_else(is_warm, tmp_path, own_session):
    reads, writes = os.pipe()
    options = {"cwd": tmp_path, "env": os.environ | {"BIREME_X": "é"}, "start_new_session": own_session}
    done = run(tmp_path, TOLD % 7, "--a", "b c", input="asked", pass_fds=[writes], **options)
    told = json.loads(done.stdout)
    assert (done.returncode, done.stderr, told["modules"]) == (7, "ended\n", True)
    assert told["environment"] == options["env"] and told["arguments"] == ["--a", "b c"]
    assert (told["folder"], told["path"], told["parent"]) == (str(tmp_path), str(tmp_path), os.getpid())
    assert (told["session"], told["group"] == os.getpgid(0)) == (own_session, not own_session)
    assert {0, 1, 2, writes} < set(told["descriptors"]) and len(told["descriptors"]) == 5, "and that of the listing"
    assert (told["name"], told["input"], told["interrupt"]) == ("__main__", "asked", True)
    os.close(reads)
    os.close(writes)


@pytest.mark.parametrize(
    ("program", "status", "words"),
    [
        ("raise SystemExit", 0, ""),
        ("raise SystemExit('refused')", 1, "refused\n"),
        ("import os; os._exit(300)", 300 & 0xFF, ""),
        ("import os; os.abort()", -signal.SIGABRT, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("import threading, time; threading.Thread(target=lambda: time.sleep(0.1) or print('late')).start()", 0, ""),
    ],
)
def test_it_ends_as_an_interpreter_ends(is_warm, tmp_path, program, status, words):
    done = run(tmp_path, program)
    assert done.returncode == status and words in done.stderr
    assert ("late" in program) is (done.stdout == "late\n")


def test_it_is_this_processs_child_whose_signals_and_end_are_seen(is_warm, tmp_path):
    (tmp_path / "program.py").write_text(WAITS)
    with subprocess.Popen([sys.executable, tmp_path / "program.py"], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"begun\n" and child.poll() is None
        child.send_signal(signal.SIGKILL)
        assert os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT).si_status == signal.SIGKILL
        assert child.wait() == -signal.SIGKILL


def test_what_a_server_has_not_begun_with_begins_as_an_interpreter(is_warm, tmp_path):
    program = str(tmp_path / "program.py")
    assert is_warm(program) and is_warm(program, env=os.environ | {"BIREME_X": "1"})
    assert not is_warm("-c", "pass") and not is_warm("-I", program) and not is_warm(f"{program}.other")
    for name in ("PYTHONPATH", "LD_PRELOAD", "MALLOC_ARENA_MAX", "LANG"):
        assert not is_warm(program, env=os.environ | {name: "other"})
    (tmp_path / "bireme").mkdir()
    assert not is_warm(program, cwd=tmp_path)
    assert not is_warm(program, preexec_fn=os.setsid) and not is_warm(program, umask=0o077)


def test_folders_of_this_checkout_are_imported_from_as_by_an_interpreter(is_warm, tmp_path, monkeypatch):
    stand_in = str(warm_children.CHECKOUT / "tests" / "contract" / "stand_in")
    (tmp_path / "program.py").write_text("import json, sys; print(json.dumps(sys.path))")
    monkeypatch.setenv("PYTHONPATH", stand_in)  # the server's

    def path(*words, **variables):
        options = {"env": {**os.environ, **variables}, "cwd": tmp_path}
        done = subprocess.run([sys.executable, *words, tmp_path / "program.py"], capture_output=True, **options)
        return json.loads(done.stdout), is_warm(*words, str(tmp_path / "program.py"), **options)

    first, is_first_warm = path(PYTHONPATH=os.pathsep.join([str(warm_children.CHECKOUT), stand_in]))
    plain, is_plain_warm = path(PYTHONPATH="")
    safe, is_safe_warm = path("-P", PYTHONPATH="")
    assert is_first_warm and is_plain_warm and is_safe_warm
    assert first == [str(tmp_path), str(warm_children.CHECKOUT), stand_in, *plain[1:]]
    assert safe == plain[1:] and stand_in not in plain


def test_after_a_signals_exception_the_next_child_is_told_its_own_pid(warm, tmp_path):
    run(tmp_path, "")
    (server,), ended = warm._servers.values(), threading.Event()

    def interrupt(_, frame):
        if frame.f_code.co_name == "_ask" and not ended.is_set():
            ended.set()
            raise TimeoutError("of the test")

    def send():
        while not ended.wait(0.02):
            os.kill(os.getpid(), signal.SIGUSR1)

    before, sender = signal.signal(signal.SIGUSR1, interrupt), threading.Thread(target=send)
    server.process.send_signal(signal.SIGSTOP)
    sender.start()
    with pytest.raises(TimeoutError, match="of the test"):
        run(tmp_path, "")
    sender.join()
    signal.signal(signal.SIGUSR1, before)
    server.process.send_signal(signal.SIGCONT)  # if it is still asked
    (tmp_path / "program.py").write_text("import os; print(os.getpid())")
    with subprocess.Popen([sys.executable, tmp_path / "program.py"], stdout=subprocess.PIPE) as child:
        assert int(child.stdout.read()) == child.pid


def test_a_child_whose_server_cant_import_begins_as_an_interpreter(warm, tmp_path, monkeypatch):
    (kind,) = [kind for kind in warm_children.KINDS if kind.endswith("program.py")]
    monkeypatch.setitem(warm_children.KINDS, kind, ["no_such_module"])
    with pytest.warns(UserWarning, match=f"the server of {kind} ended with status 1"):
        done = run(tmp_path, "print('begun')")
    assert (done.returncode, done.stdout) == (0, "begun\n")


@pytest.mark.parametrize("kind", list(warm_children.KINDS))
def test_what_a_server_imports_is_there(kind):
    assert all(importlib.util.find_spec(name) for name in warm_children.KINDS[kind])
