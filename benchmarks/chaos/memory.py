"""Resident memory of what a campaign runs, while processes come and go: who lasted, and whether it grew."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.load.memory import FLAT_SHARE
from benchmarks.load.processes import rss_bytes

EVERY_S = 5.0
WARM_S = 45.0  # of a process's life: imports, arenas, caches and the index of a full pool
WINDOW_S = 60.0
LASTING_S = 240.0  # a shorter life is not judged
ALLOWED_MB = 8.0  # growth that is still called flat, or FLAT_SHARE of what it had
Process = tuple[str, int]  # role, pid
Sample = tuple[float, float]  # time (s), MB


@dataclass(frozen=True, slots=True)
class Lasting:
    """A process that was there for LASTING_S: medians of its first minute once it was warm, and of its last."""

    role: str
    seconds: float
    first_mb: float
    last_mb: float

    @property
    def is_flat(self) -> bool:
        return self.last_mb - self.first_mb <= max(ALLOWED_MB, FLAT_SHARE * self.first_mb)

    def __str__(self) -> str:
        grown = f"{self.last_mb - self.first_mb:+.1f}"
        return f"{self.role}: {self.first_mb:.1f} -> {self.last_mb:.1f} MB ({grown}) in {self.seconds:.0f} s"


class MemoryWatch:
    """Samples on a thread of its own, from `start` to `stop`."""

    def __init__(self, find: Callable[[], Iterable[Process]]) -> None:
        self._find = find
        self._samples: dict[Process, list[Sample]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> list[Lasting]:
        self._stopping.set()
        self._thread.join()
        return lasting(self._samples)

    def _run(self) -> None:
        while not self._stopping.wait(EVERY_S):
            for process in self._find():
                if size := rss_bytes(process[1]):
                    self._samples.setdefault(process, []).append((time.monotonic(), size / 1e6))


def lasting(samples: Mapping[Process, Sequence[Sample]]) -> list[Lasting]:
    """Return who lasted, by role."""
    found = []
    for (role, _), series in sorted(samples.items()):
        begin, end = series[0][0], series[-1][0]
        if end - begin >= LASTING_S:
            first = [mb for at, mb in series if begin + WARM_S <= at <= begin + WARM_S + WINDOW_S]
            last = [mb for at, mb in series if at >= end - WINDOW_S]
            medians = (round(statistics.median(some), 1) for some in (first, last))
            found.append(Lasting(role, round(end - begin, 1), *medians))
    return found
