"""A launch as its user starts it, `tools/serve.py` in a process: what runs in it, its log, what it leaves behind.

Every process of it carries a mark in its environment, so that one whose parent is gone is found as well.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.chaos.topologies import Topology
from benchmarks.load.load_process import CHECKOUT
from benchmarks.load.metrics_page import left_behind, read_page
from benchmarks.load.processes import parent, rss_bytes
from bireme.kv.transfer import shm_file
from bireme.launch import free_port, processes

_MARK = "BIREME_CHAOS_MARK"
_PIPE_BYTES = 4096  # of the log: a reader that stops is felt after some dozens of lines
_SHM = Path("/dev/shm")
START_S, STOP_S = 600.0, 120.0  # the first start of a checkout compiles the index for minutes on a busy machine
IDLE_S = 75.0  # a killed frontend leaves leases that end with cache_transceiver_config.kv_transfer_timeout_ms, 60 s
GONE_S = 5.0


class NotStartedError(RuntimeError):
    """The launch did not become ready."""


class Launch:
    def __init__(
        self, topology: Topology, folder: Path, *, arguments: tuple[str, ...] = (), has_frontend: bool = True
    ) -> None:
        """`arguments`: further ones of serve.py. Without a frontend of its own it is one of several servers."""
        self.topology, self.folder, self._arguments = topology, folder, arguments
        self._sign_of_start = b"frontend_ready" if has_frontend else b"ready seconds="
        self.mark = secrets.token_hex(8)
        self.ports = {name: free_port() for name in ("http", "grpc", "metrics", "health")}
        self.ports["openai"] = free_port() if has_frontend else 0
        self.reads_log = threading.Event()
        self.reads_log.set()
        self._shm_before = set(_listing(_SHM))
        self._shm_prefixes: set[str] = set()
        self.log = folder / f"{topology.name}-{self.mark[:4]}.log"
        # Not in `folder`, which may have a long name: a path of more than 107 bytes can't be a socket's.
        home = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.runtime, self.temporary = home / "run", home / "tmp"
        self.runtime.mkdir(mode=0o700)
        self.temporary.mkdir(mode=0o700)

    @property
    def addresses(self) -> dict[str, str]:
        return {name: f"127.0.0.1:{port}" for name, port in self.ports.items()}

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def start(self) -> None:
        """Start and wait until it is ready. Raises NotStartedError."""
        ports = [f"--{name}-port={port}" for name, port in self.ports.items()]
        command = [
            sys.executable, "tools/serve.py", self.topology.recipe, *ports,
            f"--frontend-processes={self.topology.frontend_processes}",
            f"--override={json.dumps(self.topology.override)}", *self._arguments,
        ]  # fmt: skip
        own = {_MARK: self.mark, "XDG_RUNTIME_DIR": str(self.runtime), "TMPDIR": str(self.temporary)}
        own["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "torchinductor")  # torch's cache outlives its processes
        self._process = subprocess.Popen(
            command, cwd=CHECKOUT, env=os.environ | own, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # under nohup it would stay ignored
        )  # fmt: skip
        assert self._process.stdout is not None
        fcntl.fcntl(self._process.stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._reader = threading.Thread(target=self._read_log, name="log", daemon=True)
        self._reader.start()
        began = time.monotonic()
        deadline = began + START_S
        while self._sign_of_start not in self.log_bytes():
            if self.exit_code is not None or time.monotonic() > deadline:
                text = self.log_bytes().decode(errors="replace")
                self.kill()
                raise NotStartedError(f"{self.topology.name} did not become ready; its log:\n{text[-4000:]}")
            time.sleep(0.1)
        self.start_s = time.monotonic() - began
        self.note_run_folder()

    def log_bytes(self) -> bytes:
        return self.log.read_bytes() if self.log.exists() else b""

    def roles(self) -> dict[str, int]:
        """Return role -> pid of what serves now: serve, server, decode_1.stub, prefill.engine, frontend, member0."""
        lines = {pid: processes.command_line(pid) for pid in self.members() if processes.is_alive(pid)}
        found, models = {"serve": self.pid}, {}
        for pid, arguments in lines.items():
            if arguments and arguments[0].endswith("tritonserver"):
                found["server"] = pid
            elif model := processes.stub_name(arguments):
                found[f"{model}.stub"] = pid
                models[pid] = model
            elif "bireme.openai" in arguments:
                found[_frontend_role(arguments)] = pid
        for pid, arguments in lines.items():
            if "bireme.engines.worker" in arguments and (model := models.get(_parent(pid), "")):
                found[f"{model}.engine"] = pid
        return found

    def members(self) -> list[int]:
        """Return every process that this launch has begun, directly or not, dead ones left out."""
        mark = f"{_MARK}={self.mark}".encode()
        return [pid for pid in processes.all_pids() if pid != os.getpid() and _carries(pid, mark)]

    def run_folder(self) -> Path | None:
        """Return the folder with this launch's sockets; None where somebody has removed it."""
        return next((path.parent for path in self.runtime.glob("*/*/lock")), None) or next(
            (path for path in self.runtime.glob("*/*-*") if path.is_dir()), None
        )

    def left_in_use(self) -> dict[str, float]:
        """Return blocks, leases, requests and streams that are still counted IDLE_S after the load's end."""
        deadline = time.monotonic() + IDLE_S
        while True:
            try:
                behind = left_behind(read_page(self.addresses["metrics"]))
            except OSError as error:
                return {f"no metrics: {error}": 1.0}
            if not behind or time.monotonic() > deadline:
                return behind
            time.sleep(0.5)

    def memory_mb(self) -> float:
        """Return what serve.py itself holds."""
        return round(rss_bytes(self.pid) / 1e6, 1)

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code; None when it has not ended by then."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def left_over(self) -> list[str]:
        """Return what is still there GONE_S after serve.py has ended: processes, shared memory, sockets, folders.

        The threads of a killed process can hold its sockets for a moment longer than the process is listed.
        """
        deadline = time.monotonic() + GONE_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def _left(self) -> list[str]:
        left = [f"process {pid}: {' '.join(processes.command_line(pid))[:120]}" for pid in self.members()]
        left += [f"/dev/shm/{name}" for name in sorted(set(_listing(_SHM)) - self._shm_before) if self._is_ours(name)]
        for folder in (self.runtime, self.temporary):
            left += [f"{folder.name}/{path.relative_to(folder)}" for path in sorted(folder.glob("*/*"))]
            left += [f"{folder.name}/{path.name}" for path in sorted(folder.glob("*"))]
        sockets = Path("/proc/net/unix").read_text().splitlines()
        return left + [f"socket {line.split()[-1]}" for line in sockets if str(self.runtime) in line]

    def remove(self) -> None:
        """End what still runs, and take back what is left: at the very end, whatever has happened."""
        self.kill()
        shutil.rmtree(self.runtime.parent, ignore_errors=True)
        for name in filter(self._is_ours, _listing(_SHM)):
            (_SHM / name).unlink(missing_ok=True)

    def kill(self) -> None:
        """End everything at once, for a launch that does not end by itself."""
        self.reads_log.set()
        for _ in range(3):
            for pid in self.members():
                send_signal(pid, signal.SIGKILL)
            time.sleep(0.2)
        self._process.wait(10)

    def note_run_folder(self) -> None:
        """Remember how this life's files in /dev/shm are named; a run folder that is made again has another name."""
        if folder := self.run_folder():
            self._shm_prefixes |= {f"bireme_{folder.name}_", shm_file.file_prefix(folder, "").removesuffix("-")}

    def _is_ours(self, name: str) -> bool:
        """Files of other launches on the machine come and go as well."""
        return any(name.startswith(prefix) for prefix in self._shm_prefixes)

    def _read_log(self) -> None:
        assert self._process.stdout is not None
        with self.log.open("ab", buffering=0) as log:
            while True:
                self.reads_log.wait()
                data = os.read(self._process.stdout.fileno(), 65536)
                if not data:
                    return
                log.write(data)


def send_signal(pid: int, number: int) -> bool:
    """Send a signal; return whether there was such a process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _frontend_role(arguments: list[str]) -> str:
    if "--member" not in arguments:
        return "frontend"
    return f"member{arguments[arguments.index('--member') + 1].split('/')[0]}"


def _carries(pid: int, mark: bytes) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return mark in environment and processes.is_alive(pid)


def _parent(pid: int) -> int:
    try:
        return parent(pid)
    except (OSError, IndexError):
        return 0


def _listing(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]
