"""Make the environments of `make test-clients`: one a client of tests/clients/clients.yaml, in .clients/.

Those that are there with the same packages stay. `npm:NAME@VERSION` is a package of npm's, which needs node. What can't
be installed is told with its reason.

    python tools/clients.py                 all
    python tools/clients.py litellm openai  these
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import yaml

CHECKOUT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = CHECKOUT / ".clients"
TABLE = CHECKOUT / "tests" / "clients" / "clients.yaml"
NPM = "npm:"


class NotInstalledError(Exception):
    """A client cannot be installed here; the text says why."""


def packages() -> dict[str, list[str]]:
    """Return each client's packages; the first is the client itself."""
    table: dict[str, list[str]] = yaml.safe_load(TABLE.read_text())
    return table


def version(name: str) -> str:
    """Return the version of a client."""
    return packages()[name][0].rpartition("=" if "==" in packages()[name][0] else "@")[2]


def environment(name: str) -> Path:
    """Return the client's environment, made when it is not there as the table wants it. Raises NotInstalledError."""
    wanted, folder = packages()[name], ENVIRONMENTS / name
    stamp = folder / ".packages"
    if stamp.exists() and stamp.read_text().split("\n") == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _install(folder, wanted)
    except NotInstalledError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    stamp.write_text("\n".join(wanted))
    return folder


def _install(folder: Path, wanted: list[str]) -> None:
    """Install packages into a new folder, their programs into its bin/. Raises NotInstalledError."""
    if wanted[0].startswith(NPM):
        if shutil.which("npm") is None:
            raise NotInstalledError("npm is not here; install node")
        folder.mkdir(parents=True)
        (folder / "bin").symlink_to(Path("node_modules", ".bin"))
        command = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--loglevel=error"]
        wanted = [package.removeprefix(NPM) for package in wanted]
    else:
        venv.create(folder, symlinks=True)
        command = [sys.executable, "-m", "pip", "--python", str(folder), "install"]
        command += ["--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, *wanted], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith(("ERROR:", "npm error"))]
        raise NotInstalledError((errors or [f"{command[0]} ended with {done.returncode}"])[-1][:300])


def main(arguments: list[str] | None = None) -> int:
    known = list(packages())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; default: all")
    names = parser.parse_args(arguments).names
    if strange := [name for name in names if name not in known]:
        parser.error(
            f"{', '.join(strange)}: no client of {TABLE.relative_to(CHECKOUT)}; name one of {', '.join(known)}"
        )
    num_missing = 0
    for name in names or known:
        try:
            print(f"clients: {name}: {environment(name)}", flush=True)
        except NotInstalledError as error:
            num_missing += 1
            print(f"clients: {name}: not installed: {error}", flush=True)
    return 1 if num_missing else 0


if __name__ == "__main__":
    sys.exit(main())
