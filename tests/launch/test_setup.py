"""tools/setup.sh on machines where something is missing: one message, its remedy, code 2."""

import os
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PYTHON = """#!/bin/sh
case "$*" in
    *version_info*) echo {version} ;;
    *ensurepip*) exit {no_venv} ;;
    *) exit {no_libpython} ;;
esac
"""


def run(tmp_path, version="3.11", no_venv=0, no_libpython=0, tools=()):
    folder = tmp_path / "bin"
    folder.mkdir()
    python = folder / "python3"
    python.write_text(PYTHON.format(version=version, no_venv=no_venv, no_libpython=no_libpython))
    python.chmod(0o755)
    for name, text in tools:
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    path = f"{folder}:/usr/bin:/bin"
    environment = {"PATH": path, "VENV": str(tmp_path / "venv"), "PYTHON": str(python), "HOME": os.environ["HOME"]}
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


def test_set_up_of_a_complete_environment_changes_nothing():
    if not (CHECKOUT / ".venv" / "bin" / "python").exists():
        pytest.skip("this checkout has no .venv")
    stamps = set((CHECKOUT / ".venv").glob(".stamp-*"))
    if not stamps:
        pytest.skip("the environment was not made by tools/setup.sh")
    subprocess.run(["sh", CHECKOUT / "tools" / "setup.sh"], check=True, timeout=60)
    assert set((CHECKOUT / ".venv").glob(".stamp-*")) == stamps
