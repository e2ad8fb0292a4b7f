"""Write what an image holds that was made of a TensorRT-LLM release on a day, into tests/docker/pins.

    python tests/docker/make_pins.py 26.07 1.2.1 2026-07-20

NVIDIA's images are made by `pip install tensorrt_llm==VERSION` without a file of constraints, so they hold the newest
packages of their day that its requirements let in. The requirements stand in the release's source package, which has
nothing else of it; uv looks at the index as it was on a day.
"""

from __future__ import annotations

import argparse
import email
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PINS = Path(__file__).with_name("pins")
LEFT_OUT = ("tensorrt",)  # a source package as well, with libraries and no requirements
PLATFORM = ("--python-version=3.12", "--python-platform=x86_64-manylinux_2_39")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, text in (("image", "the file's name"), ("version", "of tensorrt-llm"), ("day", "on which it was made")):
        parser.add_argument(name, help=text)
    options = parser.parse_args()
    pins = compile_pins(requirements_of(options.version), options.day)
    text = (
        f"# Packages of TensorRT-LLM {options.version}'s requirements as of {options.day}: tests/docker/make_pins.py\n"
    )
    (PINS / f"{options.image}.txt").write_text(text + pins)
    return 0


def requirements_of(version: str) -> list[str]:
    """Return a release's own requirements. pip fails on its source package and, asked to, leaves it where it was."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["download", "--quiet", "--no-clean", "--no-deps", f"--dest={folder}", f"tensorrt-llm=={version}"]
        environment = os.environ | {"TMPDIR": folder}
        subprocess.run([sys.executable, "-m", "pip", *command], env=environment, capture_output=True, check=False)
        (information,) = list(Path(folder).rglob("PKG-INFO"))[:1]
        found: list[str] = email.message_from_string(information.read_text()).get_all("Requires-Dist", [])
    return [one for one in found if not one.startswith(LEFT_OUT) and "extra ==" not in one]


def compile_pins(requirements: list[str], day: str) -> str:
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", *PLATFORM, f"--exclude-newer={day}"]
    command += ["--quiet", "--no-annotate", "--no-header"]
    done = subprocess.run(command, input="\n".join(requirements), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
