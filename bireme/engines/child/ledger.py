"""The requests that an engine has taken and not yet answered.

Every request ends with exactly one Finish. One whose consumer is gone, or whose number was used twice, stays until
the engine has released it; what it still makes is discarded.
"""

from __future__ import annotations

from bireme.engines.base import RequestKey


class Record:
    __slots__ = ("digest", "is_discarded")

    def __init__(self, digest: str) -> None:
        self.digest = digest  # of the prompt; goes into what a context_only request exports
        self.is_discarded = False


class Ledger:
    """Owned by the IO thread."""

    def __init__(self) -> None:
        self._records: dict[RequestKey, Record] = {}

    def enter(self, key: RequestKey, digest: str = "") -> None:
        self._records[key] = Record(digest)

    def get(self, key: RequestKey) -> Record | None:
        return self._records.get(key)

    def leave(self, key: RequestKey) -> None:
        self._records.pop(key, None)

    def of_consumer(self, consumer: int) -> list[RequestKey]:
        return [key for key in self._records if key[0] == consumer]
