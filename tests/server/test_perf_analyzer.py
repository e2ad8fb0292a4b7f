"""The commands of docs/perf_analyzer.md, run for real and briefly: zero errors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import start_server

CHECKOUT = Path(__file__).resolve().parents[2]
BRIEFLY = (
    "--concurrency-range=4 --measurement-mode=count_windows --measurement-request-count=10"
    " --stability-percentage=999 --max-trials=5"
).split()
pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(sample_model):
    sample_model("llama")  # its tokenizer
    with start_server("recipes/mocker") as server:
        yield server


def perf_analyzer(*arguments):
    command = [sys.executable, str(CHECKOUT / "tools" / "perf_analyzer.py"), *arguments]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def fetched():
    done = perf_analyzer("--version")
    if done.returncode:
        pytest.skip(f"perf_analyzer can't be had here: {done.stderr.strip()}")


@pytest.mark.parametrize(
    ("model", "protocol", "options"),
    [
        ("generate", "grpc", ["--streaming"]),
        ("decode", "grpc", ["--streaming"]),
        ("completion", "grpc", []),
        ("completion", "http", []),
    ],
)
def test_perf_analyzer_measures_without_an_error(server, fetched, model, protocol, options):
    address = server.grpc if protocol == "grpc" else server.http
    inputs = f"benchmarks/inputs/{model}.json"
    done = perf_analyzer("-m", model, "-u", address, "-i", protocol, "--input-data", inputs, *options, *BRIEFLY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Failed" not in done.stdout + done.stderr
    assert int(re.search(r"Request count: (\d+)", done.stdout).group(1)) >= 10


def test_a_binary_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("BIREME_PERF_ANALYZER", "/nowhere/perf_analyzer")
    done = perf_analyzer("--version")
    assert done.returncode == 2
    assert "BIREME_PERF_ANALYZER: /nowhere/perf_analyzer is not an executable" in done.stderr
