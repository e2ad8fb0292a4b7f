"""Runs a Dockerfile's own steps without docker: below a scratch root, on a Python that stands for the base image's.

COPY copies what git does not ignore, ENV and WORKDIR count for what follows, RUN is run by a shell. Absolute
paths of the image lie below the root. What only root in a container can do (apt-get, useradd, chown) is a program
that does nothing. ARGs have their defaults.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from bireme.config import CHECKOUT

_OF_THE_IMAGE = re.compile(r"(?<![\w./$}-])/(?=(?:opt|models|etc|usr/local|var/lib)\b)")
_ONLY_IN_A_CONTAINER = ("apt-get", "useradd", "chown")


class Build:
    """An image under construction: `root` is its file system, `environment` what its next step would see."""

    def __init__(self, dockerfile: Path, root: Path, environment: dict[str, str]) -> None:
        self.root = root
        self.environment = dict(environment)
        self.folder = root
        self.commands: dict[str, list[str]] = {"SHELL": ["/bin/sh", "-c"]}  # and ENTRYPOINT, CMD
        self._steps = steps_of(dockerfile)
        programs = root / "programs"
        programs.mkdir(parents=True)
        for name in _ONLY_IN_A_CONTAINER:
            (programs / name).write_text("#!/bin/sh\n")
            (programs / name).chmod(0o755)
        self.environment["PATH"] = f"{programs}:{self.environment['PATH']}"

    def run(self) -> None:
        """Execute every step. Raises AssertionError with the output of the step that fails."""
        ways = {"RUN": self._run, "ENV": self._env, "ARG": self._arg, "WORKDIR": self._workdir, "COPY": self._copy}
        for instruction, text in self._steps:
            if instruction in ("SHELL", "ENTRYPOINT", "CMD"):
                self.commands[instruction] = json.loads(text)
            elif instruction in ways:
                ways[instruction](text)

    def call(self, command: list[str], timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a command as a container of the image would."""
        placed = [self._place(word) for word in command]
        return subprocess.run(
            placed,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def _place(self, text: str) -> str:
        return _OF_THE_IMAGE.sub(f"{self.root}/", text)

    def _run(self, text: str) -> None:
        done = self.call([*self.commands["SHELL"], text])
        assert done.returncode == 0, f"RUN {text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"

    def _arg(self, text: str) -> None:
        name, _, default = text.partition("=")
        self.environment.setdefault(name, default)

    def _env(self, text: str) -> None:
        for word in shlex.split(text):
            name, _, value = word.partition("=")
            self.environment[name] = self._place(self._expanded(value))

    def _expanded(self, value: str) -> str:
        return re.sub(r"\$\{?(\w+)\}?", lambda match: self.environment.get(match.group(1), ""), value)

    def _workdir(self, text: str) -> None:
        self.folder = Path(self._place(text))
        self.folder.mkdir(parents=True, exist_ok=True)

    def _copy(self, text: str) -> None:
        *sources, target = shlex.split(text)
        for source in sources:
            files = [Path(name) for name in _context_files() if source == "." or _is_below(name, source)]
            assert files, f"COPY {text}: {source} is not in the checkout"
            for file in files:
                place = self.folder / self._place(target)
                if source == ".":
                    place = place / file
                elif target.endswith("/"):
                    place = place / file.name
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(CHECKOUT / file, place)


def steps_of(dockerfile: Path) -> list[tuple[str, str]]:
    """Return (instruction, the rest) of each step, continued lines joined."""
    lines = [line for line in dockerfile.read_text().splitlines() if line.strip() and not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(words[0], words[1]) for line in text.splitlines() if len(words := line.split(maxsplit=1)) == 2]


def _context_files() -> list[str]:
    found = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in found.stdout.splitlines() if (CHECKOUT / name).is_file()]


def _is_below(name: str, folder: str) -> bool:
    return name == folder or name.startswith(folder.rstrip("/") + "/")


def make_environment(folder: Path, python: str, site: Path, without: tuple[str, ...]) -> Path:
    """Make a virtual environment that has the packages of `site` but those named, by links; return its site-packages.

    It is one as tools make them, its Python sees nothing else, and nothing is fetched.
    """
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True)
    (target,) = folder.glob("lib/python3*/site-packages")
    for entry in site.iterdir():
        name = re.split(r"[-.]", entry.name.lower().lstrip("_"))[0]
        if name not in without and not entry.name.startswith("__"):
            (target / entry.name).symlink_to(entry)
    return target


def add_distribution(site: Path, name: str, version: str) -> None:
    """Make pip and importlib.metadata say that `name` is installed."""
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("pip\n")
    (folder / "RECORD").write_text("")


def base_environment(python_folder: Path) -> dict[str, str]:
    """Return the variables of a container whose Python environment is first on PATH; pip asks nobody."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    return kept | {"PATH": f"{python_folder / 'bin'}:/usr/local/bin:/usr/bin:/bin"}
