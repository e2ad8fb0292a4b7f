"""tools/setup.sh on machines where something is missing: one message, its remedy, code 2."""

import os
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PYTHON = """#!/bin/sh
case "$*" in
    *version_info*) echo {version} ;;
    *optimizations*) exit {no_optimizations} ;;
    *ensurepip*) exit {no_venv} ;;
    *) exit {no_libpython} ;;
esac
"""


def make_python(file, version="3.11", no_venv=0, no_libpython=0, no_optimizations=0):
    file.parent.mkdir(exist_ok=True)
    said = {"version": version, "no_venv": no_venv, "no_libpython": no_libpython, "no_optimizations": no_optimizations}
    file.write_text(PYTHON.format(**said))
    file.chmod(0o755)


def run(tmp_path, tools=(), named=True, **python):
    folder = tmp_path / "bin"
    make_python(folder / "python3", **python)
    for name, text in tools:
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "VENV": str(tmp_path / "venv"), "HOME": os.environ["HOME"]}
    if named:
        environment["PYTHON"] = str(folder / "python3")
    return subprocess.run(
        ["sh", CHECKOUT / "tools" / "setup.sh"], env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [
        ({"version": "3.13"}, "3.11 or 3.12 is needed"),
        ({"no_venv": 1}, "apt-get install python3-venv python3.11-venv"),
        ({"no_libpython": 1}, "apt-get install libpython3.11"),
        ({"tools": [("df", "echo head; echo x 9 9 12 9% /")]}, "12 MB are free"),
        ({"tools": [("uname", "echo Darwin")]}, "use docker/Dockerfile"),
    ],
)
def test_what_is_missing_is_said_with_its_remedy(tmp_path, missing, remedy):
    result = run(tmp_path, **missing)
    assert result.returncode == 2 and remedy in result.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(("no_optimizations", "named"), [(0, False), (1, False), (1, True)])
def test_a_python_that_is_slow_is_told_of_unless_it_was_named(tmp_path, no_optimizations, named):
    """The environment that this one makes is empty, and its set-up ends there."""
    make_python(tmp_path / "bin" / "python3.12", version="3.12")
    said = run(tmp_path, named=named, no_optimizations=no_optimizations).stdout
    assert "making" in said
    assert ("make PYTHON=python3.12 setup" in said) == (no_optimizations == 1 and not named)


def test_set_up_of_a_complete_environment_changes_nothing():
    if not (CHECKOUT / ".venv" / "bin" / "python").exists():
        pytest.skip("this checkout has no .venv")
    stamps = set((CHECKOUT / ".venv").glob(".stamp-*"))
    if not stamps:
        pytest.skip("the environment was not made by tools/setup.sh")
    subprocess.run(["sh", CHECKOUT / "tools" / "setup.sh"], check=True, timeout=60)
    assert set((CHECKOUT / ".venv").glob(".stamp-*")) == stamps
