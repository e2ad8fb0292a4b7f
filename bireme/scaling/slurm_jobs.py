"""Jobs of Slurm beside a launch that serves: each has one worker of one stage, and they find each other by discovery.

Which there are, Slurm itself knows: a job is called NAME-STAGE-SLOT, and one that was told to end says so in its
comment. So the next planner goes on with them. One that is to end gets SIGURG, at which its script drains its server by
the admin door before the job ends (tools/make_sbatch.py); one that waits in the queue is canceled.
"""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bireme.errors import BiremeError, ConfigError, UnavailableError
from bireme.launch.admin_client import DoorClient
from bireme.scaling.connector import STAGES
from bireme.scaling.launches_beside import BesideLaunch, LaunchesBeside

Script = Callable[[str, int], str]  # stage and slot -> what sbatch takes. Raises ConfigError
_ANSWER_S = 15.0
_ENDING = "ended-by-planner"  # the comment of a job
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
_OVER = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
_LISTED = "%i|%j|%T|%B|%k"  # id, name, state, the first node, comment
_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True)
class SlurmJob:
    id: str
    stage: str
    slot: int
    state: str
    node: str  # the first; "": it has none yet
    is_ending: bool


class SlurmJobs(LaunchesBeside):
    def __init__(
        self, door: DoorClient, name: str, script: Script, admin_port_of: Callable[[int], int], folder: Path,
        first_slot: int = 0, stages: Sequence[str] = STAGES,
    ) -> None:  # fmt: skip
        """`name`: the beginning of the jobs' names. `admin_port_of`: of a slot's server. `folder`: of the jobs' logs,
        which the nodes see. Raises ConfigError.
        """
        super().__init__(door)
        if not _NAME.fullmatch(name):
            raise ConfigError(f"--slurm: --name {name!r}; letters, digits, dots, - and _ make the name of jobs")
        self._name, self._script, self._admin_port_of, self._first_slot = name, script, admin_port_of, first_slot
        self._addresses: dict[str, str] = {}  # of nodes
        self._folder = folder.resolve()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--launches {folder}: it can't be used ({error})") from error
        for stage in stages:
            script(stage, first_slot)  # what can't be served is refused now

    def _alive(self) -> Sequence[SlurmJob]:
        listed = _asked("squeue", "--me", "--noheader", "--states=all", f"--format={_LISTED}")
        jobs = [job for line in listed.splitlines() if (job := _job_of(line, self._name)) is not None]
        return [job for job in jobs if job.state not in _OVER]

    def _address_of(self, launch: BesideLaunch) -> str:
        assert isinstance(launch, SlurmJob)
        if not launch.node or launch.state in _WAITING:
            return ""
        if launch.node not in self._addresses:
            told = _asked("scontrol", "--oneliner", "show", "node", launch.node)
            if (found := re.search(r"\bNodeAddr=(\S+)", told)) is None:
                raise UnavailableError(f"scontrol show node {launch.node}: it tells no NodeAddr")
            self._addresses[launch.node] = found.group(1)
        return f"http://{self._addresses[launch.node]}:{self._admin_port_of(launch.slot)}"

    def _start(self, stage: str) -> str:
        taken = {job.slot for job in self._alive()}
        slot = next(number for number in itertools.count(self._first_slot) if number not in taken)
        name = f"{self._name}-{stage}-{slot}"
        told = (f"--job-name={name}", f"--output={self._folder}/%x-%j.log")
        job = _asked("sbatch", "--parsable", *told, given=self._script(stage, slot))
        return f"job {job.partition(';')[0]}, {name}, is queued"

    def _end(self, launch: BesideLaunch) -> str:
        assert isinstance(launch, SlurmJob)
        if launch.state in _WAITING:
            _asked("scancel", launch.id)
            return f"job {launch.id}, {launch.stage}, is canceled in the queue"
        _asked("scontrol", "update", f"JobId={launch.id}", f"Comment={_ENDING}")
        _asked("scancel", "--batch", "--signal=URG", launch.id)
        return f"job {launch.id}, {launch.stage}, drains and ends"


def _job_of(line: str, name: str) -> SlurmJob | None:
    """None: it is not the planner's."""
    number, job_name, state, node, comment = line.split("|", 4)
    found = re.fullmatch(rf"{re.escape(name)}-({'|'.join(STAGES)})-(\d+)", job_name)
    if found is None:
        return None
    known = node if node not in ("", "n/a", "(null)") else ""
    return SlurmJob(number, found.group(1), int(found.group(2)), state, known, comment.strip() == _ENDING)


def _asked(*command: str, given: str = "") -> str:
    """Raises UnavailableError for a controller that does not answer, BiremeError for what it refuses."""
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{command[0]}: no answer within {_ANSWER_S:g} s; is slurmctld well?") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UnavailableError(f"{command[0]}: it can't be run ({error})") from error
    if done.returncode:
        raise BiremeError(f"{command[0]}: {done.stderr.strip()[:500] or f'exit code {done.returncode}'}")
    return done.stdout.strip()
