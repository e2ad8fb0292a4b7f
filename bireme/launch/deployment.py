"""A served recipe: one tritonserver kept alive, its models loaded, its stubs healed, its health reported.

    with Deployment(settings, console) as deployment:
        deployment.supervise()

A server that dies is started again, in an emptied run folder; when it keeps dying, the deployment gives up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from bireme.child_process import Backoff
from bireme.config import CHECKOUT, Recipe
from bireme.discovery.directory import LOOK_S
from bireme.discovery.kubernetes import AT
from bireme.discovery.records import LaunchFacts, WorkerRecord
from bireme.discovery.run_folder import ask_drain, is_draining, named_key
from bireme.discovery.store import shared_key
from bireme.discovery.view import WorkerView, discover
from bireme.errors import BiremeError, ConfigError
from bireme.kv.wire.curve import needs_curve
from bireme.launch.admin_door import AdminDoor, AdminSettings
from bireme.launch.canaries import CanarySettings
from bireme.launch.console import Console, Level
from bireme.launch.doors import get
from bireme.launch.drain import drain
from bireme.launch.frontend import FrontendProcess, FrontendSettings
from bireme.launch.generation_watch import GenerationWatch
from bireme.launch.guarded_thread import GuardedThreads
from bireme.launch.health import HealthMonitor
from bireme.launch.health_server import HealthServer
from bireme.launch.installation import Installation
from bireme.launch.loading import load_models
from bireme.launch.memory_process import MemoryProcess
from bireme.launch.openings import warn_of_old_triton
from bireme.launch.operations import Operations
from bireme.launch.ports import LOOPBACK, Hosts, Listener, Ports, is_every_address, is_loopback
from bireme.launch.preflight import check_all, unkept_code
from bireme.launch.repository import link_models, python_models, used_models
from bireme.launch.run_folder import RunFolder
from bireme.launch.told_records import ToldRecords
from bireme.launch.tritonserver import (
    Server,
    ServerDiedError,
    ServerOptions,
    ServerStartError,
    address,
    thread_pool_size,
)
from bireme.launch.watchdog import StubWatchdog
from bireme.launch.whole_page import gateways_page
from bireme.observability.otlp import has_traces
from bireme.workers.grpc_tls import GrpcTls

_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.25, 30.0
_READY_LOOK_S = 0.05
_SHORT_STOP_S = 3.0
_TOUCH_S = 600.0
_RUN_FOLDER_S = 1.0  # how soon deleted files are there again
_EXIT_S = 10.0  # of a server without models: Triton looks once a second
_ANNOUNCE_S = 3.0  # until the shared store has it that a server drains
_SEEN_S = 2 * LOOK_S  # and until its readers have seen it
_METRICS_S = 5.0  # for the frontend's page


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSettings:
    recipe: Recipe
    override: str = ""
    hosts: Hosts = Hosts()
    ports: Ports = Ports()
    health_host: str = LOOPBACK
    health_port: int = 8003  # 0: any free one
    facts: LaunchFacts = LaunchFacts()  # for its workers' records
    advertise: str = ""  # host:port of gRPC as other servers reach it; "": as clients on this machine do
    drain_timeout_s: int = 30  # for requests under way at the end
    canaries: CanarySettings = CanarySettings()
    frontend: FrontendSettings | None = None  # None: without OpenAI's API
    admin: AdminSettings | None = None  # None: without the admin door
    max_restarts: int = 10  # of the server, in restart_window_s; then give up
    restart_window_s: float = 600.0
    thread_pool_size: int = 0  # 0: as many as the process limit allows, THREAD_POOL_SIZE at most
    allow_client_shm: bool = False
    visible_keys: bool = False  # of tritonserver, to all users of the host, where they can't be hidden
    triton_arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    checkout: Path = CHECKOUT


class Deployment:
    """`start`, `supervise` until `request_stop`, `stop`. As a context manager: start and stop."""

    def __init__(self, settings: DeploymentSettings, console: Console, run_folder: RunFolder | None = None) -> None:
        self.settings = settings
        self._console = console
        self.threads = GuardedThreads(console)
        self.run_folder = run_folder or RunFolder()
        self._key = deployment_key(settings.recipe)
        self._view: WorkerView | None = None  # of the workers on all servers
        self._elsewhere: Mapping[str, WorkerRecord] = {}  # others' workers
        self._generations = GenerationWatch(settings.facts.generation, console)
        models, pipelines = used_models(settings.recipe, settings.checkout)
        self._phases = (models, pipelines)
        self._installation: Installation | None = None
        self._stopping = threading.Event()
        self._has_given_up = False
        self._began_at = time.monotonic()  # of this life
        self._backoff = Backoff(
            _FIRST_BACKOFF_S, _MAX_BACKOFF_S, limit=settings.max_restarts, window_s=settings.restart_window_s
        )
        self._server: Server | None = None
        self._watchdog: StubWatchdog | None = None
        self._monitor: HealthMonitor | None = None
        self._frontend: FrontendProcess | None = None
        self._health: HealthServer | None = None
        self._told: ToldRecords | None = None  # with discovery in Kubernetes
        self._begun = contextlib.ExitStack()  # ends what `start` has begun beside server and frontend
        self._folder_problem = ""
        self._touch_at = time.monotonic() + _TOUCH_S

    @property
    def models(self) -> tuple[str, ...]:
        return self._phases[0] + self._phases[1]

    @property
    def _num_stubs(self) -> int:
        return sum(len(self.settings.recipe.instances(model)) for model in self.models)

    @property
    def server(self) -> Server:
        assert self._server is not None, "the deployment was not started"
        return self._server

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    @property
    def health_port(self) -> int:
        assert self._health is not None, "the deployment was not started"
        return self._health.port

    def check(self) -> Installation:
        """Look at all that a start needs of this machine. Raises PreflightError."""
        return check_all(self.settings.recipe, self._listeners(), self._num_stubs, self.run_folder.path)

    def start(self) -> None:
        """Check, start the server, load. Raises PreflightError, ServerStartError.

        A server that a signal kills meanwhile is started again: 2.51 sometimes aborts in a load.
        """
        settings = self.settings
        self._installation = self.check()
        if reason := unkept_code(settings.recipe):
            self._console.event("compiled_code_not_kept", "warning", reason=reason)
        self.run_folder.remember()
        self._console.event("starting", recipe=settings.recipe.name, tritonserver=self._installation.binary)
        page = gateways_page(settings.recipe, lambda: self._server)
        if settings.recipe.discovery.backend == "kubernetes":
            self._told = ToldRecords(settings.recipe.discovery, bytes.fromhex(self._key), self.run_folder.path)
        records = self._told.routes if self._told is not None else {}
        self._health = HealthServer(settings.health_host, settings.health_port, self._live, self._ready, page, records)
        self._begun.callback(self._health.stop)
        self._health.start()
        if self._told is not None:
            self._told.start(address(settings.health_host, self.health_port), self.threads)
            self._begun.callback(self._told.stop)
        self._begun.callback(self.threads.start("run-folder", self._keep_run_folder, _RUN_FOLDER_S).stop)
        if settings.admin is not None:
            self._open_door(settings.admin)
        if settings.recipe.discovery.is_shared:
            told = self._told.store() if self._told is not None else None
            self._view = discover(
                settings.recipe, self._address, self.run_folder.path, shared=told, facts=settings.facts
            )
            self._begun.callback(self._view.stop)
            self._view.watch(self._take_view)
        if settings.frontend is not None:
            own = {"BIREME_KEY": self._key, **self.facts.environment(), **self._records_at()}
            environment = dict(settings.frontend.environment) | own
            frontend = dataclasses.replace(settings.frontend, environment=environment)
            self._frontend = FrontendProcess(frontend, self._console, self.threads)
            self._frontend.spawn()  # it takes as long as the models' load: side by side
        if settings.recipe.memory_service.enabled:
            memory = MemoryProcess(self.run_folder.path, self._key, self._console, self.threads)
            self._begun.callback(memory.stop)
            memory.start()
        try:
            self._start_server()
        except ServerDiedError:
            if not self._restart():
                raise
        if self._frontend is not None and not self._stopping.is_set():
            self._frontend.wait_ready()
        self._say_ready()

    def _open_door(self, settings: AdminSettings) -> None:
        try:
            door = AdminDoor(settings, Operations(self, self._console), self._console)
        except OSError as error:
            raise ConfigError(f"--admin-port {settings.port}: it can't be had on {settings.host} ({error})") from error
        self._begun.callback(door.stop)
        door.start()
        scheme = "http" if door.is_plain else "https"
        level: Level = "warning" if door.is_plain and not is_loopback(settings.host) else "info"
        self._console.event(
            "admin_door", level, url=f"{scheme}://{address(settings.host, door.port)}",
            **({"remedy": "keys cross the network unencrypted: --admin-tls-cert"} if level == "warning" else {}),
        )  # fmt: skip

    def _take_view(self, view: Mapping[str, WorkerRecord]) -> None:
        self._elsewhere = {name: record for name, record in view.items() if "@" in name}
        self._generations.take(view)

    # What the admin door sees

    @property
    def recipe(self) -> Recipe:
        return self.settings.recipe

    @property
    def folder(self) -> Path:
        return self.run_folder.path

    @property
    def facts(self) -> LaunchFacts:
        return self.settings.facts

    def workers_elsewhere(self) -> Mapping[str, WorkerRecord]:
        return self._elsewhere

    def generation_shares(self) -> Mapping[int, float]:
        return self._generations.shares

    def is_drain_known(self) -> bool:
        return self._view is None or self._view.is_drained_elsewhere()

    def metrics_pages(self) -> Sequence[str]:
        """Return Triton's and the frontend's. Raises BiremeError, OSError, HTTPException."""
        if self._server is None or not self._server.is_running:
            return []
        pages = [self._server.metrics_text()]
        if (frontend := self._frontend) is not None:
            pages.append(get(frontend.address, "/metrics", _METRICS_S, frontend.has_tls, frontend.key).decode())
        return pages

    def _listeners(self) -> dict[str, Listener]:
        """Return port option -> where it is listened on."""
        settings = self.settings
        hosts, ports = settings.hosts, settings.ports
        listeners = {
            "--http-port": Listener("--triton-host", hosts.http, ports.http),
            "--grpc-port": Listener("--grpc-host", hosts.grpc, ports.grpc),
            "--metrics-port": Listener("--metrics-host", hosts.metrics, ports.metrics),
        }
        if settings.health_port:
            listeners["--health-port"] = Listener("--health-host", settings.health_host, settings.health_port)
        if (admin := settings.admin) is not None and admin.port:
            listeners["--admin-port"] = Listener("--admin-host", admin.host, admin.port)
        if (frontend := settings.frontend) is not None:
            listeners["--openai-port"] = Listener("--host", frontend.host, frontend.port)
        return listeners

    def supervise(self) -> bool:
        """Keep the server alive until `request_stop`; false: it kept dying."""
        while not self._stopping.is_set():
            if not self.server.wait(0.2):
                self._revive_threads()
                continue
            if not self._stopping.is_set() and not self._restart():
                return False
            self._say_ready()
        return True

    def request_stop(self) -> None:
        """End `start` or `supervise` soon; from any thread, but no signal handler."""
        self._stopping.set()

    def stop(self) -> None:
        """Drain and end everything; remove the run folder. Harmless when repeated."""
        self._stopping.set()
        self._announce_end()
        if self._frontend is not None:
            self._frontend.stop()
            self._frontend = None
        limit_s = self._drain()
        self._stop_watching()
        if self._server is not None:
            began = time.monotonic()
            code = self._server.stop(limit_s)
            self._console.event(
                "stopped", "info" if code == 0 else "warning", code=code, seconds=time.monotonic() - began
            )
            self._server = None
        self._begun.close()
        self.run_folder.remove()

    @property
    def _address(self) -> str:
        return self.settings.advertise or address(self.settings.hosts.grpc, self.settings.ports.grpc)

    def _records_at(self) -> dict[str, str]:
        """Return the variable by which processes of the launch find the records that it has."""
        return {AT: self._told.at} if self._told is not None else {}

    def _announce_end(self) -> None:
        """Have other servers send nothing new, and wait until they know."""
        view = self._view
        if view is None or self._monitor is None or not self.server.is_running or not self.run_folder.path.exists():
            return
        ask_drain(self.run_folder.path)
        deadline = time.monotonic() + _ANNOUNCE_S
        while not view.is_drained_elsewhere() and time.monotonic() < deadline:
            time.sleep(_READY_LOOK_S)
        is_known = view.is_drained_elsewhere()
        self._console.event("draining", "info" if is_known else "warning", known_to_others=is_known)
        time.sleep(_SEEN_S)

    def _keep_run_folder(self) -> None:
        now = time.monotonic()
        if now >= self._touch_at:
            self._touch_at = now + _TOUCH_S
            self.run_folder.touch()
        self.run_folder.shut_shared_memory()  # also of a model that loads: its stub does so once it has all imported
        self._folder_problem = f"{self.run_folder.path} is incomplete and can't be made again"
        if count := self.run_folder.restore():
            self._console.event("run_folder_restored", "warning", missing=count, path=self.run_folder.path)
        self._folder_problem = ""

    def _drain(self) -> float:
        """Let requests end; return how long the server's end may take."""
        monitor = self._monitor
        if monitor is None or not self.server.is_running:
            return _SHORT_STOP_S
        self._console.event("stopping", drain_timeout_s=self.settings.drain_timeout_s)
        self._stop_watching()  # a model that is unloaded must not be healed
        workers, pipelines = self._phases
        is_empty = drain(
            self.server.admin, pipelines, workers, monitor.busy_models, self._console, self.settings.drain_timeout_s
        )
        return _EXIT_S if is_empty else _SHORT_STOP_S

    def kill(self) -> None:
        if (frontend := self._frontend) is not None:
            frontend.kill()
        if self._server is not None:
            self._server.kill()

    def health(self) -> dict[str, Any]:
        return self._ready()[1]

    def __enter__(self) -> Deployment:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start_server(self) -> None:
        """Start, load, watch. Raises ServerStartError, and nothing of the server is left."""
        began = self._began_at = time.monotonic()
        link_models(self.run_folder.path / "models", self.settings.recipe, self.settings.checkout)
        server = Server(
            self._options(), self.run_folder, installation=self._installation, on_line=self._console.triton_line
        )
        self._server = server
        server.start(is_wanted=lambda: not self._stopping.is_set())
        self._console.event("server_up", pid=server.pid, seconds=time.monotonic() - began)
        self._warn(server)
        recipe = self.settings.recipe
        owners = {name: model for model in self.models for name in recipe.instances(model)}
        try:
            for phase in self._phases:
                load_models(server, phase, owners, self._console, self._stopping)
        except ServerStartError:
            server.kill()
            raise
        if not self._stopping.is_set():
            self._watch(server)

    def _warn(self, server: Server) -> None:
        if server.shows_keys:
            self._console.event(
                "keys_visible", "warning", pid=server.pid, remedy="allow ptrace (docs/security.md, Keys in arguments)"
            )
        with contextlib.suppress(BiremeError):  # it has died since, or was not waited for
            warn_of_old_triton(self.settings.hosts, server.version(), self._console)

    def _options(self) -> ServerOptions:
        settings = self.settings
        environment = {
            "BIREME_RECIPE": settings.recipe.folder,
            "BIREME_OVERRIDE": settings.override,
            "BIREME_KEY": self._key,
            "BIREME_ADVERTISE": self._address,
            **self.facts.environment(),
            **self._records_at(),
            **settings.environment,
        }
        return ServerOptions(
            repositories=(self.run_folder.path / "models",),
            ports=settings.ports,
            hosts=settings.hosts,
            models=(),
            thread_pool_size=settings.thread_pool_size or thread_pool_size(self._num_stubs),
            exit_timeout_s=settings.drain_timeout_s,
            allow_client_shm=settings.allow_client_shm,
            visible_keys=settings.visible_keys,
            grpc_tls=GrpcTls.of(settings.recipe),
            has_traces=has_traces(settings.recipe, os.environ | environment),
            environment=environment,
            arguments=settings.triton_arguments,
        )

    def _watch(self, server: Server) -> None:
        server.note_members()
        self.run_folder.remember()
        recipe = self.settings.recipe
        folder = self.run_folder.path / "models"
        stubs = {model: recipe.instances(model) for model in python_models(folder, self.models)}
        self._watchdog = StubWatchdog(server, stubs, self._console, self.threads)
        self._watchdog.start()
        self._monitor = HealthMonitor(
            server, self._watchdog, recipe, self.models, self._console, self.threads,
            self.settings.canaries, self._frontend, self._key,
        )  # fmt: skip
        self._monitor.start()

    def _stop_watching(self) -> None:
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.stop()
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.stop()

    def _say_ready(self) -> None:
        while not self._stopping.is_set() and self.server.is_running and not self._ready()[0]:
            self._revive_threads()
            self._stopping.wait(_READY_LOOK_S)
        if self._stopping.is_set() or not self.server.is_running:
            return
        server, seconds = self.server, time.monotonic() - self._began_at
        ports: dict[str, Any] = {
            "http": server.http,
            "grpc": server.grpc,
            "metrics": f"http://{server.metrics}/metrics",
        }
        if self._frontend is not None:
            ports["openai"] = self._frontend.url
        health = f"http://{address(self.settings.health_host, self.health_port)}/health/ready"
        self._console.event("ready", seconds=seconds, **ports, health=health)

    def _revive_threads(self) -> None:
        with contextlib.suppress(RuntimeError):  # no thread left: `problems` says so, the next call tries again
            self.threads.revive()

    def _restart(self) -> bool:
        """Return false: it is time to give up."""
        self._console.event("server_died", "error", code=self.server.returncode, last_lines=self.server.tail(5))
        while not self._stopping.is_set():
            delay = self._backoff.next_s()
            if delay == math.inf:
                return self._give_up()
            self._console.event("server_restart", "warning", in_s=delay)
            try:
                try:
                    self._stop_watching()
                    self.server.kill()
                    self.run_folder.clear()
                finally:
                    self._stopping.wait(delay)  # also after a failure: what the machine lacks now it may have then
                if self._stopping.is_set():
                    break
                self._start_server()
                return True
            except (BiremeError, OSError, RuntimeError) as error:  # also: no descriptor, memory or thread left
                self._console.event("server_start_failed", "error", error=error)
        return True

    def _give_up(self) -> bool:
        settings = self.settings
        self._has_given_up = True
        self._console.event(
            "gave_up", "error", restarts=settings.max_restarts, within_s=settings.restart_window_s,
            remedy="see the errors above and docs/troubleshooting.md",
        )  # fmt: skip
        return False

    def _live(self) -> tuple[bool, dict[str, Any]]:
        return not self._has_given_up, {"live": not self._has_given_up}

    def _ready(self) -> tuple[bool, dict[str, Any]]:
        monitor = self._monitor
        if self._stopping.is_set():
            return False, {"status": "stopping"}
        if monitor is None:
            return False, {"status": "starting"}
        report = monitor.report() | {"generation": self.facts.generation}
        if is_draining(self.run_folder.path):
            return False, report | {"status": "draining"}
        if self._folder_problem:
            report |= {"status": "not_ready", "run_folder": self._folder_problem}
        if problems := self.threads.problems():
            report |= {"status": "not_ready", "threads": problems}
        if (view := self._view) is not None:
            report["discovery"] = view.report()
            if report["status"] == "ready" and not _is_well(report["discovery"]):
                report["status"] = "degraded"
        return report["status"] != "not_ready", report


def _is_well(discovery: Mapping[str, Any]) -> bool:
    return discovery["current"] and not discovery["unregistered"] and not discovery["refused"]


def deployment_key(recipe: Recipe) -> str:
    """Return a launch's key (hex): BIREME_KEY, else that of the shared folder, else a new one.

    Raises ConfigError for several hosts that have no key in common.
    """
    if recipe.discovery.is_shared:
        return shared_key(recipe.discovery).hex()
    if (named := named_key()) is not None:
        return named.hex()
    host = recipe.kv_events.host
    if host and needs_curve(f"tcp://{host}:*"):
        raise ConfigError(
            f"BIREME_KEY: not set; kv_events.host {host} is for readers on other hosts, which need the key:"
            " `openssl rand -hex 32` makes one, give it to all of them"
        )
    return secrets.token_hex(32)


def advertised_address(host: str, grpc_port: int) -> str:
    """Return host:port for other servers; `host` may have a port, or mean every address."""
    if is_every_address(host):
        host = socket.gethostname()
    if host.count(":") == 1 or host.startswith("[") and "]:" in host:
        return host
    return address(host.strip("[]"), grpc_port)
