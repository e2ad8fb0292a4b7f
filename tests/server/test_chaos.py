"""tools/chaos.py for some minutes: the same faults each time, and a launch that heals from all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.server, pytest.mark.soak]
CHECKOUT = Path(__file__).resolve().parents[2]
SEED = 18


def run_chaos(folder, *arguments):
    command = [sys.executable, "tools/chaos.py", f"--seed={SEED}", f"--keep={folder}", *arguments]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=900, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("topology", ["mocker-1+1", "mocker-2+2"])
def test_a_launch_heals_from_every_fault_and_nobody_else_notices(topology, tmp_path):
    code, result = run_chaos(tmp_path, f"--topology={topology}", "--seconds=120")
    assert result["topologies"][0]["violations"] == [] and code == 0
    assert len(result["topologies"][0]["faults"]) >= 5


@pytest.mark.parametrize("topology", ["tiny-1+1", "tiny-1+2"])
def test_a_real_model_says_the_same_under_faults(topology, tmp_path):
    faults = "engine_killed,engine_ended,engine_hung,clients_garbage,clients_leave"
    code, result = run_chaos(tmp_path, f"--topology={topology}", "--seconds=60", f"--faults={faults}")
    assert result["topologies"][0]["violations"] == [] and code == 0
