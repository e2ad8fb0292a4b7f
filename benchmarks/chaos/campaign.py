"""One topology's campaign: start it, hit it again and again, each time to its recovery, then drain it and look for
what is left.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos import questions
from benchmarks.chaos.faults import KINDS, Fault, plan
from benchmarks.chaos.launch import STOP_S, Launch, NotStartedError, send_signal
from benchmarks.chaos.load import LoadSettings
from benchmarks.chaos.memory import Lasting
from benchmarks.chaos.observer import Observer
from benchmarks.chaos.records import Hit, ServerDeath
from benchmarks.chaos.topologies import Topology
from benchmarks.chaos.verdict import Violation, judge, judge_drain, longest_lie_s
from benchmarks.chaos.ways import ways_of

BASELINE_S = 60.0  # all ways must serve before the first fault
RECOVERY_S = 60.0  # and so many times what a start takes on this machine now; Triton's own exit takes half of it
RECOVERY_STARTS = 3
SETTLE_S = 1.0  # after a fault, before anybody may call it over
DRAIN_LOAD_S = 4.0
_LOOK_S = 0.3

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CampaignSettings:
    seed: int
    seconds: float  # under faults, of each topology
    kinds: tuple[str, ...] = ()
    streams: int = 2  # of each way


@dataclass(slots=True)
class Outcome:
    """What became of one topology."""

    topology: str
    hits: list[Hit] = field(default_factory=list)
    lies_s: list[float] = field(default_factory=list)  # of each hit
    requests: dict[str, int] = field(default_factory=dict)  # outcome -> how many
    by_way: dict[str, int] = field(default_factory=dict)  # way -> requests that ended as they should
    violations: list[Violation] = field(default_factory=list)
    delay_s: float = 0.0  # in which the machine did not run the observer
    memory_mb: tuple[float, float] | None = None  # of serve.py: first, last
    memory: list[Lasting] = field(default_factory=list)  # of processes that lasted, where they come and go
    exit_code: int | None = None
    stop_s: float = 0.0


class Campaign:
    def __init__(self, topology: Topology, settings: CampaignSettings, folder: Path, say: Say) -> None:
        self._topology, self._settings, self._folder, self._say = topology, settings, folder, say
        self._ways = ways_of(topology.replicas["decode"])
        self._probed = {way.name for way in self._ways.values() if way.is_probed}
        self._outcome = Outcome(topology.name)
        self._faults = plan(settings.seed, topology, settings.kinds)
        self._rng = random.Random(f"{settings.seed}/{topology.name}/pauses")

    def run(self) -> Outcome:
        """Launches that do not recover are ended and the next one is started, until the time is over."""
        deadline = time.monotonic() + self._settings.seconds
        while True:
            launch = Launch(self._topology, self._folder)
            self._say(f"{self._topology.name}: starting")
            try:
                launch.start()
            except NotStartedError as error:
                launch.remove()
                self._outcome.violations.append(Violation("not_recovered", str(error)))
                return self._outcome
            try:
                is_well = self._hit_until(launch, deadline)
                if is_well:
                    self._drain(launch)
                    return self._outcome
            finally:
                launch.remove()
            if time.monotonic() >= deadline:
                return self._outcome

    def _hit_until(self, launch: Launch, deadline: float) -> bool:
        """Return whether all is well at the end."""
        observer = Observer(self._load_settings(launch), self._folder)
        first_mb = launch.memory_mb()
        deaths = DeathWatch(launch, observer.seen.deaths)
        deaths.start()
        hits: list[Hit] = []
        observer.start()
        try:
            began = time.monotonic()
            is_well = self._await_recovery(launch, observer, began, {}, BASELINE_S)
            if not is_well:
                text = f"not all ways served {BASELINE_S:.0f} s after the start: {self._what_is_down(observer, began)}"
                self._outcome.violations.append(Violation("not_recovered", text))
            while is_well and time.monotonic() < deadline:
                hit = self._hit(launch, observer, next(self._faults), hits)
                is_well = hit.recovered is not None
                time.sleep(self._rng.uniform(0.5, 2.0) if is_well else 0.0)
            self._outcome.memory_mb = (first_mb, launch.memory_mb())
            self._stop(observer)
        finally:
            deaths.stop()
            observer.kill()
        self._take(observer, hits)
        if is_well:
            left = launch.left_in_use()
            self._outcome.violations += [Violation("left", f"{name} = {value:g}") for name, value in left.items()]
        return is_well

    def _hit(self, launch: Launch, observer: Observer, fault: Fault, hits: list[Hit]) -> Hit:
        limit_s = RECOVERY_S + RECOVERY_STARTS * launch.start_s
        if not self._await_recovery(launch, observer, time.monotonic(), {}, limit_s):
            text = f"all was well, then not for {limit_s:.0f} s: {self._what_is_down(observer, time.monotonic())}"
            self._outcome.violations.append(Violation("not_recovered", text))
        before = launch.roles()
        launch.note_run_folder()
        hit = Hit(fault, began := time.monotonic(), began)
        hits.append(hit)
        self._say(f"{self._topology.name}: {len(hits)}. {fault}")
        num_before = observer.outcomes()
        try:
            KINDS[fault.kind].act(launch, fault)
        except (KeyError, ProcessLookupError):  # the process ended by itself just now: there is something to recover
            self._say(f"{self._topology.name}:    {fault.victim} was not there")
        hit.over = time.monotonic()
        victims = {fault.victim: before.get(fault.victim)} if KINDS[fault.kind].replaces else {}
        if self._await_recovery(launch, observer, hit.over, victims, limit_s):
            hit.recovered = time.monotonic()
        else:
            hit.gave_up = time.monotonic()
        counts = hit.requests = observer.outcomes() - num_before
        down = "" if hit.recovered else f" still down: {self._what_is_down(observer, hit.over)}"
        recovery = "NOT RECOVERED" if hit.recovery_s is None else f"recovered {hit.recovery_s:.1f} s"
        has_died = fault.victim != "server" and any(death.at >= hit.began for death in observer.seen.deaths)
        died = " (tritonserver died)" if has_died else ""
        self._say(f"{self._topology.name}:    {recovery}{died} {dict(counts)}{down}")
        return hit

    def _await_recovery(
        self, launch: Launch, observer: Observer, since: float, victims: Mapping[str, int | None], limit_s: float
    ) -> bool:
        """Wait until the victims are other processes, readiness says ready and every way answers what was sent since.

        Time in which the machine did not run the observer does not count.
        """
        time.sleep(SETTLE_S)
        while time.monotonic() - since < limit_s + observer.seen.delay_s(since, time.monotonic()):
            if launch.exit_code is not None or not observer.is_running:
                return False
            roles = launch.roles()
            is_replaced = all(roles.get(role) not in (None, pid) for role, pid in victims.items())
            if is_replaced and observer.is_ready() and observer.serves_since(since + SETTLE_S, self._probed):
                return True
            time.sleep(_LOOK_S)
        return False

    def _what_is_down(self, observer: Observer, since: float) -> str:
        silent = sorted(name for name in self._probed if not observer.serves_since(since, {name}))
        errors = {probe.way: probe.error for probe in observer.seen.probes if probe.error and probe.sent > since}
        status = observer.seen.readiness[-1].status if observer.seen.readiness else "never asked"
        return f"readiness {status}; silent {silent}; {[errors.get(name, '') for name in silent][:3]}"

    def _drain(self, launch: Launch) -> None:
        """Stop in order under load: what is under way ends as it should, nothing stays behind."""
        number = self._rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
        self._say(f"{self._topology.name}: {number.name} under load")
        observer = Observer(self._load_settings(launch, has_probes=False), self._folder)
        observer.start()
        try:
            time.sleep(DRAIN_LOAD_S)
            signaled = time.monotonic()
            send_signal(launch.pid, number)
            waiting = ThreadPoolExecutor(1).submit(self._await_exit, launch, signaled)
            time.sleep(2.0)
            self._stop(observer)
            waiting.result()
        finally:
            observer.kill()
        found = judge_drain(observer.seen.requests, signaled)
        if self._outcome.exit_code is None:
            found.append(Violation("stop", f"serve.py had not ended {STOP_S:.0f} s after {number.name}"))
            return self._outcome.violations.extend(found)
        if self._outcome.exit_code != 0:
            found.append(Violation("stop", f"serve.py ended with {self._outcome.exit_code} after {number.name}"))
        found += [Violation("left", text) for text in launch.left_over()]
        self._outcome.violations += found

    def _stop(self, observer: Observer) -> None:
        if problem := observer.stop():
            self._outcome.violations.append(Violation("load", problem))

    def _await_exit(self, launch: Launch, signaled: float) -> None:
        self._outcome.exit_code = launch.wait(STOP_S)
        self._outcome.stop_s = round(time.monotonic() - signaled, 1)

    def _take(self, observer: Observer, hits: Sequence[Hit]) -> None:
        outcome, seen, first = self._outcome, observer.seen, len(self._outcome.hits)
        found = judge(seen, hits, self._ways)
        outcome.violations += [
            Violation(item.kind, item.text, tuple(number + first for number in item.hits)) for item in found
        ]
        outcome.lies_s += [longest_lie_s(seen, hit, self._ways) for hit in hits]
        outcome.hits += hits
        for request in seen.requests:
            outcome.requests[request.outcome] = outcome.requests.get(request.outcome, 0) + 1
            if request.outcome == "ok":
                outcome.by_way[request.way] = outcome.by_way.get(request.way, 0) + 1
        outcome.delay_s += sum(delay.seconds for delay in seen.delays)
        for name in self._ways:
            if not outcome.by_way.get(name):
                outcome.violations.append(Violation("failed", f"{name}: no request ended as it should"))

    def _load_settings(self, launch: Launch, has_probes: bool = True) -> LoadSettings:
        topology, path = self._topology, self._folder / f"{self._topology.name}-questions.json"
        if not path.exists():
            answer = questions.mocker_answer if topology.is_mocker else None
            made = answer(topology.model) if answer else questions.served_answer(launch.addresses["http"])
            questions.save(questions.make_questions(topology.model, made, self._settings.seed), path)
        return LoadSettings(
            addresses=launch.addresses, health=launch.addresses["health"], served_name=topology.served_name,
            questions=str(path), num_decode=topology.replicas["decode"], streams=self._settings.streams,
            seed=self._settings.seed, has_probes=has_probes,
        )  # fmt: skip


class DeathWatch:
    """Notes each time that tritonserver becomes another process, on a thread of its own."""

    def __init__(self, launch: Launch, deaths: list[ServerDeath]) -> None:
        self._launch, self._deaths = launch, deaths
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="deaths", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        known = self._launch.roles().get("server")
        while not self._stopping.wait(0.5):
            pid = self._launch.roles().get("server")
            if known is not None and pid != known:
                self._deaths.append(ServerDeath(time.monotonic()))
            known = pid
