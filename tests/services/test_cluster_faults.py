"""Servers of one model under faults, with a real etcd and nats-server: a minute of tools/chaos.py."""

import json
import subprocess
import sys

import pytest

from bireme.config import CHECKOUT

FAULTS = "worker_engine_killed,triton_killed,etcd_killed,nats_killed,far_frontend_killed,launch_leaves"


@pytest.mark.soak
def test_nobody_notices_that_workers_servers_and_etcd_die(sample_model, tmp_path):
    sample_model("llama")
    command = [sys.executable, "tools/chaos.py", "--topology=cluster", "--seconds=60", "--streams=2", "--seed=20"]
    command += [f"--faults={FAULTS}", f"--keep={tmp_path}"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=900, check=False)
    assert done.stdout, done.stderr[-3000:]
    (result,) = json.loads(done.stdout.splitlines()[-1])["topologies"]
    assert result["violations"] == [] and done.returncode == 0
    assert len(result["faults"]) >= 3 and result["requests"]["ok"] > 20
