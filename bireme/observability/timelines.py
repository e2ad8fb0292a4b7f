"""The timelines of the latest requests: a bounded ring, and those that run now.

What is kept is bytes, made once at a request's end: the ring costs the collector nothing, and its bound is exact. A
timeline is read out of them when somebody asks.
"""

from __future__ import annotations

import time
from collections import OrderedDict

import msgspec

from bireme.observability.timeline import KeptSequence, KeptTrace, Timeline, timeline_of
from bireme.request_trace import RequestTrace

RESPONSE_ID = "gen_ai.response.id"  # attribute of a trace's root: the answer's own id
_ENTRY_BYTES = 600  # of one, beside what is kept of it
_MAX_SHARE = 8  # one entry takes at most this part of all bytes; of a larger one tokens' times are left out
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(KeptTrace).decode
_Key = tuple[str, str]  # the API key's name, an id


class Timelines:
    """Used on one loop. Only who has a request's key finds it."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._kept: OrderedDict[_Key, tuple[bytes, _Key | None]] = OrderedDict()  # with the other id's key
        self._requests: dict[_Key, _Key] = {}  # answers' own ids -> requests'
        self._running: dict[_Key, RequestTrace] = {}
        self.num_bytes = 0

    def begin(self, trace: RequestTrace) -> None:
        """Take a request that can be asked for from now on."""
        self._running[trace.tenant, trace.request_id] = trace

    def drop(self, trace: RequestTrace) -> None:
        """Forget a running one."""
        key = trace.tenant, trace.request_id
        if self._running.get(key) is trace:
            del self._running[key]

    def keep(self, trace: RequestTrace) -> None:
        """Take a request that has ended; of two with one id the newer one."""
        key = trace.tenant, trace.request_id
        self.drop(trace)
        self._remove(key)
        blob = _encode(_kept(trace))
        if len(blob) > self._max_bytes // _MAX_SHARE:
            blob = _encode(_kept(trace, has_times=False))
        response_id = str(trace.root.attributes.get(RESPONSE_ID, ""))
        other = (trace.tenant, response_id) if response_id else None
        if other is not None:
            self._requests[other] = key
        self._kept[key] = blob, other
        self.num_bytes += len(blob) + _ENTRY_BYTES
        while len(self._kept) > self._max_entries or self.num_bytes > self._max_bytes:
            self._remove(next(iter(self._kept)))

    def find(self, tenant: str, an_id: str) -> Timeline | None:
        """Return the timeline of a request or answer with this id; None: this key has none."""
        key = tenant, an_id
        trace = self._running.get(key) or next(
            (one for one in self._running.values() if (one.tenant, one.root.attributes.get(RESPONSE_ID)) == key), None
        )
        if trace is not None:
            return timeline_of(_kept(trace), time.time_ns() // 1000)
        kept = self._kept.get(key) or self._kept.get(self._requests.get(key, ("", "")))
        return timeline_of(_decode(kept[0]), 0) if kept is not None else None

    def _remove(self, key: _Key) -> None:
        if (kept := self._kept.pop(key, None)) is None:
            return
        blob, other = kept
        self.num_bytes -= len(blob) + _ENTRY_BYTES
        if other is not None and self._requests.get(other) == key:
            del self._requests[other]


def _kept(trace: RequestTrace, has_times: bool = True) -> KeptTrace:
    sequences = []
    for one in trace.sequences:
        times = one.token_times if has_times else None
        usage = one.usage
        sequences.append(
            KeptSequence(
                one.index,
                len(one.prompt),
                usage.cached_tokens if usage is not None else 0,
                usage.completion_tokens if usage is not None else 0,
                one.finish_reason,
                one.first_token_us,
                times.times_us.tolist() if times is not None else [],
                times.counts.tolist() if times is not None else [],
            )
        )
    response_id = str(trace.root.attributes.get(RESPONSE_ID, ""))
    return KeptTrace(trace.request_id, response_id, trace.trace_id, trace.spans, sequences)
