"""What a report says of the machine, and what it must not say: secrets, and whose machine it is."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[3]
# Of every version of CUDA where the name says one.
_PACKAGES = (
    *("tensorrt_llm", "torch", "transformers", "tokenizers", "safetensors", "xgrammar", "llguidance", "flashinfer"),
    *(
        "nvidia-nccl",
        "nvidia-cublas",
        "cuda-python",
        "nixl",
        "mpi4py",
        "triton",
        "numpy",
        "pydantic",
        "msgspec",
        "pyzmq",
    ),
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|_KEY(_|$)|AUTH", re.I)
_SECRET_FORMS = re.compile(
    r"\b(hf_[A-Za-z0-9]{10,}|nvapi-[\w-]{10,}|sk-[\w-]{10,}|gh[pousr]_\w{10,}|AKIA\w{12,})|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
_SHORTEST = 6  # characters of a value that is taken out wherever it stands


def find_gpus() -> list[dict[str, Any]]:
    """Return what nvidia-smi tells of each; none: there are none, or no driver."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in listing.splitlines() if line.strip()]
    return [{"name": name, "memory_mib": memory, "driver": driver} for name, memory, driver in rows]


def has_tensorrt_llm() -> bool:
    """Looked for and not imported: that takes long, and belongs into an engine's process."""
    return importlib.util.find_spec("tensorrt_llm") is not None


def facts() -> dict[str, Any]:
    return {
        "bireme": {"version": _version("bireme"), "sources": _digest(CHECKOUT / "bireme")},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} CPUs",
        "packages": _packages(),
    }


def _version(name: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return "not installed"


def _digest(folder: Path) -> str:
    """Return what tells one state of the sources from another."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _packages() -> dict[str, str]:
    wanted = tuple(name.replace("_", "-") for name in _PACKAGES)
    found = {}
    for one in importlib.metadata.distributions():
        name = (one.metadata["Name"] or "").lower().replace("_", "-")
        if re.sub(r"-(cu\d+|python)$", "", name) in wanted or name in wanted:
            found[name] = one.version
    return dict(sorted(found.items()))


def clean(value: Any, folder: Path) -> Any:
    """Return a report's tree without secrets, the home, the user's and the machine's name; `folder`: the run's own."""
    if isinstance(value, dict):
        return {key: clean(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [clean(inner, folder) for inner in value]
    return _clean_text(value, folder) if isinstance(value, str) else value


def _clean_text(text: str, folder: Path) -> str:
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= _SHORTEST:
            text = text.replace(value, "***")
    text = _SECRET_FORMS.sub("***", text)
    for path, name in ((str(folder), "FOLDER"), (str(CHECKOUT), "CHECKOUT"), (_home(), "~")):
        text = text.replace(path, name) if len(path) > 1 else text
    for word, name in ((socket.gethostname(), "HOST"), (_user(), "USER")):
        text = re.sub(rf"(?<![\w.-]){re.escape(word)}(?![\w-])", name, text) if word else text
    return text


def _home() -> str:
    with contextlib.suppress(RuntimeError):
        return str(Path.home())
    return ""


def _user() -> str:
    """root is everybody's, and a user of a container may have no name."""
    with contextlib.suppress(KeyError, OSError):
        return user if (user := getpass.getuser()) != "root" else ""
    return ""
