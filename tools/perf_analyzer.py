"""Run NVIDIA's perf_analyzer; every argument is passed through.

Its binary comes from BIREME_PERF_ANALYZER, PATH, or once from the wheel tritonclient 2.51.0 (14 MB, into
~/.cache/bireme), whose two missing libraries the wheel nvidia-pytriton brings. Its profile export file
must not exist yet. Commands for each model: docs/perf_analyzer.md.

    python tools/perf_analyzer.py --version
    python tools/perf_analyzer.py -m generate -u 127.0.0.1:8001 -i grpc --streaming \\
        --input-data benchmarks/inputs/generate.json --concurrency-range 16 \\
        --measurement-mode count_windows --measurement-request-count 100
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

CLIENT = "tritonclient==2.51.0"  # the last that needs no newer glibc than 2.34, and the default server's version
MEMBER = "tritonclient-2.51.0.data/data/bin/perf_analyzer"
LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}  # needed -> in the wheel


class MissingError(Exception):
    """perf_analyzer can't be had here; the text names the remedy."""


def main(arguments: list[str]) -> int:
    try:
        command, environment = prepare(os.environ)
    except MissingError as error:
        print(f"perf_analyzer: {error}", file=sys.stderr)
        return 2
    os.execve(command, [command, *arguments], environment)


def prepare(environment: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return the binary and the environment to run it in, fetched when that is still to do. Raises MissingError."""
    named = environment.get("BIREME_PERF_ANALYZER")
    if named:
        if not os.access(named, os.X_OK):
            raise MissingError(f"BIREME_PERF_ANALYZER: {named} is not an executable")
        return named, dict(environment)
    on_path = shutil.which("perf_analyzer", path=environment.get("PATH"))
    if on_path:
        return on_path, dict(environment)
    folder = cache_folder(environment)
    binary = folder / "perf_analyzer"
    if not binary.exists():
        fetch(binary)
    library_path = [str(link_libraries(folder / "lib", libraries_folder())), environment.get("LD_LIBRARY_PATH")]
    return str(binary), {**environment, "LD_LIBRARY_PATH": ":".join(filter(None, library_path))}


def cache_folder(environment: Mapping[str, str]) -> Path:
    base = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME") or "/tmp") / ".cache")
    return Path(base) / "bireme" / CLIENT.replace("==", "-")


def fetch(binary: Path) -> None:
    """Download the wheel and take the program out of it; a half-done one is never left behind."""
    if platform.machine() != "x86_64":
        raise MissingError(f"the wheel has it for x86_64 only, not {platform.machine()}; set BIREME_PERF_ANALYZER")
    binary.parent.mkdir(parents=True, exist_ok=True)
    print(f"perf_analyzer: fetching {CLIENT} (14 MB) into {binary.parent}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=binary.parent) as scratch:
        download(Path(scratch))
        extract(next(Path(scratch).glob("*.whl")), Path(scratch) / "perf_analyzer").replace(binary)


def download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(folder), CLIENT], capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingError(
            f"pip could not download {CLIENT}: {(done.stderr.strip().splitlines() or ['no message'])[-1]};"
            " install perf_analyzer yourself and set BIREME_PERF_ANALYZER"
        )


def extract(wheel: Path, binary: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        binary.write_bytes(archive.read(MEMBER))
    binary.chmod(0o755)
    return binary


def libraries_folder() -> Path:
    spec = importlib.util.find_spec("pytriton")
    for package in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(package).parent / "nvidia_pytriton.libs"
        if folder.is_dir():
            return folder
    raise MissingError("its libraries are in the wheel nvidia-pytriton: run `pip install -e .[server]`")


def link_libraries(folder: Path, source: Path, wanted: Iterable[tuple[str, str]] = tuple(LIBRARIES.items())) -> Path:
    """Give the two libraries the names that the program looks for; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, pattern in wanted:
        found = next(iter(sorted(source.glob(pattern))), None)
        if found is None:
            raise MissingError(f"no {pattern} in {source}; reinstall nvidia-pytriton==0.7.0")
        link = folder / name
        if not link.is_symlink() or link.readlink() != found:
            link.unlink(missing_ok=True)
            link.symlink_to(found)
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
