"""The faults of a campaign: what is done, to whom, and which failures it excuses.

A fault is drawn from a seed before anything runs, so the same seed gives the same faults whatever happens. Its
victim is named by role ("decode_1.engine"); the process that has this role at that moment is hit.

Excuses are narrow. An engine that is killed excuses no request that somebody could move to another engine or to the
next life of the same; a stub excuses the ways that meet it; clients that send rubbish excuse nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos import garbage
from benchmarks.chaos.launch import Launch, send_signal
from benchmarks.chaos.topologies import Topology
from benchmarks.chaos.ways import Way

# What an honest failure says: the server or a worker is not there now. Anything else is a defect, in every fault.
HONEST = re.compile(
    r"Request for unknown model|has no available versions"  # Triton's words while models load
    r"|UNAVAILABLE|connection|Connection|closed|reset by the server|going away|gRPC status 14|HTTP 503|not healthy"
    r"|the answer ended before|it ended before|no longer|CANCELLED|RESOURCE_EXHAUSTED|UNREACHABLE"
    r"|can't be reached; try again|worker takes requests now; try again"
)


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    victim: str  # role, or "" where it is no process
    seconds: float  # of what lasts: a pause, a limit, a reader that stands still
    seed: int

    @property
    def model(self) -> str:
        """The Triton model of a stub or engine."""
        return self.victim.partition(".")[0]

    def __str__(self) -> str:
        lasts = f" {self.seconds:.1f} s" if KINDS[self.kind].lasts else ""
        return f"{self.kind}{' ' + self.victim if self.victim else ''}{lasts}"


@dataclass(frozen=True, slots=True)
class Kind:
    """`act` does it and returns when it is over, all but the recovery."""

    victims: Callable[[Topology], Sequence[str]]
    act: Callable[[Launch, Fault], None]
    replaces: bool = False  # its victim must be another process afterwards
    lasts: bool = False
    weight: int = 1  # how often, against the others


def plan(seed: int, topology: Topology, kinds: Sequence[str] = ()) -> Iterator[Fault]:
    """Yield faults without end: each kind once in random order, those of more weight more often, and again."""
    rng = random.Random(f"{seed}/{topology.name}")
    chosen = [name for name in kinds or KINDS if KINDS[name].victims(topology)]
    if not chosen:
        raise ValueError(f"no fault of {', '.join(kinds)} can happen to {topology.name}")
    bag = [name for name in chosen for _ in range(KINDS[name].weight)]
    for _ in itertools.count():
        rng.shuffle(bag)
        for name in bag:
            victim = rng.choice(KINDS[name].victims(topology))
            yield Fault(name, victim, round(rng.uniform(2, 5), 1), rng.randrange(1 << 31))


def excuses(fault: Fault, way: Way, is_late: bool, num_decode: int) -> bool:
    """Return whether a request of this way may fail honestly under this fault.

    `is_late`: the engine was not back within the pipeline's stall_timeout_s. That matters to nobody where another
    decode worker lives, nor when it is a prefill engine: decode does without.
    """
    is_late = is_late and num_decode == 1 and fault.model == "decode"
    group = fault.kind.partition("_")[0]
    if group in ("engine", "stub", "descriptors", "log"):
        return _hits(fault, way, is_late)
    if group in ("frontend", "member"):
        return way.door == "openai"
    return group in ("server", "run", "shm")


def may_hang(fault: Fault, way: Way) -> bool:
    """Triton never tells a client of a dead stub that it is dead, nor anybody while the server stands still."""
    is_stub = ".stub" in fault.victim and way.entry == fault.model
    return (is_stub and way.entry != "") or fault.kind in ("server_paused", "server_hung") and way.door != "openai"


def _hits(fault: Fault, way: Way, is_late: bool) -> bool:
    if fault.victim.endswith(".engine"):
        return way.needs(fault.model) and (way.is_direct or is_late)
    if fault.victim.endswith(".stub"):
        return way.needs(fault.model)
    return way.door == "openai"


def _engines(topology: Topology) -> list[str]:
    return [f"{name}.engine" for kind in topology.replicas for name in topology.workers(kind)]


def _stubs(topology: Topology) -> list[str]:
    workers = [name for kind in topology.replicas for name in topology.workers(kind)]
    return [f"{name}.stub" for name in (*workers, "tokenizer", "generate", "completion")]


def _members(topology: Topology) -> list[str]:
    count = topology.frontend_processes
    return [f"member{number}" for number in range(count)] if count > 1 else []


def _one(role: str) -> Callable[[Topology], Sequence[str]]:
    return lambda topology: [role]


def _signal(number: signal.Signals) -> Callable[[Launch, Fault], None]:
    def act(launch: Launch, fault: Fault) -> None:
        send_signal(launch.roles()[fault.victim], number)

    return act


def _pause(launch: Launch, fault: Fault) -> None:
    pid = launch.roles()[fault.victim]
    send_signal(pid, signal.SIGSTOP)
    time.sleep(fault.seconds)
    send_signal(pid, signal.SIGCONT)


def _delete_run_folder(launch: Launch, fault: Fault) -> None:
    if folder := launch.run_folder():
        shutil.rmtree(folder, ignore_errors=True)


def _delete_sockets(launch: Launch, fault: Fault) -> None:
    for path in folder.rglob("*") if (folder := launch.run_folder()) else ():
        if path.is_socket():
            path.unlink(missing_ok=True)


def _fill_shm(launch: Launch, fault: Fault) -> None:
    """Leave no byte in /dev/shm for a while: by its size limit where it is ours alone, else by a file."""
    with _shm_limited() if owns_mounts() else _shm_filled(launch):
        time.sleep(fault.seconds)


def owns_mounts() -> bool:
    """Return whether this process may change /dev/shm without anybody else's noticing."""
    try:
        return os.geteuid() == 0 and os.readlink("/proc/self/ns/mnt") != os.readlink("/proc/1/ns/mnt")
    except OSError:
        return False


@contextlib.contextmanager
def _shm_limited() -> Iterator[None]:
    status = os.statvfs("/dev/shm")
    used_kb = (status.f_blocks - status.f_bfree) * status.f_frsize // 1024
    _resize_shm(f"{used_kb + 4}k")
    try:
        yield
    finally:
        _resize_shm(f"{status.f_blocks * status.f_frsize // 1024}k")


def _resize_shm(size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", "/dev/shm"], check=True)


@contextlib.contextmanager
def _shm_filled(launch: Launch) -> Iterator[None]:
    """Fill at most a gigabyte: where more is free, /dev/shm does not get full, and nothing is shown."""
    path = Path("/dev/shm") / f"chaos-{launch.mark}"
    status = os.statvfs("/dev/shm")
    size = status.f_bavail * status.f_frsize
    try:
        with path.open("wb") as file:
            if size <= 1 << 30:
                os.posix_fallocate(file.fileno(), 0, max(size - 4096, 1))
        yield
    finally:
        path.unlink(missing_ok=True)


def _stop_reading_log(launch: Launch, fault: Fault) -> None:
    """Nobody reads serve.py's log, however much there is of it; meanwhile a worker must be healed."""
    launch.reads_log.clear()
    try:
        garbage.fill_log(launch.addresses["openai"])
        send_signal(launch.roles()[fault.victim], signal.SIGKILL)
        time.sleep(10 + fault.seconds)
    finally:
        launch.reads_log.set()


def _exhaust_descriptors(launch: Launch, fault: Fault) -> None:
    """serve.py can open nothing more, so that it neither reads /proc nor forks, when it has to heal something."""
    pid = launch.pid
    used = [int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()]
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    victim = launch.roles()[fault.victim]
    # The lowest free number is the first beyond the limit: every number below is taken.
    lowest = next(number for number in itertools.count() if number not in used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        time.sleep(fault.seconds / 2)
        send_signal(victim, signal.SIGKILL)
        time.sleep(fault.seconds)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def _garbage(send: Callable[..., None]) -> Callable[[Launch, Fault], None]:
    return lambda launch, fault: send(launch.addresses, random.Random(fault.seed))


def _hold_open(launch: Launch, fault: Fault) -> None:
    garbage.hold_open(launch.addresses, fault.seconds)


def _hog_cpu(launch: Launch, fault: Fault) -> None:
    code = f"import time\nend = time.monotonic() + {fault.seconds}\nwhile time.monotonic() < end: pass"
    hogs = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(os.cpu_count() or 1)]
    for hog in hogs:
        hog.wait()


def _nobody(topology: Topology) -> Sequence[str]:
    return [""]


def _heal_victims(topology: Topology) -> list[str]:
    return [*_stubs(topology), "frontend"]


KINDS = {
    "engine_killed": Kind(_engines, _signal(signal.SIGKILL), replaces=True, weight=2),
    "engine_ended": Kind(_engines, _signal(signal.SIGTERM), replaces=True, weight=2),
    "engine_paused": Kind(_engines, _pause, lasts=True),
    "engine_hung": Kind(_engines, _signal(signal.SIGSTOP), replaces=True),
    "stub_killed": Kind(_stubs, _signal(signal.SIGKILL), replaces=True),
    "stub_ended": Kind(_stubs, _signal(signal.SIGTERM)),
    "stub_paused": Kind(_stubs, _pause, lasts=True),
    "stub_hung": Kind(_stubs, _signal(signal.SIGSTOP), replaces=True),
    "server_killed": Kind(_one("server"), _signal(signal.SIGKILL), replaces=True),
    "server_ended": Kind(_one("server"), _signal(signal.SIGTERM), replaces=True),
    "server_paused": Kind(_one("server"), _pause, lasts=True),
    "server_hung": Kind(_one("server"), _signal(signal.SIGSTOP), replaces=True),
    "frontend_killed": Kind(_one("frontend"), _signal(signal.SIGKILL), replaces=True),
    "frontend_ended": Kind(_one("frontend"), _signal(signal.SIGTERM), replaces=True),
    "frontend_paused": Kind(_one("frontend"), _pause, lasts=True),
    "frontend_hung": Kind(_one("frontend"), _signal(signal.SIGSTOP), replaces=True),
    "member_killed": Kind(_members, _signal(signal.SIGKILL), replaces=True),
    "member_ended": Kind(_members, _signal(signal.SIGTERM), replaces=True),
    "member_paused": Kind(_members, _pause, lasts=True),
    "member_hung": Kind(_members, _signal(signal.SIGSTOP), replaces=True),
    "run_folder_deleted": Kind(_nobody, _delete_run_folder),
    "run_sockets_deleted": Kind(_nobody, _delete_sockets),
    "shm_full": Kind(_nobody, _fill_shm, lasts=True),
    "log_unread": Kind(_engines, _stop_reading_log, replaces=True, lasts=True),
    "descriptors_out": Kind(_heal_victims, _exhaust_descriptors, replaces=True, lasts=True),
    "clients_garbage": Kind(_nobody, _garbage(garbage.send_garbage)),
    "clients_oversize": Kind(_nobody, _garbage(garbage.send_oversize)),
    "clients_leave": Kind(_nobody, _garbage(garbage.leave_at_once)),
    "clients_silent": Kind(_nobody, _hold_open, lasts=True),
    "cpu_hog": Kind(_nobody, _hog_cpu, lasts=True),
}
