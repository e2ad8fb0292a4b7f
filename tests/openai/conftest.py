"""A frontend over fake workers, called as an ASGI server calls it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers

from bireme.config import Recipe
from bireme.conversion import convert
from bireme.metrics import Registry
from bireme.observability.entry import open_timelines, open_traces
from bireme.observability.traces import Traces
from bireme.openai import database, store_thread
from bireme.openai.app import Frontend
from bireme.openai.keys import ApiKeys
from bireme.openai.text.served_model import Models, ServedModel
from bireme.text.tokenizer import TextTokenizer
from bireme.workers.fake import FakeWorkers


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can't be kept is tried again soon, and nothing waits long for another's lock."""
    monkeypatch.setattr(store_thread, "_LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(store_thread, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(database, "_WAIT_S", 1)
    monkeypatch.setattr(database, "_OPEN_WAIT_S", 1)
    monkeypatch.setattr("bireme.openai.readiness._KEPT_S", 0.0)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a megabyte, mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@functools.cache
def letters() -> TextTokenizer:
    """One token a character: ids are code points, up to 1000. All tests have the same, which nothing changes."""
    inner = Inner(models.WordLevel({chr(code): code for code in range(1, 1000)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return TextTokenizer(inner, templates={"default": TEMPLATE})


_END_S = 60.0


class Reply:
    """One request to the application, running."""

    def __init__(self, app: Frontend, scope: dict[str, Any], parts: list[bytes], is_whole: bool) -> None:
        """`parts` of the body; the last of one that is not `is_whole` never comes."""
        self.messages: list[dict[str, Any]] = []
        self._parts, self._is_whole, self._gone = parts, is_whole, asyncio.Event()
        self._is_reading = asyncio.Event()
        self._is_reading.set()
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts) or not self._is_whole}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self._is_reading.wait()
        self.messages.append(message)

    def stop_reading(self) -> None:
        """Take no more messages, as a server that waits for a client to read."""
        self._is_reading.clear()

    def go_on_reading(self) -> None:
        self._is_reading.set()

    def leave(self) -> None:
        self._gone.set()

    async def end(self) -> Reply:
        """Return when the reply has ended; one that does not is a failure, which tells what the tasks wait for."""
        if not (await asyncio.wait((self.task,), timeout=_END_S))[0]:
            for task in asyncio.all_tasks():
                task.print_stack()
            pytest.fail(f"the reply did not end in {_END_S:g} s after {len(self.messages)} messages")
        await self.task
        return self

    @property
    def status(self) -> int:
        return self.messages[0]["status"]

    @property
    def headers(self) -> dict[str, str]:
        return {key.decode(): value.decode() for key, value in self.messages[0]["headers"]}

    @property
    def data(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    def json(self) -> Any:
        return json.loads(self.data)

    def events(self) -> list[Any]:
        """Return the events' JSON, without comments; the end as a string."""
        lines = [line[6:] for line in self.data.decode().split("\n\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


class Bench:
    """A started frontend."""

    def __init__(self, app: Frontend, workers: FakeWorkers) -> None:
        self.app, self.workers = app, workers

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None,
        is_body_coming: bool = True, query: str = "",
    ) -> Reply:  # fmt: skip
        """Send a request; a tuple is a body's parts, and other values than bytes are JSON."""
        data = body if isinstance(body, (bytes, tuple)) else b"" if body is None else json.dumps(body).encode()
        parts = list(data) if isinstance(data, tuple) else [data] if is_body_coming else []
        given = {"host": "localhost", "content-type": "application/json", **(headers or {})}
        pairs = [(key.encode(), value.encode("latin-1")) for key, value in given.items()]
        scope = {"type": "http", "method": method, "path": path, "headers": pairs, "query_string": query.encode()}
        return Reply(self.app, scope, parts, is_body_coming)

    def chat(self, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": "test", "messages": messages, "max_tokens": 4, **fields}
        return self.call("POST", "/v1/chat/completions", body, headers)

    async def answered(self, reply: Reply) -> Reply:
        """Have workers make tokens until the reply has ended, however often its request moves."""
        async with asyncio.timeout(_END_S):
            while not reply.task.done():
                for generation in list(self.workers.running):
                    generation.emit()
                await asyncio.sleep(0)
        return await reply.end()

    def complete(self, **fields: Any) -> Reply:
        return self.call("POST", "/v1/completions", {"model": "test", "prompt": "hi", "max_tokens": 4, **fields})


@pytest.fixture
def bench_of() -> Callable[[Frontend, Any], Bench]:
    """Return a function: a started frontend and its workers -> what calls it."""
    return Bench


Make = Callable[..., Any]


@contextlib.asynccontextmanager
async def started_frontends() -> AsyncIterator[Make]:
    """A function that starts a frontend; each is stopped at the end, with what it keeps."""
    apps: list[Frontend] = []

    async def make(
        keys: ApiKeys | None = None, files_folder: Path | None = None, responses_folder: Path | None = None,
        traces: Traces | None = None, run_dir: Path | None = None, **tree: Any,
    ) -> Bench:  # fmt: skip
        workers, metrics = FakeWorkers(), Registry("frontend")
        fields = {"model": "none", "workers": {"decode": {"engine": "mocker"}}, "name": "test"}
        fields |= {
            "router": {"transfer_ms": 0}
        } | tree  # prompts of tests are short, and go through prefill all the same
        recipe = convert(fields, Recipe, "test")
        models = Models([ServedModel(recipe, workers, letters(), metrics)])
        timelines = open_timelines(recipe)
        app = Frontend(
            models, metrics, recipe.frontend, keys, files_folder=files_folder, responses_folder=responses_folder,
            traces=traces or open_traces(recipe, metrics, timelines), timelines=timelines, run_dir=run_dir,
        )  # fmt: skip
        await app.start()
        apps.append(app)
        return Bench(app, workers)

    try:
        yield make
    finally:
        for app in apps:
            await app.stop()


@pytest.fixture
async def frontend() -> AsyncIterator[Make]:
    async with started_frontends() as make:
        yield make
