"""A program has its secret arguments, and nobody sees them, from its first moment on."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bireme import own_process
from bireme.errors import ConfigError
from bireme.launch import processes
from bireme.launch.hidden_arguments import HiddenArguments, NotHiddenError

PYTHON = Path(sys.executable).resolve()
TELLS = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
ARGUMENTS = ["-c", TELLS, "--port=8000", "--key=s3cret", "--key=another=1", "--quiet"]
# ptrace fails with EPERM, as in a container whose seccomp profile lacks it.
WITHOUT_PTRACE = """
import ctypes, os, struct, sys
call = {"x86_64": 101, "aarch64": 117}[os.uname().machine]
rules = ((0x20, 0, 0, 0), (0x15, 0, 1, call), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000))
filter = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(filter)))
assert ctypes.CDLL(None).prctl(38, 1, 0, 0, 0) == 0 and ctypes.CDLL(None).prctl(22, 2, program) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""


def start(hidden, program, *, before=()):
    command = [sys.executable, "-I", "-S", own_process.__file__, str(os.getpid()), "held", str(program), *hidden.shown]
    return subprocess.Popen(
        [*before, *command], env={"PATH": os.environ["PATH"], **hidden.environment}, stdout=subprocess.PIPE
    )


def test_a_program_has_its_arguments_and_what_it_starts_inherits_none():
    hidden = HiddenArguments(ARGUMENTS, ("--key",))
    with start(hidden, PYTHON) as process:
        hidden.hand_over(process.pid, PYTHON)
        arguments, environment = json.loads(process.stdout.read())
    assert arguments == ["--port=8000", "--key=s3cret", "--key=another=1", "--quiet"]
    assert not [name for name in environment if name.startswith("BIREME_")]


def test_no_moment_shows_a_secret_and_the_rest_is_shown():
    hidden, seen, has_ended = HiddenArguments(ARGUMENTS, ("--key",)), set(), threading.Event()
    with start(hidden, PYTHON) as process:
        watcher = threading.Thread(target=watch, args=(process.pid, seen, has_ended))
        watcher.start()
        hidden.hand_over(process.pid, PYTHON)
        process.wait()
        has_ended.set()
        watcher.join()
    assert (str(PYTHON), *hidden.shown) in seen
    assert not [line for line in seen if "s3cret" in str(line)] and "--key=(hidden)" in hidden.shown


def watch(pid, seen, has_ended):
    while not has_ended.is_set():
        seen.add(tuple(processes.command_line(pid)))


def test_a_script_in_the_programs_place_is_refused(tmp_path):
    script = tmp_path / "tritonserver"
    script.write_text('#!/bin/sh\nexec sleep 60 "$@"\n')
    script.chmod(0o755)
    hidden = HiddenArguments(ARGUMENTS, ("--key",))
    with start(hidden, script) as process:
        with pytest.raises(ConfigError, match="set BIREME_TRITONSERVER to the program itself"):
            hidden.hand_over(process.pid, script)
        process.kill()


def test_a_program_that_ends_before_is_left_to_who_started_it():
    hidden = HiddenArguments(ARGUMENTS, ("--key",))
    with start(hidden, "/nowhere/tritonserver") as process:
        hidden.hand_over(process.pid, PYTHON)
    assert process.returncode == 1


def test_where_ptrace_is_forbidden_the_program_does_not_start_and_the_remedy_is_named():
    hidden = HiddenArguments(ARGUMENTS, ("--key",))
    with start(hidden, PYTHON, before=(sys.executable, "-c", WITHOUT_PTRACE)) as process:
        with pytest.raises(NotHiddenError, match="ptrace_scope=1.*--visible-keys"):
            hidden.hand_over(process.pid, PYTHON)
        assert process.stdout.read() == b""
