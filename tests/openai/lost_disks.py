"""Disks and databases that a frontend can't use, and what it says of them."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.openai.batch.forms import ask

_HOLD = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); {}; print(flush=True); sys.stdin.read()"


@contextlib.contextmanager
def another_program(path: Path, *, what: str) -> Iterator[None]:
    """Another process does something with a database, and holds it."""
    command = [sys.executable, "-c", _HOLD.format(what), path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.stdin.close()


def fill(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


async def report(bench: Any) -> Any:
    return (await ask(bench, "/health/ready")).json()


async def until(bench: Any, status: str, *stores: str) -> Any:
    """Return the report that has this status, and problems of these stores."""
    for _ in range(2000):
        found = await report(bench)
        if found["status"] == status and found.get("stores", {}).keys() >= set(stores):
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(found)
