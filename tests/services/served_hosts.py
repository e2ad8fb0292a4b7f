"""Servers of tiny-vlm on two hosts that a cable joins, and what is asked of them."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bireme.config import CHECKOUT
from tests.server.picture_questions import chat_messages
from tests.services.two_hosts import Cable

LIMIT_S = 180
MODEL = "tiny-vlm"
NUM_STREAMS, PROMPT_TOKENS, NEW_TOKENS = 3, 900, 24
SLOW_KBIT_S = 8000  # a prompt's KV takes seconds
FAR_PREFILL = "prefill@10.77.0.1:8001"
NIXL = {"engine_config": {"cache_transceiver_config": {"backend": "NIXL"}}}
REPLICAS = {
    "prefill": {"multimodal_encoder": 0, "prefill": 1, "decode": 0},
    "decode": {"multimodal_encoder": 1, "prefill": 0, "decode": 1},
}


class Server:
    """tools/serve.py on one of the hosts, with the default ports."""

    def __init__(self, cable: Cable, worker: str, folder: Path, recipe: str, override: dict[str, Any]) -> None:
        self.cable, self.worker, self.log = cable, worker, folder / f"{worker}.log"
        self._runtime = Path(tempfile.mkdtemp(prefix="host-"))  # short: sockets lie there
        command = [
            *cable.command(worker), sys.executable, "tools/serve.py", f"recipes/{recipe}",
            f"--grpc-host={cable.addresses[worker]}", f"--discovery={folder / 'shared'}", "--canary-interval=0",
            f"--openai-port={9000 if worker == 'decode' else 0}", f"--override={json.dumps(override)}",
        ]  # fmt: skip
        with self.log.open("wb") as log:
            environment = os.environ | {"XDG_RUNTIME_DIR": str(self._runtime)}
            self._process = subprocess.Popen(command, cwd=CHECKOUT, env=environment, stdout=log, stderr=log)

    def wait_ready(self) -> None:
        sign = "frontend_ready" if self.worker == "decode" else "ready seconds="
        wait_until(lambda: sign in self.log.read_text() or self._process.poll() is not None, self.log.read_text)
        assert self._process.poll() is None, self.log.read_text()[-3000:]

    def end(self) -> None:
        self._process.kill()  # and with it all on that host
        self._process.wait(LIMIT_S)
        shutil.rmtree(self._runtime, ignore_errors=True)

    def metric(self, name: str, *labels: str) -> float:
        """Return the sum of a metric's series with all of the labels."""

        def read() -> str:
            connection = http.client.HTTPConnection("127.0.0.1", 8002, timeout=10)
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()

        lines = self.cable.on_host(self.worker, read).splitlines()
        found = [line for line in lines if line.startswith(f"{name}{{") and all(label in line for label in labels)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)


class Stream:
    """One streamed completion, asked for on the host of the frontend."""

    def __init__(self, cable: Cable, prompt: list[int], salt: str) -> None:
        self.text, self.timing, self.error = "", dict[str, Any](), ""
        self.began = threading.Event()
        body = {"model": MODEL, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": True}
        self._body = json.dumps(body | {"cache_salt": salt, "bireme": {"ignore_eos": True, "return_timing": True}})
        self._thread = threading.Thread(target=lambda: cable.on_host("decode", self._read))
        self._thread.start()

    def wait(self) -> None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "the stream hangs"

    def result(self) -> str:
        self.wait()
        assert not self.error, self.error
        return self.text

    def _read(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", 9000, timeout=LIMIT_S)
        connection.request("POST", "/v1/completions", self._body, {"content-type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            self.error = reply.read().decode()
        for line in reply if not self.error else ():
            if line.startswith(b"data: {"):
                self._take(json.loads(line[6:]))
        self.began.set()

    def _take(self, event: dict[str, Any]) -> None:
        self.error = self.error or str(event.get("error", ""))
        self.timing = event.get("bireme", {}).get("timing", [self.timing])[0]
        for choice in event.get("choices", ()):
            self.text += choice["text"]
            self.began.set()


class Hosts:
    def __init__(self, cable: Cable, folder: Path) -> None:
        self.cable = cable
        self.prefill, self.decode = (self._serve(worker, folder) for worker in ("prefill", "decode"))
        dice = np.random.default_rng(5)
        self.prompts = dice.integers(20, 500, (NUM_STREAMS, PROMPT_TOKENS)).tolist()
        self._num_salts = 0

    def _serve(self, worker: str, folder: Path) -> Server:
        workers = {name: {"replicas": count, **NIXL} for name, count in REPLICAS[worker].items()}
        override = {"workers": workers, "pipeline": {"stall_timeout_s": 5}}
        return Server(self.cable, worker, folder, "tiny-vlm-epd", override)

    def ask(self, prompts: list[list[int]]) -> list[Stream]:
        """Begin to answer prompts of which nobody holds a block."""
        self._num_salts += 1
        return [Stream(self.cable, prompt, f"salt {self._num_salts}") for prompt in prompts]

    def texts(self) -> list[str]:
        return [stream.result() for stream in self.ask(self.prompts)]

    def begin_slowly(self) -> list[Stream]:
        """Begin streams whose KV is on its way, and remains so."""
        self.cable.slow_down(0)
        wait_until(self.has_transferred)  # after a failure prefill is passed by for a moment
        self.cable.slow_down(SLOW_KBIT_S)
        streams = self.ask(self.prompts)
        for stream in streams:
            assert stream.began.wait(LIMIT_S)
        wait_until(lambda: self.prefill.metric("bireme_kv_leases", 'state="claimed"') > 0)
        return streams

    def answer(self, dialogue: Any) -> str:
        """Return the answer to a question about pictures."""

        def ask() -> str:
            body = {"model": MODEL, "max_tokens": 100, "messages": chat_messages(dialogue)}
            connection = http.client.HTTPConnection("127.0.0.1", 9000, timeout=LIMIT_S)
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
            text: str = json.load(connection.getresponse())["choices"][0]["message"]["content"]
            return text

        return self.cable.on_host("decode", ask)

    def end(self) -> None:
        self.prefill.end()
        self.decode.end()

    def failures(self) -> float:
        return self.decode.metric("bireme_kv_transfer_failures_total", 'worker="decode"')

    def has_transferred(self) -> bool:
        """Return whether a prompt's KV comes from the other host."""
        (stream,) = self.ask(self.prompts[:1])
        stream.wait()
        return stream.timing.get("prefill_worker") == FAR_PREFILL and stream.timing["transfer_ms"] > 0


def wait_until(condition: Callable[[], bool], why: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, why()[-3000:]
        time.sleep(0.05)
