"""What a decoder's step on a CPU does between its matrix products, in C++, compiled where it runs.

The library is made by the machine's compiler when an engine first starts, for exactly this CPU, and kept in
$XDG_CACHE_HOME/bireme (~/.cache/bireme). Without a compiler the same is done by `decoder_ops.PlainOps`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from bireme.engines.torch.native import cpu

SOURCES = tuple(Path(__file__).with_name(name) for name in ("decoder.cpp", "quantized.cpp", "step.cpp"))
_HEADER = Path(__file__).with_name("parts.h")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
_COMPILE_S = 300.0  # it takes 7 s of an idle core


class NativeUnavailableError(Exception):
    """There is no library on this machine; says why."""


def load(sources: tuple[Path, ...] = SOURCES, more_flags: tuple[str, ...] = ()) -> tuple[ctypes.CDLL, float]:
    """Return the library, and the seconds that compiling it took; 0: it was there. Raises NativeUnavailableError.

    `more_flags`: of the compiler; those that take instructions away have what other CPUs run compiled here.
    """
    import torch  # here: programs without it ask for the compiler

    flags = [*_FLAGS, *more_flags]
    if platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        flags.append("-mno-avx512f")  # of a CPU without it nothing changes; ATEN_CPU_CAPABILITY takes it away
    try:
        compiler, folder = find_compiler(), _folder()
        # With the CPU's flags: several hosts may share a home.
        texts = b"".join(map(Path.read_bytes, (*sources, _HEADER)))
        made_for = f"{compiler} {flags} {sorted(cpu.flags())}".encode() + texts
        path = folder / f"decoder-{hashlib.sha256(made_for).hexdigest()[:16]}.so"
        began, is_new = time.monotonic(), not path.exists()
        if is_new:
            _compile(compiler, flags, sources, path)
        return ctypes.CDLL(str(path)), time.monotonic() - began if is_new else 0.0
    # RuntimeError: there is no home; ValueError: CXX can't be parsed
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        raise NativeUnavailableError(f"{type(error).__name__}: {error}") from error


def find_compiler() -> list[str]:
    """Return its command; CXX may hold several words, such as "ccache g++". Raises NativeUnavailableError."""
    found = (
        shlex.split(os.environ.get("CXX", "")) or list(filter(None, map(shutil.which, ("g++", "c++", "clang++"))))[:1]
    )
    if not found:
        raise NativeUnavailableError("no C++ compiler (g++, c++, clang++, CXX)")
    return found


def _folder() -> Path:
    """Return this user's folder of compiled files. Raises OSError: others could put code there."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bireme"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} is not this user's alone; set XDG_CACHE_HOME, or chmod 700 it")
    return folder


def _compile(compiler: list[str], flags: list[str], sources: tuple[Path, ...], path: Path) -> None:
    """Processes that start at once each make their own; the last one's stays."""
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        made = Path(work) / path.name
        command = [*compiler, *flags, "-o", str(made), *map(str, sources)]
        found = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S, check=False)
        if found.returncode != 0:
            raise NativeUnavailableError(f"{compiler[0]}: {found.stderr.strip().partition(chr(10))[0]}")
        made.replace(path)
