"""A load as a child process, read event by event; see __main__.py for what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]


class LoadProcess:
    """`python -m benchmarks.load PATH --option value ...`; a true value is a bare flag, None is left out.

    Path `sse_client` is the one that measures chats and checks nothing: `python -m benchmarks.load.sse_client`.
    """

    def __init__(self, path: str, options: Mapping[str, Any]) -> None:
        program = ["benchmarks.load.sse_client"] if path == "sse_client" else ["benchmarks.load", path]
        self._process = subprocess.Popen(
            [sys.executable, "-m", *program, *to_arguments(options)],
            cwd=CHECKOUT,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield each event until the process ends. Raises RuntimeError when that was without a report."""
        assert self._process.stdout is not None
        event: dict[str, Any] = {}
        for line in self._process.stdout:
            event = json.loads(line)
            yield event
        code = self._process.wait()
        if event.get("event") != "report":
            raise RuntimeError(f"the load process ended without a report, exit code {code}; see its error output above")

    def __enter__(self) -> LoadProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def to_arguments(options: Mapping[str, Any]) -> list[str]:
    arguments: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        arguments.append("--" + name.replace("_", "-"))
        if value is not True:
            arguments.append(str(value))
    return arguments
