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


def run(tmp_path, tools=(), named=True, venv="venv", **python):
    folder = tmp_path / "bin"
    make_python(folder / "python3", **python)
    for name, text in tools:
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "VENV": str(tmp_path / venv), "HOME": os.environ["HOME"]}
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


@pytest.mark.parametrize(
    ("slow", "named", "other", "taken"),
    [
        (1, False, {}, True),
        (0, False, {}, False),
        (1, True, {}, False),
        (1, False, {"no_optimizations": 1}, False),
        (1, False, {"no_venv": 1}, False),
        (1, False, {"no_libpython": 1}, False),
        (1, False, {"version": "3.13"}, False),
    ],
)
def test_a_faster_python_is_taken_unless_one_was_named_or_it_lacks_something(tmp_path, slow, named, other, taken):
    """No environment can be made below a file."""
    (tmp_path / "venv").touch()
    make_python(tmp_path / "bin" / "python3.12", **{"version": "3.12"} | other)
    said = run(tmp_path, venv="venv/below", named=named, no_optimizations=slow).stdout
    assert " making " in said
    assert ("taking python3.12 (make PYTHON=python3 setup" in said) == taken


def test_set_up_of_a_complete_environment_changes_nothing():
    if not (CHECKOUT / ".venv" / "bin" / "python").exists():
        pytest.skip("this checkout has no .venv")
    stamps = set((CHECKOUT / ".venv").glob(".stamp-*"))
    if not stamps:
        pytest.skip("the environment was not made by tools/setup.sh")
    subprocess.run(["sh", CHECKOUT / "tools" / "setup.sh"], check=True, timeout=60)
    assert set((CHECKOUT / ".venv").glob(".stamp-*")) == stamps
