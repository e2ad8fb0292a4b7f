"""Jobs of tools/make_sbatch.py on a real Slurm, with mocker engines: they serve, drain, come again, and sweep."""

import json
import threading
import time
import urllib.request

import pytest

from bireme.launch import free_port
from tests.services.slurm_cluster import cluster, missing
from tools import make_sbatch

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(bool(missing()), reason=f"no {', '.join(missing())}: slurmctld slurmd slurm-client munge"),
]
LIMIT_S = 400  # Slurm itself waits two minutes before a job runs again


@pytest.fixture(scope="module")
def slurm(tmp_path_factory, sample_model):
    sample_model("llama")
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def first_port():
    """Of ports that nobody else has; each server takes ten."""
    return next(port for port in iter(free_port, None) if port % 50 < 20)


def wait_for(condition, what="it does not come"):
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return found


def submitted(slurm, name, first_port, *options):
    script = slurm.folder / f"{name}.sbatch"
    ports = ["--first-port", str(first_port), "--network", "127.0.0.0/8", "--name", name]
    assert make_sbatch.main(["recipes/mocker", "--out", str(script), *ports, *options]) == 0
    return slurm.submit(script)


def ready(slurm, name, job, times=1):
    log = slurm.folder / f"{name}-{job}.log"
    return wait_for(lambda: log.exists() and log.read_text().count("bireme: ready") == times and log, f"see {log}")


def complete(port, **fields):
    body = {"model": "mocker", "prompt": "One day", "max_tokens": 1, "ignore_eos": True} | fields
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
        return json.load(reply)["usage"]["completion_tokens"]


def test_two_servers_serve_together_and_a_job_that_is_told_to_end_loses_nothing(slurm, first_port):
    job = submitted(slurm, "pair", first_port, "--servers", "2", "--drain", "60")
    log = ready(slurm, "pair", job)
    for number in range(2):
        assert complete(first_port + 10 * number + 4) == 1
    answers = []
    running = threading.Thread(target=lambda: answers.append(complete(first_port + 4, max_tokens=400, n=2)))
    running.start()
    time.sleep(0.5)
    slurm.ask("scancel", "--batch", "--signal=URG", job)
    running.join(LIMIT_S)
    assert answers == [800]
    wait_for(lambda: slurm.state(job) in ("COMPLETED", "CANCELLED"))
    assert "all has ended its requests" in log.read_text() and "queued again" not in log.read_text()


def test_a_killed_step_has_the_job_queued_again_and_it_serves(slurm, first_port):
    job = submitted(slurm, "again", first_port, "--servers", "2", "--drain", "5")
    ready(slurm, "again", job)
    slurm.ask("scancel", "--signal=KILL", f"{job}.0")
    log = ready(slurm, "again", job, times=2)
    assert "a server has ended" in log.read_text() and "the job is queued again" in log.read_text()
    assert complete(first_port + 4) == complete(first_port + 14) == 1
    slurm.ask("scancel", "--batch", "--signal=URG", job)
    wait_for(lambda: slurm.state(job) in ("COMPLETED", "CANCELLED"))


def test_an_array_sweeps_values_and_keeps_what_each_task_found(slurm, first_port):
    run = "curl -s ${BIREME_URL%/v1}/v1/models > $BIREME_OUT/models && echo $TASK > $BIREME_OUT/task"
    sweep = ("--sweep", "limits.max_tokens=7,9", "--run", run, "--drain", "5", "--sbatch=--array=0-1%1")
    job = submitted(slurm, "sweep", first_port, *sweep)
    wait_for(lambda: set(slurm.state(job).split()) <= {"COMPLETED"}, "the array does not end")
    for task, value in enumerate((7, 9)):
        found = slurm.folder / f"sweep-{task}"
        assert (found / "task").read_text() == f"limits.max_tokens={value}\n"
        assert json.loads((found / "models").read_text())["data"][0]["id"] == "mocker"
