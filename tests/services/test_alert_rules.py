"""What promtool says of docker/prometheus: the files are right, and each alert fires when its unit test says so."""

import subprocess

import pytest

from tests.services.prometheus import FILES


@pytest.mark.parametrize(
    "what", ["check config prometheus.yaml", "check rules alerts.yaml", "test rules alerts_test.yaml"]
)
def test_promtool_finds_no_fault(what):
    command = ["promtool", *what.split()]
    done = subprocess.run(command, cwd=FILES, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
