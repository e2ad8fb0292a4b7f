"""What a launch runs on: versions, processor, memory, GPUs. What can't be found out is left out."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import bireme
from bireme.config import CHECKOUT, Recipe
from bireme.engines.stub.environment import find_python, usable_cores
from bireme.errors import ConfigError

_PACKAGES = (
    *("msgspec", "numpy", "nvidia-pytriton", "pyzmq", "tokenizers", "fastokens", "transformers", "torch", "triton"),
    *("safetensors", "xgrammar", "numba", "tensorrt_llm", "diffusers", "accelerate", "av", "nixl", "nats-py"),
    *("tritonclient", "grpcio", "aiohttp", "openai", "opentelemetry-sdk"),
)
_FLAGS = ("fma", "f16c", "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16", "bf16")
_PATIENCE_S = 20.0
_ASK_PACKAGES = """
import importlib.metadata as metadata, json, platform, sys
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
_GPU_FIELDS = ("index", "name", "uuid", "memory.total", "compute_cap", "driver_version")


def versions(recipe: Recipe, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return those of this environment, and of others that engines have."""
    found: dict[str, Any] = {"bireme": bireme.__version__, "commit": _commit(), "python": platform.python_version()}
    found["packages"] = {name: version for name in _PACKAGES if (version := _version(name))}
    own = str(Path(sys.prefix) / "bin")
    for python in dict.fromkeys(_engine_pythons(recipe, environment)):
        if str(Path(python).parent) != own:
            found.setdefault("engines", {})[python] = _ask(python)
    return _known(found)


def describe(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    cpu = _cpu()
    return _known(
        {
            "system": platform.platform(),
            "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
            "cpu_flags": [flag for flag in _FLAGS if flag in cpu.get("flags", cpu.get("Features", "")).split()],
            "cores": usable_cores(),
            "memory_bytes": _memory_bytes(),
            "memory_limit_bytes": _memory_limit(),
            "gpus": _gpus(environment),
            "cuda": _driver_cuda(),
        }
    )


def _known(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if value not in (None, "", [], {})}


def _version(distribution: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def _engine_pythons(recipe: Recipe, environment: Mapping[str, str]) -> Iterable[str]:
    for entry in recipe.workers.values():
        with contextlib.suppress(ConfigError):  # the launch says so
            yield find_python({**environment, **entry.env})


def _ask(python: str) -> dict[str, str]:
    found: dict[str, str] = json.loads(_output(python, "-c", _ASK_PACKAGES, *_PACKAGES) or "{}")
    return found


def _output(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """Return what a program prints; "": it is not there, fails or takes too long."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE_S, check=True, env=environment
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip()


def _commit() -> str:
    return _output("git", "-C", str(CHECKOUT), "rev-parse", "HEAD") if (CHECKOUT / ".git").exists() else ""


def _cpu() -> dict[str, str]:
    """Return /proc/cpuinfo's rows of the first processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    rows = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in rows}


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory_limit() -> int | None:
    """Return the cgroup's; None: it has none."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/sys/fs/cgroup/memory.max").read_text())
    return None


def _gpus(environment: Mapping[str, str]) -> list[dict[str, str]]:
    query = f"--query-gpu={','.join(_GPU_FIELDS)}"
    rows = _output("nvidia-smi", query, "--format=csv,noheader", environment=environment).splitlines()
    return [dict(zip(_GPU_FIELDS, (part.strip() for part in row.split(",")), strict=False)) for row in rows]


def _driver_cuda() -> str | None:
    """Return the newest CUDA that the driver takes."""
    with contextlib.suppress(OSError, AttributeError):
        number = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) == 0:
            return f"{number.value // 1000}.{number.value % 1000 // 10}"
    return None
