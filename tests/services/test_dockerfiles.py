"""The files of docker/ as hadolint, with Docker's own grammar, reads them."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig

import pytest

from bireme.config import CHECKOUT

DOCKERFILES = sorted((CHECKOUT / "docker").glob("Dockerfile*"))


def lint(file):
    """Return what hadolint says of a file, of the severity of warnings and above."""
    program = shutil.which("hadolint", path=sysconfig.get_path("scripts"))
    assert program, "no hadolint in this environment; run: make services"
    done = subprocess.run([program, "--failure-threshold=warning", file], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_a_dockerfile_parses_and_has_no_warning(file):
    assert lint(file)[0] == 0, lint(file)[1]


@pytest.mark.parametrize(
    ("step", "said"),
    [("RUNN true", "missing whitespace"), ("RUN cd /opt && true", "DL3003"), ("COPY only", "unexpected")],
)
def test_what_does_not_parse_is_found(tmp_path, step, said):
    broken = tmp_path / "Dockerfile"
    broken.write_text(DOCKERFILES[0].read_text() + step + "\n")
    status, text = lint(broken)
    assert status != 0 and said in text
