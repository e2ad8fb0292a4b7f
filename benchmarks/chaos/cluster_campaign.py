"""Several servers of one model, hit again and again while others are still coming back: nobody may notice.

Every few seconds a process is killed by its id: an engine, a stub, a tritonserver, a whole launch, etcd, nats-server
(both stay away for a while), a frontend; or a launch leaves in good order. Whatever was ended is started again beside
the next faults. A decode worker that is ready is always left. By the seed one launch is never ended as a whole, and
one frontend never: their processes last, so that memory can be judged, and that frontend's clients have no excuse.

A request that fails is a violation, unless its own frontend was dead while it ran. At the end nothing may be left in
use, and no record in etcd.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.chaos import questions
from benchmarks.chaos.campaign import CampaignSettings, Outcome, Say
from benchmarks.chaos.cluster import (
    BACK_S,
    LAUNCHES,
    NAME,
    NUM_FRONTENDS,
    Cluster,
    FarFrontend,
    ask,
    remaining_decode,
    serves,
    topology,
    wait_for,
)
from benchmarks.chaos.faults import HONEST
from benchmarks.chaos.launch import STOP_S, Launch, NotStartedError, send_signal
from benchmarks.chaos.load import LoadSettings
from benchmarks.chaos.memory import MemoryWatch
from benchmarks.chaos.observer import Observer
from benchmarks.chaos.records import Hit, Request
from benchmarks.chaos.verdict import Violation, hits_under
from bireme.discovery.store import StoreError

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
NUM_QUESTIONS = 600  # most prompts are new to every worker: they go through prefill and a transfer
_PAUSE_S = (4.0, 8.0)
_GONE_S = (5.0, 60.0)
_BASELINE_S = 5.0
_CONNECTIONS_S = 1.0  # a killed frontend's clients see it so long after it at most
_PROCESSES = {"worker_engine_killed": ".engine", "worker_stub_killed": ".stub", "triton_killed": "server"}

Finish = Callable[[Hit], None]  # brings back what was ended and waits until it serves; raises RuntimeError


@dataclass(frozen=True, slots=True)
class ClusterFault:
    kind: str
    victim: str

    def __str__(self) -> str:
        return f"{self.kind} {self.victim}".strip()


class ClusterCampaign:
    """Run once."""

    def __init__(self, settings: CampaignSettings, folder: Path, say: Say) -> None:
        self._settings, self._folder, self._say = settings, folder, say
        self._rng = random.Random(f"{settings.seed}/{NAME}")
        self._lasting_launch = self._rng.choice(LAUNCHES)
        self._lasting_frontend = self._rng.randrange(NUM_FRONTENDS)
        self._outcome = Outcome(NAME)
        self._cluster = Cluster(folder)
        self._away: set[str] = set()  # etcd, nats, frontends: being brought back
        self._finishing: list[threading.Thread] = []

    def run(self) -> Outcome:
        outcome, cluster = self._outcome, self._cluster
        with ExitStack() as stack:
            stack.enter_context(cluster)
            self._say(f"{NAME}: starting")
            try:
                cluster.start()
            except (NotStartedError, RuntimeError) as error:
                outcome.violations.append(Violation("not_recovered", str(error)[-3000:]))
                return outcome
            observers = [self._observer(frontend) for frontend in cluster.frontends]
            for observer in observers:
                stack.callback(observer.kill)
                observer.start()
            memory = MemoryWatch(cluster.processes)
            memory.start()
            time.sleep(_BASELINE_S)
            self._hit_until(time.monotonic() + self._settings.seconds)
            outcome.memory = memory.stop()
            outcome.violations += [Violation("memory", str(one)) for one in outcome.memory if not one.is_flat]
            outcome.violations += [Violation("load", text) for one in observers if (text := one.stop())]
            self._judge(observers)
            self._end()
        return outcome

    def _hit_until(self, deadline: float) -> None:
        """Do one fault after the other until then; return when all is well again."""
        bag: list[str] = []
        kinds = [kind for kind in self._settings.kinds if kind in KINDS] or list(KINDS)
        while time.monotonic() < deadline:
            if not bag:
                bag = [kind for kind in kinds for _ in range(KINDS[kind])]
                self._rng.shuffle(bag)
            began = time.monotonic()
            for kind in dict.fromkeys(bag):
                if (attack := self._attack(kind)) is not None:
                    bag.remove(kind)
                    fault, finish = attack
                    hit = Hit(fault, began, time.monotonic())  # type: ignore[arg-type]
                    self._outcome.hits.append(hit)
                    self._outcome.lies_s.append(0.0)
                    self._say(f"{NAME}: {len(self._outcome.hits)}. {fault}")
                    self._finishing.append(threading.Thread(target=self._finish, args=(hit, finish), daemon=True))
                    self._finishing[-1].start()
                    time.sleep(self._rng.uniform(*_PAUSE_S))
                    break
            else:
                time.sleep(0.5)
        for thread in self._finishing:
            thread.join(BACK_S)
        for name, launch in self._cluster.launches.items():
            if launch is None or not serves(launch.addresses["health"]):
                self._outcome.violations.append(Violation("not_recovered", f"launch {name} does not serve"))

    def _finish(self, hit: Hit, finish: Finish) -> None:
        number = self._outcome.hits.index(hit)
        try:
            finish(hit)
            hit.recovered = time.monotonic()
        except (RuntimeError, NotStartedError) as error:
            hit.gave_up = time.monotonic()
            self._outcome.violations.append(Violation("not_recovered", f"{hit.fault}: {error}"[-3000:], (number,)))
        self._say(f"{NAME}:    {number + 1}. {hit.fault} is over after {time.monotonic() - hit.began:.1f} s")

    def _attack(self, kind: str) -> tuple[ClusterFault, Finish] | None:
        """Do it; return what follows, or None where nobody can be hit so now."""
        if kind in ("etcd_killed", "nats_killed"):
            return self._end_service(kind)
        if kind == "far_frontend_killed":
            return self._end_frontend(kind)
        workers = self._cluster.frontends[self._lasting_frontend].ready_workers()
        name = self._rng.choice([one for one in LAUNCHES if kind in _PROCESSES or one != self._lasting_launch])
        launch = self._cluster.launches[name]
        if launch is None:
            return None
        if kind in _PROCESSES:
            return self._end_process(kind, name, launch, workers)
        if not remaining_decode(workers, launch.addresses["grpc"]):
            return None
        self._cluster.launches[name] = None
        if kind == "launch_killed":
            launch.kill()
        else:
            send_signal(launch.pid, signal.SIGTERM)
        return ClusterFault(kind, name), partial(self._replace, name, launch, is_killed=kind == "launch_killed")

    def _end_service(self, kind: str) -> tuple[ClusterFault, Finish] | None:
        cluster, name, gone_s = self._cluster, kind.removesuffix("_killed"), self._rng.uniform(*_GONE_S)
        service = cluster.etcd if name == "etcd" else cluster.nats
        if name in self._away:
            return None
        self._away.add(name)
        service.kill()

        def is_known() -> bool:
            reports = cluster.reports()
            if name == "nats":
                return all(report and not report.get("routing") for report in reports)
            return all(_follows_discovery(report) for report in reports)

        def finish(hit: Hit) -> None:
            time.sleep(gone_s)
            service.start()
            hit.over = time.monotonic()
            self._away.discard(name)
            wait_for(is_known, BACK_S, f"somebody still misses it: {cluster.reports()}")

        return ClusterFault(kind, f"for {gone_s:.0f} s"), finish

    def _end_frontend(self, kind: str) -> tuple[ClusterFault, Finish] | None:
        number = self._rng.choice([one for one in range(NUM_FRONTENDS) if one != self._lasting_frontend])
        frontend, name = self._cluster.frontends[number], f"frontend {number}"
        if name in self._away:
            return None
        self._away.add(name)
        frontend.kill()

        def finish(hit: Hit) -> None:
            frontend.restart()
            self._away.discard(name)

        return ClusterFault(kind, str(number)), finish

    def _end_process(
        self, kind: str, name: str, launch: Launch, workers: dict[str, str]
    ) -> tuple[ClusterFault, Finish] | None:
        wanted, server = _PROCESSES[kind], launch.addresses["grpc"]
        roles = {
            role: pid for role, pid in launch.roles().items()
            if (role == wanted == "server" or role.startswith(("prefill", "decode")) and role.endswith(wanted))
        }  # fmt: skip
        if not roles:
            return None
        role = self._rng.choice(sorted(roles))
        worker = "" if role == "server" else role.partition(".")[0]
        if not remaining_decode(workers, server, worker):
            return None
        send_signal(roles[role], signal.SIGKILL)

        def is_back() -> bool:
            if self._cluster.launches[name] is not launch:  # it was ended as a whole meanwhile
                return True
            report = ask(launch.addresses["health"])
            is_well = report.get("status") in ("ready", "degraded")
            if worker:
                is_well = bool(report.get("workers", {}).get(worker, {}).get("ready"))
            return is_well and launch.roles().get(role) not in (None, roles[role])

        def finish(hit: Hit) -> None:
            wait_for(is_back, BACK_S, f"not back: {ask(launch.addresses['health'])}")

        return ClusterFault(kind, f"{name}.{role}"), finish

    def _replace(self, name: str, launch: Launch, hit: Hit, *, is_killed: bool) -> None:
        """Wait for the end of a launch, and start another in its place."""
        violations = self._outcome.violations
        if not is_killed:
            code = launch.wait(STOP_S)
            hit.over = time.monotonic()
            if code != 0:
                violations.append(Violation("stop", f"launch {name} ended with {code} after SIGTERM"))
            violations += [Violation("left", text) for text in launch.left_over()]
        launch.remove()
        self._cluster.start_launch(name)

    def _observer(self, frontend: FarFrontend) -> Observer:
        one = topology("a")
        folder = self._folder / f"load{frontend.number}"
        folder.mkdir(exist_ok=True)
        path = folder / "questions.json"
        answer, seed = questions.mocker_answer(one.model), self._settings.seed + frontend.number
        questions.save(questions.make_questions(one.model, answer, seed, NUM_QUESTIONS), path)
        return Observer(
            LoadSettings(
                addresses={"openai": frontend.address}, health=frontend.address, served_name=one.served_name,
                questions=str(path), num_decode=1, streams=max(1, self._settings.streams), drop_share=0.1,
                seed=seed, has_probes=False, ways=WAYS,
            ),
            folder,
        )  # fmt: skip

    def _judge(self, observers: Sequence[Observer]) -> None:
        outcome = self._outcome
        for frontend, observer in zip(self._cluster.frontends, observers, strict=True):
            served = Counter[str]()
            for request in observer.seen.requests:
                under = hits_under(request.began, request.ended, outcome.hits)
                found = judge_request(request, frontend.downs)
                what = "excused" if request.outcome == "failed" and found is None else request.outcome
                outcome.requests[what] = outcome.requests.get(what, 0) + 1
                for number in under:
                    outcome.hits[number].requests[what] += 1
                if found is not None:
                    outcome.violations.append(Violation(found.kind, f"frontend {frontend.number}: {found.text}", under))
                if what == "ok":
                    served[request.way] += 1
            for way in WAYS:
                outcome.by_way[way] = outcome.by_way.get(way, 0) + served[way]
                if not served[way]:
                    outcome.violations.append(Violation("failed", f"frontend {frontend.number}: no {way} was answered"))
            outcome.delay_s += sum(delay.seconds for delay in observer.seen.delays)

    def _end(self) -> None:
        """Nothing may be in use now; then everything ends in good order, and etcd has no record left."""
        outcome, cluster, began = self._outcome, self._cluster, time.monotonic()
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
        try:
            outcome.violations += [Violation("left", f"record {name} in etcd") for name in cluster.records()]
        except StoreError as error:
            outcome.violations.append(Violation("not_recovered", str(error)))


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


def _follows_discovery(report: dict[str, object]) -> bool:
    """Whether a launch, or a frontend for each of its models, has a current view of the store."""
    told = report.get("discovery")
    if not isinstance(told, dict):
        return False
    return all(one.get("current") for one in ([told] if "current" in told else told.values()))
