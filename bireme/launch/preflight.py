"""What a launch needs, checked before it begins: each missing thing is one message with its remedy.

Checks return messages, so that all show at once.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bireme.config import CHECKOUT, Recipe, WorkerEntry
from bireme.engines.stub.environment import PYTHON_VARIABLE, find_python
from bireme.engines.trtllm import pair_rules
from bireme.engines.trtllm.problems import errors
from bireme.errors import ConfigError
from bireme.gguf.folder import gguf_files
from bireme.gguf.head import SUFFIX
from bireme.launch.footprint.launch_footprint import LaunchFootprint
from bireme.launch.footprint.machine_memory import read_machine
from bireme.launch.installation import Installation, find_installation, find_libpython
from bireme.launch.ports import Listener, is_free
from bireme.launch.processes import command_line
from bireme.launch.run_folder import SHM
from bireme.observability.otlp import check_traces
from bireme.observability.request_log import path_of
from bireme.observability.rotated_files import check_writable
from bireme.workers.grpc_tls import GrpcTls

logger = logging.getLogger("bireme.launch")
SUPPORTED_PYTHON = ((3, 11), (3, 12))  # oldest and newest, both inclusive
_MIB = 1 << 20
_SHM_MIB_PER_STUB = 2  # a region of 1 MiB for the instance, one while its configuration is completed
_SHM_MIB_SPARE = 32  # larger tensors grow the regions
_SHM_MIB_TRANSFER = 64  # KV on its way from a prefill to a decode worker, for each prefill worker
_RUN_FOLDER_MIB = 32
_MAX_SOCKET_PATH = 107  # bytes of a Unix socket's address
_LONGEST_SOCKET_NAME = 40
# The engine process's imports among bireme's own requirements; this environment has them.
_OF_EVERY_ENGINE = ("msgspec", "numpy", "tokenizers", "xxhash", "yaml", "zmq")
KERNELS = CHECKOUT / "bireme" / "kv" / "kernels"
_FIND_MODULES = "import sys, importlib.util as u; print(*(m for m in sys.argv[1:] if u.find_spec(m) is None))"


class PreflightError(ConfigError):
    """One message a line."""


def check_all(
    recipe: Recipe,
    listeners: Mapping[str, Listener],
    num_stubs: int,
    run_folder: Path,
    environment: Mapping[str, str] = os.environ,
) -> Installation:
    """Return the tritonserver to run. Raises PreflightError."""
    problems = [*check_python(), *check_platform(), *check_engines(recipe, environment)]
    problems += check_arguments(recipe)
    problems += check_model(recipe)
    problems += check_grpc_tls(recipe)
    problems += check_request_log(recipe)
    problems += check_traces(recipe, environment)
    installation = None
    try:
        installation = find_installation(environment)
        problems += check_installation(installation)
    except ConfigError as error:
        problems.append(str(error))
    problems += check_memory(recipe, num_stubs, environment)
    problems += check_shared_memory(needed_shm_mib(recipe, num_stubs))
    problems += check_disk(run_folder, _RUN_FOLDER_MIB)
    problems += check_socket_paths(run_folder)
    problems += check_ports(listeners)
    if problems or installation is None:
        raise PreflightError("\n".join(problems))
    return installation


def check_python(version: tuple[int, ...] = sys.version_info[:2]) -> list[str]:
    low, high = SUPPORTED_PYTHON
    if low <= version[:2] <= high:
        return []
    return [
        f"Python {version[0]}.{version[1]} is not supported ({low[0]}.{low[1]} to {high[0]}.{high[1]}); make the"
        " environment with another one: `make clean-venv && make PYTHON=python3.11 setup`"
    ]


def check_platform(platform: str = sys.platform) -> list[str]:
    return [] if platform == "linux" else [f"tritonserver runs on Linux, not on {platform}; use docker/Dockerfile"]


def check_installation(installation: Installation) -> list[str]:
    if not installation.is_wheel:
        return []
    problems = check_numpy(_version_of("numpy"))
    try:
        find_libpython(f"{sys.version_info.major}.{sys.version_info.minor}")
    except ConfigError as error:
        problems.append(str(error))
    return problems


def check_numpy(version: str | None) -> list[str]:
    if version is None:
        return ["numpy is not installed; run `pip install -e .[server]`"]
    if int(version.split(".")[0]) < 2:
        return []
    return [
        f"numpy {version} is installed; the Python stub of tritonserver 2.51 gets empty arrays from numpy 2, so every"
        " response would fail: run `pip install 'numpy>=1.26,<2'`"
    ]


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_engines(recipe: Recipe, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Looked up where the engines will, not imported."""
    problems: dict[str, None] = {}  # two workers of one engine miss the same
    for stage, entry in sorted(recipe.workers.items()):
        needs = [(f"engine {entry.engine}", entry.kind.modules, entry.kind.remedy)]
        needs.append(("an engine process", _OF_EVERY_ENGINE, "`PYTHON -m pip install -e .` with its python"))
        if stage == "video_diffusion":
            modules = ("av", "PIL", *entry.kind.video_modules)
            needs.append(("workers.video_diffusion", modules, "pip install -e .[video]"))
        try:
            for what, modules, remedy in needs:
                if missing := _missing(modules, environment, entry.env):
                    problems[f"{what} needs {', '.join(missing)}; {remedy}"] = None
        except ConfigError as error:
            problems[str(error)] = None
    return list(problems)


def _missing(modules: tuple[str, ...], environment: Mapping[str, str], own: Mapping[str, str]) -> list[str]:
    """Return those that the engines' python lacks. Raises ConfigError."""
    whole = {**environment, **own}
    if PYTHON_VARIABLE not in whole and "PYTHONPATH" not in own:
        return [module for module in modules if importlib.util.find_spec(module) is None]
    command = [find_python(whole), "-c", _FIND_MODULES, *modules]
    try:
        found = subprocess.run(command, env=whole, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine process: {command[0]} can't be run: {error}; set BIREME_ENGINE_PYTHON") from error
    if found.returncode:
        reason = found.stderr.strip()[-300:] or f"exit status {found.returncode}"
        raise ConfigError(f"engine process: {command[0]} is no python: {reason}; set BIREME_ENGINE_PYTHON")
    return found.stdout.split()


def check_arguments(recipe: Recipe) -> list[str]:
    """What TensorRT-LLM would refuse in its YAMLs, minutes into a load.

    What the contract does not list is a warning: the installed release decides.
    """
    found = errors(pair_rules.check_recipe(recipe))
    for problem in found:
        if problem.is_by_release:
            logger.warning("engine_config_warning text=%s", problem)
    return [str(problem) for problem in found if not problem.is_by_release]


def check_grpc_tls(recipe: Recipe) -> list[str]:
    try:
        GrpcTls.of(recipe)
    except ConfigError as error:
        return [str(error)]
    return []


def check_model(recipe: Recipe) -> list[str]:
    text = [entry for stage, entry in recipe.workers.items() if stage != "video_diffusion"]
    problems = []
    try:
        if text or not recipe.workers:
            problems += _check_folder(Path(recipe.model_path), lambda path: _check_text_model(path, text))
        if (video := recipe.workers.get("video_diffusion")) and video.kind.needs_model:
            problems += _check_folder(Path(recipe.worker_model_path("video_diffusion")), _check_pipeline_folder)
    except ConfigError as error:
        problems.append(str(error))
    return problems


def _check_folder(folder: Path, check: Callable[[Path], list[str]]) -> list[str]:
    return check(folder) if folder.is_dir() else []  # a hub id: fetching it will show whether it exists


def _check_pipeline_folder(folder: Path) -> list[str]:
    if not (folder / "model_index.json").is_file():
        return [f"{folder} has no model_index.json; a folder in diffusers' layout is expected"]
    if not any(folder.glob("*/*.safetensors")):
        return [f"{folder} has no .safetensors file; other weight formats are not loaded, convert them first"]
    return []


def _check_model_folder(folder: Path, needs_weights: bool) -> list[str]:
    config = folder / "config.json"
    if not config.is_file():
        found = next(iter(sorted(folder.glob(f"*{SUFFIX}"))), None)
        remedy = f"name the file: {found}" if found else "a model folder in Hugging Face's layout is expected"
        return [f"{folder} has no config.json; {remedy}"]
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [f"{config} can't be read ({error}); copy the model folder again"]
    if needs_weights and not any(folder.glob("*.safetensors")) and not gguf_files(folder):
        return [f"{folder} has no .safetensors or .gguf file; other weight formats are not loaded, convert them first"]
    return []


def _check_text_model(folder: Path, text: Sequence[WorkerEntry]) -> list[str]:
    loading = [entry for entry in text if entry.kind.needs_model and entry.engine_config.load_format != "dummy"]
    problems = _check_model_folder(folder, bool(loading))
    others = sorted({entry.engine for entry in loading if not entry.kind.reads_gguf})
    if problems or not others or not gguf_files(folder) or any(folder.glob("*.safetensors")):
        return problems
    return [f"engine {others[0]} reads no GGUF files; use engine torch, or the model as safetensors"]


def unkept_code(recipe: Recipe, environment: Mapping[str, str] = os.environ, package: Path = KERNELS) -> str:
    """Return why routing's compiled code is made anew at each start; "": it is kept, or not needed.

    numba takes the first of these places that it can write.
    """
    if not recipe.has_kv_routing or importlib.util.find_spec("numba") is None:
        return ""
    home = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or Path.home(), ".cache")
    own = environment.get("NUMBA_CACHE_DIR")
    places = [Path(own)] if own else [package / "__pycache__", Path(home, "numba")]
    if any(_is_writable(place) for place in places):
        return ""
    return (
        f"{' and '.join(map(str, places))} can't be written, so each process that routes by KV compiles for half a"
        " minute of CPU at every start; set NUMBA_CACHE_DIR to a folder that can be written and outlives the process"
    )


def _is_writable(folder: Path) -> bool:
    existing = next(part for part in (folder, *folder.parents) if part.exists())
    return existing.is_dir() and os.access(existing, os.W_OK)


def check_request_log(recipe: Recipe) -> list[str]:
    config = recipe.observability.request_log
    try:
        if config.path:
            check_writable(path_of(config, recipe.folder))
    except ConfigError as error:
        return [str(error)]
    return []


def check_memory(recipe: Recipe, num_stubs: int, environment: Mapping[str, str] = os.environ) -> list[str]:
    """What can't fit; what may not fit is a warning."""
    footprint = LaunchFootprint(recipe, read_machine(environment), num_stubs)
    found = list(footprint.problems())
    for problem in found:
        if not problem.is_error:
            logger.warning("memory_warning text=%s", problem)
    return [str(problem) for problem in found if problem.is_error]


def needed_shm_mib(recipe: Recipe, num_stubs: int) -> int:
    transfers = len(recipe.replicas("prefill")) * _SHM_MIB_TRANSFER
    return num_stubs * _SHM_MIB_PER_STUB + transfers + _SHM_MIB_SPARE


def check_shared_memory(needed_mib: int, folder: Path = SHM) -> list[str]:
    if not folder.is_dir():
        return [f"{folder} does not exist; mount a tmpfs there: `mount -t tmpfs -o size=1g tmpfs {folder}`"]
    usage = shutil.disk_usage(folder)
    if usage.total < needed_mib * _MIB:
        return [
            f"{folder} holds {usage.total // _MIB} MiB; {needed_mib} MiB are needed: in a container start it with"
            f" `--shm-size=1g`, otherwise `mount -o remount,size=1g {folder}`"
        ]
    if usage.free < needed_mib * _MIB:
        return [
            f"{folder} is full: {usage.free // _MIB} of {usage.total // _MIB} MiB are free, {needed_mib} MiB are"
            f" needed; remove what crashed programs left there (`ls -lS {folder}`)"
        ]
    return []


def check_disk(folder: Path, needed_mib: int) -> list[str]:
    existing = next(part for part in (folder, *folder.parents) if part.is_dir())
    free = shutil.disk_usage(existing).free
    if free >= needed_mib * _MIB:
        return []
    return [
        f"the disk of {existing} is full: {free // _MIB} MiB are free, {needed_mib} MiB are needed; free some space or"
        " set XDG_RUNTIME_DIR to a folder elsewhere"
    ]


def check_socket_paths(folder: Path) -> list[str]:
    longest = len(os.fsencode(folder)) + _LONGEST_SOCKET_NAME
    if longest <= _MAX_SOCKET_PATH:
        return []
    return [f"the run folder {folder} is too long for Unix sockets; set XDG_RUNTIME_DIR to a shorter path"]


def check_ports(listeners: Mapping[str, Listener]) -> list[str]:
    """`listeners`: as in {"--http-port": Listener("--triton-host", "127.0.0.1", 8000)}."""
    wrong: dict[str, list[str]] = {}
    for host_option, host, _ in listeners.values():
        if host not in wrong:
            wrong[host] = check_host(host_option, host)
    problems = [*itertools.chain(*wrong.values())]
    for option, (_, host, port) in listeners.items():
        if not 0 < port < 65536:
            problems.append(f"{option} {port} is not a port (1 to 65535)")
        elif not wrong[host]:
            problems += _check_port(option, port, host)
    uses = sorted(Counter(listener.port for listener in listeners.values()).items())
    names = ", ".join(listeners)
    return problems + [f"port {port} is given to more than one of {names}" for port, count in uses if count > 1]


def check_host(option: str, host: str) -> list[str]:
    try:
        is_free(0, host)
    except OSError as error:
        return [
            f"{option} {host}: {error.strerror or error}; give an address of this machine (`ip address` lists them) or"
            " a name of one; 0.0.0.0 is all of them"
        ]
    return []


def _check_port(option: str, port: int, host: str) -> list[str]:
    try:
        if is_free(port, host):
            return []
    except OSError as error:  # below 1024, without the right to
        return [f"port {port} of {host} can't be listened on: {error.strerror}; choose another with {option}"]
    return [f"port {port} of {host} is taken{_holder(port)}; end it or choose another with {option}"]


def _holder(port: int) -> str:
    """Return " by pid 12 (name)" where /proc shows it, else nothing."""
    for pid in port_holders(port):
        return f" by pid {pid} ({' '.join(command_line(pid))[:80] or 'unknown'})"
    return ""


def port_holders(port: int) -> Iterator[int]:
    """Yield those that this user may see."""
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not wanted:
        return
    for process in Path("/proc").glob("[0-9]*"):
        if wanted & set(_descriptors(process)):
            yield int(process.name)


def _descriptors(process: Path) -> Iterator[str]:
    try:
        links = os.listdir(process / "fd")
    except OSError:  # another user's, or gone
        return
    for link in links:
        with contextlib.suppress(OSError):  # closed meanwhile
            yield os.readlink(process / "fd" / link)


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            if fields[3] == "0A" and re.search(rf":{port:04X}$", fields[1]):  # 0A: listening
                yield fields[9]
