"""From an encode request to embeddings under lease: load, look up, batch, encode, offer.

Knows no engine: an `ImageEncoder` does the work, and `EmbeddingShare` holds what it made. Everything runs on one event
loop in a thread of its own, with `media` and `vision` threads; callers post from any thread and are called back on the
loop. Equal pictures that come at the same time are encoded once, pictures of different requests together in a batch. A
bad picture ends only its own request.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from bireme.config import MediaLimits, MultimodalConfig
from bireme.errors import (
    BiremeError,
    DeadlineExceededError,
    RequestCancelledError,
    RequestError,
    ResourceExhaustedError,
    UnavailableError,
)
from bireme.gathering import all_results
from bireme.messages import EncodeRequest, EncodeSource
from bireme.metrics import Registry
from bireme.multimodal.budget import Budget
from bireme.multimodal.embedding_cache import EmbeddingCache
from bireme.multimodal.embedding_share import EmbeddingRows, EmbeddingShare
from bireme.multimodal.media import MediaLoader
from bireme.multimodal.wire import EmbeddingHandle, Grid, peek_handle
from bireme.own_process import lower_thread_priority
from bireme.own_work import NO_MARK

logger = logging.getLogger("bireme.multimodal")
_T = TypeVar("_T")
_STOP_S = 3.0


class PreparedImage(Protocol):
    """A picture as the model wants it."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def grid(self) -> Grid | None: ...


class ImageEncoder(Protocol):
    """An engine's vision tower with its preprocessing. `encode` is called from one thread, the others from several."""

    @property
    def hidden_size(self) -> int: ...

    def name_of(self, content_hash: bytes) -> str:
        """Return the 64 hexadecimal digits that name a picture's embeddings: content, model, processor, dtype."""

    def prepare(self, pixels: Any) -> PreparedImage:
        """Scale and normalize (height, width, 3) uint8. Raises RequestError."""

    def encode(self, batch: Sequence[Any]) -> list[EmbeddingRows]: ...

    def read_embeddings(self, content: bytes) -> EncodedRows:
        """Check embeddings that a client computed (safetensors). Raises RequestError."""

    def write_embeddings(self, rows: Sequence[EmbeddingRows]) -> bytes:
        """Return safetensors with tensors image_0, image_1, ..."""


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """One picture's embeddings, as the cache keeps them."""

    name: str
    rows: EmbeddingRows
    grid: Grid | None

    @property
    def num_bytes(self) -> int:
        return self.rows.num_bytes


@dataclass(frozen=True, slots=True)
class EncodedPicture:
    encoded: EncodedRows
    handles: tuple[EmbeddingHandle, ...]


@dataclass(frozen=True, slots=True)
class EncodeOutcome:
    """The result of a job; the engine process signs the handles."""

    pictures: tuple[EncodedPicture, ...]
    hidden_size: int
    embeddings: bytes = b""


Done = Callable[[EncodeOutcome | BiremeError], None]  # once, on the loop's thread; quick, must not raise
Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Waiting:
    prepared: Any
    name: str
    result: asyncio.Future[EncodedRows]
    mark: AbstractContextManager[None]


class EncoderService:
    """Start it, `submit`, `abort`, `stop`; all from any thread."""

    def __init__(
        self,
        encoder: ImageEncoder,
        share: EmbeddingShare,
        config: MultimodalConfig,
        media: MediaLimits,
        metrics: Registry,
        max_queue_size: int,
        num_threads: int = 1,
        max_copies: int = 1,
        on_failure: Callable[[], None] = lambda: None,
        mark: Callable[[Key], AbstractContextManager[None]] = lambda key: NO_MARK,
    ) -> None:
        """`on_failure`: called on the encoder's thread after it could not encode a picture. `mark`: returns what is
        held by a thread while it works on a job's pictures alone.
        """
        self._on_failure, self._mark = on_failure, mark
        self._encoder, self._share, self._config, self._media = encoder, share, config, media
        self._metrics = metrics
        self._max_queue_size = max_queue_size
        self._num_threads, self._max_copies = num_threads, max_copies
        self._cache: EmbeddingCache[EncodedRows] = EmbeddingCache(config.embedding_cache_bytes, metrics)
        self._under_way: dict[str, asyncio.Future[EncodedRows]] = {}
        self._waiting: list[_Waiting] = []
        self._tasks: dict[Key, asyncio.Task[EncodeOutcome]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._is_encoding = self._is_stopping = False
        self._num_submitted = 0
        self._lock = threading.Lock()  # guards the count
        self.num_steps = 0
        self.step_began_at = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="encoder", daemon=True)
        self._has_started = threading.Event()
        self._failure: Exception | None = None

    @property
    def num_pending(self) -> int:
        return self._num_submitted

    def start(self) -> None:
        """Raises ConfigError for impossible media settings."""
        for name in ("hits", "misses", "evictions"):
            self._metrics.add(f"bireme_embedding_cache_{name}_total", 0)
        self._cache.publish()
        self._thread.start()
        self._has_started.wait()
        if self._failure is not None:
            raise self._failure

    def submit(self, key: Key, job: EncodeRequest, done: Done) -> None:
        """Queue a job. Raises RequestError, or ResourceExhaustedError when the queue is full."""
        self._check(job)
        with self._lock:
            if self._num_submitted >= self._max_queue_size:
                raise ResourceExhaustedError(
                    f"queue: {self._num_submitted} encode requests wait; scheduler_config.max_queue_size is"
                    f" {self._max_queue_size}; try again later"
                )
            self._num_submitted += 1
        self._loop.call_soon_threadsafe(self._begin, key, job, done)

    def release(self, handles: Sequence[str]) -> None:
        """Free embeddings that nobody will fetch."""
        self._loop.call_soon_threadsafe(self._release, handles)

    def abort(self, key: Key) -> None:
        """Stop a job, or end the leases of one that has ended."""
        self._loop.call_soon_threadsafe(self._abort, key)

    def stop(self) -> None:
        """End all jobs with UNAVAILABLE, then the threads. May be called again."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_STOP_S)

    def _check(self, job: EncodeRequest) -> None:
        if not job.sources:
            raise RequestError("images: none; send at least one")
        if len(job.sources) > self._media.max_images:
            raise RequestError(f"{len(job.sources)} images; at most {self._media.max_images} (media.max_images)")
        if not 1 <= job.copies <= self._max_copies:
            raise RequestError(f"copies: {job.copies}; 1 to {self._max_copies} (limits.max_n)")

    # The loop's thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loader = self._loop.run_until_complete(_made(lambda: MediaLoader(self._media)))
        except Exception as error:
            self._failure = error
            return
        finally:
            self._has_started.set()
        self._vision = ThreadPoolExecutor(1, "vision", self._set_threads)
        self._processors = ThreadPoolExecutor(2, "processor", self._begin_processor)
        self._slots = asyncio.Semaphore(self._config.max_concurrent_encodes)
        self._loop.run_forever()
        self._loop.run_until_complete(self._close())
        self._loop.close()

    def _set_threads(self) -> None:
        begin = getattr(self._encoder, "begin_thread", None)
        if begin is not None:
            begin(self._num_threads)

    def _begin_processor(self) -> None:
        self._set_threads()
        lower_thread_priority()

    async def _close(self) -> None:
        tasks: list[asyncio.Task[Any]] = [*self._tasks.values(), *self._background]
        self._is_stopping = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loader.close()
        for pool in (self._vision, self._processors):
            pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self, key: Key, job: EncodeRequest, done: Done) -> None:
        task = self._tasks[key] = self._loop.create_task(self._within_limit(key, job))
        # Not by the task itself: one that is cancelled before its first step never runs.
        task.add_done_callback(lambda ended: self._finish(key, ended, done))

    def _abort(self, key: Key) -> None:
        if (task := self._tasks.get(key)) is not None:
            task.cancel()
        else:
            self._share.abort(key)

    def _release(self, handles: Sequence[str]) -> None:
        for text in handles:
            try:
                self._share.release(peek_handle(text))
            except BiremeError as error:
                logger.warning("handle_not_released error=%s", error)

    async def _within_limit(self, key: Key, job: EncodeRequest) -> EncodeOutcome:
        limit_ms = job.timeout_ms
        try:
            async with asyncio.timeout(limit_ms / 1000 if limit_ms else None):
                return await self._outcome(key, job)
        except TimeoutError:
            raise DeadlineExceededError(f"timeout_ms: {limit_ms} ms have passed") from None

    def _finish(self, key: Key, task: asyncio.Task[EncodeOutcome], done: Done) -> None:
        outcome = self._outcome_of(task)
        if isinstance(outcome, BiremeError):
            self._share.abort(key)
        del self._tasks[key]
        with self._lock:
            self._num_submitted -= 1
        self.num_steps += 1
        done(outcome)

    def _outcome_of(self, task: asyncio.Task[EncodeOutcome]) -> EncodeOutcome | BiremeError:
        if task.cancelled():
            if self._is_stopping:
                return UnavailableError("the encoder has stopped; try again")
            return RequestCancelledError("the request was aborted")
        error = task.exception()
        if error is None or isinstance(error, BiremeError):
            return error or task.result()
        logger.error("encode_failed", exc_info=error)
        return BiremeError(f"{type(error).__name__}: {error}")

    async def _outcome(self, key: Key, job: EncodeRequest) -> EncodeOutcome:
        async with self._slots:
            encoded = await self._pictures(job.sources, self._mark(key))
        pictures = tuple(self._offer(key, one, job.copies) for one in encoded)
        inline = b""
        if job.inline:
            inline = await self._in(self._processors, lambda: self._encoder.write_embeddings([e.rows for e in encoded]))
        return EncodeOutcome(pictures, self._encoder.hidden_size, inline)

    def _offer(self, key: Key, encoded: EncodedRows, copies: int) -> EncodedPicture:
        offers = (self._share.offer(key, encoded.rows, encoded.name, encoded.grid) for _ in range(copies))
        return EncodedPicture(encoded, tuple(offers))

    async def _pictures(self, sources: Sequence[EncodeSource], mark: AbstractContextManager[None]) -> list[EncodedRows]:
        at_images = [at for at, source in enumerate(sources) if source.kind == "image"]
        at_others = [at for at, source in enumerate(sources) if source.kind != "image"]
        budget = Budget(self._media)
        images = await self._loader.load([sources[at].content for at in at_images], at_images, budget, mark)
        work = [
            self._image(image.pixels, image.content_hash, at, mark) for image, at in zip(images, at_images, strict=True)
        ]
        work += [self._precomputed(sources[at].content, at, budget) for at in at_others]
        results = await all_results(work)
        found = dict(zip([*at_images, *at_others], results, strict=True))
        return [found[at] for at in range(len(sources))]

    async def _precomputed(self, source: bytes, at: int, budget: Budget) -> EncodedRows:
        try:
            content = await self._loader.read(source, budget)
            return await self._in(self._processors, lambda: self._encoder.read_embeddings(content))
        except BiremeError as error:
            raise type(error)(f"images[{at}]: {error}") from None

    async def _image(
        self, pixels: Any, content_hash: bytes, at: int, mark: AbstractContextManager[None]
    ) -> EncodedRows:
        name = self._encoder.name_of(content_hash)
        if (known := self._cache.get(name)) is not None:
            self._metrics.add("bireme_embedding_cache_hits_total")
            return known
        future = self._under_way.get(name)
        if future is None:
            self._metrics.add("bireme_embedding_cache_misses_total")
            future = self._under_way[name] = self._loop.create_future()
            future.add_done_callback(lambda ended: self._ended(name, ended))
            self._in_background(self._prepare(name, pixels, future, mark))
        else:
            self._metrics.add("bireme_embedding_cache_hits_total")
        try:
            return await asyncio.shield(future)
        except BiremeError as error:
            raise type(error)(f"images[{at}]: {error}") from None

    def _ended(self, name: str, future: asyncio.Future[EncodedRows]) -> None:
        del self._under_way[name]
        if not future.cancelled() and future.exception() is None:
            self._cache.put(name, future.result())

    async def _prepare(
        self, name: str, pixels: Any, future: asyncio.Future[EncodedRows], mark: AbstractContextManager[None]
    ) -> None:
        try:
            prepared = await self._in(self._processors, lambda: self._encoder.prepare(pixels), mark)
        except asyncio.CancelledError:
            future.cancel()
            raise
        except Exception as error:
            future.set_exception(_own(error))
            return
        self._waiting.append(_Waiting(prepared, name, future, mark))
        if not self._is_encoding:
            self._is_encoding = True
            self._in_background(self._encode_waiting())

    async def _encode_waiting(self) -> None:
        try:
            while self._waiting:
                count = self._config.max_batch_images
                batch, self._waiting = self._waiting[:count], self._waiting[count:]
                await self._encode_batch(batch)
        except asyncio.CancelledError:
            for item in self._waiting:
                item.result.cancel()
            raise
        finally:
            self._is_encoding = False

    async def _encode_batch(self, batch: list[_Waiting]) -> None:
        """A failed batch is done again picture by picture, so that only the bad one fails."""
        try:
            marks = {id(item.mark): item.mark for item in batch}
            mark = batch[0].mark if len(marks) == 1 else NO_MARK
            rows = await self._timed([item.prepared for item in batch], mark)
        except asyncio.CancelledError:
            for item in batch:
                item.result.cancel()
            raise
        except Exception as error:
            if len(batch) == 1:
                logger.exception("picture_failed")
                batch[0].result.set_exception(_own(error))
                await self._in(self._vision, self._on_failure)
                return
            for item in batch:
                await self._encode_batch([item])
            return
        for item, one in zip(batch, rows, strict=True):
            item.result.set_result(EncodedRows(item.name, one, item.prepared.grid))

    async def _timed(self, batch: list[Any], mark: AbstractContextManager[None]) -> list[EmbeddingRows]:
        self.step_began_at = began = time.monotonic()
        try:
            rows = await self._in(self._vision, lambda: self._encoder.encode(batch), mark)
        finally:
            self.step_began_at = 0.0
            self.num_steps += 1
        self._metrics.add("bireme_images_encoded_total", len(batch))
        self._metrics.observe("bireme_image_encode_seconds", time.monotonic() - began)
        return rows

    async def _in(
        self, pool: ThreadPoolExecutor, work: Callable[[], _T], mark: AbstractContextManager[None] = NO_MARK
    ) -> _T:
        def marked() -> _T:
            with mark:
                return work()

        return await self._loop.run_in_executor(pool, marked)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _own(error: Exception) -> BiremeError:
    if isinstance(error, BiremeError):
        return error
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return ResourceExhaustedError("no memory to encode it now; try again")
    return BiremeError(f"it could not be encoded: {type(error).__name__}")


async def _made(make: Callable[[], _T]) -> _T:
    return make()
