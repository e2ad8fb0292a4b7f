"""GET /v1/live: the live state as server-sent events. One state an interval serves all who watch.

A viewer that reads slowly gets the newest state when it has taken the one before, and never learns of those between.
Without a viewer nothing runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec

from bireme.openai.http.call import Call
from bireme.openai.http.error_replies import HttpError
from bireme.openai.http.event_stream import DONE, PREFIX, SUFFIX
from bireme.openai.http.members import Member
from bireme.openai.live.source import INTERVAL_S, LiveSource
from bireme.openai.live.state import LiveState, merged

LIVE = "live"  # of one member to another
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
_encode = msgspec.json.Encoder().encode
_encode_part = msgspec.msgpack.Encoder().encode
_decode_part = msgspec.msgpack.Decoder(LiveState).decode
logger = logging.getLogger("bireme.openai")


class LiveFeed:
    """Used on the frontend's loop."""

    def __init__(
        self, source: LiveSource, member: Member | None, max_viewers: int, is_draining: Callable[[], bool]
    ) -> None:
        self._source, self._member, self._is_draining = source, member, is_draining
        self._max_viewers = max_viewers if member is None else member.share_of(max_viewers) or 1
        self._num_viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._number, self._event = 0, b""  # the newest state
        self._is_over = False
        self._turn = asyncio.Event()  # set with the next state, and replaced

    async def get(self, call: Call) -> None:
        """Write states until the viewer leaves, or this process drains. Raises HttpError."""
        if not call.tenant.is_operator:
            raise HttpError(
                403, "this key may not see workers; `operator: true` in the key file lets it", code="not_an_operator"
            )
        if call.method == "HEAD":
            await call.reply(200, b"", _EVENTS)
            return
        if self._num_viewers >= self._max_viewers:
            raise HttpError(
                503, f"{self._num_viewers} watch already (frontend.live_viewers); close one, or raise the limit",
                "server_error", "overloaded", ((b"retry-after", b"5"),),
            )  # fmt: skip
        self._num_viewers += 1
        try:
            await call.end_body()
            if self._task is None:
                self._task = asyncio.get_running_loop().create_task(self._run())
            await call.unless_gone(self._show(call))
        finally:
            self._num_viewers -= 1
            if not self._num_viewers:
                self._stop()

    def part(self) -> bytes:
        """Return this process's part, for another process that is watched."""
        return _encode_part(self._source.state())

    def close(self) -> None:
        self._stop()
        self._source.close()

    def _stop(self) -> None:
        """Without a task the state is none, so that the next viewer waits for one that is new."""
        if self._task is not None:
            self._task.cancel()
            self._task, self._number, self._event = None, 0, b""
        self._is_over = False  # a drain can be undone

    async def _show(self, call: Call) -> None:
        seen = 0
        while not self._is_over:
            if seen == self._number:  # else there was a newer one while that one was written
                await self._turn.wait()
            seen = self._number
            await call.write_events(self._event, False)
        await call.write_events(DONE, True)

    async def _run(self) -> None:
        while not self._is_over:
            try:
                self._event = PREFIX + _encode(await self._state()) + SUFFIX
            except Exception:  # the next one may succeed
                logger.exception("live_state_failed")
            self._is_over = self._is_draining()
            self._number += 1
            turn, self._turn = self._turn, asyncio.Event()
            turn.set()
            await asyncio.sleep(INTERVAL_S)

    async def _state(self) -> LiveState:
        own = self._source.state()
        if self._member is None:
            return own
        others = [part for answer in await self._member.ask(LIVE) if (part := _part(answer)) is not None]
        return merged(own, others, self._member.count)


def _part(answer: bytes) -> LiveState | None:
    with contextlib.suppress(msgspec.MsgspecError):  # a process that has just ended, or another version's
        return _decode_part(answer)
    return None
