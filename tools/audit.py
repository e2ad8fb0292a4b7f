"""Look up known holes of the packages that bireme uses: as they are here, and the oldest that pyproject.toml lets in.

    make audit
    make audit ARGS="--service osv"
    python tools/audit.py --program pip-audit

pip-audit looks them up, from an environment of its own (.audit). Ends with 0 when all were looked up and none has a
hole, with 1 when one has, with 2 when a package could not be looked up: nothing is known of it then.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

CHECKOUT = Path(__file__).resolve().parents[1]
ENVIRONMENT = CHECKOUT / ".audit"
PIP_AUDIT = "pip-audit==2.10.1"
OWN = "bireme"
Pins = dict[str, str]  # version by package


class UnavailableError(Exception):
    """Nothing can be looked up here; the text says why."""


@dataclass(slots=True)
class Findings:
    num_known: int = 0
    holes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)  # packages
    reason: str = ""  # why the last of them is


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--service", default="pypi", help="of pip-audit's: pypi or osv")
    parser.add_argument("--program", help="a pip-audit that is here already")
    options = parser.parse_args(arguments)
    codes = set()
    try:
        program = options.program or environment()
        for title, pins in (("installed", installed()), ("oldest let in", oldest())):
            codes.add(tell(title, look_up(program, options.service, pins)))
    except UnavailableError as error:
        print(f"audit: {error}")
        return 2
    return next((code for code in (1, 2) if code in codes), 0)


def installed() -> Pins:
    """Return what this environment has."""
    found = {canonicalize_name(one.metadata["Name"]): one.version for one in metadata.distributions()}
    return {name: public(version) for name, version in sorted(found.items()) if name != OWN}


def oldest() -> Pins:
    """Return the oldest version that bireme's requirements let in, of each package that has such a bound."""
    found: dict[str, Version] = {}
    for requirement in map(Requirement, metadata.requires(OWN) or ()):
        for bound in requirement.specifier:
            if bound.operator in (">=", "==", "~="):
                name = canonicalize_name(requirement.name)
                found[name] = max(Version(bound.version), found.get(name, Version("0")))
    return {name: public(str(version)) for name, version in sorted(found.items()) if name != OWN}


def public(version: str) -> str:
    """Leave out what a build adds (2.13.0+cpu): holes are those of the release."""
    return Version(version).public


def look_up(program: str, service: str, pins: Pins) -> Findings:
    """Raises UnavailableError."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.writelines(f"{name}=={version}\n" for name, version in pins.items())
        file.flush()
        command = [program, "--requirement", file.name, "--no-deps", "--disable-pip", "--format", "json"]
        command += ["--vulnerability-service", service, "--progress-spinner", "off"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise UnavailableError(f"{program}: {error}") from error
    try:
        looked_up = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError) as error:
        said = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise UnavailableError(f"pip-audit tells nothing: {said[:300]}") from error
    return findings_of(looked_up, pins)


def findings_of(looked_up: Iterable[dict[str, object]], pins: Pins) -> Findings:
    """What pip-audit leaves out or skips is unknown; it ends with 0 all the same."""
    findings, missing = Findings(), dict(pins)
    for one in looked_up:
        name = canonicalize_name(str(one["name"]))
        version = missing.pop(name, "")
        if "skip_reason" in one:
            findings.unknown.append(f"{name} {version}")
            findings.reason = str(one["skip_reason"])
            continue
        findings.num_known += 1
        findings.holes += [f"{name} {version}: {hole}" for hole in holes_of(one["vulns"])]
    if missing:
        findings.unknown += [f"{name} {version}" for name, version in missing.items()]
        findings.reason = "pip-audit has left it out"
    return findings


def holes_of(vulns: Iterable[dict[str, object]]) -> Iterator[str]:
    for vuln in vulns:
        names = ", ".join([vuln["id"], *vuln.get("aliases", ())])
        fixed = ", ".join(vuln.get("fix_versions", ())) or "no release"
        yield f"{names}; mended in {fixed}"


def tell(title: str, findings: Findings) -> int:
    """Print what was found. Returns the exit code for it."""
    print(
        f"audit: {title}: {findings.num_known} packages looked up, {len(findings.holes)} holes,"
        f" {len(findings.unknown)} packages of which nothing is known"
    )
    for hole in findings.holes:
        print(f"  hole     {hole}")
    if findings.unknown:
        print(f"  unknown  {', '.join(findings.unknown)}\n  because  {findings.reason}")
    return 1 if findings.holes else 2 if findings.unknown else 0


def environment() -> str:
    """Return pip-audit's program, installed when it is not there. Raises UnavailableError."""
    stamp, program = ENVIRONMENT / ".packages", ENVIRONMENT / "bin" / "pip-audit"
    if stamp.exists() and stamp.read_text() == PIP_AUDIT:
        return str(program)
    venv.create(ENVIRONMENT, symlinks=True, clear=True)
    command = [sys.executable, "-m", "pip", "--python", str(ENVIRONMENT), "install", "--quiet", PIP_AUDIT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        raise UnavailableError(f"{PIP_AUDIT} can't be installed: {(said or [f'pip ended with {done.returncode}'])[-1]}")
    stamp.write_text(PIP_AUDIT)
    return str(program)


if __name__ == "__main__":
    sys.exit(main())
