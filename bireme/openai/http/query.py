"""Query strings and the pages of lists, as OpenAI's API has them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import parse_qsl

from bireme.errors import RequestError
from bireme.openai.http.call import Call

PAGING = ("after", "limit", "order")
_MAX_DIGITS = 8


def query_of(call: Call, known: Collection[str]) -> dict[str, str]:
    """Return the query's parameters. Raises RequestError for others than these."""
    given = dict(parse_qsl(call.query.decode("latin-1"), keep_blank_values=True))
    for name in given:
        if name.removesuffix("[]") not in known:
            raise RequestError(f"{name[:40]}: unknown parameter; remove it")
    return given


def limit_of(query: Mapping[str, str], usual: int, most: int) -> int:
    """Return how many a page is to have. Raises RequestError."""
    limit = query.get("limit", str(usual))
    size = page_size(limit, most)
    if size is None:
        raise RequestError(f"limit: {limit[:20]}; the range is 1 to {most}")
    return size


def page_tree(data: list[dict[str, Any]], has_more: bool, no_id: str | None = None) -> dict[str, Any]:
    """Return OpenAI's object of a page. `no_id`: of the first and the last where there is none."""
    first, last = (data[0]["id"], data[-1]["id"]) if data else (no_id, no_id)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more}


def page_size(text: str, most: int) -> int | None:
    """None: the text is no number from 1 to `most`, or a long one."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        return None
    size = int(text)
    return size if 1 <= size <= most else None


def is_ascending(query: Mapping[str, str]) -> bool:
    """Whether the oldest come first. Raises RequestError."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError(f"order: {order[:20]}; send asc or desc")
    return order == "asc"
