"""Several servers of one model and what they share, as real processes: launches, etcd, nats-server, far frontends.

Two launches of the mocker (prefill + decode, prefill + 2 decode) register in etcd; two frontends without a server
follow it; KV events and load go over nats-server.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos.etcd import EtcdServer
from benchmarks.chaos.launch import STOP_S, Launch, NotStartedError
from benchmarks.chaos.nats import NatsProcess
from benchmarks.chaos.topologies import Topology
from benchmarks.load.load_process import CHECKOUT
from bireme.config import stage_of
from bireme.conversion import convert
from bireme.discovery.store import RecordStore, parse_address
from bireme.discovery.view import create_store
from bireme.launch import free_port
from bireme.settings import DiscoveryConfig

NAME = "cluster"
LAUNCHES = ("a", "b")
NUM_FRONTENDS = 2
START_S, BACK_S = 600.0, 600.0
_ASK_S = 4.0  # a frontend gives its workers three seconds to answer
# Pools of this size are full, and the routers' indices with them, within the first minute of a hundred streams.
_ENGINE = {"mocker": {"step_ms": 50, "prefill_ms": 10}, "kv_cache_config": {"max_tokens": 1 << 16}}
Report = Mapping[str, Any]  # of /health/ready; {} when it did not answer


class FarFrontend:
    """A frontend without a server: python -m bireme.openai --discovery."""

    def __init__(self, number: int, topology: Topology, discovery: str, folder: Path) -> None:
        self.number, self._served_name = number, topology.served_name
        self.log = folder / f"frontend{number}.log"
        self.downs: list[list[float]] = []  # [killed, serving again]
        self.process: subprocess.Popen[bytes] | None = None
        self._environment = {name: value for name, value in os.environ.items() if name != "BIREME_GRPC"}
        self._environment |= {"PYTHONPATH": str(CHECKOUT), "BIREME_OVERRIDE": json.dumps(topology.settings)}
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "bireme.openai", "--recipe", topology.recipe, "--discovery", discovery]
        self._command += ["--port", str(port), "--no-access-log"]

    def spawn(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, cwd=CHECKOUT, env=self._environment, stdout=log, stderr=log)

    def start(self) -> None:
        """Raises RuntimeError when it does not serve."""
        self.spawn()
        wait_for(lambda: serves(self.address), START_S, f"frontend {self.number} is not ready; see {self.log}")

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        assert self.process is not None
        self.downs.append([time.monotonic(), float("inf")])
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.start()
        self.downs[-1][1] = time.monotonic()

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(STOP_S)

    def ready_workers(self) -> dict[str, str]:
        """Return id -> what it says of each worker that it follows: `ready`, or why not."""
        workers: dict[str, str] = ask(self.address).get("models", {}).get(self._served_name, {})
        return workers


class Cluster:
    """Used as a context manager, which ends all processes."""

    def __init__(self, folder: Path, launches: Sequence[str] = LAUNCHES, num_frontends: int = NUM_FRONTENDS) -> None:
        self.folder, self._num_frontends = folder, num_frontends
        self._key_before = os.environ.get("BIREME_KEY", "")
        os.environ["BIREME_KEY"] = secrets.token_hex(32)  # launches and frontends take it from here
        self.etcd, self.nats = EtcdServer(folder), NatsProcess(folder)
        self.launches: dict[str, Launch | None] = dict.fromkeys(launches)  # None: it is being started
        self.frontends: list[FarFrontend] = []

    def start(self) -> None:
        """Raises NotStartedError, RuntimeError."""
        self.etcd.start()
        self.nats.start()
        errors: list[NotStartedError] = []

        def start_one(name: str) -> None:
            try:
                self.start_launch(name)
            except NotStartedError as error:
                errors.append(error)

        starting = [threading.Thread(target=start_one, args=(name,)) for name in self.launches]
        for thread in starting:
            thread.start()
        for thread in starting:
            thread.join()
        if errors:
            raise errors[0]
        for number in range(self._num_frontends):
            self.frontends.append(self.make_frontend(number))
            self.frontends[-1].start()

    def start_launch(self, name: str) -> None:
        """Raises NotStartedError; then nothing of it is left."""
        arguments = ("--discovery", self.etcd.address, "--drain-timeout=60")
        launch = Launch(topology(name, self.nats.url), self.folder, arguments=arguments, has_frontend=False)
        try:
            launch.start()
        except NotStartedError:
            launch.remove()
            raise
        self.launches[name] = launch

    def reports(self) -> list[Report]:
        """Return what each launch and frontend that is there says of its readiness."""
        launches = [launch.addresses["health"] for launch in self.launches.values() if launch is not None]
        return [ask(address) for address in (*launches, *(one.address for one in self.frontends if one.is_running))]

    def processes(self) -> set[tuple[str, int]]:
        """Return role and pid of all that serves."""
        found = {(f"frontend {one.number}", one.process.pid) for one in self.frontends if one.process is not None}
        for name, launch in list(self.launches.items()):
            if launch is not None:
                found |= {(f"{name}.{role}", pid) for role, pid in launch.roles().items()}
        return found

    @contextlib.contextmanager
    def store(self) -> Iterator[RecordStore]:
        """Yield where the workers are registered."""
        store = create_store(convert(parse_address(self.etcd.address), DiscoveryConfig, "etcd"))
        try:
            yield store
        finally:
            store.close()

    def records(self) -> list[str]:
        """Return the ids of the workers that are registered."""
        with self.store() as store:
            return sorted(store.read())

    def make_frontend(self, number: int) -> FarFrontend:
        """Return one that is not started yet."""
        return FarFrontend(number, topology("a", self.nats.url), self.etcd.address, self.folder)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        for frontend in self.frontends:
            if frontend.process is not None and frontend.is_running:
                frontend.process.kill()
                frontend.process.wait()
        for launch in filter(None, self.launches.values()):
            launch.remove()
        self.etcd.kill()
        self.nats.kill()
        os.environ["BIREME_KEY"] = self._key_before  # empty: as if it were not set


def topology(name: str, nats_url: str = "") -> Topology:
    events = {"kv_events": {"plane": "nats", "nats_url": nats_url}} if nats_url else {}
    return Topology(
        name=f"{NAME}-{name}",
        recipe="recipes/mocker-disagg",
        model="models/tiny-llama",
        served_name="mocker-disagg",
        replicas={"prefill": 1, "decode": 1 if name == "a" else 2},
        is_mocker=True,
        engine_config=_ENGINE,
        settings={"pipeline": {"migration_limit": 20}, "router": {"mode": "kv"}, **events},
    )


def ask(address: str) -> Report:
    """Return a launch's or a frontend's /health/ready."""
    connection = http.client.HTTPConnection(address, timeout=_ASK_S)
    try:
        connection.request("GET", "/health/ready")
        report: Report = json.loads(connection.getresponse().read())
        return report
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    finally:
        connection.close()


def serves(address: str) -> bool:
    return ask(address).get("status") in ("ready", "degraded")


def remaining_decode(workers: Mapping[str, str], server: str, worker: str = "") -> list[str]:
    """Return the decode workers that are ready, but for one of a server, or with "" all of that server."""
    ready = [name for name, state in workers.items() if state == "ready" and stage_of(name) == "decode"]
    return [name for name in ready if name != f"{worker}@{server}" and (worker or not name.endswith(f"@{server}"))]


def wait_for(condition: Callable[[], bool], limit_s: float, problem: str) -> None:
    """Raises RuntimeError with `problem`."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(problem)
        time.sleep(0.2)
