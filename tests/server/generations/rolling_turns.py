"""Launches that take each other's place by tools/update.py, and clients as a load balancer sends them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bireme.config import CHECKOUT
from bireme.launch import free_port
from bireme.launch.admin_client import DoorClient

KEY = "the-operator-s-own-key"
LIMIT_S = 240
PROMPTS = [f"the oars of bank {number}" for number in range(8)]
NUM_TOKENS = 24
Prompt = str | tuple[int, ...]


@dataclass(frozen=True)
class Revision:
    """What decides the answers."""

    recipe: str
    settings: tuple[str, ...]


def mocked(vocab_size: int) -> Revision:
    return Revision("recipes/mocker", (f"workers.decode.engine_config.mocker.vocab_size={vocab_size}",))


def of_weights(model: Path) -> Revision:
    return Revision("recipes/tiny-agg", (f"model={model}", "served_model_name=mocker"))


@dataclass
class Generation:
    """One launch: `command` serves it."""

    folder: Path
    revision: Revision
    checkout: Path = CHECKOUT
    has_door: bool = True
    arguments: Sequence[str] = ()  # further ones of serve.py
    environment: Mapping[str, str] = field(default_factory=dict)
    pair: tuple[str, str] | None = None  # certificate and key: door and frontend speak https
    ports: dict[str, int] = field(
        default_factory=lambda: {name: free_port() for name in ("http", "grpc", "metrics", "health", "openai", "admin")}
    )

    @property
    def door(self) -> DoorClient:
        return DoorClient(f"{self._scheme}://127.0.0.1:{self.ports['admin']}", KEY, self.pair[0] if self.pair else "")

    @property
    def entry(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.ports['openai']}"

    @property
    def _scheme(self) -> str:
        return "https" if self.pair else "http"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.ports['openai']}.log"

    @property
    def command(self) -> list[str]:
        ports = [f"--{name}-port={port}" for name, port in self.ports.items() if name != "admin" or self.has_door]
        door = [f"--admin-key-file={self.folder / 'key'}"] if self.has_door else []
        serve = [sys.executable, str(self.checkout / "tools" / "serve.py"), self.revision.recipe]
        settings = [f"--set={setting}" for setting in self.revision.settings]
        if self.pair is not None:
            names = ("tls-cert", "tls-key", "admin-tls-cert", "admin-tls-key")
            door += [f"--{name}={path}" for name, path in zip(names, self.pair * 2, strict=True)]
        return [*serve, *ports, *door, *settings, "--canary-interval=0", *self.arguments]

    def start(self) -> subprocess.Popen[bytes]:
        """Return once it answers."""
        process = self.begin()
        self.wait(process)
        return process

    def begin(self) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as log:
            environment = os.environ | {"PYTHONPATH": str(self.checkout)} | dict(self.environment)
            return subprocess.Popen(self.command, stdout=log, stderr=log, cwd=self.checkout, env=environment)

    def wait(self, process: subprocess.Popen[bytes]) -> None:
        wait_for(lambda: self.is_ready() or process.poll() is not None)
        assert process.poll() is None, self.log.read_text()[-3000:]

    @contextlib.contextmanager
    def streaming(self) -> Iterator[None]:
        """A request is under way there meanwhile."""
        body = {"model": "mocker", "prompt": PROMPTS[0], "max_tokens": 1_000_000, "stream": True, "ignore_eos": True}
        with contextlib.closing(self.connect()) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            reply = connection.getresponse()  # which must be kept: with it the connection ends
            assert reply.readline().startswith(b"data: {")
            yield
            reply.close()

    @contextlib.contextmanager
    def streaming_itself(self) -> Iterator[None]:
        """The same by its own engine; weights that are no more may hold in its frontend for a moment."""
        has_it, tries = False, 0
        while not has_it:
            assert (tries := tries + 1) < 40, self.door.status()
            with self.streaming():
                deadline = time.monotonic() + 3
                while not has_it and time.monotonic() < deadline:
                    has_it = self.door.status()["workers"]["decode"]["in_flight_requests"] > 0
                    time.sleep(0.05)
                if has_it:
                    yield

    def is_ready(self) -> bool:
        """As a balancer asks."""
        try:
            return self.call("GET", "/health/ready", at="openai" if self.ports["openai"] else "health")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def connect(self, at: str = "openai") -> http.client.HTTPConnection:
        """`at`: a name of `ports`."""
        if self.pair is None or at != "openai":
            return http.client.HTTPConnection("127.0.0.1", self.ports[at], timeout=LIMIT_S)
        trusted = ssl.create_default_context(cafile=self.pair[0])
        return http.client.HTTPSConnection("127.0.0.1", self.ports[at], timeout=LIMIT_S, context=trusted)

    def call(self, method: str, path: str, body: Any = None, at: str = "openai") -> tuple[int, bytes]:
        connection = self.connect(at)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def ask(self, prompt: Prompt) -> str:
        body = {"model": "mocker", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
        status, answer = self.call("POST", "/v1/completions", body | {"bireme": {"ignore_eos": True}})
        assert status == 200, answer
        return str(json.loads(answer)["choices"][0]["text"])


class Clients:
    """Ask whichever entry says that it is ready; a context manager."""

    def __init__(
        self, entries: Sequence[Generation], known: Mapping[Prompt, set[str]], num_clients: int = 4, pause_s: float = 0
    ) -> None:
        """`known`: prompt -> its answers, one a revision; these prompts are sent. `pause_s`: after an answer."""
        self.entries = list(entries)
        self._known, self._num_clients, self._pause_s = known, num_clients, pause_s
        self.served: Counter[int] = Counter()  # by the entry's port
        self.problems: list[str] = []
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Clients:
        self._threads = [threading.Thread(target=self._run, args=(at,)) for at in range(self._num_clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(LIMIT_S)

    def _run(self, at: int) -> None:
        prompts = list(self._known)
        while not self._stopping.is_set():
            at += 1
            ready = [entry for entry in list(self.entries) if entry.is_ready()]
            if not ready:
                self.problems.append("no entry is ready")
                time.sleep(0.05)
                continue
            entry, prompt = ready[at % len(ready)], prompts[at % len(prompts)]
            try:
                answer = entry.ask(prompt)
            except ConnectionRefusedError:  # nothing was sent: a balancer takes another one
                continue
            except (OSError, http.client.HTTPException, AssertionError) as error:
                self.problems.append(f"{entry.ports['openai']}: {error!r}")
                continue
            self.served[entry.ports["openai"]] += 1
            self._stopping.wait(self._pause_s)
            if answer not in self._known[prompt]:
                self.problems.append(f"{entry.ports['openai']}: {prompt}: {answer!r}")


def before_the_door(folder: Path) -> Path:
    """Return a checkout of the last version without an admin door."""
    log = ["git", "log", "--format=%H", "--diff-filter=A", "--", "bireme/launch/admin_door.py"]
    first = subprocess.run(log, capture_output=True, text=True, check=True, cwd=CHECKOUT).stdout.split()[-1]
    archive = subprocess.run(["git", "archive", f"{first}^"], capture_output=True, check=True, cwd=CHECKOUT).stdout
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    (folder / "models" / "tiny-llama").symlink_to(CHECKOUT / "models" / "tiny-llama")
    return folder


def update_command(old: Generation, new: Generation, *arguments: str) -> list[str]:
    doors = ["--old", old.door.address, "--new", new.door.address, "--admin-key-file", str(old.folder / "key")]
    trusted = ["--admin-ca", new.pair[0], "--entry-ca", new.pair[0]] if new.pair else []
    update = [sys.executable, str(CHECKOUT / "tools" / "update.py"), *doors, *trusted, "--entry", new.entry]
    return [*update, "--json", *arguments]


def update(old: Generation, new: Generation, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run tools/update.py; return its code, its result and what it told."""
    command = update_command(old, new, *arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
