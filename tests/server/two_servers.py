"""Two tritonservers of one model that share a folder, and a frontend that has none of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.chaos.launch import Launch
from benchmarks.chaos.topologies import Topology
from bireme.config import CHECKOUT
from bireme.launch import free_port

LIMIT_S = 180
MODEL = "mocker-disagg"
SETTINGS = {"router": {"mode": "round_robin"}}


def topology(name: str) -> Topology:
    return Topology(
        name=name,
        recipe=f"recipes/{MODEL}",
        model="models/tiny-llama",
        served_name=MODEL,
        replicas={"prefill": 1, "decode": 1},
        engine_config={"mocker": {"step_ms": 20, "prefill_ms": 10}},
        settings=SETTINGS,
    )


class TwoServers:
    """`start` once, `stop` once. Their environment is this process's."""

    def __init__(self, folder: Path, discovery: dict[str, str] | None = None) -> None:
        """`discovery`: the recipe's block; None: a folder."""
        self.log, self.port = folder / "frontend.log", free_port()
        self.discovery = discovery or {"backend": "directory", "folder": str(folder / "shared")}
        settings = (word for key, value in self.discovery.items() for word in ("--set", f"discovery.{key}={value}"))
        arguments = ("--canary-interval=0", *settings)
        self.a, self.b = (Launch(topology(name), folder, arguments=arguments, has_frontend=False) for name in "ab")
        self.frontend: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        starting = [threading.Thread(target=launch.start) for launch in (self.a, self.b)]
        for thread in starting:
            thread.start()
        for thread in starting:
            thread.join()
        command = [sys.executable, "-m", "bireme.openai", "--recipe", f"recipes/{MODEL}", "--port", str(self.port)]
        override = json.dumps(SETTINGS | {"discovery": self.discovery})
        with self.log.open("wb") as log:
            environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "BIREME_OVERRIDE": override}
            self.frontend = subprocess.Popen(command, cwd=CHECKOUT, env=environment, stdout=log, stderr=log)
        self.until(lambda: len(self.workers()) == 4)

    def stop(self) -> None:
        if self.frontend is not None:
            self.frontend.terminate()
            self.frontend.wait(LIMIT_S)
        for launch in (self.a, self.b):
            launch.remove()

    def get(self, path: str, body: Any = None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
            return json.load(reply)

    def workers(self) -> dict[str, str]:
        """Return worker id -> state, as the frontend has it; {} while it does not answer."""
        try:
            found: dict[str, str] = self.get("/health/ready")["models"][MODEL]
            return found
        except OSError:
            return {}

    def decode_of(self, launch: Launch) -> str:
        return f"decode@{launch.addresses['grpc']}"

    def ask(self, length: int = 4) -> str:
        body = {"model": MODEL, "prompt": "the oars of the upper bank", "max_tokens": length}
        answer = self.get("/v1/completions", body | {"bireme": {"ignore_eos": True}})
        return str(answer["choices"][0]["text"])

    def served_by(self, count: int) -> set[str]:
        """Return the decode workers that served a number of requests of the frontend's."""
        before = self.counts()
        texts = {self.ask() for _ in range(count)}
        assert len(texts) == 1
        return {name for name, number in self.counts().items() if number > before.get(name, 0) and "decode" in name}

    def counts(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=LIMIT_S) as page:
            lines = [line for line in page.read().decode().splitlines() if line.startswith("bireme_routed_total{")]
        return {line.split('target="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.1)
