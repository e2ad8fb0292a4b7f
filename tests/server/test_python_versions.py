"""`make demo` with each Python that the package claims and this machine has, in an environment made for it."""

import contextlib
import os
import signal
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.pythons import python_of

CHECKOUT = Path(__file__).resolve().parents[2]
CLAIM = SpecifierSet(tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["requires-python"])
CLAIMED = [version for version in (f"3.{minor}" for minor in range(8, 30)) if version in CLAIM]
LIMIT_S = 1200  # an environment takes a minute where the packages are near


def test_some_versions_are_claimed_and_one_of_them_is_here():
    assert CLAIMED and any(python_of(version) for version in CLAIMED)


@pytest.mark.soak
@pytest.mark.server
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("version", CLAIMED)
def test_the_environment_and_the_demo_are_made_with(version, tmp_path):
    python = python_of(version)
    if python is None:
        pytest.skip(f"no Python {version} here; install it (apt-get install python{version}-venv)")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    made = subprocess.Popen(
        ["make", "demo", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"],
        cwd=CHECKOUT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        told, errors = made.communicate(timeout=LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(made.pid, signal.SIGKILL)  # make alone would leave what it has started
    assert made.returncode == 0, told[-2000:] + errors[-4000:]
    assert "red kite" in told and f"making {tmp_path / 'venv'} with {python} ({version})" in told
