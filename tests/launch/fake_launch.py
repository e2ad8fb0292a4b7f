"""A launch as operations see it, without any process."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bireme.config import Recipe, WorkerEntry
from bireme.discovery.records import LaunchFacts, WorkerRecord
from bireme.errors import UnavailableError

READY = {"ready": True, "reason": ""}


class FakeLaunch:
    def __init__(self, folder: Path) -> None:
        workers = {"prefill": WorkerEntry(engine="mocker"), "decode": WorkerEntry(engine="mocker", replicas=2)}
        self.recipe = Recipe(model=str(folder), workers=workers, name="test", folder=str(folder))
        self.folder, self.facts = folder, LaunchFacts(generation=3, weight=0.5)
        self.pages: list[str] = [""]
        self.is_reachable = self.is_known = True
        self.elsewhere: dict[str, WorkerRecord] = {}
        self.shares: Mapping[int, float] = {3: 1.0}
        self.states: dict[str, dict[str, Any]] = dict.fromkeys(("prefill", "decode", "decode_1"), READY)

    def health(self) -> dict[str, Any]:
        return {"status": "ready", "workers": self.states}

    def metrics_pages(self) -> Sequence[str]:
        if not self.is_reachable:
            raise UnavailableError("tritonserver does not answer")
        return self.pages

    def workers_elsewhere(self) -> Mapping[str, WorkerRecord]:
        return self.elsewhere

    def generation_shares(self) -> Mapping[int, float]:
        return self.shares

    def is_drain_known(self) -> bool:
        return self.is_known

    def add_elsewhere(self, worker: str, **facts: Any) -> None:
        record = WorkerRecord(worker=worker, server="b:1", life=1, **facts)
        self.elsewhere[record.id] = record
