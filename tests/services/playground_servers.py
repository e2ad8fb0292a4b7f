"""What the playground's tests talk to: frontends of a real tritonserver, and a frontend whose answers a test writes."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from bireme.config import Recipe
from bireme.conversion import convert
from bireme.launch import free_port
from bireme.launch.admin_client import DoorClient
from bireme.metrics import Registry
from bireme.openai.app import Frontend
from bireme.openai.text.embedding_model import EmbeddingModel, EmbeddingModels
from bireme.openai.text.served_model import Models, ServedModel
from bireme.text.tokenizer import load_tokenizer
from bireme.workers.fake import FakeWorkers
from tests.server.openai_served import five_ports

LIMIT_S = 60
RECIPE, TINY_CHAT = "recipes/tiny-chat", "models/tiny-chat"
PORTS = five_ports()
URL = f"http://127.0.0.1:{PORTS['openai']}/"
DOOR = DoorClient(f"http://127.0.0.1:{free_port()}", "the-playground-s-own-operator")


def _wait_until_live(url: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            urllib.request.urlopen(url + "health/live", timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < deadline, f"nothing answers on {url}"
            time.sleep(0.1)


@contextlib.contextmanager
def further_frontend(log: Path, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """One more frontend of the deployment's tritonserver: (url, process)."""
    port = free_port()
    command = [sys.executable, "-m", "bireme.openai", "--recipe", RECIPE, "--grpc", f"127.0.0.1:{PORTS['grpc']}"]
    with log.open("wb") as stream:
        process = subprocess.Popen([*command, "--port", str(port), *arguments], stdout=stream, stderr=stream)
    try:
        _wait_until_live(f"http://127.0.0.1:{port}/")
        yield f"http://127.0.0.1:{port}/", process
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def _recipe(name: str, stage: str, folder: str = TINY_CHAT) -> Recipe:
    return convert({"model": folder, "workers": {stage: {"engine": "torch"}}, "name": name}, Recipe, "")


def _model(name: str, folder: str, metrics: Registry) -> ServedModel:
    return ServedModel(_recipe(name, "decode", folder), FakeWorkers(), load_tokenizer(TINY_CHAT), metrics)


class ScriptedFrontend:
    """A frontend that serves the page as ever, and chats with the bytes of `pieces`, each written at once.

    Of its models `scripted` reads text only, `other` takes pictures, and `vectors` makes embeddings.
    """

    def __init__(self) -> None:
        metrics = Registry("frontend")
        models = [_model("scripted", TINY_CHAT, metrics), _model("other", "models/tiny-vlm", metrics)]
        vectors = EmbeddingModel(_recipe("vectors", "embedding"), FakeWorkers(), load_tokenizer(TINY_CHAT), metrics)
        self._frontend = Frontend(Models(models), metrics, embedders=EmbeddingModels([vectors]))
        self.pieces: list[bytes] = []
        self.pause_s = 0.0
        self.releases: threading.Semaphore | None = None  # each lets one piece go; None: all may
        self.requests: list[bytes] = []
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/"
        config = uvicorn.Config(self._app, port=port, log_config=None, lifespan="on", interface="asgi3")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> ScriptedFrontend:
        self._thread.start()
        _wait_until_live(self.url)
        return self

    def __exit__(self, *_: object) -> None:
        self.releases = None
        self._server.should_exit = True
        self._thread.join(LIMIT_S)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/v1/chat/completions":
            await self._chat(receive, send)
        else:
            await self._frontend(scope, receive, send)

    async def _chat(self, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.requests.append(body)
        headers = [(b"content-type", b"text/event-stream"), (b"x-request-id", b"scripted-1")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in self.pieces:
            while (releases := self.releases) is not None and not releases.acquire(blocking=False):
                await asyncio.sleep(0.01)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(self.pause_s)
        await send({"type": "http.response.body", "body": b""})
