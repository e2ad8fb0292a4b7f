"""A disaggregated deployment of tiny-vlm with tiers, keys and canaries, and one of each thing that panels draw."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bireme.launch import free_port, processes
from tests.server.openai_served import Served, five_ports, served
from tests.server.picture_questions import chat_messages, held_out

KEY, LIMITED_KEY = "an operator's key", "a key with a limit"
LIMIT_S = 120.0
MODEL = "tiny-vlm"
BLOCK = 32
_BLOCKS = 48  # of the pools: a few prompts turn them over, down into the tiers


def override(folder: Path) -> dict[str, Any]:
    tiers = {"host_cache_size": 1 << 20, "disk_cache_size": 8 << 20, "disk_cache_path": str(folder / "tiers")}
    pool = {"tokens_per_block": BLOCK, "max_tokens": BLOCK * _BLOCKS, **tiers}
    engine = {"engine_config": {"kv_cache_config": pool, "max_seq_len": 1024}}
    return {
        "workers": {"prefill": engine, "decode": {**engine, "replicas": 2}},
        "router": {"mode": "kv", "transfer_ms": 0},
        "frontend": {"api_keys": str(folder / "keys.yaml")},
        "kv_events": {"step_records": True},
        "metrics": {"aliases": ["dynamo"]},  # has the frontend count by model
        "observability": {
            "request_log": {"path": str(folder / "requests")},
            "traces": {"endpoint": f"http://127.0.0.1:{free_port()}"},  # a collector that is away
        },
    }


@contextlib.contextmanager
def deployment(folder: Path) -> Iterator[Deployment]:
    keys = [
        {"name": "operator", "sha256": _sha256(KEY), "operator": True},
        {"name": "limited", "sha256": _sha256(LIMITED_KEY), "requests_per_minute": 1},
    ]
    (folder / "keys.yaml").write_text(json.dumps({"keys": keys}))
    (folder / "tiers").mkdir()
    ports = five_ports()
    arguments = (
        f"--override={json.dumps(override(folder))}",
        "--canary-interval=2",
        f"--discovery={folder / 'shared'}",
    )
    with served("recipes/tiny-vlm-epd", folder / "log", *arguments, ports=ports) as running:
        yield Deployment(running, ports)


class Deployment:
    def __init__(self, running: Served, ports: dict[str, int]) -> None:
        self._running = running
        self.targets = [f"127.0.0.1:{ports[name]}" for name in ("metrics", "openai")]
        self._address = f"127.0.0.1:{ports['openai']}"

    def load(self) -> None:
        """One of each: pictures, a guide, wrong and cancelled requests, a batch, long prompts again, a migration."""
        dialogue = held_out(1, ("colour",))[0]
        for _ in range(2):  # the second finds the picture's embedding
            assert self.post("/v1/chat/completions", {"messages": chat_messages(dialogue), "max_tokens": 8})[0] == 200
        guided = {"prompt": "a", "max_tokens": 12, "guided_choice": ["red", "blue"]}
        assert self.post("/v1/completions", guided)[0] == 200
        assert self.post("/v1/completions", {"prompt": "a", "max_tokens": -1})[0] == 400
        for _ in range(2):
            self.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, LIMITED_KEY)
        assert self.post("/v1/completions", {"prompt": "a long text " * 400})[0] == 400  # longer than the context
        for number in (1, 2, 3, 4, 1, 2):
            prompt = [20 + (number * at + at * at // 7) % 480 for at in range(20 * BLOCK)]
            assert self.post("/v1/completions", {"prompt": prompt, "max_tokens": 4})[0] == 200
        self.batch()
        self.leave()
        self.migrate()

    def post(self, path: str, body: dict[str, Any], key: str = KEY) -> tuple[int, Any]:
        connection = self._connection(path, body, key)
        reply = connection.getresponse()
        answer = json.loads(reply.read())
        connection.close()
        return reply.status, answer

    def stream(self, max_tokens: int) -> http.client.HTTPConnection:
        """Return the connection of a stream that has begun."""
        here = {"ignore_eos": True, "routing": {"decode_worker": "decode"}}
        body = {"prompt": "once", "max_tokens": max_tokens, "stream": True, "bireme": here}
        connection = self._connection("/v1/completions", body, KEY)
        connection.reply = connection.getresponse()  # type: ignore[attr-defined]
        assert connection.reply.readline().startswith(b"data: {")  # type: ignore[attr-defined]
        return connection

    def leave(self) -> None:
        """Leave a stream, and return when its engine has told of it: what a killed one had not told is lost."""
        deadline = time.monotonic() + LIMIT_S
        while not self._has_cancelled():  # a stream that ends before it is seen that nobody reads it counts for nothing
            assert time.monotonic() < deadline, "no stream that was left is counted"
            left = self.stream(900)
            left.reply.close()  # type: ignore[attr-defined]
            left.close()
            with contextlib.suppress(AssertionError):
                until(self._has_cancelled, "it is not counted", limit_s=5)

    def migrate(self) -> None:
        """Kill an engine under a stream, which another one is given."""
        tree = processes.children(self._running.process.pid)
        server = next(pid for pid in tree if "tritonserver" in str(processes.command_line(pid)))
        (engine,) = processes.engines(processes.stubs(server)["decode"][0])
        connection = self.stream(900)
        os.kill(engine, signal.SIGKILL)
        until(
            lambda: self._has_counted(1, "bireme_migrations_total", "frontend"),
            "its stream is not given to another one",
        )
        connection.close()

    def answer_s(self) -> float:
        """Return how long a short answer takes."""
        began = time.monotonic()
        assert self.post("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
        return time.monotonic() - began

    @contextlib.contextmanager
    def asking_for_pages(self, times_a_second: int) -> Iterator[list[int]]:
        """Ask for each target's page, by a few threads, so often; yield the statuses as they come."""
        statuses, ends, num_threads = list[int](), threading.Event(), 10

        def ask(address: str) -> None:
            connection = http.client.HTTPConnection(address, timeout=LIMIT_S)
            while not ends.wait(num_threads / times_a_second):
                connection.request("GET", "/metrics", headers={"authorization": f"Bearer {KEY}"})
                reply = connection.getresponse()
                reply.read()
                statuses.append(reply.status)
            connection.close()

        threads = [threading.Thread(target=ask, args=(one,)) for one in self.targets for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        try:
            yield statuses
        finally:
            ends.set()
            for thread in threads:
                thread.join()

    def _has_cancelled(self) -> bool:
        return self._has_counted(0, "bireme_cancellations_total", "decode")

    def _has_counted(self, target: int, name: str, worker: str) -> bool:
        connection = http.client.HTTPConnection(self.targets[target], timeout=LIMIT_S)
        connection.request("GET", "/metrics", headers={"authorization": f"Bearer {KEY}"})
        page = connection.getresponse().read().decode()
        connection.close()
        lines = [line for line in page.splitlines() if line.startswith(name + "{")]
        return any(f'worker="{worker}' in line and float(line.split()[-1]) > 0 for line in lines)

    def batch(self) -> None:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
        line["body"] = {"model": MODEL, "prompt": "a", "max_tokens": 2}  # type: ignore[assignment]
        form = (
            b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
            + json.dumps(line).encode() + b"\r\n--x--\r\n"
        )  # fmt: skip
        connection = http.client.HTTPConnection(self._address, timeout=LIMIT_S)
        headers = {"authorization": f"Bearer {KEY}", "content-type": "multipart/form-data; boundary=x"}
        connection.request("POST", "/v1/files", form, headers)
        file = json.loads(connection.getresponse().read())["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        _, batch = self.post("/v1/batches", asked)
        until(lambda: self.get(f"/v1/batches/{batch['id']}")["status"] == "completed", "the batch does not end")

    def get(self, path: str) -> Any:
        connection = http.client.HTTPConnection(self._address, timeout=LIMIT_S)
        connection.request("GET", path, headers={"authorization": f"Bearer {KEY}"})
        return json.loads(connection.getresponse().read())

    def _connection(self, path: str, body: dict[str, Any], key: str) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._address, timeout=LIMIT_S)
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}", "traceparent": "none"}
        connection.request(
            "POST", path, json.dumps({"model": MODEL, **body} if "batches" not in path else body), headers
        )
        return connection


def until(condition: Callable[[], object], problem: str, limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, problem
        time.sleep(0.1)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
