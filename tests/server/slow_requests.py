"""Requests that are slow for a known cause, made for real: a tritonserver with the mocker, a frontend, its timelines.

Prompts of more than 2,048 tokens go through prefill; decode computes shorter ones itself, a millisecond each token, and
has two places in its batch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bireme.discovery import run_folder
from bireme.errors import NotFoundError
from bireme.launch import Server
from tests.openai.frontend_process import FrontendServer, frontend_server, wait_for
from tests.servers import start_server

RECIPE = "recipes/mocker-disagg"
_ENGINE = {"max_num_tokens": 2048, "max_batch_size": 2, "mocker": {"step_ms": 1, "prefill_ms_per_token": 1.0}}
OVERRIDE: dict[str, Any] = {
    "workers": {"decode": {"engine_config": _ENGINE}, "prefill": {"engine_config": {"mocker": {"prefill_ms": 5}}}},
    "router": {"mode": "kv", "transfer_ms": 1e6},
    "observability": {"timelines": {"max_entries": 100}},
}
MODEL = "mocker-disagg"
LONG_S = 1.2  # what is slow takes so long


@contextlib.contextmanager
def slow_requests(folder: Path) -> Iterator[SlowRequests]:
    override = json.dumps(OVERRIDE)
    models = ("tokenizer", "prefill", "decode")
    with pytest.MonkeyPatch.context() as patch, start_server(RECIPE, override=override, models=models) as server:
        patch.setenv("BIREME_RUN_DIR", str(server.run_folder.path))
        patch.setenv("BIREME_GRPC", server.grpc)
        patch.setenv("BIREME_OVERRIDE", override)
        with frontend_server(folder, recipe=RECIPE, grpc=server.grpc) as frontend:
            wait_for(lambda: frontend.call("GET", "/health/ready")[0] == 200)
            yield SlowRequests(server, frontend)


class SlowRequests:
    """One method a cause: it returns the timeline of a request that it has slowed."""

    def __init__(self, server: Server, frontend: FrontendServer) -> None:
        self._server, self.frontend = server, frontend
        self._num_prompts, self._num_slow = 0, 0

    def queue(self) -> dict[str, Any]:
        """Both places of the batch are taken for a while."""
        name = self._new_name()
        with self._busy_decode():
            slow = self._begin(name, 4, 10)
            time.sleep(LONG_S)
        return self._ended(slow, name)

    def neighbors(self) -> dict[str, Any]:
        """A long prompt is computed beside it."""
        name = self._new_name()
        slow = self._begin(name, 4, 600)
        slow.fp.readline()  # its first token
        other = self._begin("neighbor", 2000, 1)
        other.read()
        return self._ended(slow, name)

    def transfer(self) -> dict[str, Any]:
        """Prefill stands still when decode claims the KV."""
        name = self._new_name()
        prefill = self._pid("prefill")
        with self._busy_decode():
            slow = self._begin(name, 3000, 10)
            wait_for(lambda: self._is_prefilled(name))
            os.kill(prefill, signal.SIGSTOP)
        try:
            time.sleep(LONG_S)
        finally:
            os.kill(prefill, signal.SIGCONT)
        return self._ended(slow, name)

    def migration(self) -> dict[str, Any]:
        """Its engine is killed, and started again."""
        name = self._new_name()
        before = self._pid("decode")
        slow = self._begin(name, 4, 600)
        slow.fp.readline()
        os.kill(before, signal.SIGKILL)
        return self._ended(slow, name)

    def reader(self) -> dict[str, Any]:
        """Its client takes nothing while 3.4 MB of events are made, and for a while after that: the kernel's buffers
        hold 2.3 MB.
        """
        name = self._new_name()
        slow = self._begin(name, 4, 1100, n=2, logprobs=True, top_logprobs=20)
        ended = wait_for(lambda: self._made(name))
        time.sleep(max(LONG_S, 1.5 * ended / 1e3))
        return self._ended(slow, name)

    def _new_name(self) -> str:
        """Return one that no request has had, that of a test's first try neither."""
        self._num_slow += 1
        return f"slow-{self._num_slow}"

    def timeline(self, request_id: str) -> dict[str, Any]:
        status, found = self.frontend.call("GET", f"/v1/requests/{request_id}/timeline")
        assert status == 200, found
        return dict(found)

    @contextlib.contextmanager
    def _busy_decode(self) -> Iterator[None]:
        """Both places of decode's batch are taken within."""
        with contextlib.ExitStack() as stack:
            for number in range(2):
                other = stack.enter_context(contextlib.closing(self._begin(f"other-{number}", 4, 100_000)))
                other.fp.readline()
            yield

    def _begin(self, request_id: str, num_prompt: int, max_tokens: int, **fields: Any) -> _Reply:
        """Send a streamed request; return its reply at once."""
        if "logprobs" in fields:
            path, prompt = "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}
        else:
            self._num_prompts += 1  # no two begin alike, so that nothing of them is in a cache
            path, prompt = "/v1/completions", {"prompt": [7 + self._num_prompts] * num_prompt}
        body = {"model": MODEL, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, **prompt, **fields}
        return _Reply(self.frontend.port, path, request_id, body)

    def _ended(self, slow: _Reply, request_id: str) -> dict[str, Any]:
        assert b"[DONE]" in slow.read()
        slow.close()
        found = wait_for(lambda: one if (one := self.timeline(request_id))["state"] != "running" else None)
        return dict(found)

    def _is_prefilled(self, request_id: str) -> bool:
        attempts = self.timeline(request_id)["attempts"]
        return bool(attempts and attempts[0]["decode"])

    def _made(self, request_id: str) -> float | None:
        """Return when the engine had made everything, in ms; None: it has not."""
        attempts = self.timeline(request_id)["attempts"]
        return max(one["end_ms"] for one in attempts) if attempts and all(one["end_ms"] for one in attempts) else None

    def _pid(self, worker: str) -> int:
        return int(wait_for(lambda: _record(self._server.run_folder.path, worker)))


class _Reply:
    """A streamed reply, read as a test wants: through a small window, so that little of it waits in the kernel."""

    def __init__(self, port: int, path: str, request_id: str, body: dict[str, Any]) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect(("127.0.0.1", port))
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Request-Id: {request_id}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        self._socket.sendall(head.encode() + data)
        self.fp = self._socket.makefile("rb")

    def read(self) -> bytes:
        return self.fp.read()

    def close(self) -> None:
        self.fp.close()
        self._socket.close()


def _record(folder: Path, worker: str) -> int | None:
    with contextlib.suppress(NotFoundError):  # its engine starts again
        return run_folder.find(folder, worker).pid
    return None
