"""Children of tests that run certain modules of ours begin as forks of a process that has imported what these import.

A child's imports cost from 0.3 s of CPU (an engine process) to 6 s (one with transformers). A `Popen` of such a module
is asked of a server instead: one process for each kind of child, started with the first one, with no thread but its
own. It forks twice, and the second fork becomes this process's child when the first has ended. So pid, signals, exit,
session, descriptors, folder, arguments and environment are those of the child that was asked for. Limits of resources,
niceness, umask, CPU affinity and the seed of hashes are the server's, which has them from when it began. What looks at
an interpreter's start, or at /proc/PID/cmdline, is no such module (nor a process with `--standby`).

As a program it is the server: `python warm_children.py SOCKET MODULE...`.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import io
import json
import operator
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

CHECKOUT = Path(__file__).resolve().parents[1]
ENGINE = (
    "bireme.engines.child.process bireme.engines.registry bireme.engines.mocker.engine bireme.engines.child.standby"
)
TRANSFERS = "bireme.kv.transfer.leased bireme.kv.transfer.mapped bireme.kv.transfer.nixl tests.kv.transfer.shared_pools"
PROOF = "torch safetensors.torch bireme.engines.trtllm.engine tests.gpu.trtllm_proof.lives"
# What a child runs -> what its server has imported: torch only for children that have it, being large.
KINDS = {
    "bireme.engines.worker": ENGINE.split(),
    "bireme.logits.guided.compile_process": ["tests.logits.guided.imported_parts"],
    "bireme.openai": ["bireme.openai.app", "bireme.openai.__main__", "bireme.openai.http.process_group"],
    "tests.gpu.trtllm_proof.engine_process": PROOF.split(),
    "tests/kv/kernels/call_outer.py": ["bireme.kv.kernels.index_kernels"],
    "tests/kv/transfer/kv_side.py": TRANSFERS.split(),
}
_READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "LC_", "LANG", "TZ", "UCX_", "NIXL_", "GRPC_", "NUMBA_")
_READ_BY_TORCH = ("OMP_", "KMP_", "GOMP_", "MKL_", "CUDA_", "TORCH", "PYTORCH")
_PR_SET_CHILD_SUBREAPER = 36
_MOST_FDS = 200
# Of what `Popen` is asked beside the program: with which values a fork begins as an interpreter would.
_FITS_A_FORK: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("preexec_fn", "shell", "gid", "gids", "uid"), operator.not_),
    "close_fds": bool,
    "umask": lambda umask: umask < 0,
    "process_group": lambda group: group in (None, -1),
    "pass_fds": lambda fds: len(fds) <= _MOST_FDS,
}
_LEAVE_S = 10.0
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class _Server(NamedTuple):
    channel: socket.socket
    process: subprocess.Popen[bytes]
    environment: dict[str, str]


class WarmChildren:
    """While it is installed, `subprocess.Popen` asks servers for the children that they can give."""

    def __init__(self) -> None:
        self._servers: dict[str, _Server] = {}
        self._lock = threading.Lock()
        self._real: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        self._signature = inspect.signature(self._real)

    def install(self) -> None:
        real, signature = self._real, self._signature

        @functools.wraps(real)
        def execute(popen: Any, *arguments: Any) -> None:
            asked = dict(signature.bind(popen, *arguments).arguments)
            del asked["self"]
            if (kind := self.kind_of(**asked)) is None or not self._begin(popen, kind, asked):
                real(popen, *arguments)

        subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]

    def remove(self) -> None:
        subprocess.Popen._execute_child = self._real  # type: ignore[attr-defined]
        for kind in list(self._servers):
            self._drop(kind, _LEAVE_S)

    def kind_of(
        self, args: Any, *, env: Mapping[str, str] | None = None, executable: Any = None, cwd: Any = None, **others: Any
    ) -> str | None:
        """Return what is run, if a server can have it begin as a new interpreter would."""
        if isinstance(args, str | bytes | os.PathLike):
            return None
        words = [os.fsdecode(word) for word in args]
        if words[1:2] == ["-P"]:
            del words[1]
        if len(words) < 2 or not _is_this_python(words[0]) or executable not in (None, args[0]):
            return None
        kind = words[2] if words[1] == "-m" and len(words) > 2 else os.path.relpath(words[1], CHECKOUT)
        is_plain = all(fits(others[name]) for name, fits in _FITS_A_FORK.items() if name in others)
        if kind not in KINDS or "--standby" in words or not is_plain or _has_other_packages(cwd or os.getcwd()):
            return None
        return kind if self._is_known(kind, os.environ if env is None else env) else None

    def _is_known(self, kind: str, environment: Mapping[str, str]) -> bool:
        """Return whether the libraries that the server has loaded would have begun with it in the same way."""
        names = _READ_AT_START + (_READ_BY_TORCH if "torch" in KINDS[kind] else ())

        def read(variables: Mapping[str, str]) -> dict[str, str]:
            read = {name: value for name, value in variables.items() if name.startswith(names)}
            read.pop("PYTHONUNBUFFERED", None)  # which a fork heeds itself, as it does folders of this checkout
            if all(Path(folder).is_relative_to(CHECKOUT) for folder in _import_path(variables)):
                read.pop("PYTHONPATH", None)
            return read

        server = self._servers.get(kind)
        return read(environment) == read(server.environment if server is not None else os.environ)

    def _begin(self, popen: Any, kind: str, asked: Mapping[str, Any]) -> bool:
        """Return whether the child has begun: not if its server has ended, as one does that can't import."""

        def given(name: str, inherited: int) -> int:
            return int(asked[name]) if asked[name] != -1 else inherited

        passed = [int(fd) for fd in asked["pass_fds"]]
        fds = [given("p2cread", 0), given("c2pwrite", 1), given("errwrite", 2), *passed]
        request = {
            "args": [os.fsdecode(word) for word in asked["args"]],
            "environment": dict(os.environ if asked["env"] is None else asked["env"]),
            "folder": os.path.abspath(asked["cwd"] or os.getcwd()),
            "fds": [0, 1, 2, *passed],
            "own_session": bool(asked["start_new_session"]),
        }
        with self._lock:
            channel = self._server(kind)
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                popen.pid = _ask(channel, request, fds)
            except ConnectionError:
                status = self._drop(kind, _LEAVE_S)
                told = f"the server of {kind} ended with status {status}: this child begins as an interpreter"
                warnings.warn(told, stacklevel=1)
                return False
            except BaseException:  # of a signal's handler: its answer would be taken for the next child's
                self._drop(kind, 0.0)
                raise
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        popen._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        popen._close_pipe_fds(*(asked[name] for name in names))
        return True

    def _drop(self, kind: str, leave_s: float) -> int:
        """Have the next child ask a new server; return how this one ended: the status, or the negative signal."""
        server = self._servers.pop(kind)
        server.channel.close()
        try:
            return server.process.wait(leave_s)
        except subprocess.TimeoutExpired:
            server.process.kill()
            return server.process.wait()

    def _server(self, kind: str) -> socket.socket:
        if kind not in self._servers:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            command, environment = [sys.executable, __file__, str(theirs.fileno()), *KINDS[kind]], dict(os.environ)
            process = subprocess.Popen(command, cwd=CHECKOUT, env=environment, pass_fds=[theirs.fileno()])
            theirs.close()
            self._servers[kind] = _Server(ours, process, environment)
        return self._servers[kind].channel


def _ask(channel: socket.socket, request: Mapping[str, Any], fds: Sequence[int]) -> int:
    """Return the pid of a new child, which goes on when the server has heard that its pid is known."""
    packed = array.array("i", fds)
    channel.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)])
    if not (told := channel.recv(64)):
        raise ConnectionResetError
    channel.send(told)
    return int(told)


def _import_path(variables: Mapping[str, str]) -> list[str]:
    return [folder for folder in variables.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _is_this_python(path: str) -> bool:
    own = Path(sys.executable)
    return Path(path).parent == own.parent and Path(path).resolve() == own.resolve()


def _has_other_packages(folder: Any) -> bool:
    """Return whether `-m` would find modules of our names there."""
    here = Path(os.fsdecode(folder)).resolve()
    return here != CHECKOUT and any((here / name).exists() for name in ("bireme", "tests"))


# -- the server


def serve(channel: socket.socket) -> None:
    """Fork what is asked for, until nobody can ask any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 1 << 20, _MOST_FDS + 3)
        if not message:
            return
        waits, goes = os.pipe()
        told, tells = os.pipe()
        if (first := os.fork()) == 0:
            if (second := os.fork()) == 0:
                os.close(goes)
                if not os.read(waits, 1):  # until its parent is who asks, and knows it
                    os._exit(1)
                _become(json.loads(message), fds)
            os.write(tells, b"%d" % second)
            os._exit(0)
        os.waitpid(first, 0)
        os.close(tells)
        try:
            channel.send(os.read(told, 64))
            is_known = bool(channel.recv(64))
        except ConnectionError:
            is_known = False
        if not is_known:
            return
        os.write(goes, b"1")
        for fd in (waits, goes, told, *fds):
            os.close(fd)


def _become(asked: Mapping[str, Any], fds: Sequence[int]) -> NoReturn:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if asked["own_session"]:
        os.setsid()
    _place(fds, asked["fds"])
    os.chdir(asked["folder"])
    servers = _import_path(os.environ)
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.path[1:] = [*_import_path(os.environ), *(folder for folder in sys.path[1:] if folder not in servers)]
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _writer(1, "strict", is_unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _writer(2, "backslashreplace", is_unbuffered)  # type: ignore[misc]
    gc.enable()  # what was imported stays frozen: to look through it is to copy it
    atexit._clear()
    os._exit(_run(asked["args"]))


def _place(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Have the descriptors be those numbers, and no others open."""
    above = max([*fds, *numbers]) + 1
    for at, fd in enumerate(fds):
        os.dup2(fd, above + at)
    for at, number in enumerate(numbers):
        os.dup2(above + at, number, inheritable=True)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in numbers:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(int(name))


def _writer(fd: int, errors: str, is_unbuffered: bool) -> io.TextIOWrapper:
    raw = open(fd, "wb", 0 if is_unbuffered else -1, closefd=False)
    lines = fd == 2 or raw.isatty()
    return io.TextIOWrapper(raw, "utf-8", errors, line_buffering=lines, write_through=is_unbuffered)


def _run(args: Sequence[str]) -> int:
    """Return the exit status that an interpreter would have."""
    status, is_interrupted = 0, False
    is_safe_path = args[1] == "-P"
    words = [args[0], *args[1 + is_safe_path :]]
    try:
        if words[1] == "-m":
            sys.argv, sys.path[0] = words[2:], os.getcwd()
        else:
            sys.argv, sys.path[0] = words[1:], os.path.dirname(os.path.abspath(words[1]))
        if is_safe_path:
            del sys.path[0]
        if words[1] == "-m":
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[1], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exc()
        status, is_interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return status & 0xFF


if __name__ == "__main__":
    sys.path[0] = str(CHECKOUT)  # until a fork has its own
    own = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()
    for name in sys.argv[2:]:
        importlib.import_module(name)
    for name in ("bireme.openai.__main__",):
        sys.modules.pop(name, None)
    sys.argv = [__file__]
    gc.freeze()
    serve(own)
