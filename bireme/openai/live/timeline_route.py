"""GET /v1/requests/{id}/timeline: what took a request's time, for the key that has sent it."""

from __future__ import annotations

import msgspec

from bireme.observability.timelines import Timelines
from bireme.openai.http.call import Call, Handler
from bireme.openai.http.error_replies import HttpError
from bireme.openai.http.members import Member

TIMELINE = "timeline"  # question of one member to another
_PREFIX, _SUFFIX = "/v1/requests/", "/timeline"
_SEPARATOR = "\n"  # in no key's name and no id
_OFF = "timelines are not kept here; observability.timelines.max_entries in the recipe says how many are"
_encode = msgspec.json.Encoder().encode


class TimelineRoute:
    def __init__(self, timelines: Timelines | None, member: Member | None) -> None:
        """`timelines`: None: none are kept."""
        self._timelines, self._member = timelines, member

    def match(self, path: str) -> dict[str, Handler] | None:
        """Return the methods of a path; None: it is another's."""
        if not (path.startswith(_PREFIX) and path.endswith(_SUFFIX) and len(path) > len(_PREFIX) + len(_SUFFIX)):
            return None
        return {"GET": self._get}

    def answer(self, about: str) -> bytes:
        """Return the timeline for another process; b"": it is not here."""
        tenant, _, request_id = about.partition(_SEPARATOR)
        found = self._timelines.find(tenant, request_id) if self._timelines is not None else None
        return _encode(found) if found is not None else b""

    async def _get(self, call: Call) -> None:
        request_id = call.path.removeprefix(_PREFIX).removesuffix(_SUFFIX)
        about = f"{call.tenant.name}{_SEPARATOR}{request_id}"
        found = self.answer(about)
        if not found and self._member is not None:
            found = next(iter(await self._member.ask(f"{TIMELINE} {about}")), b"")
        if not found:
            text = "no timeline of a request of yours has this id; it was never here, or others have taken its place"
            raise HttpError(404, text if self._timelines is not None else _OFF, code="not_found")
        await call.reply(200, found, (b"cache-control", b"no-store"))
