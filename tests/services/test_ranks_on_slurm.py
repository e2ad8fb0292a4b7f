"""tools/serve_nodes.py's srun line run for real: an engine over two nodes of a Slurm cluster, its ranks one MPI world.

TensorRT-LLM and its launcher are stand-ins; the tokens are those of rank 0's process alone.
"""

import json
import subprocess
import sys
import time
import urllib.request

import psutil
import pytest

from bireme.launch import free_port
from tests.contract import stand_in_workers
from tests.services.slurm_cluster import missing_mpi

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(bool(missing_mpi()), reason=f"no {', '.join(missing_mpi())}: make services ARGS=slurm"),
    pytest.mark.skipif(stand_in_workers.is_real_there(), reason="about the stand-in's launcher"),
]
LIMIT_S = 200


class Started:
    """serve_nodes.py in an allocation of its own."""

    def __init__(self, slurm, recipe, *nodes):
        self.log = slurm.folder / f"{recipe.name}.log"
        self.port = next(port for port in iter(free_port, None) if port % 50 < 20)
        names = ("http", "grpc", "metrics", "health", "openai")
        ports = [word for at, name in enumerate(names) for word in (f"--{name}-port", str(self.port + at))]
        allocate = ["salloc", "--nodes", str(len(nodes)), "--nodelist", ",".join(nodes), "--ntasks-per-node", "1"]
        serve = [sys.executable, "tools/serve_nodes.py", str(recipe), "--gpus-per-node", "1", "--", *ports]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*allocate, *serve], env=slurm.environment, stdout=log, stderr=log, cwd=stand_in_workers.CHECKOUT
            )

    def wait_for(self, condition):
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, self.log.read_text()[-5000:]
            time.sleep(0.1)

    def ended(self):
        return self.process.wait(LIMIT_S)

    def says(self, text):
        return text in self.log.read_text()

    def complete(self):
        body = {"model": "tiny-llama", "prompt": "One day", "max_tokens": 3, "ignore_eos": True}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port + 4}/v1/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
            return json.load(reply)["usage"]["completion_tokens"]

    def rank(self, number):
        """Return its process."""
        for process in psutil.process_iter():
            try:
                if process.environ().get("SLURM_PROCID") == str(number) and "launch.py" in " ".join(process.cmdline()):
                    return process
            except psutil.Error:
                continue
        raise AssertionError(f"no rank {number}")


def engine(**more):
    return {"decode": stand_in_workers.worker({"dtype": "float32", "gpus_per_node": 1} | more)}


def test_ranks_over_two_nodes_serve_as_one_engine_and_a_lost_one_ends_it_by_name(slurm, write_recipe, sample_model):
    recipe = write_recipe(sample_model("llama"), engine(tensor_parallel_size=2), served_model_name="tiny-llama")
    started = Started(slurm, recipe, "n0", "n1")
    started.wait_for(lambda: started.says("serve  | ready") or started.process.poll() is not None)
    assert started.says("2 ranks on n0, n1")
    assert started.complete() == 3
    started.rank(1).kill()
    assert started.ended() != 0
    assert started.says("n1: task 1: Killed") and not started.says("queued again")
    slurm.wait_idle()  # nothing of it is left on any node
