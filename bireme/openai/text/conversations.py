"""/v1/conversations: items in their order, which responses go on from and add to; each a row among the responses."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from bireme.errors import NotFoundError, RequestError
from bireme.openai.http.call import Call, Handler, Post
from bireme.openai.http.query import PAGING, is_ascending, limit_of, page_tree, query_of
from bireme.openai.keys import Tenant
from bireme.openai.store_thread import StoreThread
from bireme.openai.text.response_items import Item, checked_items, listed
from bireme.openai.text.response_store import CONVERSATION, NewResponse, ResponseStore, StoredResponse
from bireme.pipelines.chat_answer import encode_json
from bireme.pipelines.chat_request import check_metadata
from bireme.pipelines.json_body import decode_body

PATH = "/v1/conversations"
_MAX_ITEMS, _MAX_PAGE, _PAGE = 20, 100, 20  # OpenAI's: of one request, and of a page


class ConversationBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/conversations."""

    items: list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None


class ConversationUpdate(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/conversations/{id}."""

    metadata: dict[str, str] | None


class ItemsBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/conversations/{id}/items."""

    items: list[dict[str, Any]]


class Conversations:
    """Used on one loop."""

    def __init__(self, store: StoreThread[ResponseStore], max_bytes: int) -> None:
        """`max_bytes` of the items that a response goes on from: more are not added."""
        self._store, self._max_bytes = store, max_bytes

    def match(self, path: str, with_body: Callable[[Post], Handler]) -> dict[str, Handler] | None:
        name, *parts = path.removeprefix(f"{PATH}/").split("/")
        if not all((name, *parts)):
            return None
        if not parts:
            return {"GET": self._show, "POST": with_body(self._update), "DELETE": self._delete}
        if parts == ["items"]:
            return {"GET": self._list, "POST": with_body(self._add)}
        if parts[0] == "items" and len(parts) == 2:
            return {"GET": self._show_item, "DELETE": self._delete_item}
        return None

    async def create(self, call: Call, data: bytes) -> None:
        body = decode_body(data, ConversationBody, {})
        name, items = f"{CONVERSATION}{secrets.token_hex(24)}", _checked(body.items) if body.items else []
        shown = _shown(name, int(time.time()), body.metadata)
        await self._store.do(ResponseStore.add, NewResponse(name, call.tenant.name, None, shown, items))
        await call.reply(200, shown)

    async def items(self, name: str, tenant: Tenant) -> list[Item]:
        """Return what a response goes on from. Raises NotFoundError, RequestError."""
        row = await self._find(name, tenant)
        if len(row.items) > self._max_bytes:
            raise RequestError(
                f"conversation: {len(row.items)} bytes; frontend.max_body_bytes is {self._max_bytes}, delete items"
            )
        return row.input

    async def add(self, name: str, tenant: Tenant, items: Sequence[Item]) -> None:
        """Add items at the end. Raises NotFoundError, UnavailableError."""
        if not await self._store.do(ResponseStore.add_items, name, tenant.name, items):
            raise _missing(name)

    async def _show(self, call: Call) -> None:
        await call.reply(200, (await self._named(call)).response)

    async def _update(self, call: Call, data: bytes) -> None:
        body, row = decode_body(data, ConversationUpdate, {}), await self._named(call)
        shown = _shown(row.id, msgspec.json.decode(row.response)["created_at"], body.metadata)
        await self._store.do(ResponseStore.change, row.id, call.tenant.name, shown)
        await call.reply(200, shown)

    async def _delete(self, call: Call) -> None:
        row = await self._named(call)
        await self._store.do(ResponseStore.remove, row.id, call.tenant.name)
        await call.reply(200, encode_json({"id": row.id, "object": "conversation.deleted", "deleted": True}))

    async def _list(self, call: Call) -> None:
        await call.reply(200, page_json(call, (await self._named(call)).input))

    async def _add(self, call: Call, data: bytes) -> None:
        query_of(call, ("include",))
        items, name = _checked(decode_body(data, ItemsBody, {}).items), _name_of(call)
        if not await self._store.do(ResponseStore.add_items, name, call.tenant.name, items, self._max_bytes):
            raise await self._too_large(call)
        await call.reply(200, encode_json(page_tree(items, False, no_id="")))

    async def _show_item(self, call: Call) -> None:
        query_of(call, ("include",))
        items, name = (await self._named(call)).input, call.path.rpartition("/")[2]
        await call.reply(200, encode_json(items[_place(items, name)]))

    async def _delete_item(self, call: Call) -> None:
        row, name = await self._named(call), call.path.rpartition("/")[2]

        def without(items: list[Item]) -> list[Item]:
            place = _place(items, name)
            return items[:place] + items[place + 1 :]

        await self._store.do(ResponseStore.change_items, row.id, call.tenant.name, without)
        await call.reply(200, row.response)

    async def _too_large(self, call: Call) -> RequestError:
        size = len((await self._named(call)).items)
        return RequestError(
            f"items: the conversation has {size} bytes, with these more than frontend.max_body_bytes, which is"
            f" {self._max_bytes}; delete items, or begin another conversation"
        )

    async def _named(self, call: Call) -> StoredResponse:
        return await self._find(_name_of(call), call.tenant)

    async def _find(self, name: str, tenant: Tenant) -> StoredResponse:
        """Raises NotFoundError, also for another key's."""
        row = None
        if name.startswith(CONVERSATION):
            row = await self._store.read(ResponseStore.find, name, tenant.name)
        if row is None:
            raise _missing(name)
        return row


def page_json(call: Call, items: list[Item]) -> bytes:
    """Return the page of items that the query asks for; `items`: all, the oldest first. Raises RequestError."""
    query = query_of(call, ("include", *PAGING))
    limit, after = limit_of(query, _PAGE, _MAX_PAGE), query.get("after")
    ordered = items if is_ascending(query) else items[::-1]
    if after is not None:
        at = next((at for at, item in enumerate(ordered) if item["id"] == after), None)
        if at is None:
            raise RequestError(f"after: {after[:80]}; no such item, send the last_id of a page")
        ordered = ordered[at + 1 :]
    return encode_json(page_tree(ordered[:limit], len(ordered) > limit, no_id=""))


def _checked(given: list[Item]) -> list[Item]:
    if len(given) > _MAX_ITEMS:
        raise RequestError(f"items: {len(given)} items; a request adds {_MAX_ITEMS} at most, send several")
    return listed(checked_items(given, "items"))


def _shown(name: str, created_at: int, metadata: dict[str, str] | None) -> bytes:
    check_metadata(metadata)
    return encode_json({"id": name, "object": "conversation", "created_at": created_at, "metadata": metadata or {}})


def _name_of(call: Call) -> str:
    return call.path.removeprefix(f"{PATH}/").partition("/")[0]


def _place(items: list[Item], name: str) -> int:
    place = next((at for at, item in enumerate(items) if item["id"] == name), None)
    if place is None:
        raise NotFoundError(f"item: {name[:80]} does not exist in this conversation")
    return place


def _missing(name: str) -> NotFoundError:
    return NotFoundError(f"conversation: {name[:80]} does not exist; it may have been deleted or have expired")
