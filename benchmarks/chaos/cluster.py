"""Several servers of one model behind frontends of their own, hit again and again: nobody may notice.

Two launches of the mocker (prefill + decode, prefill + 2 decode) register in a real etcd; two frontends without a
server follow it; KV events and load go over a real nats-server. Each few seconds a process is killed by its id: an
engine, a stub, a tritonserver, a whole launch, etcd, nats-server, a frontend; or a launch leaves in good order, and
comes back. There is always one launch that serves.

A request that fails is a violation, unless its own frontend was dead while it ran. At the end nothing may be left in
use, and no record in etcd.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.chaos import questions
from benchmarks.chaos.campaign import CampaignSettings, Outcome, Say
from benchmarks.chaos.etcd import EtcdServer
from benchmarks.chaos.faults import HONEST
from benchmarks.chaos.launch import STOP_S, Launch, NotStartedError, send_signal
from benchmarks.chaos.load import LoadSettings, ask_readiness
from benchmarks.chaos.nats import NatsProcess
from benchmarks.chaos.observer import Observer
from benchmarks.chaos.records import Hit, Request
from benchmarks.chaos.topologies import Topology
from benchmarks.chaos.verdict import Violation
from benchmarks.load.load_process import CHECKOUT
from benchmarks.load.processes import rss_bytes
from bireme.config import DiscoveryConfig
from bireme.discovery.etcd import EtcdStore
from bireme.discovery.store import parse_address
from bireme.launch import free_port

NAME = "cluster"
KINDS = {  # fault -> how often, against the others
    "worker_engine_killed": 4,
    "worker_stub_killed": 2,
    "triton_killed": 1,
    "launch_killed": 1,
    "launch_leaves": 2,
    "etcd_killed": 1,
    "nats_killed": 1,
    "far_frontend_killed": 1,
}
WAYS = ("chat_stream", "chat", "completions_stream", "completions")
NUM_FRONTENDS = 2
START_S, BACK_S = 240.0, 300.0
_PAUSE_S = (2.0, 5.0)
_GONE_S = (3.0, 20.0)
_BASELINE_S = 3.0
_CONNECTIONS_S = 1.0  # a killed frontend's clients see it so long after it at most
_MOCKER = {"mocker": {"step_ms": 50, "prefill_ms": 10}}


@dataclass(frozen=True, slots=True)
class ClusterFault:
    kind: str
    victim: str

    def __str__(self) -> str:
        return f"{self.kind} {self.victim}".strip()


@dataclass(slots=True)
class FarFrontend:
    """A frontend without a server: python -m bireme.openai --discovery."""

    number: int
    command: list[str]
    environment: dict[str, str]
    log: Path
    address: str
    downs: list[list[float]] = field(default_factory=list)  # [killed, serving again]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, cwd=CHECKOUT, env=self.environment, stdout=log, stderr=log)
        wait_for(lambda: self.is_ready, START_S, f"frontend {self.number} is not ready; see {self.log}")

    @property
    def is_ready(self) -> bool:
        return readiness(self.address) == "ready"

    def kill(self) -> None:
        assert self.process is not None
        self.downs.append([time.monotonic(), float("inf")])
        self.process.kill()
        self.process.wait()
        self.start()
        self.downs[-1][1] = time.monotonic()

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(STOP_S)


class Cluster:
    """The processes. Used as a context manager, which ends them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = secrets.token_hex(32)
        os.environ["BIREME_KEY"] = self.key  # launches take it from here
        self.etcd, self.nats = EtcdServer(folder), NatsProcess(folder)
        self.launches: dict[str, Launch | None] = {"a": None, "b": None}  # None: it is being started again
        self.frontends: list[FarFrontend] = []
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.problems: list[Violation] = []

    @property
    def discovery(self) -> str:
        return self.etcd.address

    def start(self) -> None:
        self.etcd.start()
        self.nats.start()
        starting = [threading.Thread(target=self.start_launch, args=(name,)) for name in self.launches]
        for thread in starting:
            thread.start()
        for thread in starting:
            thread.join()
        if missing := [name for name, launch in self.launches.items() if launch is None]:
            raise NotStartedError(f"{', '.join(missing)} did not start: {[item.text for item in self.problems]}")
        for number in range(NUM_FRONTENDS):
            self.frontends.append(self._make_frontend(number))
            self.frontends[-1].start()

    def start_launch(self, name: str) -> None:
        launch = Launch(
            topology(name, self.nats.url), self.folder, arguments=("--discovery", self.discovery, "--drain-timeout=60"),
            has_frontend=False,
        )  # fmt: skip
        try:
            launch.start()
        except NotStartedError as error:
            launch.remove()
            self.problems.append(Violation("not_recovered", str(error)[-3000:]))
            return
        with self._lock:
            self.launches[name] = launch

    def take(self, name: str) -> Launch | None:
        """Take a launch out if another one serves; who does starts the next."""
        with self._lock:
            others = [launch for other, launch in self.launches.items() if other != name and launch is not None]
            launch = self.launches[name]
            if launch is None or not any(serves(other) for other in others):
                return None
            self.launches[name] = None
            return launch

    def later(self, work: Callable[[], None]) -> None:
        """Do what takes long beside the next faults."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=work, daemon=True))
        self._threads[-1].start()

    def settle(self) -> None:
        """Wait until all that was killed is there again."""
        for thread in self._threads:
            thread.join(BACK_S)
        for name, launch in self.launches.items():
            if launch is None:
                self.problems.append(Violation("not_recovered", f"launch {name} is not there again"))
            else:
                wait_for(lambda one=launch: serves(one), BACK_S, f"launch {name} does not serve")  # type: ignore[misc]

    def records(self) -> list[str]:
        store = EtcdStore(_config(self.discovery))
        try:
            return sorted(store.read())
        finally:
            store.close()

    def _make_frontend(self, number: int) -> FarFrontend:
        port = free_port()
        command = [
            sys.executable,
            "-m",
            "bireme.openai",
            "--recipe",
            topology("a").recipe,
            "--discovery",
            self.discovery,
        ]
        command += ["--port", str(port), "--no-access-log"]
        environment = {name: value for name, value in os.environ.items() if name != "BIREME_GRPC"}
        own = {"PYTHONPATH": str(CHECKOUT), "BIREME_OVERRIDE": json.dumps(topology("a", self.nats.url).settings)}
        return FarFrontend(
            number, command, environment | own, self.folder / f"frontend{number}.log",
            f"127.0.0.1:{port}",
        )  # fmt: skip

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        for frontend in self.frontends:
            if frontend.process is not None and frontend.process.poll() is None:
                frontend.process.kill()
                frontend.process.wait()
        for thread in self._threads:
            thread.join(BACK_S)
        for launch in filter(None, self.launches.values()):
            launch.remove()
        self.etcd.kill()
        self.nats.kill()


class ClusterCampaign:
    """Run once."""

    def __init__(self, settings: CampaignSettings, folder: Path, say: Say) -> None:
        self._settings, self._folder, self._say = settings, folder, say
        self._rng = random.Random(f"{settings.seed}/{NAME}")
        self._outcome = Outcome(NAME)

    def run(self) -> Outcome:
        outcome = self._outcome
        with Cluster(self._folder) as cluster:
            self._say(f"{NAME}: starting")
            try:
                cluster.start()
            except (NotStartedError, RuntimeError) as error:
                outcome.violations.append(Violation("not_recovered", str(error)[-3000:]))
                return outcome
            observers = [self._observer(cluster, frontend) for frontend in cluster.frontends]
            try:
                for observer in observers:
                    observer.start()
                time.sleep(_BASELINE_S)
                first_mb = self._memory_mb(cluster)
                self._hit_until(cluster, time.monotonic() + self._settings.seconds)
                cluster.settle()
                outcome.memory_mb = (first_mb, self._memory_mb(cluster))
                outcome.violations += [Violation("load", text) for one in observers if (text := one.stop())]
            except RuntimeError as error:
                outcome.violations.append(Violation("not_recovered", str(error)))
            finally:
                for observer in observers:
                    observer.kill()
            self._judge(cluster, observers)
            self._end(cluster)
            outcome.violations += cluster.problems
        return outcome

    def _hit_until(self, cluster: Cluster, deadline: float) -> None:
        bag: list[str] = []
        kinds = [kind for kind in self._settings.kinds if kind in KINDS] or list(KINDS)
        while time.monotonic() < deadline:
            if not bag:
                bag = [kind for kind in kinds for _ in range(KINDS[kind])]
                self._rng.shuffle(bag)
            began = time.monotonic()
            if (fault := self._hit(cluster, bag.pop())) is not None:
                self._outcome.hits.append(Hit(fault, began, time.monotonic()))  # type: ignore[arg-type]
                self._outcome.lies_s.append(0.0)
                self._say(f"{NAME}: {len(self._outcome.hits)}. {fault}")
                time.sleep(self._rng.uniform(*_PAUSE_S))
            else:
                time.sleep(0.5)

    def _hit(self, cluster: Cluster, kind: str) -> ClusterFault | None:
        """Do it; return None where nobody could be hit now."""
        if kind in ("etcd_killed", "nats_killed"):
            service = cluster.etcd if kind == "etcd_killed" else cluster.nats
            gone_s = self._rng.uniform(*_GONE_S)
            service.kill()
            time.sleep(gone_s)
            service.start()
            return ClusterFault(kind, f"for {gone_s:.0f} s")
        if kind == "far_frontend_killed":
            frontend = self._rng.choice(cluster.frontends)
            frontend.kill()
            return ClusterFault(kind, str(frontend.number))
        name = self._rng.choice(sorted(cluster.launches))
        if kind.startswith("launch"):
            if (launch := cluster.take(name)) is None:
                return None
            cluster.later(partial(self._replace, cluster, name, launch, is_killed=kind == "launch_killed"))
            return ClusterFault(kind, name)
        launch = cluster.launches[name]
        others = [one for other, one in cluster.launches.items() if other != name and one is not None]
        if launch is None or not any(serves(other) for other in others):
            return None
        return self._kill_process(kind, name, launch)

    def _kill_process(self, kind: str, name: str, launch: Launch) -> ClusterFault | None:
        wanted = {"worker_engine_killed": ".engine", "worker_stub_killed": ".stub", "triton_killed": "server"}[kind]
        roles = {
            role: pid for role, pid in launch.roles().items()
            if role.endswith(wanted) and (wanted == "server" or role.startswith(("prefill", "decode")))
        }  # fmt: skip
        if not roles:
            return None
        role = self._rng.choice(sorted(roles))
        send_signal(roles[role], signal.SIGKILL)
        return ClusterFault(kind, f"{name}.{role}")

    def _replace(self, cluster: Cluster, name: str, launch: Launch, *, is_killed: bool) -> None:
        """End a launch, by SIGKILL of all its processes or in good order, and start another in its place."""
        if is_killed:
            launch.kill()
        else:
            send_signal(launch.pid, signal.SIGTERM)
            code = launch.wait(STOP_S)
            if code != 0:
                cluster.problems.append(Violation("stop", f"launch {name} ended with {code} after SIGTERM"))
            cluster.problems += [Violation("left", text) for text in launch.left_over()]
        launch.remove()
        cluster.start_launch(name)

    def _observer(self, cluster: Cluster, frontend: FarFrontend) -> Observer:
        one = topology("a")
        folder = self._folder / f"load{frontend.number}"
        folder.mkdir(exist_ok=True)
        path = folder / "questions.json"
        made = questions.make_questions(one.model, questions.mocker_answer(one.model), self._settings.seed)
        questions.save(made, path)
        return Observer(
            LoadSettings(
                addresses={"openai": frontend.address}, health=frontend.address, served_name=one.served_name,
                questions=str(path), num_decode=1, streams=max(1, self._settings.streams), drop_share=0.1,
                seed=self._settings.seed + frontend.number, has_probes=False, ways=WAYS,
            ),
            folder,
        )  # fmt: skip

    def _judge(self, cluster: Cluster, observers: Sequence[Observer]) -> None:
        outcome = self._outcome
        for frontend, observer in zip(cluster.frontends, observers, strict=True):
            for request in observer.seen.requests:
                outcome.requests[request.outcome] = outcome.requests.get(request.outcome, 0) + 1
                if request.outcome == "ok":
                    outcome.by_way[request.way] = outcome.by_way.get(request.way, 0) + 1
                if (found := judge_request(request, frontend.downs)) is not None:
                    outcome.violations.append(found)
            outcome.delay_s += sum(delay.seconds for delay in observer.seen.delays)
            outcome.violations += [
                Violation("failed", f"frontend {frontend.number}: no {way} ended as it should")
                for way in WAYS
                if not any(one.way == way and one.outcome == "ok" for one in observer.seen.requests)
            ]

    def _end(self, cluster: Cluster) -> None:
        """Nothing may be in use now; then everything ends in good order, and etcd has no record left."""
        outcome, began = self._outcome, time.monotonic()
        running = {name: launch for name, launch in cluster.launches.items() if launch is not None}
        for name, launch in running.items():
            left = launch.left_in_use()
            outcome.violations += [Violation("left", f"{name}: {what} = {value:g}") for what, value in left.items()]
        for frontend in cluster.frontends:
            frontend.stop()
        for name, launch in running.items():
            send_signal(launch.pid, signal.SIGTERM)
            outcome.exit_code = launch.wait(STOP_S)
            if outcome.exit_code != 0:
                outcome.violations.append(Violation("stop", f"launch {name} ended with {outcome.exit_code}"))
            outcome.violations += [Violation("left", f"{name}: {text}") for text in launch.left_over()]
        outcome.stop_s = round(time.monotonic() - began, 1)
        outcome.violations += [Violation("left", f"record {name} in etcd") for name in cluster.records()]

    def _memory_mb(self, cluster: Cluster) -> float:
        """Return what the frontends hold; they are killed now and then, so it says more in a run without that."""
        pids = [frontend.process.pid for frontend in cluster.frontends if frontend.process is not None]
        return round(sum(rss_bytes(pid) for pid in pids) / 1e6, 1)


def judge_request(request: Request, downs: Sequence[Sequence[float]]) -> Violation | None:
    """`downs`: from when to when the request's own frontend was dead."""
    what = f"{request.way}: {request.error}"
    if request.outcome in ("ok", "dropped"):
        return None
    if request.outcome in ("wrong", "hung"):
        return Violation(request.outcome, what)
    if not any(begin <= request.ended and request.began <= end + _CONNECTIONS_S for begin, end in downs):
        return Violation("failed", what)
    return None if HONEST.search(request.error) else Violation("dishonest", what)


def topology(name: str, nats_url: str = "") -> Topology:
    events = {"kv_events": {"plane": "nats", "nats_url": nats_url}} if nats_url else {}
    return Topology(
        name=f"{NAME}-{name}",
        recipe="recipes/mocker-disagg",
        model="models/tiny-llama",
        served_name="mocker-disagg",
        replicas={"prefill": 1, "decode": 1 if name == "a" else 2},
        is_mocker=True,
        engine_config=_MOCKER,
        settings={"pipeline": {"migration_limit": 20}, "router": {"mode": "kv"}, **events},
    )


def readiness(address: str) -> str:
    try:
        return ask_readiness(address)[0]
    except (OSError, ValueError):
        return "silent"


def serves(launch: Launch) -> bool:
    return readiness(launch.addresses["health"]) in ("ready", "degraded")


def wait_for(condition: Callable[[], bool], limit_s: float, problem: str) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(problem)
        time.sleep(0.2)


def _config(address: str) -> DiscoveryConfig:
    return DiscoveryConfig(backend="etcd", endpoints=tuple(parse_address(address)["endpoints"]))
