"""Pack what serving needs for a machine without a package registry: tritonserver, its stub, the thin packages.

The archive holds one `site` folder for one Python version (numpy 1.26: the stub of tritonserver 2.51 needs it),
without torch and transformers, which such a machine has itself; the stub runs in a venv over `site`, the
engine child in the system's Python. tests/gpu/unpack.sh makes that venv.

    python tests/gpu/pack.py --python 3.12 --output .pack/serving.tar.xz
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")
TRITON = "nvidia-pytriton==0.7.0"
PACKAGES = (
    "numpy>=1.26,<2",
    "tritonclient>=2.51",
    "grpcio",
    "protobuf>=5",
    "pyyaml>=6",
    "prometheus-client>=0.20",
    "pyzmq>=26",
    "msgspec>=0.19",
    "xxhash>=3.4",
    "tokenizers>=0.20",
    "jinja2>=3.1.6",
    "regex>=2024.4",
    "uvicorn>=0.30",
    "uvloop>=0.20",
    "httptools>=0.6",
    "psutil>=5.9",
)
# For Pythons that are not packed, perf_analyzer, bfloat16 client arrays, downloads.
DROPPED = (
    *("**/tests", "bin", "ml_dtypes*", "hf_xet*", "**/libpython3-*", "numpy/f2py", "numpy/distutils"),
    *("numpy/core/_simd*", "numpy/core/include", "numpy/core/lib", "**/*.pyi", "**/*.pyx"),
)
STRIPPED = (
    "uvloop/*.so",
    "rapidjson*.so",
    "xxhash/*.so",
    "yaml/*.so",
    "httptools/*/*.so",
    "grpc/_cython/*.so",
)  # of debug symbols


def main() -> int:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        install(site, arguments.python, [TRITON], "--no-deps", platform="manylinux_2_35_x86_64")
        install(site, arguments.python, PACKAGES)
        prune(site, arguments.python)
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(arguments.output, "w:xz", preset=9) as archive:
            archive.add(site, "site")
    print(f"{arguments.output}: {arguments.output.stat().st_size / 1e6:.1f} MB")
    return 0


def install(site: Path, python: str, packages: list[str] | tuple[str, ...], *flags: str, platform: str = "") -> None:
    platforms = [f"--platform={name}" for name in ((platform,) if platform else PLATFORMS)]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--target", str(site), "--only-binary=:all:", "--no-compile"]
        + ["--implementation=cp", f"--python-version={python}", *platforms, *flags, *packages],
        check=True,
    )


def prune(site: Path, python: str) -> None:
    for pattern in DROPPED:
        for path in list(site.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for pattern in STRIPPED:
        subprocess.run(["strip", "--strip-unneeded", *map(str, site.glob(pattern))], check=True)
    (site / "ml_dtypes.py").write_text("bfloat16 = None\n")  # tritonclient imports it for the sake of its name
    for stub in (site / "pytriton/tritonserver/python_backend_stubs").iterdir():
        if stub.name != python:
            shutil.rmtree(stub)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pack what serving needs for a machine without a registry.")
    parser.add_argument("--python", default="3.12", help="version there")
    parser.add_argument("--output", type=Path, default=Path(".pack/serving.tar.xz"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
