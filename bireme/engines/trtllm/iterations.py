"""TensorRT-LLM's iteration statistics and KV events, read on a thread with a loop of its own.

Reading empties both queues, so this is their only reader; everything else asks here. Without input the reads become
rarer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bireme.engines.trtllm.kv_events import KvEventReader, PicturePlaces
from bireme.engines.trtllm.series import SeriesRelay
from bireme.engines.trtllm.step_records import record_of
from bireme.kv.blocks.events import BlocksRemoved, BlocksStored, KvEvent
from bireme.kv.blocks.hashing import MediaSpan
from bireme.kv.wire.step_records import StepRing
from bireme.metrics import Registry

logger = logging.getLogger("bireme.engines.trtllm")

MAX_BATCH = 256  # items of one read, so that both readers get their turn
STATS_PAUSE_S = (0.01, 0.1)  # least and most between two reads
EVENTS_PAUSE_S = (0.005, 0.02)
_RETRY_S = 1.0
_RELAY_S = 0.5
_QUIET_S = 0.5  # without an iteration for so long the engine is idle


class Iterations:
    """`start` after the first generation: before it the engine's own loop may not exist."""

    def __init__(
        self,
        llm: Any,
        metrics: Registry,
        relay: SeriesRelay,
        tokens_per_block: int,
        event_buffer: int,
        has_stats: bool,
        events_name_owners: bool = True,
        places: PicturePlaces | None = None,
        steps: StepRing | None = None,
    ) -> None:
        self._llm = llm
        self._steps = steps
        self._metrics = metrics
        self._relay, self._relay_error = relay, ""
        self._has_stats = has_stats
        self._reader = KvEventReader(tokens_per_block, has_owners=events_name_owners, places=places)
        self._events: deque[KvEvent] = deque(maxlen=event_buffer or 1)
        self._has_events = event_buffer > 0
        self._used: dict[int, int] = {}  # by rank: blocks
        self._total: dict[int, int] = {}
        self._last_at = 0.0
        self._has_pool_size = threading.Event()
        self._failures: Counter[tuple[str, str]] = Counter()  # (queue, kind of error)
        self._stops = threading.Event()
        self._reading: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="trtllm-iterations", daemon=True)
        self.num_seen = 0
        self.is_idle: Callable[[], bool] = lambda: False  # no request is open

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stops.set()
        if self._thread.is_alive():
            if self._reading is not None:
                self._reading[0].call_soon_threadsafe(self._reading[1].cancel)
            self._thread.join(1)

    def take_kv_events(self) -> list[KvEvent]:
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events

    def request_begins(self, prompt: Sequence[int], media: Sequence[MediaSpan] = ()) -> None:
        """Before TensorRT-LLM has one with a salt or adapter: its blocks are not to be shared."""
        if self._has_events:
            self._reader.expect_owned(prompt, media)

    def pool_size(self, timeout_s: float) -> int:
        """Waits for the first statistics; 0: they don't tell."""
        self._has_pool_size.wait(timeout_s if self._has_stats else 0)
        return max(self._total.values(), default=0)

    @property
    def num_blocks_used(self) -> int:
        return sum(list(self._used.values()))

    @property
    def num_blocks(self) -> int:
        return sum(list(self._total.values()))

    def request_ended(self, result: Any) -> None:
        self._relay.request_ended(getattr(result, "metrics_dict", None) or {})

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._read_all())

    async def _read_all(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._reading = (asyncio.get_running_loop(), task)
        tasks = [self._relay_series()]
        if self._has_stats:
            tasks.append(self._read("stats", self._llm.get_stats_async, self._take_stats, STATS_PAUSE_S))
        if self._has_events:
            ask = self._llm.get_kv_cache_events_async
            tasks.append(self._read("kv_events", ask, self._take_event, EVENTS_PAUSE_S))
        await asyncio.gather(*tasks)

    async def _read(
        self, name: str, ask: Callable[..., Any], take: Callable[[Mapping[str, Any]], None], pauses: tuple[float, float]
    ) -> None:
        """An engine's error is logged, and the read repeated."""
        pause = pauses[0]
        while not self._stops.is_set():
            try:
                count = await self._drain(ask, take)
            except Exception as error:
                self._tell_failure(name, error)
                count = 0
                await asyncio.sleep(_RETRY_S)
            pause = pauses[0] if count else min(2 * pause, pauses[1])
            await asyncio.sleep(pause)

    def _tell_failure(self, name: str, error: Exception) -> None:
        """Log the first of a kind with its traceback, then the count at each power of ten."""
        kind = type(error).__name__
        self._failures[name, kind] += 1
        count = self._failures[name, kind]
        if count == 1:
            logger.error("read_failed queue=%s kind=%s", name, kind, exc_info=error)
        elif str(count).strip("0") == "1":
            logger.error("read_failed queue=%s kind=%s count=%d error=%s", name, kind, count, error)

    async def _drain(self, ask: Callable[..., Any], take: Callable[[Mapping[str, Any]], None]) -> int:
        """Take what is there. Asked with a timeout, the shared result of 1.2 and 1.3 would end for good."""
        count = 0
        with contextlib.suppress(asyncio.QueueEmpty, asyncio.TimeoutError, TimeoutError):
            async for item in ask(timeout=0):
                take(item)
                count += 1
                if count >= MAX_BATCH:
                    break
        return count

    def _take_stats(self, stats: Mapping[str, Any]) -> None:
        """A missing field leaves its gauge unchanged."""
        self.num_seen += 1
        self._last_at = time.monotonic()
        blocks, rank = stats.get("kvCacheStats") or {}, int(stats.get("attentionDpRank") or 0)
        if (latency := stats.get("iterLatencyMS")) is not None and not rank:  # the ranks step together
            self._metrics.observe("bireme_engine_step_seconds", latency / 1e3)
        if "usedNumBlocks" in blocks:
            self._used[rank] = blocks["usedNumBlocks"]
            self._metrics.set("bireme_kv_blocks_used", sum(self._used.values()))
        if "maxNumBlocks" in blocks:
            self._total[rank] = blocks["maxNumBlocks"]
            self._metrics.set("bireme_kv_blocks_total", sum(self._total.values()))
            self._has_pool_size.set()
        if self._steps is not None and (record := record_of(stats)) is not None:
            self._steps.add(record)
        self._relay.iteration(stats)

    def _take_event(self, event: Mapping[str, Any]) -> None:
        gaps = self._reader.num_gaps
        found = self._reader.read(event)
        if self._reader.num_gaps > gaps:
            self._metrics.add("bireme_kv_event_gaps_total", self._reader.num_gaps - gaps)
        for one in found:
            if isinstance(one, BlocksStored):
                self._metrics.add("bireme_kv_events_total", len(one.blocks), "stored")
            elif isinstance(one, BlocksRemoved):
                self._metrics.add("bireme_kv_events_total", len(one.block_hashes), "removed")
        with self._lock:
            self._events += found

    async def _relay_series(self) -> None:
        while not self._stops.is_set():
            await asyncio.sleep(_RELAY_S)
            try:
                self._settle()
                self._relay.relay()
            except Exception as error:  # of another release's series: statistics and events are still read
                if str(error) != self._relay_error:
                    logger.exception("series_not_relayed")
                self._relay_error = str(error)

    def _settle(self) -> None:
        """The last iteration's statistics may be from before its requests were freed, and no more follow."""
        if any(self._used.values()) and self.is_idle() and time.monotonic() - self._last_at > _QUIET_S:
            self._used.clear()
            self._metrics.set("bireme_kv_blocks_used", 0)
