"""Where tritonserver is, and the environment in which it starts.

In this order: BIREME_TRITONSERVER (a binary with `backends/` beside its `bin/`), PATH, /opt/tritonserver, the
nvidia-pytriton wheel. The wheel can't run from site-packages: a private folder gets a backend directory of three
symlinks (the libraries' run path is relative to the real files) and one to libpython (alone: its folder may hold an
older libstdc++).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bireme.engines.stub.environment import LIBRARY_PATH_VARIABLE
from bireme.errors import ConfigError

_OPT = Path("/opt/tritonserver/bin/tritonserver")
_STUB = "triton_python_backend_stub"
# From 25.06 bodies end at 64 MiB, which an image of 50 MB exceeds in base64.
_NEWER_FLAGS = {"--http-max-input-size": str(256 << 20)}


@dataclass(frozen=True, slots=True)
class Installation:
    binary: Path
    root: Path | None = None  # the wheel's tritonserver folder; None: an ordinary installation

    @property
    def is_wheel(self) -> bool:
        return self.root is not None

    @property
    def libraries(self) -> Path | None:
        return self.root.parents[1] / "nvidia_pytriton.libs" if self.root else None


def find_installation(environment: Mapping[str, str] = os.environ) -> Installation:
    """Raises ConfigError with the places searched."""
    named = environment.get("BIREME_TRITONSERVER")
    if named:
        if not os.access(named, os.X_OK) or Path(named).is_dir():
            raise ConfigError(
                f"BIREME_TRITONSERVER: {named} is not an executable; name the binary, .../bin/tritonserver"
            )
        return _installation_of(Path(named).resolve())
    on_path = shutil.which("tritonserver", path=environment.get("PATH"))
    if on_path:
        return _installation_of(Path(on_path).resolve())
    if os.access(_OPT, os.X_OK):
        return Installation(_OPT)
    root = _wheel_root()
    if root is not None:
        return _installation_of(root / "bin" / "tritonserver")
    raise ConfigError(
        "no tritonserver: not in BIREME_TRITONSERVER, on PATH, in /opt/tritonserver or in this Python environment;"
        " run `pip install -e .[server]` (Linux, Python 3.11 or 3.12) or set BIREME_TRITONSERVER=/path/bin/tritonserver"
    )


def _installation_of(binary: Path) -> Installation:
    """A wheel's binary has stubs for several Pythons beside it."""
    root = binary.parent.parent
    return Installation(binary, root if (root / "python_backend_stubs").is_dir() else None)


def _wheel_root() -> Path | None:
    # Importing pytriton would take half a second and start things not needed here.
    spec = importlib.util.find_spec("pytriton")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        root = Path(folder) / "tritonserver"
        if (root / "bin" / "tritonserver").is_file():
            return root
    return None


@dataclass(frozen=True, slots=True)
class PreparedStart:
    """What a start needs beside the user's options."""

    binary: Path
    arguments: tuple[str, ...]
    environment: dict[str, str]
    stub: Path | None  # the wheel's stub, to check its libraries; None: an ordinary installation


def prepare(installation: Installation, folder: Path, environment: Mapping[str, str]) -> PreparedStart:
    """Fill `folder`. Raises ConfigError without libpython."""
    if installation.root is None:
        return _prepare_ordinary(installation, environment)
    return _prepare_wheel(installation, installation.root, folder, environment)


def _prepare_ordinary(installation: Installation, environment: Mapping[str, str]) -> PreparedStart:
    backends = installation.binary.parent.parent / "backends"
    arguments = (f"--backend-directory={backends}",) if backends.is_dir() else ()
    return PreparedStart(installation.binary, arguments, _venv_first(environment), None)


def _prepare_wheel(
    installation: Installation, root: Path, folder: Path, environment: Mapping[str, str]
) -> PreparedStart:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / version / _STUB
    if not stub.is_file():
        raise ConfigError(f"nvidia-pytriton has no stub for Python {version}; use Python 3.11 or 3.12")
    backend, library = folder / "backends" / "python", folder / "lib"
    python = root / "backends" / "python"
    _link(backend / _STUB, stub)
    _link(backend / "libtriton_python.so", python / "libtriton_python.so")
    _link(backend / "triton_python_backend_utils.py", python / "triton_python_backend_utils.py")
    _link(library / f"libpython{version}.so.1.0", find_libpython(version))
    result = _venv_first(environment)
    result[LIBRARY_PATH_VARIABLE] = environment.get("LD_LIBRARY_PATH", "")
    result["LD_LIBRARY_PATH"] = f"{library}:{installation.libraries}"
    arguments = (f"--backend-directory={folder / 'backends'}", f"--cache-directory={root / 'caches'}")
    return PreparedStart(installation.binary, arguments, result, stub)


def _venv_first(environment: Mapping[str, str]) -> dict[str, str]:
    """PATH's first `python3` has the stub's packages, unless PYTHONHOME overrides that.

    With AIP_MODE (Vertex AI) the server would open a port without restrictions.
    """
    result = dict(environment)
    for name in ("PYTHONHOME", "AIP_MODE"):
        result.pop(name, None)
    result["PATH"] = f"{sys.prefix}/bin:{result.get('PATH', os.defpath)}"
    return result


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def find_libpython(version: str) -> Path:
    """Return libpythonX.Y.so.1.0. Raises ConfigError."""
    name = f"libpython{version}.so.1.0"
    for folder in _library_folders():
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(
        f"{name} not found (looked in {', '.join(map(str, _library_folders()))}): this Python was built without a"
        f" shared library; run `apt-get install libpython{version}` (Debian, Ubuntu), or use a Python built with"
        " --enable-shared"
    )


def _library_folders() -> list[Path]:
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    configured = sysconfig.get_config_var("LIBDIR")
    named = [configured, f"{configured}/{multiarch}" if configured and multiarch else None, f"{sys.base_prefix}/lib"]
    system = [f"/usr/lib/{multiarch}" if multiarch else None, "/usr/lib64", "/usr/lib"]
    return list(dict.fromkeys(Path(folder) for folder in (*named, *system) if folder))


def missing_libraries(prepared: PreparedStart) -> list[str]:
    """Return what the stub's linker can't find: the server would wait for it."""
    if prepared.stub is None or shutil.which("ldd") is None:
        return []
    listing = subprocess.run(
        ["ldd", str(prepared.stub)], env=prepared.environment, capture_output=True, text=True, timeout=30, check=False
    )
    return re.findall(r"^\s*(\S+) => not found", listing.stdout, re.MULTILINE)


def newer_flags(installation: Installation, prepared: PreparedStart, allow_client_shm: bool = False) -> tuple[str, ...]:
    """Return flags that the wheel's 2.51 lacks and later servers need."""
    if installation.is_wheel:
        return ()
    listing = subprocess.run(
        [str(prepared.binary), "--help"],
        env=prepared.environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    known = set(re.findall(r"--[a-z][a-z-]+", listing.stdout + listing.stderr))
    flags = _NEWER_FLAGS | ({"--allow-client-shm": "true"} if allow_client_shm else {})
    return tuple(f"{flag}={value}" for flag, value in flags.items() if flag in known)
