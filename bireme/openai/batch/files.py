"""/v1/files: uploads to disk, lists, contents, deletions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from bireme.config import FrontendConfig
from bireme.errors import NotFoundError, RequestError, UnavailableError
from bireme.openai.batch.batch_store import BatchStore
from bireme.openai.batch.upload import Upload, too_large
from bireme.openai.batch.upload_store import UploadedFile, UploadStore
from bireme.openai.database import DatabaseError
from bireme.openai.http.call import Call
from bireme.openai.http.error_replies import HttpError
from bireme.openai.http.query import PAGING, is_ascending, limit_of, page_tree, query_of
from bireme.openai.keys import Tenant
from bireme.openai.store_thread import StoreThread
from bireme.pipelines.chat_answer import encode_json

PATH = "/v1/files"
FORM = (b"multipart/form-data",)
_PART_BYTES = 1 << 20  # each must come within frontend.body_timeout_s
_SENT_BYTES = 128 << 10  # a part of a reply: a slow client has a minute for each
_ROUND_BYTES = 64 << 10  # of a form beside its file
_PAGE = 10_000
_LEAST_AGE_S = 3600
_EXPIRY = {"anchor": "expires_after[anchor]", "seconds": "expires_after[seconds]"}


class FilesAndBatches:
    """Both stores, of one folder."""

    def __init__(self, folder: Path, config: FrontendConfig) -> None:
        self.files = UploadStore(folder, config.files)
        try:
            self.batches = BatchStore(folder)
        except DatabaseError:
            self.files.close()
            raise
        self.databases = (self.files.database, self.batches.database)

    def check(self) -> None:
        for database in self.databases:
            database.check()

    def close(self) -> None:
        self.batches.close()
        self.files.close()


class FilesApi:
    def __init__(self, config: FrontendConfig, store: StoreThread[FilesAndBatches]) -> None:
        self._config, self._store = config, store

    async def upload(self, call: Call) -> None:
        limit = self._config.files.max_file_bytes
        if call.body_length > limit + _ROUND_BYTES:
            raise too_large(limit)
        part = await self._store.do(lambda own: own.files.new_part())
        try:
            upload = await self._receive(call, part, limit)
            name = upload.check()
            max_age_s = _check_fields(upload, self._config.files.max_age_s)
            await self._store.do(lambda own: own.files.set_aside(part, call.tenant.name, upload.size))
            file = await self._store.do(lambda own: own.files.add(part, call.tenant.name, "batch", name, max_age_s))
        except OSError as error:
            raise UnavailableError(f"the file can't be written ({error.strerror}); try again") from error
        finally:
            with contextlib.suppress(OSError):  # first, and without the store: that may wait for just this room
                part.unlink(missing_ok=True)
            with contextlib.suppress(UnavailableError):  # the disk is full or locked: its row goes with its age
                await self._store.do(lambda own: own.files.give_up(part))
        await call.reply(200, encode_json(file.shown()))

    async def _receive(self, call: Call, part: Path, limit: int) -> Upload:
        """Room is set aside before the bytes come: at once where their number is told, else with each part."""
        tenant, timeout_s = call.tenant.name, self._config.body_timeout_s
        kept = max(0, call.body_length - _ROUND_BYTES)
        await self._store.do(lambda own: own.files.set_aside(part, tenant, kept))
        upload = await asyncio.to_thread(Upload, call.header(b"content-type"), part, limit)
        try:
            while data := await call.body_part(_PART_BYTES, timeout_s, FORM):
                if (least := min(limit, upload.size + len(data) - _ROUND_BYTES)) > kept:
                    await self._store.do(lambda own, least=least: own.files.set_aside(part, tenant, least))
                    kept = least
                await asyncio.to_thread(upload.feed, data)
        finally:
            await asyncio.to_thread(upload.close)  # writes what is left: the disk may be full
        return upload

    async def list_files(self, call: Call) -> None:
        query = query_of(call, ("purpose", *PAGING))
        limit, oldest_first, purpose = limit_of(query, _PAGE, _PAGE), is_ascending(query), query.get("purpose")
        tenant, after = call.tenant.name, query.get("after")
        found = await self._store.read(lambda own: own.files.page(tenant, purpose, after, oldest_first, limit))
        if found is None:
            raise RequestError(f"after: {after or ''}; no such file, send the last_id of a page")
        await call.reply(200, encode_json(page_tree([file.shown() for file in found[0]], found[1])))

    async def show(self, call: Call) -> None:
        await call.reply(200, encode_json((await self.find(_id_in(call.path), call.tenant)).shown()))

    async def content(self, call: Call) -> None:
        file = await self.find(_id_in(call.path), call.tenant)
        path = await self._store.read(lambda own: own.files.path(file))
        headers = (
            (b"content-type", b"application/jsonl"),
            (b"content-disposition", b'attachment; filename="' + file.id.encode() + b'.jsonl"'),
            (b"x-content-type-options", b"nosniff"),
        )
        try:
            stream = await asyncio.to_thread(path.open, "rb")
        except OSError:
            raise _missing(file.id) from None
        with contextlib.closing(stream):
            await call.reply_parts(file.bytes, _parts(stream.read), *headers)

    async def delete(self, call: Call) -> None:
        file = await self.find(_id_in(call.path), call.tenant)
        if file.id in await self._store.read(lambda own: own.batches.used_files()):
            raise HttpError(409, f"file: {file.id} is the input of a batch that has not ended; cancel the batch first",
                            code="file_in_use")  # fmt: skip
        await self._store.do(lambda own: own.files.remove(file))
        await call.reply(200, encode_json({"id": file.id, "object": "file", "deleted": True}))

    async def find(self, file_id: str, tenant: Tenant) -> UploadedFile:
        """Raises NotFoundError, also for another key's."""
        file: UploadedFile | None = await self._store.read(lambda own: own.files.find(file_id, tenant.name))
        if file is None:
            raise _missing(file_id)
        return file


def age_of(anchor: object, seconds: object, names: dict[str, str], max_age_s: int) -> int | None:
    """Return after how many seconds a file goes; None: not asked for. Raises RequestError."""
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise RequestError(f"{names['anchor']}: {str(anchor)[:40]}; send created_at")
    if not isinstance(seconds, int) or not _LEAST_AGE_S <= seconds <= max_age_s:
        raise RequestError(f"{names['seconds']}: {str(seconds)[:40]}; the range is {_LEAST_AGE_S} to {max_age_s}")
    return seconds


def _check_fields(upload: Upload, most_s: int) -> int | None:
    fields = dict(upload.fields)
    purpose = fields.pop("purpose", None)
    if purpose != "batch":
        raise RequestError(f"purpose: {(purpose or 'missing')[:40]}; only batch is served, send it")
    anchor, text = fields.pop(_EXPIRY["anchor"], None), fields.pop(_EXPIRY["seconds"], None)
    for name in fields:
        raise RequestError(f"{name[:80]}: unknown field; remove it")
    seconds = int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else text
    return age_of(anchor, seconds, _EXPIRY, most_s)


def _id_in(path: str) -> str:
    return path.removeprefix(f"{PATH}/").partition("/")[0]


def _missing(file_id: str) -> NotFoundError:
    return NotFoundError(f"file: {file_id[:80]} does not exist; it may have been deleted or have expired")


async def _parts(read: Callable[[int], bytes]) -> AsyncIterator[bytes]:
    while data := await asyncio.to_thread(read, _SENT_BYTES):
        yield data
