"""Debian's Prometheus and alertmanager with docker/prometheus's own files, and who is told of the alerts.

The files are used as they are but for addresses and times: what waits or looks back for minutes does so for seconds.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from bireme.config import CHECKOUT
from bireme.launch import free_port

FILES = CHECKOUT / "docker" / "prometheus"
START_S = 60.0
SCRAPE_MS = 500
Labels = Mapping[str, str]


def shortened(rules: str, for_s: float, window_s: float) -> str:
    """Return alerts.yaml with each `for` and each range made short: 5 minutes that it looks back to `window_s`."""
    rules = re.sub(r"(?<=\bfor: )\d+m$", f"{for_s * 1000:.0f}ms", rules, flags=re.MULTILINE)
    return re.sub(r"\[(\d+)m\]", lambda found: f"[{window_s * 1000 * int(found[1]) / 5:.0f}ms]", rules)


class Prometheus:
    """Scrapes the targets from `__enter__` to `__exit__`."""

    def __init__(
        self, folder: Path, targets: list[str], alertmanager: str = "", rules: str = "", key: str = ""
    ) -> None:
        """`key`: an API key, where the frontend asks for one."""
        self._folder = folder / "prometheus"
        self._folder.mkdir()
        self.address = f"127.0.0.1:{free_port()}"
        config = yaml.safe_load((FILES / "prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": f"{SCRAPE_MS}ms", "evaluation_interval": f"{SCRAPE_MS}ms"}
        config["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
        if key:
            config["scrape_configs"][0]["authorization"] = {"credentials": key}
        config["alerting"]["alertmanagers"][0]["static_configs"] = [{"targets": [alertmanager] if alertmanager else []}]
        (self._folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        (self._folder / "alerts.yaml").write_text(rules or (FILES / "alerts.yaml").read_text())
        self._programs = contextlib.ExitStack()

    def __enter__(self) -> Prometheus:
        command = [
            "prometheus", f"--config.file={self._folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={self._folder / 'data'}", f"--web.listen-address={self.address}", "--log.level=warn",
        ]  # fmt: skip
        self._programs.enter_context(_running(command, self._folder / "log", f"http://{self.address}/-/ready"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._programs.close()

    def ask(self, query: str) -> list[tuple[Labels, float]]:
        """Return labels and value of each series now. Raises RuntimeError with what Prometheus says of a bad query."""
        url = f"http://{self.address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(url, timeout=30) as reply:
                found = json.load(reply)["data"]
        except urllib.error.HTTPError as refusal:
            raise RuntimeError(f"{query}: {refusal.read().decode()}") from None
        assert found["resultType"] == "vector", query
        return [(one["metric"], float(one["value"][1])) for one in found["result"]]


class Taker:
    """An address that takes what is sent to it, with `status`."""

    def __init__(self) -> None:
        self.status = 200
        self.address = f"127.0.0.1:{free_port()}"
        taker = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                taker.take(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(taker.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        host, _, port = self.address.partition(":")
        self._server = http.server.ThreadingHTTPServer((host, int(port)), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def take(self, body: bytes) -> None: ...

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Receiver(Taker):
    """A webhook that alertmanager calls: what fires, and what has ended."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []  # alerts, as they came
        super().__init__()

    def take(self, body: bytes) -> None:
        self.told.extend(json.loads(body)["alerts"])

    def last(self, alert: str, **labels: str) -> dict[str, Any] | None:
        """Return the alert of these labels as it was last told of."""
        wanted = {"alertname": alert, **labels}.items()
        return next((one for one in reversed(self.told) if wanted <= one["labels"].items()), None)

    def firing(self) -> dict[str, int]:
        """Return name -> how many of that name have fired and not ended."""
        states = {one["fingerprint"]: one for one in self.told}
        names = [one["labels"]["alertname"] for one in states.values() if one["status"] == "firing"]
        return {name: names.count(name) for name in sorted(set(names))}


@contextlib.contextmanager
def alertmanager(folder: Path, receiver: Receiver) -> Iterator[str]:
    """Yield its address; with docker/prometheus/alertmanager.yaml, but at once and to the receiver."""
    folder = folder / "alertmanager"
    folder.mkdir()
    config = yaml.safe_load((FILES / "alertmanager.yaml").read_text())
    config["route"] |= {"group_wait": "1ms", "group_interval": f"{SCRAPE_MS}ms"}
    config["receivers"][0]["webhook_configs"] = [{"url": f"http://{receiver.address}/", "send_resolved": True}]
    (folder / "alertmanager.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus-alertmanager", f"--config.file={folder / 'alertmanager.yaml'}",
        f"--storage.path={folder / 'data'}", f"--web.listen-address={address}", "--cluster.listen-address=",
        "--log.level=warn",
    ]  # fmt: skip
    with _running(command, folder / "log", f"http://{address}/-/ready"):
        yield address


@contextlib.contextmanager
def _running(command: list[str], log: Path, ready_url: str) -> Iterator[None]:
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream)
    try:
        deadline = time.monotonic() + START_S
        while not _answers(ready_url):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
