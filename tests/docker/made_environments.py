"""Python environments made of what this one has, without fetching anything."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))
ENGINES_ONLY = ("torch", "torchgen", "functorch", "transformers", "safetensors", "xgrammar", "tensorrt_llm", "bireme")
TRITON_ONLY = ("pytriton", "nvidia_pytriton", "bireme")
STAND_IN = Path(__file__).resolve().parents[1] / "contract" / "stand_in" / "tensorrt_llm"


def make_triton_environment(folder: Path) -> str:
    """Make an environment that has tritonserver and no engine's library; return its python."""
    make_environment(folder, sys._base_executable, without=ENGINES_ONLY)  # type: ignore[attr-defined]
    return str(folder / "bin" / "python")


def make_engine_environment(folder: Path) -> str:
    """Make an environment that has tensorrt_llm (the stand-in) and no tritonserver; return its python."""
    site = make_environment(folder, sys._base_executable, without=TRITON_ONLY)  # type: ignore[attr-defined]
    (site / "tensorrt_llm").symlink_to(STAND_IN)
    add_distribution(site, "tensorrt_llm", "1.2.1")
    return str(folder / "bin" / "python")


def make_environment(folder: Path, python: str, without: tuple[str, ...]) -> Path:
    """Make a virtual environment that has this one's packages but those named, by links; return its site-packages.

    It is one as tools make them, its Python sees nothing else, and nothing is fetched.
    """
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True)
    (target,) = folder.glob("lib/python3*/site-packages")
    for entry in SITE.iterdir():
        name = re.split(r"[-.]", entry.name.lower().lstrip("_"))[0]
        if name not in without and not entry.name.startswith("__"):
            (target / entry.name).symlink_to(entry)
    return target


def add_distribution(site: Path, name: str, version: str) -> None:
    """Make pip and importlib.metadata say that `name` is installed."""
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("pip\n")
    (folder / "RECORD").write_text("")
