"""Python interpreters of other versions that this machine has."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def python_of(version: str) -> str | None:
    """Return a Python of a version ("3.12") that can make environments: on the PATH, or beside this one as pyenv's."""
    beside = sorted(Path(sys.base_prefix).parent.glob(f"{version}.*/bin/python{version}"))
    return next(
        (path for path in (shutil.which(f"python{version}"), *map(str, beside)) if path and _can_run(path)), None
    )


def _can_run(path: str) -> bool:
    done = subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True, check=False)
    return done.returncode == 0  # pyenv's stand-ins on the PATH fail for versions that are not chosen
