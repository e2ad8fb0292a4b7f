"""Compiled functions across files, processes and folders that can't be written."""

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

pytest.importorskip("numba")

INNER = "from bireme.kv.kernels.compiling import compiled\nNUMBER = {}\n@compiled()\ndef inner(x): return x + NUMBER\n"
OUTER = "from bireme.kv.kernels.compiling import compiled\nfrom {} import inner\n@compiled('int64(int64)')\n"
PROGRAM = os.path.join(os.path.dirname(__file__), "call_outer.py")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inner_kernels.py").write_text(INNER.format(1))
    (tmp_path / "outer_kernels.py").write_text(OUTER.format("inner_kernels") + "def outer(x): return inner(x)\n")
    return tmp_path


def start(folder, **env):
    pipe = subprocess.PIPE
    command = [sys.executable, PROGRAM, str(folder)]
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, env=os.environ | env, cwd=folder, text=True)


def answer_and_log(process):
    output, log = process.communicate()
    assert process.returncode == 0
    return [int(word) for word in output.split()], log


def answer(process):
    return answer_and_log(process)[0]


def test_code_is_compiled_once_and_again_when_another_file_that_is_part_of_it_changes_as_the_log_says(folder):
    answers, logs = zip(*[answer_and_log(start(folder)) for _ in range(2)], strict=True)
    assert answers == ([2, 1], [2, 0])
    assert "compiled function=outer s=" in logs[0] and "compiled" not in logs[1]
    (folder / "inner_kernels.py").write_text(INNER.format(2))
    assert answer(start(folder)) == [3, 1]


def test_of_processes_that_start_at_once_one_compiles(folder):
    with ExitStack() as stack:
        answers = [answer(one) for one in [stack.enter_context(start(folder)) for _ in range(3)]]
    assert sorted(answers) == [[2, 0], [2, 0], [2, 1]]


def test_where_nothing_can_be_kept_it_is_compiled_at_each_start(folder):
    (folder / "__pycache__").write_text("no folder can be made here")
    assert answer(start(folder, HOME="/proc/nobody", XDG_CACHE_HOME="/proc/nobody"))[0] == 2
