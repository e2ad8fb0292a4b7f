"""The process that loads and watches a launch: python -m benchmarks.chaos.load CONFIG.json

Two things at once on one event loop: a closed loop of requests on every way, each answer checked token by token,
and each second a short probe of every way and a look at /health/ready. One JSON record a line goes to stdout. A
line on stdin, or its end, stops the load: what is under way is taken to its end, then the process ends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import random
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.chaos import questions, records
from benchmarks.chaos.ways import Way, make_client, ways_of
from benchmarks.load.meter import LoadError, Meter, Trace, WrongAnswerError, clock
from benchmarks.load.runner import LoadPlan, Runner
from benchmarks.load.workload import Workload

PROBE_EVERY_S, PROBE_TIMEOUT_S = 1.0, 10.0
READINESS_EVERY_S, READINESS_TIMEOUT_S = 0.25, 2.0
BEAT_S, LATE_S = 0.1, 0.3
NO_NEWS_S = 75.0  # after so long a request hangs: twice pipeline.stall_timeout_s, and a start of an engine
FOREVER_S = 1e7


@dataclasses.dataclass(frozen=True, slots=True)
class LoadSettings:
    addresses: dict[str, str]  # door -> host:port
    health: str
    served_name: str
    questions: str  # file
    num_decode: int
    streams: int = 2  # a way
    drop_share: float = 0.15
    seed: int = 1
    has_probes: bool = True
    ways: tuple[str, ...] = ()  # empty: all


def say(record: Any) -> None:
    fields = dataclasses.asdict(record)
    print(json.dumps({"record": type(record).__name__, **fields}), flush=True)


class WayLoad:
    """The closed loop and the probes of one way."""

    def __init__(self, way: Way, settings: LoadSettings, workloads: dict[str, Workload]) -> None:
        self.way = way
        kind = "text" if way.has_text else "chat"
        plan = LoadPlan(
            streams=settings.streams,
            seconds=FOREVER_S,
            warmup_s=0.0,
            stall_s=NO_NEWS_S,
            drop_share=settings.drop_share,
            drain_s=NO_NEWS_S + 15,
            seed=random.Random(f"{settings.seed}/{way.name}").randrange(1 << 31),
        )
        client = make_client(way, settings.addresses, settings.served_name)
        self.runner = Runner(client, workloads[kind], plan, on_end=self._tell)
        self._prober = make_client(way, settings.addresses, settings.served_name)
        self._probes = workloads[f"{kind}_probe"]
        self._tasks: set[asyncio.Task[None]] = set()

    async def probe(self) -> None:
        """Ask each second, also while earlier probes hang."""
        await self._prober.open()
        number = 0
        try:
            while True:
                task = asyncio.create_task(self._probe_once(number))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                number += 1
                await asyncio.sleep(PROBE_EVERY_S)
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._prober.close()

    async def _probe_once(self, slot: int) -> None:
        sent, error = clock(), ""
        try:
            trace = Trace(Meter(), self._probes.prompt(slot, 0))
            await asyncio.wait_for(self._prober.request(slot, trace), PROBE_TIMEOUT_S)
        except TimeoutError:
            error = f"no answer within {PROBE_TIMEOUT_S:.0f} s"
        except LoadError as problem:
            error = f"WRONG: {problem}" if isinstance(problem, WrongAnswerError) else str(problem)
        self._prober.drop(slot)
        say(records.Probe(self.way.name, sent, clock(), error))

    def _tell(self, trace: Trace, error: LoadError | None) -> None:
        say(records.Request(self.way.name, trace.sent_at, clock(), outcome_of(trace, error), str(error or "")))


def outcome_of(trace: Trace, error: LoadError | None) -> records.Outcome:
    """A wrong token is wrong, also where the client was about to leave."""
    if error is None:
        return "ok"
    if isinstance(error, WrongAnswerError):
        return "wrong"
    if trace.is_dropped:
        return "dropped"
    return "hung" if trace.is_stalled else "failed"


async def watch_readiness(health: str) -> None:
    while True:
        began = clock()
        try:
            status, is_ready = await asyncio.wait_for(asyncio.to_thread(ask_readiness, health), READINESS_TIMEOUT_S + 1)
        except (TimeoutError, OSError, ValueError, http.client.HTTPException):
            status, is_ready = "silent", False
        say(records.Readiness(began, status, is_ready))
        await asyncio.sleep(max(0.0, began + READINESS_EVERY_S - clock()))


def ask_readiness(health: str) -> tuple[str, bool]:
    connection = http.client.HTTPConnection(health, timeout=READINESS_TIMEOUT_S)
    try:
        connection.request("GET", "/health/ready")
        reply = connection.getresponse()
        return str(json.loads(reply.read()).get("status")), reply.status == 200
    finally:
        connection.close()


async def watch_delays() -> None:
    """Tell when this process was not run in time: what it then saw late is not the launch's fault."""
    while True:
        began = clock()
        await asyncio.sleep(BEAT_S)
        if (late := clock() - began - BEAT_S) > LATE_S:
            say(records.Delay(began, round(late, 3)))


async def run(settings: LoadSettings) -> None:
    workloads = questions.load(settings.questions)
    ways = ways_of(settings.num_decode)
    loads = [WayLoad(ways[name], settings, workloads) for name in settings.ways or ways]
    watchers: list[Callable[[], Awaitable[None]]] = [watch_delays]
    if settings.has_probes:
        watchers += [lambda: watch_readiness(settings.health)]
        watchers += [load.probe for load in loads if load.way.is_probed]
    watching = [asyncio.ensure_future(watch()) for watch in watchers]
    running = [asyncio.create_task(load.runner.run()) for load in loads]
    stop = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    await asyncio.wait([stop, *running, *watching], return_when=asyncio.FIRST_COMPLETED)
    for load in loads:
        load.runner.stop()
    for task in watching:
        task.cancel()
    ended = await asyncio.gather(*running, *watching, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error


def main() -> None:
    import uvloop

    uvloop.run(run(LoadSettings(**json.loads(Path(sys.argv[1]).read_text()))))


if __name__ == "__main__":
    main()
