"""Responses in SQLite: for later requests that go on from them, and for answers that nobody waits for.

A row has the response as JSON and the items of its own input; what came before is found by the id of the response that
it goes on from. Rows are one key's alone. An unfinished row belongs to a process; when that is gone another takes it.
One that is streamed has its events beside it, many in a row, compressed. A conversation is a row as well: itself as the
response, and all of its items.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bireme.config import StoredResponsesConfig
from bireme.openai.database import SharedStore, columns_of, structs
from bireme.openai.text.response_items import Item

FILE = "responses.sqlite"
CONVERSATION = "conv_"  # beginning of the ids of rows that are no responses
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    used_at REAL NOT NULL,
    size INTEGER NOT NULL,
    previous TEXT,
    response BLOB NOT NULL,
    items BLOB NOT NULL,
    process TEXT,
    request BLOB
);
CREATE INDEX IF NOT EXISTS responses_by_use ON responses (tenant, used_at, size);
CREATE INDEX IF NOT EXISTS unfinished_responses ON responses (process) WHERE process IS NOT NULL;
CREATE TABLE IF NOT EXISTS response_events (
    id TEXT NOT NULL,
    last INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (id, last)
) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS removed_responses AFTER DELETE ON responses BEGIN
    DELETE FROM response_events WHERE id = OLD.id;
END;
"""
_PAGE = 32  # rows of events
_SWEPT_SHARE = 16  # a sweep follows when so small a share of max_bytes has come
_encode, _decode = msgspec.json.Encoder().encode, msgspec.json.decode


def response_id() -> str:
    """Return a new id that nobody can guess: 96 random bits, after the time so that those of responses that end
    together are neighbors in their index, and not each in a page of its own.
    """
    return f"resp_{int(time.time() * 1000):012x}{secrets.token_hex(12)}"


class StoredResponse(msgspec.Struct, frozen=True):
    id: str
    tenant: str  # name of the key; "" where no keys are asked for
    previous: str | None
    response: bytes  # JSON
    items: bytes  # JSON
    process: str | None  # that works on it; None: it has ended
    request: bytes | None  # JSON of an unfinished one's body

    @property
    def input(self) -> list[Item]:
        items: list[Item] = _decode(self.items)
        return items

    @property
    def is_streamed(self) -> bool:
        return self.request is not None and bool(_decode(self.request, type=_Streamed).stream)

    @property
    def output(self) -> list[Item]:
        return _decode(self.response, type=_Output).output


class NewResponse(NamedTuple):
    id: str
    tenant: str
    previous: str | None
    response: bytes  # JSON
    items: list[Item]  # of its own input
    request: bytes | None = None  # JSON of the body of one that has not ended: it is this process's
    turn: list[Item] | None = None  # what `previous`, a conversation, gets with it


class EventPage(NamedTuple):
    """Events of a response, and how far it is."""

    last: int | None  # number of the last event so far; None: there are none
    response: bytes | None  # JSON of one that has ended
    chunks: list[tuple[int, bytes]]  # (number of its last event, events)


class _Streamed(msgspec.Struct):
    stream: bool | None = None


class _Output(msgspec.Struct):
    output: list[dict[str, Any]]


_INSERT = "INSERT INTO responses (id, tenant, used_at, size, previous, response, items, process, request)"
_COLUMNS = columns_of(StoredResponse)
_END = (
    "UPDATE responses SET response = ?, process = NULL, request = NULL, size = ? + LENGTH(items)"
    " + (SELECT COALESCE(SUM(LENGTH(data)), 0) FROM response_events e WHERE e.id = responses.id)"
    " WHERE id = ? AND process = ?"
)
_ADD_ITEMS = (  # both are JSON lists, and the new one has something in it
    "UPDATE responses SET used_at = ?, size = size + ?, items = CAST(CASE WHEN LENGTH(items) = 2 THEN ? ELSE"
    " SUBSTR(items, 1, LENGTH(items) - 1) || ',' || ? END AS BLOB) WHERE id = ? AND tenant = ?"
)


def _ended(response_id: str, process: str, response: bytes) -> tuple[Any, ...]:
    return response, len(response), response_id, process


def _added(conversation: str, tenant: str, items: bytes) -> tuple[Any, ...]:
    return time.time(), len(items), items, items[1:], conversation, tenant


def _is_whole(links: Sequence[sqlite3.Row]) -> bool:
    """Whether responses, the oldest first, go on from nothing else, have all ended, and are of no conversation."""
    if not links or links[0]["previous"] is not None:
        return False
    return not any(link["process"] or link["id"].startswith(CONVERSATION) for link in links)


class ResponseStore(SharedStore):
    """Every method may block on the disk; all are thread-safe. Unfinished responses are left to others at its end."""

    def __init__(self, folder: Path, config: StoredResponsesConfig) -> None:
        super().__init__(folder / FILE, _SCHEMA, "responses")
        self._config = config
        self._num_new_bytes = self._num_new = 0  # since the last sweep

    def add(self, *responses: NewResponse) -> frozenset[str]:
        """Keep all of them, or none, each with its turn; return those without a conversation for theirs.

        Raises UnavailableError.
        """
        turns = {one.id: (one, _encode(one.turn)) for one in responses if one.turn is not None}
        counts = self.database.write_together(
            *((f"{_INSERT} VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", *self._row(one)) for one in responses),
            *((_ADD_ITEMS, *_added(one.previous or "", one.tenant, items)) for one, items in turns.values()),
        )
        self._num_new += len(responses)
        self._note_bytes(sum(len(items) for _, items in turns.values()))
        return frozenset(name for name, count in zip(turns, counts[len(responses) :], strict=True) if not count)

    def begin(self, response: NewResponse, max_unfinished: int) -> bool:
        """Keep one that has not ended; false: so many of its key have not. Raises UnavailableError."""
        count = "SELECT COUNT(*) FROM responses WHERE process IS NOT NULL AND tenant = ?"
        is_kept = self.database.write(
            f"{_INSERT} SELECT ?, ?, ?, ?, ?, ?, ?, ?, ? WHERE ({count}) < ?",
            *self._row(response), response.tenant, max_unfinished,
        )  # fmt: skip
        self._num_new += is_kept
        self._sweep_if_many()
        return bool(is_kept)

    def _row(self, one: NewResponse) -> tuple[Any, ...]:
        """Return the values of _INSERT, and count their bytes."""
        items = _encode(one.items)
        size = len(one.response) + len(items) + len(one.request or b"")
        self._num_new_bytes += size
        process = self.process if one.request else None
        return one.id, one.tenant, time.time(), size, one.previous, one.response, items, process, one.request

    def _sweep_if_many(self) -> None:
        limits = self._config
        if self._num_new_bytes * _SWEPT_SHARE > limits.max_bytes or self._num_new * _SWEPT_SHARE > limits.max_responses:
            self.sweep()

    def find(self, response_id: str, tenant: str) -> StoredResponse | None:
        """None also for another key's."""
        return next(iter(self._rows("WHERE id = ? AND tenant = ?", response_id, tenant)), None)

    def history(self, last: str, tenant: str, max_bytes: int) -> list[StoredResponse] | None:
        """Return the responses up to this one, the oldest first, and note their use.

        None: one of them is not there, has not ended or is of a conversation, or they are larger than `max_bytes`.
        """
        links = self.database.read(
            "WITH RECURSIVE links (id, previous, size, process, depth) AS ("
            " SELECT id, previous, size, process, 0 FROM responses WHERE id = ? AND tenant = ?"
            " UNION ALL SELECT r.id, r.previous, r.size, r.process, depth + 1 FROM responses r JOIN links"
            " ON r.id = links.previous WHERE r.tenant = ?) SELECT * FROM links ORDER BY depth DESC",
            last, tenant, tenant,
        )  # fmt: skip
        if not _is_whole(links) or sum(link["size"] for link in links) > max_bytes:
            return None
        ids = [link["id"] for link in links]
        among = "WHERE id IN (SELECT value FROM json_each(?))"
        self.database.write(f"UPDATE responses SET used_at = ? {among}", time.time(), _encode(ids).decode())
        rows = {row.id: row for row in self._rows(among, _encode(ids).decode())}
        return [rows[link] for link in ids] if len(rows) == len(ids) else None  # one may have been removed meanwhile

    def end(self, response_id: str, response: bytes) -> bool:
        """Replace an unfinished response of this process; false: it was cancelled or removed."""
        return self.database.write(_END, *_ended(response_id, self.process, response)) > 0

    def end_turn(self, response_id: str, response: bytes, output: Sequence[Item]) -> bool:
        """Replace an unfinished response of this process, and add its input and output to its conversation, or neither.

        False: it was cancelled or removed, or its conversation does not exist.
        """
        for row in self._rows("WHERE id = ? AND process = ?", response_id, self.process):
            items, other = _encode([*row.input, *output]), "AND EXISTS (SELECT 1 FROM responses WHERE id = ? AND"
            is_added, is_ended = self.database.write_together(
                (f"{_ADD_ITEMS} {other} process = ?)",
                 *_added(row.previous or "", row.tenant, items), row.id, self.process),
                (f"{_END} {other} tenant = ?)", *_ended(row.id, self.process, response), row.previous, row.tenant),
            )  # fmt: skip
            assert is_added == is_ended, "each is done where the other can be"
            self._note_bytes(len(items))
            return is_ended > 0
        return False

    def cancel(self, row: StoredResponse, response: bytes) -> bool:
        """Replace an unfinished response by its end; false: it has ended meanwhile."""
        return self.database.write(_END, *_ended(row.id, row.process or "", response)) > 0

    def report(self, response_id: str, response: bytes) -> None:
        """Replace an unfinished response of this process by a newer state."""
        query = "UPDATE responses SET response = ? WHERE id = ? AND process = ?"
        self.database.write(query, response, response_id, self.process)

    def change(self, conversation: str, tenant: str, shown: bytes) -> None:
        self.database.write(
            "UPDATE responses SET response = ?, used_at = ?, size = ? + LENGTH(items) WHERE id = ? AND tenant = ?",
            shown, time.time(), len(shown), conversation, tenant,
        )  # fmt: skip

    def add_items(self, conversation: str, tenant: str, items: Sequence[Item], max_bytes: int | None = None) -> bool:
        """Add items at a conversation's end; false: it does not exist, or all its items would have more bytes."""
        data, bound = _encode(items), "" if max_bytes is None else " AND LENGTH(items) + ? <= ?"
        values = () if max_bytes is None else (len(data), max_bytes)
        is_added = self.database.write(_ADD_ITEMS + bound, *_added(conversation, tenant, data), *values) > 0
        self._note_bytes(len(data))
        return is_added

    def change_items(
        self, conversation: str, tenant: str, change: Callable[[list[Item]], list[Item]]
    ) -> list[Item] | None:
        """Replace a conversation's items by what `change` makes of them, and return these. None: it does not exist."""
        while (row := self.find(conversation, tenant)) is not None:
            items = change(row.input)
            data = _encode(items)
            if self.database.write(
                "UPDATE responses SET items = ?, used_at = ?, size = LENGTH(response) + ?"
                " WHERE id = ? AND tenant = ? AND items = ?",
                data, time.time(), len(data), conversation, tenant, row.items,
            ):  # fmt: skip
                self._note_bytes(max(0, len(data) - len(row.items)))
                return items
        return None

    def _note_bytes(self, count: int) -> None:
        self._num_new_bytes += count
        self._sweep_if_many()

    def add_events(self, response_id: str, first: int, last: int, data: bytes) -> None:
        """Keep events of an unfinished response of this process, up to number `last`; those before `first` go."""
        packed, mine = zlib.compress(data, 1), "FROM responses WHERE id = ? AND process = ?"
        self.database.write_together(
            (f"DELETE FROM response_events WHERE last < ? AND id IN (SELECT id {mine})",
             first, response_id, self.process),
            (f"INSERT OR REPLACE INTO response_events SELECT id, ?, ? {mine}", last, packed, response_id, self.process),
            ("UPDATE responses SET size = size + ? WHERE id = ? AND process = ?",
             len(packed), response_id, self.process),
        )  # fmt: skip

    def last_event(self, response_id: str) -> int | None:
        """Return the number of the last event so far; None: there are none."""
        found: int | None = self.database.read(
            "SELECT MAX(last) AS last FROM response_events WHERE id = ?", response_id
        )[0]["last"]
        return found

    def events(self, response_id: str, tenant: str, after: int) -> EventPage | None:
        """Return the next events after number `after`. None: there is no such response of this key."""
        rows = self.database.read(  # first, so that one that has ended has all its events by now
            "SELECT CASE WHEN process IS NULL THEN response END AS response FROM responses WHERE id = ? AND tenant = ?",
            response_id, tenant,
        )  # fmt: skip
        if not rows:
            return None
        chunks = self.database.read(
            "SELECT last, data FROM response_events WHERE id = ? AND last > ? ORDER BY last LIMIT ?",
            response_id, after, _PAGE,
        )  # fmt: skip
        unpacked = [(chunk["last"], zlib.decompress(chunk["data"])) for chunk in chunks]
        return EventPage(self.last_event(response_id), rows[0]["response"], unpacked)

    def remove(self, response_id: str, tenant: str) -> bool:
        return self.database.write("DELETE FROM responses WHERE id = ? AND tenant = ?", response_id, tenant) > 0

    def own_unfinished(self) -> frozenset[str]:
        rows = self.database.read("SELECT id FROM responses WHERE process = ?", self.process)
        return frozenset(row["id"] for row in rows)

    def take_orphans(self, max_rows: int) -> list[StoredResponse]:
        """Return unfinished responses whose process is gone; on an error none, else all are this process's now."""
        if not (gone := self.gone("responses")):
            return []
        orphans = "SELECT id FROM responses WHERE process IN (SELECT value FROM json_each(?)) LIMIT ?"
        taken = self.database.change(
            f"UPDATE responses SET process = ? WHERE id IN ({orphans}) RETURNING {_COLUMNS}",
            self.process, _encode(gone).decode(), max_rows,
        )  # fmt: skip
        return structs(StoredResponse, taken)

    def sweep(self) -> int:
        """Remove what is too old, and of each key what is too much; return how many."""
        self._num_new = self._num_new_bytes = 0
        count = 0
        for key in self.database.read(
            "SELECT tenant, COUNT(*) AS num, SUM(size) AS size FROM responses GROUP BY tenant"
        ):
            count += self._sweep(key["tenant"], key["num"], key["size"])
        if count:
            self.database.change("PRAGMA incremental_vacuum")
        self._lives.sweep()
        return count

    def _sweep(self, tenant: str, num: int, size: int) -> int:
        """`num` and `size`: of all that the key has. What has not ended counts, and stays."""
        write, limits = self.database.write, self._config
        ended = "DELETE FROM responses WHERE process IS NULL AND"
        count = write(f"{ended} tenant = ? AND used_at < ?", tenant, time.time() - limits.max_age_s)
        if (excess := num - count - limits.max_responses) > 0:
            oldest = "SELECT rowid FROM responses WHERE tenant = ? ORDER BY used_at LIMIT ?"
            count += write(f"{ended} rowid IN ({oldest})", tenant, excess)
        if size > limits.max_bytes:
            count += write(
                f"{ended} rowid IN (SELECT rowid FROM (SELECT rowid, SUM(size) OVER newest AS total FROM responses"
                " WHERE tenant = ? WINDOW newest AS (ORDER BY used_at DESC, rowid DESC ROWS UNBOUNDED PRECEDING))"
                " WHERE total > ?)",
                tenant, limits.max_bytes,
            )  # fmt: skip
        return count

    def _rows(self, condition: str, *values: Any) -> list[StoredResponse]:
        return self.database.select(StoredResponse, f"responses {condition}", *values)
