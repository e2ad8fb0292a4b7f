"""Where all pictures come in: URLs, data: URLs, files, raw bytes -> RGB pixels.

A source is judged by its first bytes: a known picture format is a picture, `scheme:` a URL, everything else is refused.
Fetching waits on the loop, decoding runs on a few threads. Errors say which picture and which limit, and never repeat a
path, a URL, a payload or an address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

from bireme.config import MediaLimits
from bireme.errors import BiremeError, RequestError, ResourceExhaustedError
from bireme.gathering import all_results
from bireme.multimodal.budget import Budget, PictureBudget
from bireme.multimodal.images import FORMATS, DecodedImage, decode_image, kind_of
from bireme.multimodal.inline import decode_data_url
from bireme.multimodal.local_files import LocalFiles
from bireme.multimodal.urls import scheme_of
from bireme.own_process import lower_thread_priority
from bireme.own_work import NO_MARK

if TYPE_CHECKING:
    from bireme.multimodal.fetch import HttpFetcher

_T = TypeVar("_T")
_DECODE_THREADS = 2  # each may hold a few times max_pixels bytes


class MediaLoader:
    """Belongs to one event loop: make and `close` it there. Raises ConfigError for a wrong media path."""

    def __init__(self, limits: MediaLimits, make_fetcher: Callable[[MediaLimits], HttpFetcher] | None = None) -> None:
        self._limits = limits
        self._files = LocalFiles(limits)
        self._fetcher = (make_fetcher or _http_fetcher)(limits)
        self._threads = ThreadPoolExecutor(_DECODE_THREADS, "media", lower_thread_priority)

    async def close(self) -> None:
        await self._fetcher.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def load(
        self,
        sources: Sequence[bytes | str],
        numbers: Sequence[int] | None = None,
        budget: Budget | None = None,
        mark: AbstractContextManager[None] = NO_MARK,
    ) -> list[DecodedImage]:
        """Return the pictures in order. Raises RequestError naming the first that fails; the others stop.

        `numbers` are the pictures' numbers in the request, for errors; None: 1, 2, ... `budget` is the request's, if it
        has more than these. `mark`: is held, by a thread, while it decodes one.
        """
        if len(sources) > self._limits.max_images:
            raise RequestError(f"{len(sources)} images; at most {self._limits.max_images} (media.max_images)")
        budget = budget or Budget(self._limits)
        names = range(len(sources)) if numbers is None else numbers
        return await all_results(self._named(*named, budget, mark) for named in zip(names, sources, strict=True))

    async def read(self, source: bytes | str, budget: Budget) -> bytes:
        """Return the bytes of computed embeddings, under the same rules. Raises RequestError."""
        part = budget.picture()
        if isinstance(source, bytes) and source[8:9] == b"{":  # safetensors: a length, then JSON
            part.take(len(source))
            return source
        return await self._read(source, part)

    async def _named(
        self, at: int, source: bytes | str, budget: Budget, mark: AbstractContextManager[None]
    ) -> DecodedImage:
        def decode() -> DecodedImage:
            with mark:
                return decode_image(content, self._limits, budget.take_pixels)

        try:
            content = await self._read(source, budget.picture())
            return await self._in_thread(decode)
        except BiremeError as error:
            raise type(error)(f"images[{at}]: {error}") from None
        except MemoryError:
            raise ResourceExhaustedError(f"images[{at}]: no memory for it now; try again") from None

    async def _read(self, source: bytes | str, budget: PictureBudget) -> bytes:
        if isinstance(source, bytes) and kind_of(source):
            budget.take(len(source))
            return source
        text = _text(source)
        scheme = scheme_of(text)
        if scheme in ("http", "https"):
            return await self._fetcher.fetch(text, budget)
        if scheme == "data":
            content = await self._in_thread(lambda: decode_data_url(text, budget))
        elif scheme == "file":
            content = await self._in_thread(lambda: self._files.read(text, budget))
        else:
            raise RequestError(f"neither {FORMATS} nor a URL that is fetched here; send https:, http: or data:")
        budget.take(len(content))
        return content

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _text(source: bytes | str) -> str:
    if isinstance(source, str):
        return source
    try:
        return source.decode("utf-8")
    except UnicodeDecodeError:
        raise RequestError(f"not a picture that is understood here; send {FORMATS}") from None


def _http_fetcher(limits: MediaLimits) -> HttpFetcher:
    from bireme.multimodal.fetch import HttpFetcher  # aiohttp: a third of a second that only this needs

    return HttpFetcher(limits)
