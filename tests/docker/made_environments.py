"""Python environments made of what this one has, without fetching anything."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from packaging.utils import canonicalize_name

SITE = Path(sysconfig.get_path("purelib"))
NOWHERE = ("bireme", "tensorrt_llm", "tritonclient")
ENGINES_ONLY = ("torch", "torchgen", "functorch", "transformers", "safetensors", "xgrammar")
TRITON_ONLY = ("pytriton", "nvidia_pytriton", "uvicorn", "uvloop", "httptools", "python_multipart", "multipart")
STAND_IN = Path(__file__).resolve().parents[1] / "contract" / "stand_in" / "tensorrt_llm"
# What is built for GPUs, and gigabytes of their libraries.
FOR_GPUS = re.compile(r"(torch|triton|nvidia-|cuda-|flashinfer|cupy|nccl|tensorrt)")
PINS = Path(__file__).with_name("pins")
# Triton's images and TensorRT-LLM's own: the release in them, and what bireme's are made with.
IMAGES = {
    "26.04": ("1.2.1", "Dockerfile.trtllm"),
    "26.07": ("1.2.1", "Dockerfile.trtllm"),
    "1.3.0rc29": ("1.3.0rc29", "Dockerfile.trtllm-release"),
    "1.4.0rc1": ("1.4.0rc1", "Dockerfile.trtllm-release"),
}


def pins_of(image: str) -> dict[str, str]:
    """Return the version of each package in an image with TensorRT-LLM, as pins/ has it."""
    lines = (PINS / f"{image}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


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


def make_environment(
    folder: Path, python: str, without: tuple[str, ...] = (), pins: Mapping[str, str] = MappingProxyType({})
) -> Path:
    """Make a virtual environment that has this one's packages but those named, by links; return its site-packages.

    It is one as tools make them, its Python sees nothing else, and nothing is fetched. Of `pins` the environment says
    that it has these versions, so that pip holds bireme's requirements, and those of what is linked, against them.
    """
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True)
    (target,) = folder.glob("lib/python3*/site-packages")
    for entry in SITE.iterdir():
        name = re.split(r"[-.]", entry.name.lower().lstrip("_"))[0]
        is_pinned = entry.suffix == ".dist-info" and canonicalize_name(name) in pins
        if name not in (*NOWHERE, *without) and not entry.name.startswith("__") and not is_pinned:
            (target / entry.name).symlink_to(entry)
    shutil.copytree(SITE / "__pycache__", target / "__pycache__")  # of modules that are a single file
    for name, version in pins.items():
        folder = add_distribution(target, name, version)
        for entry_points in SITE.glob(f"{folder.name.partition('-')[0]}-*.dist-info/entry_points.txt"):
            (folder / entry_points.name).symlink_to(entry_points)  # setuptools finds its own commands so
    return target


def add_distribution(site: Path, name: str, version: str) -> Path:
    """Make pip and importlib.metadata say that `name` is installed; return where they look."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("pip\n")
    (folder / "RECORD").write_text("")
    return folder


def make_image_environment(folder: Path, python: str, image: str, version: str) -> Path:
    """Make an environment that really has an image's packages, and say of those for a GPU that it has them."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    pins = pins_of(image)
    installed = [f"{name}=={pinned}" for name, pinned in pins.items() if not FOR_GPUS.match(name)]
    command = [sys.executable, "-m", "uv", "pip", "install", f"--python={folder}/bin/python", "--no-deps", *installed]
    subprocess.run(command, check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    for name, pinned in pins.items():
        if FOR_GPUS.match(name):
            add_distribution(site, name, pinned)
    (site / "torch").mkdir()
    (site / "torch" / "version.py").write_text("cuda = '13.0'\n")
    (site / "tensorrt_llm").symlink_to(STAND_IN)
    add_distribution(site, "tensorrt_llm", version)
    return site
