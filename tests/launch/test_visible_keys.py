"""A launch where ptrace is forbidden ends with the remedy, and goes on if told that keys may be seen."""

import os
import subprocess
import sys

import pytest

from bireme.config import CHECKOUT
from bireme.launch import free_port
from tests.launch.test_hidden_arguments import WITHOUT_PTRACE
from tools import serve

pytestmark = pytest.mark.server
LIMIT_S = 120


@pytest.fixture
def launch(sample_model):
    sample_model("llama")
    ports = [f"--{name}-port={free_port()}" for name in ("http", "grpc", "metrics", "health")]
    command = [sys.executable, "-c", WITHOUT_PTRACE, sys.executable, "tools/serve.py", "recipes/mocker", *ports]
    started = []

    def start(*options):
        started.append(
            subprocess.Popen(
                [*command, "--openai-port=0", *options], cwd=CHECKOUT, stderr=subprocess.PIPE, text=True, env=os.environ
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_it_ends_with_code_2_and_names_the_remedy(launch):
    process = launch()
    _, told = process.communicate(timeout=LIMIT_S)
    assert process.returncode == serve.WRONG and "ptrace is forbidden; allow ptrace" in told


def test_told_that_keys_may_be_seen_it_serves_and_says_so(launch):
    told = []
    for line in launch("--visible-keys").stderr:
        told.append(line)
        if " ready seconds=" in line:
            break
    assert [line for line in told if "keys_visible" in line] and " ready seconds=" in told[-1]
