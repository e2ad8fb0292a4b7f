"""A Slurm cluster of one machine: munged, slurmctld and three slurmd, with folders and ports of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from bireme.launch import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
NODES = 3
_LIMIT_S = 60
_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MailProg=/bin/true
MpiDefault=none
ReturnToService=2
KillWait=5
MinJobAge=600
JobRequeue=1
SchedulerParameters=batch_sched_delay=1,sched_interval=1
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "HOME": str(folder)}

    def ask(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(self, script: Path) -> str:
        return self.ask("sbatch", "--parsable", str(script))

    def state(self, job: str) -> str:
        """Return RUNNING, COMPLETED, ..."""
        return self.ask("squeue", "--noheader", "--states=all", "--format=%T", "--jobs", job)


def missing() -> list[str]:
    path = os.environ["PATH"] + ":/usr/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    for name in ("munge", "state", *(f"spool/n{number}" for number in range(NODES))):
        (folder / name).mkdir(parents=True, mode=0o700)
    key = folder / "munge" / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    nodes = [
        f"NodeName=n{number} NodeAddr=127.0.0.1 NodeHostname={socket.gethostname()} Port={free_port()} CPUs=2"
        for number in range(NODES)
    ]
    conf = _CONF.format(host=socket.gethostname(), controller=free_port(), folder=folder)
    (folder / "slurm.conf").write_text("\n".join([*nodes, conf]))
    made = Cluster(folder)
    own = [f"--{name}={folder}/munge/{file}" for name, file in _MUNGE.items()]
    commands = [["/usr/sbin/munged", "--foreground", "--force", *own], ["/usr/sbin/slurmctld", "-D"]]
    commands += [["/usr/sbin/slurmd", "-D", "-N", f"n{number}"] for number in range(NODES)]
    with contextlib.ExitStack() as stack:
        for command in commands:
            process = subprocess.Popen(
                command, env=made.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(_end, process)
        _wait_idle(made)
        yield made
        made.ask("scancel", "--full", "--signal=KILL", "--user=root")


_MUNGE = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}


def _wait_idle(made: Cluster) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while True:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            if made.ask("sinfo", "--noheader", "--format=%t %D") == f"idle {NODES}":
                return
        assert time.monotonic() < deadline, "the cluster does not start"
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
