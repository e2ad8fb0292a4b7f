"""Jobs of tools/make_sbatch.py on a real Slurm: every form serves, drains, comes again after a loss, and sweeps.

Engines are mockers, and TensorRT-LLM's stand-ins where they span nodes.
"""

import contextlib
import dataclasses
import json
import shlex
import subprocess
import sys
import threading
import time
import urllib.request

import psutil
import pytest

from bireme.config import CHECKOUT
from bireme.launch import free_port
from tests.contract import stand_in_workers
from tests.server.steady_load import SteadyLoad
from tests.services.slurm_cluster import missing, missing_mpi
from tools import make_sbatch

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(bool(missing()), reason=f"no {', '.join(missing())}: make services ARGS=slurm"),
]
LIMIT_S = 400


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


def submitted(slurm, name, first_port, *options, recipe="recipes/mocker"):
    script = slurm.folder / f"{name}.sbatch"
    ports = ["--first-port", str(first_port), "--network", "127.0.0.0/8", "--name", name]
    assert make_sbatch.main([str(recipe), "--out", str(script), *ports, *options]) == 0
    return slurm.submit(script)


def ready(slurm, name, job, times=1):
    log = slurm.folder / f"{name}-{job}.log"
    return wait_for(lambda: log.exists() and log.read_text().count("bireme: ready") == times and log, f"see {log}")


def server_below(launcher, words):
    """Return the serve.py that a launcher runs with these words."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command, above = " ".join(process.cmdline()), process.parent()
            if words in command and "serve.py" in command and launcher in " ".join(above.cmdline()):
                return process
    raise AssertionError(f"no serve.py with {words} below {launcher}")


def end(slurm, job):
    slurm.ask("scancel", "--batch", "--signal=URG", job)
    wait_for(lambda: slurm.state(job) in ("COMPLETED", "CANCELLED"))


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
    assert "a server has ended: server-" in log.read_text() and "the job is queued again" in log.read_text()
    assert complete(first_port + 4) == complete(first_port + 14) == 1
    end(slurm, job)


def test_an_array_sweeps_values_and_keeps_what_each_task_found(slurm, first_port):
    run = "curl -s ${BIREME_URL%/v1}/v1/models > $BIREME_OUT/models && echo $TASK > $BIREME_OUT/task"
    sweep = ("--sweep", "limits.max_tokens=7,9", "--run", run, "--drain", "5", "--sbatch=--array=0-1%1")
    job = submitted(slurm, "sweep", first_port, *sweep)
    wait_for(lambda: set(slurm.state(job).split()) <= {"COMPLETED"}, "the array does not end")
    for task, value in enumerate((7, 9)):
        found = slurm.folder / f"sweep-{task}"
        assert (found / "task").read_text() == f"limits.max_tokens={value}\n"
        assert json.loads((found / "models").read_text())["data"][0]["id"] == "mocker"


SLOW = ("--set", "workers.decode.engine_config.mocker.step_ms=50")  # so that a request outlasts Slurm's notice


def test_a_lost_node_costs_nothing_of_the_others_and_the_job_is_served_by_those_that_are_left(slurm, first_port):
    job = submitted(slurm, "lost", first_port, "--servers", "2", "--drain", "200", *SLOW)
    ready(slurm, "lost", job)
    lost = slurm.nodes_of(job)[1]
    answers = []
    running = threading.Thread(target=lambda: answers.append(complete(first_port + 4, max_tokens=1000, n=2)))
    running.start()
    time.sleep(0.5)
    slurm.lose_node(lost)
    wait_for(lambda: slurm.node_state(lost).startswith("down"))
    running.join(LIMIT_S)
    assert answers == [2000]  # what ran on the lost node went on where it still could
    log = ready(slurm, "lost", job, times=2)
    assert "a server has ended: server-1" in log.read_text() and lost not in slurm.nodes_of(job)
    assert complete(first_port + 4) == complete(first_port + 14) == 1
    slurm.start_node(lost)
    end(slurm, job)
    slurm.wait_idle()


def test_a_job_whose_own_node_is_lost_is_queued_again_by_slurm_and_its_clients_are_answered_again(slurm, first_port):
    job = submitted(slurm, "own", first_port, "--servers", "2", "--drain", "5")
    ready(slurm, "own", job)
    lost = slurm.nodes_of(job)[0]
    slurm.lose_node(lost)
    ready(slurm, "own", job, times=2)
    assert lost not in slurm.nodes_of(job)
    assert complete(first_port + 4) == complete(first_port + 14) == 1
    slurm.start_node(lost)
    end(slurm, job)
    slurm.wait_idle()


def test_prefill_and_decode_of_one_node_serve(slurm, first_port):
    job = submitted(slurm, "pair-of-stages", first_port, "--gpus-per-node", "1", recipe="recipes/mocker-disagg")
    ready(slurm, "pair-of-stages", job)
    assert complete(first_port + 4, model="mocker-disagg", max_tokens=3) == 3
    end(slurm, job)


@pytest.mark.skipif(bool(missing_mpi()), reason=f"no {', '.join(missing_mpi())}: make services ARGS=slurm")
@pytest.mark.skipif(stand_in_workers.is_real_there(), reason="about the stand-in's launcher")
def test_prefill_and_decode_over_two_nodes_each_serve_together(slurm, first_port, write_recipe, sample_model):
    engine = {"dtype": "float32", "tensor_parallel_size": 2, "cache_transceiver_config": {"backend": "DEFAULT"}}
    stages = dict.fromkeys(("prefill", "decode"), stand_in_workers.worker(engine))
    recipe = write_recipe(sample_model("llama"), stages, served_model_name="mocker")
    options = ("--apart", "--gpus-per-node", "1", "--drain", "5", "--restarts", "0")
    job = submitted(slurm, "apart", first_port, *options, recipe=recipe)
    log = ready(slurm, "apart", job)
    for number in range(2):
        assert complete(first_port + 10 * number + 4, max_tokens=3) == 3
    assert "2 ranks on n0, n1" in log.read_text() and "2 ranks on n2, n3" in log.read_text()
    server_below("launch.py", f"--http-port {first_port + 10}").kill()  # its ranks and their srun stay
    wait_for(lambda: slurm.state(job) == "FAILED")
    assert "a server answers no more: decode-1, first node" in log.read_text()
    assert "0 restarts are used up; sbatch it again" in log.read_text()


@dataclasses.dataclass(frozen=True)
class Planned:
    """A stage that a planner has grow and shrink, of mockers two of which can't do all of 4 requests a second."""

    stage: str
    recipe: str
    mockers: tuple[str, ...]
    bounds: dict[str, dict[str, int]]  # of planner.yaml
    more: tuple[str, ...] = ()  # options of the planner


PREFILL = Planned(
    "prefill",
    "mocker-disagg",
    ("workers.prefill.engine_config.mocker.prefill_ms=150", "workers.decode.engine_config.mocker.step_ms=20"),
    {"decode": {"maximum": 1}},
)
DECODE = Planned(
    "decode",
    "mocker-disagg",
    ("workers.decode.engine_config.mocker.step_ms=20", "workers.decode.engine_config.mocker.step_ms_per_request=30"),
    {"prefill": {"maximum": 1}},
)
BOTH = Planned(
    "decode",
    "mocker",
    ("workers.decode.engine_config.mocker.prefill_ms=150", "workers.decode.engine_config.mocker.step_ms=20"),
    {},
    ("--aggregated",),
)
SETTINGS = {
    "ttft_ms": 600, "itl_ms": 100, "max_gpus": 4, "interval_s": 5, "start_s": 10, "reversal_s": 0, "down_window_s": 5,
}  # fmt: skip


def settings_words(planned):
    return [f"--set={setting}" for setting in planned.mockers]


def planner_of(slurm, first_port, planned, name, options):
    (slurm.folder / f"{name}.yaml").write_text(json.dumps(SETTINGS | planned.bounds))
    command = [
        *(sys.executable, str(CHECKOUT / "tools" / "plan.py"), f"--admin=http://127.0.0.1:{first_port + 5}"),
        *(f"--admin-key-file={slurm.folder}/{name}-joined/admin.key", f"--settings={slurm.folder}/{name}.yaml"),
        *(f"--recipe=recipes/{planned.recipe}", *settings_words(planned), *planned.more),
        *(f"--slurm={shlex.join(options)}", f"--launches={slurm.folder}/{name}-logs"),
    ]
    with (slurm.folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=slurm.environment)


def jobs_of(slurm, name):
    """Return name -> state of a planner's jobs, but for those that are over."""
    lines = slurm.ask("squeue", "--noheader", "--format=%j %T").splitlines()
    return {job: state for job, state in map(str.split, lines) if job.startswith(f"{name}-")}


@pytest.mark.parametrize("planned", [PREFILL, DECODE, BOTH], ids=["prefill", "decode", "aggregated"])
def test_a_planner_s_jobs_of_one_worker_come_as_load_grows_and_drain_once_it_is_over(slurm, request, planned):
    name = f"planned-{request.node.callspec.id}"
    first_port = next(port for port in iter(free_port, None) if port % 50 == 0)  # of 50 that nobody else has
    joined = ("--join", str(slurm.folder / f"{name}-joined"), "--drain", "60", *settings_words(planned))
    recipe = f"recipes/{planned.recipe}"
    base = submitted(slurm, f"base-of-{name}", first_port, *joined, recipe=recipe)
    ready(slurm, f"base-of-{name}", base)
    ports = ("--first-port", str(first_port), "--network", "127.0.0.0/8", "--name", name)
    planner = planner_of(slurm, first_port, planned, name, [recipe, *ports, *joined])
    load = SteadyLoad(f"http://127.0.0.1:{first_port + 4}", planned.recipe)
    log = slurm.folder / f"{name}.log"
    try:
        load.send(4, until=lambda: f"{planned.stage} 3" in log.read_text())  # two jobs have come, and serve
        load.end()
        wait_for(lambda: not jobs_of(slurm, name), f"they do not end: {log}")
        assert planner.poll() is None, log.read_text()
    finally:
        planner.terminate()
        planner.wait(LIMIT_S)
    said = [path.read_text() for path in slurm.folder.glob(f"{name}-logs/{name}-{planned.stage}-*.log")]
    assert len(said) >= 2 and all("bireme: told to end" in one and "has ended its requests" in one for one in said)
    assert complete(first_port + 4, model=planned.recipe) == 1  # the launch itself serves on
    end(slurm, base)
