"""The frontend's instructions a chat are counted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind, as Debian's package has it")
def test_a_chat_costs_as_many_instructions_each_time():
    program = [sys.executable, "benchmarks/instructions.py", "--streams", "1", "--chats", "32", "--rounds", "2"]
    output = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True, timeout=500).stdout
    first, second = json.loads(output.splitlines()[-1])["here"]["1"]
    assert first > 1e5 and abs(second / first - 1) < 0.1
