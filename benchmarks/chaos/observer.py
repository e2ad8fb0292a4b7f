"""The campaign's side of the load process: starts it, keeps what it tells, stops it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from benchmarks.chaos import records
from benchmarks.chaos.load import NO_NEWS_S, LoadSettings
from benchmarks.load.load_process import CHECKOUT

_KINDS = {kind.__name__: kind for kind in (records.Request, records.Probe, records.Readiness, records.Delay)}


class Observer:
    """Runs from `start` to `stop`. What it has seen may be read at any time."""

    def __init__(self, settings: LoadSettings, folder: Path) -> None:
        self.seen = records.Seen()
        self._config = folder / "load.json"
        self._config.write_text(json.dumps(dataclasses.asdict(settings)))

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.chaos.load", str(self._config)],
            cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._read, name="observer", daemon=True)
        self._thread.start()

    def stop(self) -> str:
        """Let requests under way end, or show that they hang. Return what went wrong with the load itself, or ""."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            code = self._process.wait(NO_NEWS_S + 60)
        except subprocess.TimeoutExpired:
            self.kill()
            return "the load process did not end"
        self._thread.join(10)
        return f"the load process failed with code {code}; see its error output above" if code else ""

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def outcomes(self) -> Counter[str]:
        return Counter(request.outcome for request in self.seen.requests)

    def serves_since(self, moment: float, ways: set[str]) -> bool:
        """Return whether each way has answered a probe that was sent after a moment."""
        answered = {probe.way for probe in self.seen.probes if probe.sent > moment and not probe.error}
        return ways <= answered

    def is_ready(self) -> bool:
        """Return whether the latest word on readiness, not an old one, is that all is well."""
        latest = self.seen.readiness[-1] if self.seen.readiness else None
        return latest is not None and latest.status == "ready" and time.monotonic() - latest.at < 5

    def _read(self) -> None:
        lists = {
            "Request": self.seen.requests,
            "Probe": self.seen.probes,
            "Readiness": self.seen.readiness,
            "Delay": self.seen.delays,
        }
        assert self._process.stdout is not None
        for line in self._process.stdout:
            fields = json.loads(line)
            kind = fields.pop("record")
            lists[kind].append(_KINDS[kind](**fields))  # type: ignore[attr-defined]
