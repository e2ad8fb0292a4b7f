"""A Slurm cluster of one machine: munged, slurmctld and four slurmd, with folders and ports of their own.

Its delays are short: a node that is silent is down after 20 s (Slurm's default is 300), a job that is queued again may
run after 10 s (120).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from bireme.launch import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
NODES = 4
_PMIX = Path(f"/usr/lib/{platform.machine()}-linux-gnu/pmix2/lib/libpmix.so")  # what Debian's `srun --mpi pmix` opens
_LIMIT_S = 60
_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
TmpFS={folder}/tmp/%n
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
GresTypes=gpu
KillWait=5
SlurmdTimeout=20
MinJobAge=600
JobRequeue=1
SchedulerParameters=batch_sched_delay=1,sched_interval=1
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # To MPI all nodes are this host, and its shared memory would be that of all.
        mpi = {"OMPI_MCA_btl": "self,tcp", "OMPI_MCA_pml": "ob1"}
        root = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
        own = {"SLURM_CONF": str(folder / "slurm.conf"), "HOME": str(folder)}
        self.environment = os.environ | own | mpi | root | {"PATH": f"{folder}/programs:{os.environ['PATH']}"}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

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

    def nodes_of(self, job: str) -> list[str]:
        """Return its nodes; its script runs on the first."""
        listed = self.ask("squeue", "--noheader", "--format=%N", "--jobs", job)
        return self.ask("scontrol", "show", "hostnames", listed).split()

    def add_program(self, name: str, *command: str) -> None:
        """Have jobs find this command by a name."""
        program = self.folder / "programs" / name
        program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        program.chmod(0o755)

    def node_state(self, node: str) -> str:
        """Return idle, alloc, down, ..., with a * of one that does not answer."""
        return self.ask("sinfo", "--noheader", "--format=%t", "--nodes", node)

    def start(self, name: str, *command: str) -> None:
        self._daemons[name] = subprocess.Popen(
            command, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def start_node(self, node: str) -> None:
        self.start(node, "/usr/sbin/slurmd", "-D", "-N", node)

    def lose_node(self, node: str) -> None:
        """Kill its slurmd and all that runs there, at once: as a machine that has lost its power."""
        self._daemons[node].kill()
        lost = self._processes_of(node)
        for process in lost:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _, alive = psutil.wait_procs(lost, _LIMIT_S)
        self._daemons[node].wait(_LIMIT_S)
        assert lost and not alive

    def _processes_of(self, node: str) -> list[psutil.Process]:
        """Return Slurm's own for its steps, and all below them."""
        steps = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                known, above = process.environ(), process.parent()
                is_there = known.get("SLURMD_NODENAME") == node
                if is_there and known.get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                    steps |= {above} if above is not None and above.name().startswith("slurmstepd") else set()
        return [*steps, *(below for step in steps for below in step.children(recursive=True))]

    def wait_idle(self) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while True:
            with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
                if self.ask("sinfo", "--noheader", "--format=%t %D") == f"idle {NODES}":
                    return
            assert time.monotonic() < deadline, "the cluster does not start"
            time.sleep(0.2)

    def end(self) -> None:
        for daemon in reversed(self._daemons.values()):
            _end(daemon)


def missing() -> list[str]:
    path = os.environ["PATH"] + ":/usr/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


def missing_mpi() -> list[str]:
    """Return what an MPI world under srun needs besides."""
    mpi4py = [] if importlib.util.find_spec("mpi4py") else ["mpi4py"]
    return [*missing(), *([] if _PMIX.exists() else ["libpmix-dev"]), *mpi4py]


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    for name in (
        "munge",
        "state",
        "programs",
        *(f"{kind}/n{number}" for kind in ("spool", "tmp") for number in range(NODES)),
    ):
        (folder / name).mkdir(parents=True, mode=0o700)
    key = folder / "munge" / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    nodes = [
        f"NodeName=n{number} NodeAddr=127.0.0.1 NodeHostname={socket.gethostname()} Port={free_port()} CPUs=2"
        " Gres=gpu:1"
        for number in range(NODES)
    ]
    conf = _CONF.format(host=socket.gethostname(), controller=free_port(), folder=folder)
    (folder / "slurm.conf").write_text("\n".join([*nodes, conf]))
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
    made = Cluster(folder)
    own = [f"--{name}={folder}/munge/{file}" for name, file in _MUNGE.items()]
    try:
        made.start("munged", "/usr/sbin/munged", "--foreground", "--force", *own)
        made.start("slurmctld", "/usr/sbin/slurmctld", "-D")
        for number in range(NODES):
            made.start_node(f"n{number}")
        made.wait_idle()
        yield made
        made.ask("scancel", "--full", "--signal=KILL", "--user=root")
    finally:
        made.end()


_MUNGE = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
