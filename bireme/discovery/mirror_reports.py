"""What the frontend's processes have found with copies of requests: a file of the run folder each, added up here."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from bireme import private_files
from bireme.discovery.live_settings import MirrorSettings
from bireme.messages import MALFORMED

_FILES = "mirror-*.json"
MAX_TIMES, MAX_EXAMPLES = 1000, 10
# same, different: answers that must be equal. sampled: chance decides, so only status and times count.
# failed, old_failed: the copy has no answer, or the client has none. dropped: no room for it.
# left_out: it can't be sent twice, or its client left.
Outcome = Literal["same", "different", "sampled", "failed", "old_failed", "dropped", "left_out"]
Side = Literal["old", "new"]


class Example(msgspec.Struct, frozen=True):
    """A request whose copy was answered in another way, or not at all. Nothing of prompts and answers is in it."""

    request_id: str
    path: str
    reason: str


class Times(msgspec.Struct):
    """Milliseconds of the last MAX_TIMES requests that both sides have answered."""

    old: list[float] = []
    new: list[float] = []

    def add(self, old_s: float, new_s: float) -> None:
        for times, seconds in ((self.old, old_s), (self.new, new_s)):
            times.append(round(1e3 * seconds, 2))
            del times[:-MAX_TIMES]


class MirrorReport(msgspec.Struct, kw_only=True):
    """One process's since the comparison began."""

    run: str
    outcomes: dict[str, int] = {}
    statuses: dict[Side, dict[str, int]] = {}
    ttft: Times = msgspec.field(default_factory=Times)  # of streams
    latency: Times = msgspec.field(default_factory=Times)
    examples: list[Example] = []

    def count(self, outcome: Outcome) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def note_status(self, side: Side, status: str) -> None:
        counts = self.statuses.setdefault(side, {})
        counts[status] = counts.get(status, 0) + 1

    def note_example(self, example: Example) -> None:
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(example)


def write(folder: Path, report: MirrorReport) -> None:
    """Raises OSError."""
    private_files.replace_file(folder / f"mirror-{os.getpid()}.json", msgspec.json.encode(report))


def clear(folder: Path) -> None:
    for path in folder.glob(_FILES):
        path.unlink(missing_ok=True)


def summary(folder: Path, settings: MirrorSettings) -> dict[str, Any]:
    """Return what all processes together have found in a comparison."""
    reports = _reports(folder, settings.run)
    outcomes = _added(report.outcomes for report in reports)
    examples = [one for report in reports for one in report.examples][:MAX_EXAMPLES]
    return {
        "url": settings.url,
        "share": settings.share,
        "compared": outcomes["same"] + outcomes["different"],
        **{name: outcomes[name] for name in Outcome.__args__},  # type: ignore[attr-defined]
        "statuses": {"old": _statuses(reports, "old"), "new": _statuses(reports, "new")},
        "ttft_ms": _percentiles([report.ttft for report in reports]),
        "latency_ms": _percentiles([report.latency for report in reports]),
        "examples": msgspec.to_builtins(examples),
    }


def _reports(folder: Path, run: str) -> list[MirrorReport]:
    found = map(_read, sorted(folder.glob(_FILES)))
    return [report for report in found if report is not None and report.run == run]


def _statuses(reports: Sequence[MirrorReport], side: Side) -> dict[str, int]:
    return _added(report.statuses.get(side, {}) for report in reports)


def _read(path: Path) -> MirrorReport | None:
    try:
        with private_files.open_regular(path) as file:
            return msgspec.json.decode(file.read(), type=MirrorReport)
    except (OSError, *MALFORMED):  # gone, or of another version
        return None


def _added(counts: Iterable[dict[str, int]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for one in counts:
        found.update(one)
    return found


def _percentiles(times: Sequence[Times]) -> dict[str, Any]:
    sides = {
        "old": [time for one in times for time in one.old],
        "new": [time for one in times for time in one.new],
    }
    told = {side: {"p50": _quantile(0.5, values), "p90": _quantile(0.9, values)} for side, values in sides.items()}
    return {"count": len(sides["old"]), **told}


def _quantile(at: float, values: Sequence[float]) -> float | None:
    """None: there are none."""
    return sorted(values)[math.ceil(at * len(values)) - 1] if values else None
