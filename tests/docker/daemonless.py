"""Builds docker/Dockerfile with buildah and starts what it made, without a daemon, a registry or a container runtime.

The base is made of Debian's packages (docker/make_base.sh). Steps and containers run in a chroot, with Docker's default
seccomp filter. What `docker run` adds comes from namespaces: a network of its own, processes of its own, a /dev/shm of
a size, a root that can't be written, and no capability. Only root can do it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from bireme.config import CHECKOUT

PROGRAMS = {"buildah": "buildah", "mmdebstrap": "mmdebstrap", "unshare": "util-linux", "ip": "iproute2"}
NEEDED_MB = 12000  # the base, each step's layer, and the wheels of a step
BASE = "localhost/bireme-base"
_BUILD_S = 3000.0
_TMP = "--mount=type=tmpfs,destination=/tmp,tmpfs-mode=1777"  # docker's --tmpfs /tmp
_END = "container: exit"
# This release of buildah sets no_new_privs in no chroot, and fails at its end after a root that it can't write.
_STARTED_BY = ("setpriv", "--no-new-privs", "sh", "-c", f'"$@"; echo "{_END} $?"', "sh")
_CONTAINER = """
set -e
root=$1 shm=$2
shift 2
ip link set lo up
mount -t tmpfs -o "size=$shm,mode=1777,nosuid,nodev,noexec" shm /dev/shm
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
exec "$@"
"""


class BuilderError(Exception):
    """A command of the builder has failed; its last lines say why."""


def why_not() -> str:
    """Return what this machine lacks for a build; empty: nothing."""
    missing = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    if missing:
        return f"{', '.join(missing)}: not installed; run: apt-get install {' '.join(missing)}"
    if os.getuid() != 0:
        return "buildah in a chroot with namespaces of its own needs root"
    return ""


class Store:
    """A folder of images: nothing of it is anywhere else, and `remove` takes it away."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._words = ["buildah", f"--root={folder}/storage", f"--runroot={folder}/run"]

    def buildah(self, *words: str, timeout_s: float = 600) -> str:
        """Run a command of buildah's and return what it prints. Raises BuilderError."""
        return _called([*self._words, *words], timeout_s)

    def command(self, *words: str) -> list[str]:
        """Return a command of buildah's on this store."""
        return [*self._words, *words]

    def make_base(self) -> None:
        """Make BASE of Debian's packages."""
        tar = self.folder / "base.tar"
        _called(["sh", str(CHECKOUT / "docker" / "make_base.sh"), str(tar)], 1200)
        container = self.buildah("from", "scratch").strip()
        self.buildah("add", "--quiet", container, str(tar), "/")
        self.buildah("config", "--cmd", "bash", container)
        self.buildah("commit", "--quiet", "--rm", container, BASE)
        tar.unlink()

    def build(self, dockerfile: Path, name: str, **arguments: str) -> float:
        """Build an image; return the seconds it took. Raises BuilderError with the step that failed."""
        began = time.monotonic()
        given = [f"--build-arg={key}={value}" for key, value in arguments.items()]
        self.buildah(
            "bud", "--isolation=chroot", "--pull-never", "--format=docker", "--layers=false",
            *self._pip_of_this_machine(), *given, f"--tag={name}", f"--file={dockerfile}", str(CHECKOUT),
            timeout_s=_BUILD_S,
        )  # fmt: skip
        return time.monotonic() - began

    def image(self, name: str) -> dict[str, Any]:
        """Return what an image says of itself, and its size."""
        found: dict[str, Any] = json.loads(self.buildah("inspect", "--type=image", name))["Docker"]["config"]
        (listed,) = json.loads(self.buildah("images", "--json", name))
        return found | {"Size": listed["size"]}

    def remove(self) -> None:
        """Take away every container and image."""
        self.buildah("rm", "--all")
        self.buildah("rmi", "--all", "--force")
        shutil.rmtree(self.folder)

    def _pip_of_this_machine(self) -> list[str]:
        """Return volumes with the packages and certificates that pip uses here, and with a file that names them."""
        settings, volumes = {}, set()
        for line in _called([sys.executable, "-m", "pip", "config", "list"], 60).splitlines():
            name, _, value = line.partition("=")
            key, value = name.rpartition(".")[2], value.strip("'\"")
            places = {word.removeprefix("file://") for word in value.split()}
            for place in (one for one in places if one.startswith("/")):
                # A package of Debian's writes where certificates lie; an index links to files beside it.
                inside = "/run/pip/cert.pem" if key == "cert" else place.removesuffix("/simple")
                volumes.add(f"--volume={place.removesuffix('/simple')}:{inside}:ro")
                value = inside if key == "cert" else value
            settings[key] = value
        file = self.folder / "pip.conf"
        file.write_text("\n".join(["[global]", *(f"{key} = {value}" for key, value in settings.items())]) + "\n")
        return [f"--volume={file}:/etc/pip.conf:ro", *sorted(volumes)]


class Container:
    """A container as `docker run --read-only --tmpfs /tmp --cap-drop ALL --shm-size=1g IMAGE COMMAND` starts one.

    With no-new-privileges, too.
    """

    def __init__(self, store: Store, image: str, log: Path, *command: str) -> None:
        self._store = store
        self.config = store.image(image)
        self.name = store.buildah("from", "--pull-never", image).strip()
        self.root = Path(store.buildah("mount", self.name).strip())
        store.buildah("run", "--isolation=chroot", _TMP, self.name, "--", "true")  # makes the places of mounts
        (self.root / "run" / ".containerenv").touch()
        words = [*self.config["Entrypoint"], *(command or self.config.get("Cmd") or ())]
        run = store.command("run", "--isolation=chroot", "--cap-drop=ALL", _TMP, self.name, "--", *_STARTED_BY, *words)
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
                 "sh", "-c", _CONTAINER, "container", str(self.root), "1g", *run],
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._main = words

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Return its main process and all below it."""
        main = self._main_process()
        return [main, *main.children(recursive=True)]

    def call(self, command: list[str], timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
        """Run a command in it, as `docker exec` would."""
        main = self._main_process()
        within = ["nsenter", f"--target={main.pid}", "--net", "--mount", "--pid", "--root", "--wd"]
        user = main.uids().real
        within += [f"--setuid={user}", f"--setgid={main.gids().real}", "--", *command]
        return subprocess.run(
            within, env=main.environ(), capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def wait_healthy(self, timeout_s: float) -> None:
        """Wait until the image's HEALTHCHECK says so. Raises BuilderError when the container ends before."""
        test = self.config["Healthcheck"]["Test"]
        ends = time.monotonic() + timeout_s
        while time.monotonic() < ends:
            if self._process.poll() is not None:
                raise BuilderError(f"the container has ended\n{self.log[-4000:]}")
            if self._found() is not None and self.call(test[1:]).returncode == 0:
                return
            time.sleep(1)
        raise BuilderError(f"not healthy after {timeout_s:.0f} s\n{self.log[-4000:]}")

    def stop(self, timeout_s: float = 120) -> int | None:
        """End it as `docker stop` does, by SIGTERM to its main process; return that one's exit status."""
        if (main := self._found()) is not None:
            main.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        found = re.search(rf"^{_END} (\d+)$", self.log, re.M)
        return int(found[1]) if found else None

    def remove(self) -> None:
        """Kill what still runs, and take its files away."""
        self._process.kill()
        self._process.wait()
        self._store.buildah("rm", self.name)

    def _main_process(self) -> psutil.Process:
        found = self._found()
        if found is None:
            raise BuilderError(f"the container does not run\n{self.log[-4000:]}")
        return found

    def _found(self) -> psutil.Process | None:
        """Return the process that runs the image's command: the builder's own have it within longer ones."""
        if self._process.poll() is not None:
            return None
        below = psutil.Process(self._process.pid).children(recursive=True)
        return next((one for one in below if _words(one)[1:] == self._main[1:]), None)


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _called(command: list[str], timeout_s: float) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise BuilderError(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout
