"""Launches beside one that serves: each has one worker of one stage, and they find each other by discovery.

They are processes of their own and outlive the planner. Which there are stands in a file of its folder, so that the
next planner goes on with them. One that is to end gets SIGTERM: it drains, and what it has ends or moves.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bireme import private_files
from bireme.errors import BiremeError, ConfigError
from bireme.launch import processes
from bireme.launch.admin_client import DoorClient
from bireme.launch.ports import free_port
from bireme.messages import MALFORMED
from bireme.scaling.connector import STAGES
from bireme.scaling.launches_beside import BesideLaunch, LaunchesBeside

_FILE = "launches.json"
_PORTS = ("http", "grpc", "metrics", "health")
SLOT = "{slot}"  # in the command: the least number that no launch of the planner's has


class ExtraLaunch(msgspec.Struct):
    stage: str
    slot: int
    pid: int
    began: int | None  # of its process, in the kernel's ticks: tells it from another one with this id
    admin_port: int
    is_ending: bool = False

    @property
    def is_alive(self) -> bool:
        return processes.is_alive(self.pid) and processes.started_at(self.pid) == self.began


class ExtraLaunches(LaunchesBeside):
    def __init__(
        self,
        door: DoorClient,
        command: str,
        folder: Path,
        key_file: str,
        first_slot: int = 0,
        stages: Sequence[str] = STAGES,
    ) -> None:
        """`door`: of the launch that is there anyway, with `key_file`'s key. `command`: serve.py's, with the discovery
        of all. Raises ConfigError.
        """
        super().__init__(door)
        self._first_slot, self._stages = first_slot, stages
        if "--discovery" not in command:
            raise ConfigError("--start: name --discovery, by which its launch and the others find each other")
        self._command, self._folder, self._key_file = command, folder, key_file
        self._started: dict[int, subprocess.Popen[bytes]] = {}  # by this planner, which reaps them
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._launches = self._read()
        except (OSError, *MALFORMED) as error:
            raise ConfigError(f"--launches {folder}: it can't be used ({error})") from error

    def _address_of(self, launch: BesideLaunch) -> str:
        assert isinstance(launch, ExtraLaunch)
        return f"http://127.0.0.1:{launch.admin_port}"

    def _alive(self) -> Sequence[ExtraLaunch]:
        """Forget those that have ended."""
        for process in self._started.values():
            process.poll()
        alive = [one for one in self._launches if one.is_alive]
        if len(alive) < len(self._launches):
            self._launches = alive
            self._write()
        return list(alive)

    def _start(self, stage: str) -> str:
        taken = {one.slot for one in self._launches}
        slot = next(number for number in itertools.count(self._first_slot) if number not in taken)
        ports = {name: free_port() for name in _PORTS}
        admin_port = free_port()
        command = [
            *(word.replace(SLOT, str(slot)) for word in shlex.split(self._command)),
            *(f"--{name}-port={port}" for name, port in ports.items()),
            *("--openai-port=0", f"--admin-port={admin_port}", f"--admin-key-file={self._key_file}"),
            *(word for other in self._stages for word in ("--set", f"workers.{other}.replicas={int(other == stage)}")),
        ]
        log = self._folder / f"{stage}-{slot}.log"
        try:
            with log.open("ab") as stream:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
                )
        except OSError as error:
            raise BiremeError(f"--start: {command[0]}: it can't be run ({error})") from error
        self._started[process.pid] = process
        began = processes.started_at(process.pid)
        self._launches.append(ExtraLaunch(stage, slot, process.pid, began, admin_port))
        self._write()
        return f"a launch with a {stage} worker starts ({log})"

    def _end(self, launch: BesideLaunch) -> str:
        assert isinstance(launch, ExtraLaunch)
        launch.is_ending = True
        self._write()
        with contextlib.suppress(ProcessLookupError):
            os.kill(launch.pid, signal.SIGTERM)
        return f"the launch {launch.pid} with a {launch.stage} worker drains and ends"

    def _read(self) -> list[ExtraLaunch]:
        path = self._folder / _FILE
        if not path.exists():
            return []
        with private_files.open_regular(path) as file:
            return msgspec.json.decode(file.read(), type=list[ExtraLaunch])

    def _write(self) -> None:
        """Raises BiremeError."""
        try:
            private_files.replace_file(self._folder / _FILE, msgspec.json.encode(self._launches))
        except OSError as error:
            raise BiremeError(f"--launches {self._folder}: it can't be written ({error})") from error
