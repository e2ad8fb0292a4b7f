"""One running tritonserver: its flags, start with useful errors, stop without remains.

    with start_server("recipes/tiny") as server:
        client = tritonclient.grpc.InferenceServerClient(server.grpc)

The kernel kills it with the thread that started it, a permanent one of the Server's.
"""

from __future__ import annotations

import collections
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

from bireme import own_process
from bireme.config import Recipe
from bireme.errors import BiremeError, ConfigError
from bireme.launch import processes
from bireme.launch.admin import ADMIN_HEADER, RESTRICTED_APIS, SHM_HEADER, AdminClient
from bireme.launch.hidden_arguments import HiddenArguments, NotHiddenError
from bireme.launch.installation import (
    Installation,
    PreparedStart,
    find_installation,
    missing_libraries,
    newer_flags,
    prepare,
)
from bireme.launch.model_configs import are_whole
from bireme.launch.ports import Hosts, Ports, free_ports, listen_flags, own_host
from bireme.launch.repository import link_models
from bireme.launch.run_folder import RunFolder
from bireme.observability.otlp import has_traces
from bireme.recipe_files import load_recipe
from bireme.workers.grpc_tls import GrpcTls

_TAIL_LINES = 400
_SHOWN_LINES = 30
_RESTRICTIONS = ("--http-restricted-api", "--grpc-restricted-protocol")
# Headers that become request parameters. Triton does so on gRPC and on HTTP's /infer, not on /generate_stream.
_TRACE_HEADERS = tuple(f"--{door}-header-forward-pattern=(?i)trace(parent|state)" for door in ("http", "grpc"))
_ECHO = "Non-graceful termination detected"
# Blocked BLS calls and sends share a model's pool threads; the threads not for BLS are left to the sends.
_THREADS_FOR_SENDS = 32
_LEAST_FOR_SENDS = 8  # four senders, the poller of cancellations, the publisher of metrics
# More would let more BLS calls wait at once, but each response then wakes another cold thread: with 256, twice the
# context switches and a fifth fewer tokens at 256 streams (measured on 2 cores).
THREAD_POOL_SIZE = 64


class ServerStartError(BiremeError):
    """It ended, or was not ready in time; the text says why."""


class ServerDiedError(ServerStartError):
    """A signal ended it while it started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    repositories: tuple[Path, ...]
    ports: Ports = Ports()
    hosts: Hosts = Hosts()
    models: tuple[str, ...] | None = None  # explicit mode with these loaded at the start; None: all, no explicit mode
    thread_pool_size: int = THREAD_POOL_SIZE  # of the Python backend for each model
    http_threads: int = 16  # a blocking load holds one
    exit_timeout_s: int = 20  # for requests under way at SIGTERM
    allow_client_shm: bool = False  # clients may have the server map memory of their choice
    visible_keys: bool = False  # start as well where the server's keys can't be hidden from other users of the host
    grpc_tls: GrpcTls | None = None
    has_traces: bool = False  # models are told of their callers' traces
    environment: Mapping[str, str] = field(default_factory=dict)  # on top of the process's own
    arguments: tuple[str, ...] = ()  # more flags, last

    @property
    def bls_threads(self) -> int:
        return max(self.thread_pool_size - _THREADS_FOR_SENDS, self.thread_pool_size // 2)

    @property
    def bls_spare_threads(self) -> int:
        """Threads that sends can do without, once dead models' calls hold the others."""
        return max(self.thread_pool_size - self.bls_threads - _LEAST_FOR_SENDS, 0)


class Server:
    """`start` once, `stop` once; both from any thread."""

    def __init__(
        self,
        options: ServerOptions,
        run_folder: RunFolder,
        *,
        installation: Installation | None = None,
        on_line: Callable[[str], None] | None = None,
        log_path: Path | None = None,
    ) -> None:
        self.options = options
        self.run_folder = run_folder
        self.log_path = log_path
        self.admin_key = secrets.token_hex(16)
        self.http = address(options.hosts.http, options.ports.http)
        self.grpc = address(options.hosts.grpc, options.ports.grpc)
        self.metrics = address(options.hosts.metrics, options.ports.metrics)
        self.admin = AdminClient(self.http, self.metrics, self.admin_key)
        self._installation = installation or find_installation()
        self._on_line = on_line or (lambda line: None)
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._process: subprocess.Popen[str] | None = None
        self._started = threading.Event()
        self._exited = threading.Event()
        self._start_error: Exception | None = None
        self.shows_keys = False  # to every user of this host, as `visible_keys` allows
        self._members: dict[int, int | None] = {}  # pid -> start time of what ran below the server

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was not started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.returncode if self._process is not None and self._exited.is_set() else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and not self._exited.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether the process has ended."""
        return self._exited.wait(timeout_s)

    def start(self, timeout_s: float = 900.0, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Return when it is ready. Raises ServerStartError, and the process has ended."""
        prepared = prepare(self._installation, self.run_folder.path, os.environ | dict(self.options.environment))
        missing = missing_libraries(prepared)
        if missing:
            raise ConfigError(f"{prepared.stub} needs {', '.join(missing)}, which the linker does not find")
        threading.Thread(target=self._parent, args=(prepared,), name="tritonserver-parent", daemon=True).start()
        self._started.wait()
        if isinstance(self._start_error, ConfigError):
            raise self._start_error
        if self._start_error is not None:
            raise ServerStartError(f"{prepared.binary} can't be run: {self._start_error}")
        self._wait_ready(timeout_s, is_wanted)

    def stop(self, timeout_s: float | None = None) -> int:
        """SIGTERM, after `timeout_s` SIGKILL to all below; return the exit code."""
        if self._process is None:
            return 0
        self.note_members()
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            self._exited.wait(self.options.exit_timeout_s + 5 if timeout_s is None else timeout_s)
        self.kill()
        return self._process.returncode

    def kill(self) -> None:
        """SIGKILL it and all below, wait, sweep shared memory.

        Harmless when repeated, or before `start`. Raises OSError when /proc can't be read.
        """
        if self._process is None:
            return
        self.note_members()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        processes.kill_all(self._members.items())
        self._exited.wait(10)
        processes.wait_gone(processes.survivors(self._members.items()), 5)
        self.run_folder.sweep_shared_memory()

    def note_members(self) -> None:
        """Remember what runs below it, to be ended after it."""
        if self.is_running:
            with contextlib.suppress(OSError):
                self._members.update({pid: processes.started_at(pid) for pid in processes.descendants(self.pid)})

    def stub_pids(self, model: str) -> list[int]:
        """Of a model, or of one of its stubs."""
        return processes.stubs(self.pid).get(model, [])

    def stub_pid(self, model: str) -> int:
        pids = self.stub_pids(model)
        if len(pids) != 1:
            raise BiremeError(f"model {model} has {len(pids)} stub processes, not one")
        return pids[0]

    def engine_pid(self, model: str) -> int:
        pids = processes.engines(self.stub_pid(model))
        if len(pids) != 1:
            raise BiremeError(f"model {model} has {len(pids)} engine processes, not one")
        return pids[0]

    def load(self, model: str) -> None:
        """Load a model (again), and shut its shared memory. Raises BiremeError."""
        self.admin.load(model)
        self.run_folder.shut_shared_memory()

    def metrics_text(self) -> str:
        return self.admin.metrics_text()

    def version(self) -> str:
        return str(self.admin.get_json("/v2")["version"])

    def tail(self, lines: int = _SHOWN_LINES) -> str:
        """Less what stubs say when a server dies."""
        own_lines = [line for line in self._tail if _ECHO not in line]
        return "\n".join(own_lines[-lines:])

    def exit_error(self) -> ServerStartError:
        code = self.returncode
        kind = ServerDiedError if code is not None and code < 0 else ServerStartError
        return kind(self._failure(f"tritonserver exited with code {code}"))

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _parent(self, prepared: PreparedStart) -> None:
        try:
            self._process = self._spawn(prepared)
        except (OSError, ConfigError) as error:
            self._start_error = error
            self._exited.set()
            return
        finally:
            self._started.set()
        assert self._process.stdout is not None
        reader = threading.Thread(target=self._read, args=(self._process.stdout,), name="tritonserver-log", daemon=True)
        reader.start()
        self._process.wait()
        reader.join(0.3)  # not longer: a stub that outlives the server holds the pipe open
        self._exited.set()

    def _spawn(self, prepared: PreparedStart) -> subprocess.Popen[str]:
        newer = newer_flags(self._installation, prepared, self.options.allow_client_shm)
        arguments = [*self._arguments(), *prepared.arguments, *newer, *self.options.arguments]
        hidden = HiddenArguments(arguments, _RESTRICTIONS)
        process = self._run(prepared, "held", hidden.shown, hidden.environment)
        try:
            hidden.hand_over(process.pid, prepared.binary)
        except (OSError, ConfigError) as error:
            process.kill()
            process.wait()
            if not (isinstance(error, NotHiddenError) and self.options.visible_keys):
                raise
            self.shows_keys = True
            return self._run(prepared, "free", arguments, {})
        return process

    def _run(
        self, prepared: PreparedStart, how: str, arguments: list[str], more: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        # A program of its own rather than preexec_fn, which may deadlock in a process with threads.
        leashed = [sys.executable, "-I", "-S", own_process.__file__, str(os.getpid()), how]
        # start_new_session: Ctrl-C in a terminal reaches the launcher alone, and the group can be killed whole.
        return subprocess.Popen(
            [*leashed, str(prepared.binary), *arguments],
            env={**prepared.environment, **self._own_environment(), **more}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, text=True, errors="replace",
        )  # fmt: skip

    def _own_environment(self) -> dict[str, str]:
        own = {
            "BIREME_RUN_DIR": str(self.run_folder.path),
            "BIREME_SHM_PREFIX": self.run_folder.shm_prefix,
            "BIREME_GRPC": self.grpc,
            "BIREME_BLS_THREADS": str(self.options.bls_threads),
            "BIREME_BLS_SPARE_THREADS": str(self.options.bls_spare_threads),
            **own_process.reused_memory_environment(),
        }
        return own | dict(self.options.environment)

    def _arguments(self) -> list[str]:
        options = self.options
        mode = [] if options.models is None else ["--model-control-mode=explicit"]
        return [
            *(f"--model-repository={folder}" for folder in options.repositories),
            *mode,
            *self._completion(),
            *(f"--load-model={model}" for model in options.models or ()),
            *listen_flags(options.hosts),
            f"--http-port={options.ports.http}",
            f"--grpc-port={options.ports.grpc}",
            f"--metrics-port={options.ports.metrics}",
            f"--http-thread-count={options.http_threads}",
            f"--exit-timeout-secs={options.exit_timeout_s}",
            *self._restrictions(),
            *(options.grpc_tls.server_flags() if options.grpc_tls is not None else ()),
            *(_TRACE_HEADERS if options.has_traces else ()),
            f"--backend-config=python,shm-region-prefix-name={self.run_folder.shm_prefix}",
            f"--backend-config=python,thread-pool-size={options.thread_pool_size}",
        ]

    def _restrictions(self) -> list[str]:
        """Each list of what clients may not call has a header whose key opens it; one key is kept."""
        restricted: dict[str, tuple[str, ...]] = {ADMIN_HEADER: RESTRICTED_APIS}
        if not self.options.allow_client_shm:
            restricted[SHM_HEADER] = ("shared-memory",)
        keys = {("--http-restricted-api", ADMIN_HEADER): self.admin_key}
        return [
            f"{flag}={','.join(apis)}:{header}={keys.get((flag, header)) or secrets.token_hex(16)}"
            for flag in _RESTRICTIONS
            for header, apis in restricted.items()
        ]

    def _completion(self) -> list[str]:
        """Whole configurations load faster when Triton asks for no more."""
        options = self.options
        has_more = any("model-repository" in argument or "model-store" in argument for argument in options.arguments)
        if has_more or not all(map(are_whole, options.repositories)):
            return []
        return ["--disable-auto-complete-config"]

    def _read(self, stream: IO[str]) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(stream)
            log = stack.enter_context(self.log_path.open("a")) if self.log_path else None
            for line in stream:
                line = line.rstrip("\n")
                self._tail.append(line)
                # Even a faulty log's pipe must be emptied: the server waits for that.
                with contextlib.suppress(Exception):
                    if log is not None:
                        print(line, file=log, flush=True)
                    self._on_line(line)

    def _wait_ready(self, timeout_s: float, is_wanted: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.admin.is_ready():
            if self._exited.wait(0.05):
                self.kill()
                raise self.exit_error()
            if not is_wanted():
                return
            if time.monotonic() > deadline:
                self.kill()
                raise ServerStartError(self._failure(f"tritonserver was not ready within {timeout_s:.0f} s"))
        self.note_members()
        self.run_folder.shut_shared_memory()

    def _failure(self, what: str) -> str:
        failed = failed_models(list(self._tail))
        if failed:
            return what + "".join(f"\n  model {model}: {reason}" for model, reason in failed.items())
        return f"{what}; its last lines:\n{self.tail()}"


def address(host: str, port: int) -> str:
    """Return host:port as this machine's clients use it."""
    host = own_host(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def thread_pool_size(num_stubs: int, limit: int | None = None) -> int:
    """Return threads for each stub's pool, fewer than THREAD_POOL_SIZE where a container limits processes."""
    limit = _process_limit() if limit is None else limit
    return max(32, min(THREAD_POOL_SIZE, limit // 2 // max(num_stubs, 1)))


def _process_limit() -> int:
    for path in ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"):
        try:
            return int(Path(path).read_text())
        except (OSError, ValueError):  # no cgroup, or "max"
            continue
    return 1 << 20


def failed_models(lines: list[str]) -> dict[str, str]:
    """Return model -> reason out of the table at the end of loading."""
    failed: dict[str, str] = {}
    model = ""
    for line in lines:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|", 2)] if line.startswith("|") else []
        if len(cells) != 3:
            continue
        if cells[0]:
            model = cells[0] if cells[2].startswith("UNAVAILABLE") else ""
            if model:
                failed[model] = cells[2]
        elif model and cells[2]:
            failed[model] += f" {cells[2]}"
    return failed


@contextlib.contextmanager
def start_server(
    recipe: str | Path | Recipe | None = None,
    *,
    ports: Ports | None = None,
    env: Mapping[str, str] | None = None,
    override: str = "",
    models: tuple[str, ...] | None = None,
    repositories: tuple[Path, ...] | None = None,
    timeout_s: float = 180.0,
    arguments: tuple[str, ...] = (),
    allow_client_shm: bool = False,
) -> Iterator[Server]:
    """Run a tritonserver for the length of the block: own ports, run folder, log file.

    Loads the recipe's models, or `models` (explicit mode). `repositories` replaces the recipe's model folders.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, override)
    run_folder = RunFolder()
    environment = {"BIREME_RECIPE": recipe.folder, "BIREME_OVERRIDE": override, **(env or {})}
    try:
        if repositories is None:
            repositories = (run_folder.path / "models",)
            link_models(repositories[0], recipe)
        options = ServerOptions(
            repositories=repositories, ports=ports or free_ports(), models=models, environment=environment,
            arguments=arguments, allow_client_shm=allow_client_shm, grpc_tls=GrpcTls.of(recipe),
            has_traces=has_traces(recipe, os.environ | environment),
        )  # fmt: skip
        server = Server(options, run_folder, log_path=run_folder.path / "tritonserver.log")
        with server:
            server.start(timeout_s)
            yield server
    finally:
        run_folder.remove()
