"""What each generation gets of new requests, as a launch sees it."""

from __future__ import annotations

from collections.abc import Mapping

from bireme.discovery.records import WorkerRecord
from bireme.kv.routing.generations import shares_of, weights_of
from bireme.launch.console import Console


class GenerationWatch:
    """`take` is called by one thread at a time."""

    def __init__(self, own: int, console: Console) -> None:
        self.shares: Mapping[int, float] = {own: 1.0}  # of what the last view had, the newest first
        self._console = console
        self._met: set[int] = set()  # newest ones that were seen beside older ones

    def take(self, view: Mapping[str, WorkerRecord]) -> None:
        """Warn of one that has joined with weight 1."""
        self.shares = shares = shares_of(weights_of(view.values()))
        newest, *older = shares or {0: 0.0}
        if not older or newest in self._met:
            return
        self._met.add(newest)
        if shares[newest] == 1.0:
            self._console.event(
                "generation_takes_all", "warning", generation=newest, idle=",".join(map(str, older)),
                remedy="it has joined with weight 1; tools/status.py --weight 0 at its admin door takes that back,"
                " and serve.py --weight 0 starts one that waits",
            )  # fmt: skip
