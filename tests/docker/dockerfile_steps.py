"""Runs a Dockerfile's own steps without docker: below a scratch root, on a Python that stands for the base image's.

COPY copies what git does not ignore, ENV and WORKDIR count for what follows, RUN is run by a shell. Absolute
paths of the image lie below the root. What only root in a container can do (apt-get, useradd, chown) is a program
that does nothing. ARGs have their defaults unless they are given.
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


class StepError(Exception):
    """A step has failed; docker build would end here."""


class Build:
    """An image under construction: `root` is its file system, `environment` what its next step would see."""

    def __init__(self, dockerfile: Path, root: Path, environment: dict[str, str], **arguments: str) -> None:
        self.root = root
        self.environment = environment | arguments
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
        """Execute every step. Raises StepError with the output of the one that fails."""
        ways = {"RUN": self._run, "ENV": self._env, "ARG": self._arg, "WORKDIR": self._workdir, "COPY": self._copy}
        for instruction, text in self._steps:
            if instruction in ("SHELL", "ENTRYPOINT", "CMD"):
                self.commands[instruction] = json.loads(text)
            elif instruction in ways:
                ways[instruction](text)

    def call(self, command: list[str], timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a command as a container of the image would."""
        placed = [self.place(word) for word in command]
        return subprocess.run(
            placed,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def place(self, text: str) -> str:
        """Return a text of the image with its absolute paths below the root."""
        return _OF_THE_IMAGE.sub(f"{self.root}/", text)

    def _run(self, text: str) -> None:
        done = self.call([*self.commands["SHELL"], text])
        if done.returncode:
            raise StepError(f"RUN {text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")

    def _arg(self, text: str) -> None:
        name, _, default = text.partition("=")
        self.environment.setdefault(name, default)

    def _env(self, text: str) -> None:
        for word in shlex.split(text):
            name, _, value = word.partition("=")
            self.environment[name] = self.place(self._expanded(value))

    def _expanded(self, value: str) -> str:
        return re.sub(r"\$\{?(\w+)\}?", lambda match: self.environment.get(match.group(1), ""), value)

    def _workdir(self, text: str) -> None:
        self.folder = Path(self.place(text))
        self.folder.mkdir(parents=True, exist_ok=True)

    def _copy(self, text: str) -> None:
        *sources, target = shlex.split(text)
        for source in sources:
            files = [Path(name) for name in _context_files() if source == "." or _is_below(name, source)]
            if not files:
                raise StepError(f"COPY {text}: {source} is not in the checkout")
            for file in files:
                place = self.folder / self.place(target)
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


def base_environment(python_folder: Path) -> dict[str, str]:
    """Return the variables of a container whose Python environment is first on PATH."""
    kept = {name: value for name, value in os.environ.items() if name in ("HOME", "LANG") or name.startswith("PIP_")}
    return kept | {"PATH": f"{python_folder / 'bin'}:/usr/local/bin:/usr/bin:/bin"}
