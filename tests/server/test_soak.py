"""tools/soak.py, briefly, on real servers: every token is the right one and nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.server, pytest.mark.slow]


def soak(*arguments):
    command = [sys.executable, str(CHECKOUT / "tools" / "soak.py"), "--seconds", "3", "--warmup-s", "1", *arguments]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout, done.stderr
    return done, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(autouse=True)
def tokenizer(sample_model):
    sample_model("llama")


def test_streams_of_both_models_bring_every_token(tokenizer):
    done, result = soak("--paths", "generate,decode,bus", "--streams", "16")
    assert result["problems"] == [] and done.returncode == 0
    assert all(load["requests"] > 16 for load in result["loads"].values())


def test_http_streams_bring_every_token(tokenizer):
    _, result = soak("--paths", "http", "--streams", "16", "--step-ms", "20", "--max-tokens", "32")
    assert result["problems"] == []


def test_chats_through_the_frontend_bring_every_token(tokenizer):
    shape = ("--streams", "64", "--max-tokens", "32", "--frontend-processes", "2")
    done, result = soak("--paths", "sse", *shape, "--seconds", "9")  # memory is told of six samples, one a second
    assert result["problems"] == [] and done.returncode == 0
    assert result["loads"]["sse"]["requests"] > 64 and "frontend2" in result["memory"]


@pytest.mark.soak  # test_cancel.py drops as many clients of each kind of deployment
@pytest.mark.parametrize("recipe", ["recipes/mocker", "recipes/mocker-disagg"])
def test_two_hundred_clients_that_drop_leave_nothing_behind(tokenizer, recipe):
    _, result = soak("--paths", "generate", "--streams", "200", "--drop", "0.7", "--recipe", recipe)
    assert result["problems"] == [] and result["left_behind"] == {}
    assert result["loads"]["generate"]["dropped"] > 50
