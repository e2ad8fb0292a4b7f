"""A disaggregated deployment of mockers that Prometheus watches and alertmanager tells of, and faults for it.

etcd and nats-server are real. The engines are small and slow, so that a few requests fill them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from benchmarks.chaos.etcd import EtcdServer
from benchmarks.chaos.launch import Launch
from benchmarks.chaos.nats import NatsProcess
from benchmarks.chaos.topologies import Topology
from tests.server.triton_client import Client
from tests.services.prometheus import FILES, Prometheus, Receiver, Taker, alertmanager, shortened

LIMIT_S = 150.0
FOR_S, WINDOW_S = 1.0, 15.0
BLOCK, POOL_BLOCKS, PROMPT_BLOCKS = 32, 64, 10
LEASE_MS = 2000


def topology(model: Path, nats_url: str, collector: str) -> Topology:
    pool = {
        "kv_cache_config": {
            "tokens_per_block": BLOCK,
            "max_tokens": BLOCK * POOL_BLOCKS,
            "event_buffer_max_size": POOL_BLOCKS,
        },
        "cache_transceiver_config": {"backend": "DEFAULT", "kv_transfer_timeout_ms": LEASE_MS},
    }
    slow = {"step_ms": 20, "step_ms_per_request": 250}  # two requests get a token in more than half a second
    return Topology(
        name="watched",
        recipe="recipes/mocker-disagg",
        model=str(model),
        served_name="mocker-disagg",
        replicas={},
        is_mocker=True,
        settings={
            "model": str(model),
            "workers": {
                "prefill": {"engine_config": {**pool, "mocker": {"prefill_ms": 5}}},
                "decode": {"engine_config": {**pool, "mocker": slow}},
            },
            "supervisor": {
                "max_restarts": 1000,
                "restart_window_s": 2,
            },
            "router": {"mode": "kv"},
            "kv_events": {"plane": "nats", "nats_url": nats_url},
            "pipeline": {"stall_timeout_s": 3},
            "observability": {"traces": {"endpoint": f"http://{collector}/v1/traces"}},
        },
    )


class Watched:
    """The deployment, what watches it, and who is told; a context manager."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.model = folder / "model"  # a link, so that it can be away
        self.model.symlink_to(model)
        self._environment = pytest.MonkeyPatch()
        self._environment.setenv("BIREME_KEY", secrets.token_hex(32))
        self.etcd, self.nats, self.collector = EtcdServer(folder), NatsProcess(folder), Taker()
        self.launch = Launch(
            topology(self.model, self.nats.url, self.collector.address),
            folder,
            arguments=("--discovery", self.etcd.address, "--canary-interval=0"),
        )
        self._folder, self._parts = folder, contextlib.ExitStack()
        self.receiver = Receiver()
        self._num_prompts = 0

    def __enter__(self) -> Watched:
        self._parts.callback(self.receiver.close)
        self._parts.callback(self.collector.close)
        self._parts.callback(self._environment.undo)
        self._parts.callback(self.etcd.kill)
        self._parts.callback(self.nats.kill)
        self.etcd.start()
        self.nats.start()
        self._parts.callback(self.launch.remove)
        self.launch.start()
        address = self._parts.enter_context(alertmanager(self._folder, self.receiver))
        targets = [self.launch.addresses[name] for name in ("metrics", "openai")]
        rules = shortened((FILES / "alerts.yaml").read_text(), FOR_S, WINDOW_S)
        self.prometheus = self._parts.enter_context(Prometheus(self._folder, targets, address, rules))
        self.client = Client(self.launch.addresses["grpc"])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._parts.close()

    def fires(self, alert: str, act: Callable[[], object] = lambda: None, **labels: str) -> dict[str, Any]:
        """Return the alert once it has come to the receiver; `act` is done again and again until then."""

        def has_fired() -> bool:
            act()
            told = self.receiver.last(alert, **labels)
            return told is not None and told["status"] == "firing"

        until(has_fired, f"{alert} {labels} does not fire; fired: {self.receiver.firing()}")
        told = self.receiver.last(alert, **labels)
        assert told is not None
        return told

    def new_prompt(self) -> list[int]:
        """Return one that nobody holds a block of."""
        self._num_prompts += 1
        return [5 + (self._num_prompts + at * (1 + self._num_prompts)) % 400 for at in range(BLOCK * PROMPT_BLOCKS)]

    def ask(self, prompt: list[int] | None = None, max_tokens: int = 2) -> int:
        """Return the status of a completion."""
        return Completion(self.launch.addresses["openai"], prompt or self.new_prompt(), max_tokens).end()

    def begin(self, max_tokens: int) -> Completion:
        return Completion(self.launch.addresses["openai"], self.new_prompt(), max_tokens)

    def kill_engine(self, worker: str) -> None:
        """Return once another one is ready."""
        pid = self.launch.roles()[f"{worker}.engine"]
        os.kill(pid, signal.SIGKILL)
        until(lambda: self.launch.roles().get(f"{worker}.engine") not in (None, pid), f"{worker} is not started again")
        until(lambda: self.is_ready(worker), f"the new engine of {worker} is not ready")

    def is_ready(self, worker: str) -> bool:
        try:
            self.client.generate(worker, ping=True)
        except InferenceServerException:
            return False
        return True

    @contextlib.contextmanager
    def stopped(self, role: str) -> Iterator[None]:
        """A process stands still meanwhile."""
        pid = self.launch.roles()[role]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    @contextlib.contextmanager
    def model_gone(self) -> Iterator[None]:
        target = self.model.readlink()
        self.model.unlink()
        try:
            yield
        finally:
            self.model.symlink_to(target)


class Completion:
    """One that runs until it ends or is left."""

    def __init__(self, address: str, prompt: list[int], max_tokens: int) -> None:
        body = {
            "model": "mocker-disagg",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "stream": True,
            "ignore_eos": True,
        }
        self._connection = http.client.HTTPConnection(address, timeout=LIMIT_S)
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})

    def wait_for_token(self) -> None:
        assert self._connection.getresponse().readline().startswith(b"data: {")

    def end(self) -> int:
        """Return the status."""
        reply = self._connection.getresponse()
        reply.read()
        self._connection.close()
        return reply.status

    def leave(self) -> None:
        self._connection.close()


def until(condition: Callable[[], object], problem: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, problem
        time.sleep(0.1)
