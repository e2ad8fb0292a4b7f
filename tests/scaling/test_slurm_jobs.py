"""Jobs of Slurm as a planner sees and asks for them. Its programs are scripts here: tests/services has real ones."""

import os

import pytest

from bireme.errors import BiremeError, ConfigError, UnavailableError
from bireme.launch.admin_client import DoorClient
from bireme.scaling.slurm_jobs import SlurmJobs
from tests.scaling.test_extra_launches import base

__all__ = ["base"]  # a fixture

# squeue prints what a test wrote, scontrol a node's address. All note what they were asked, and fail where they are to.
PROGRAM = """#!/bin/sh
cd {folder}
name=$(basename "$0")
echo "$name $*" >> asked
if [ -e failure ]; then cat failure >&2; exit 1; fi
case $name in
squeue) cat jobs;;
sbatch) cat > script; echo 77;;
scontrol) echo "NodeName=$5 Arch=x NodeAddr=127.0.0.1 NodeHostName=x";;
esac
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    for name in ("squeue", "sbatch", "scancel", "scontrol"):
        (tmp_path / name).write_text(PROGRAM.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "jobs").write_text("")
    return tmp_path


@pytest.fixture
def jobs(base, slurm):
    ports = {0: base.address.rpartition(":")[2]}  # a slot's door that answers: the launch's own stands for it
    return SlurmJobs(base, "m", lambda stage, slot: f"{stage} {slot}", lambda slot: int(ports.get(slot, 9)), slurm)


def asked(slurm, program):
    return [line for line in (slurm / "asked").read_text().splitlines() if line.startswith(program)]


def test_jobs_count_by_what_slurm_and_their_doors_say(jobs, slurm, base):
    before = jobs.sizes()
    rows = [
        "1|m-prefill-0|RUNNING|n1|", "2|m-prefill-1|RUNNING|n2|", "3|m-prefill-2|PENDING||",
        "4|m-decode-3|RUNNING|n3|ended-by-planner", "5|m-prefill-4|COMPLETED|n1|", "6|other-prefill-0|RUNNING|n1|",
        "7|m-prefill|RUNNING|n1|",
    ]  # fmt: skip
    (slurm / "jobs").write_text("\n".join(rows))
    found = jobs.sizes()
    assert found["prefill"].num_ready == before["prefill"].num_ready + 1  # the door of slot 1 does not answer yet
    assert found["prefill"].num_starting == before["prefill"].num_starting + 2
    assert found["decode"].num_ending == before["decode"].num_ending + 1
    assert len(jobs.pages()) == 2


def test_more_are_queued_in_slots_that_are_free_with_logs_in_the_folder(jobs, slurm):
    (slurm / "jobs").write_text("1|m-prefill-0|RUNNING|n1|\n4|m-decode-2|RUNNING|n3|ended-by-planner")
    (done,) = jobs.scale({"prefill": jobs.sizes()["prefill"].num_workers + 1})
    assert done == "job 77, m-prefill-1, is queued" and (slurm / "script").read_text() == "prefill 1"
    assert asked(slurm, "sbatch") == [f"sbatch --parsable --job-name=m-prefill-1 --output={slurm}/%x-%j.log"]


def test_who_waits_in_the_queue_is_canceled_and_who_serves_is_marked_and_drains(jobs, slurm):
    (slurm / "jobs").write_text("1|m-prefill-0|RUNNING|n1|\n3|m-prefill-2|PENDING||")
    own = jobs.sizes()["prefill"].num_workers - 2
    assert jobs.scale({"prefill": own + 1}) == ["job 3, prefill, is canceled in the queue"]
    (slurm / "jobs").write_text("1|m-prefill-0|RUNNING|n1|")
    assert jobs.scale({"prefill": own}) == ["job 1, prefill, drains and ends"]
    assert asked(slurm, "scancel") == ["scancel 3", "scancel --batch --signal=URG 1"]
    assert "scontrol update JobId=1 Comment=ended-by-planner" in asked(slurm, "scontrol")


def test_what_slurm_refuses_and_programs_that_are_not_there_are_told(jobs, slurm, monkeypatch):
    (slurm / "failure").write_text("squeue: error: Unable to contact slurm controller")
    with pytest.raises(BiremeError, match="squeue: .*Unable to contact slurm controller"):
        jobs.sizes()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UnavailableError, match="squeue: it can't be run"):
        jobs.sizes()


def test_a_name_that_jobs_can_t_have_is_refused(slurm):
    with pytest.raises(ConfigError, match="--name 'a b'"):
        SlurmJobs(DoorClient("http://127.0.0.1:9"), "a b", lambda stage, slot: "", lambda slot: 9, slurm)
