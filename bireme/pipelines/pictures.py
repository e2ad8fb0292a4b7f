"""The pictures of one chat request, from content parts to embeddings that engines can fetch.

They are encoded before the prompt is known, because it depends on their number of tokens. Each attempt of a sequence
then takes a set of handles, good for one fetch; an attempt after a loss has the pictures encoded again, which the
encoder's cache makes cheap. Unused handles are given back, so that no lease waits for its timer.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bireme.canary_mark import is_canary
from bireme.child_process import Backoff
from bireme.config import Recipe
from bireme.discovery.records import is_like
from bireme.errors import (
    BiremeError,
    DeadlineExceededError,
    EngineLostError,
    EngineStalledError,
    RequestError,
    UnavailableError,
)
from bireme.kv.blocks.hashing import MediaSpan
from bireme.messages import EncodeRequest, EncodeSource
from bireme.multimodal.model_config import PictureModel
from bireme.multimodal.placeholders import Ids, expand
from bireme.multimodal.wire import EncodeAnswer, MediaItem, encode_multimodal
from bireme.pipelines.services import Services
from bireme.workers.base import UnreachableError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_NUMBERED = re.compile(r"images\[(\d+)\]: ")


@dataclass(frozen=True, slots=True)
class PictureSource:
    source: EncodeSource
    where: str  # messages[0].content[1].image_url, for errors
    part: str = "image_url"  # its type in the request


class RequestPictures:
    """Belongs to one request; used on one loop."""

    def __init__(
        self, services: Services, model: PictureModel, sources: Sequence[PictureSource], deadline: float = 0.0,
        cache_salt: str = "", session_id: str = "", generation: int | None = None,
    ) -> None:  # fmt: skip
        """`deadline`: time.monotonic(); 0: none. `cache_salt`: the request's, which tells a canary. `generation`: as it
        asks for; None: by weight.
        """
        self.generation = services.router.choose_generation(session_id, generation)  # that encodes; None: only one is
        self._services, self._model, self._deadline = services, model, deadline
        self._canary = cache_salt if is_canary(cache_salt) else ""
        self._sources = tuple(sources)
        self._items: tuple[MediaItem, ...] = ()
        self._stock: list[_Handles] = []

    async def expand(self, ids: Ids, copies: int) -> Ids:
        """Return the prompt with room for each picture's embeddings. Raises RequestError naming the content part."""
        self._stock, answer = await self._encode(copies)
        try:
            expanded, places = expand(ids, self._model.placeholder, [one.num_tokens for one in answer.pictures])
        except RequestError:
            self.close()
            raise
        self._items = tuple(
            MediaItem(hash=one.hash, num_tokens=one.num_tokens, position=place, grid=one.grid)
            for one, place in zip(answer.pictures, places, strict=True)
        )
        return expanded

    @property
    def spans(self) -> tuple[MediaSpan, ...]:
        """Where the pictures lie in the prompt, for the hashes of its blocks."""
        return tuple(
            MediaSpan(item.position, item.position + item.num_tokens, bytes.fromhex(item.hash)) for item in self._items
        )

    @property
    def places(self) -> bytes:
        """The request's `multimodal` for a worker that gets the pictures' KV."""
        return encode_multimodal(self._items)

    async def take(self, revision: str = "") -> RequestEmbeddings:
        """Return handles for one attempt, newly encoded if none are left, or none of this revision of the model."""
        if self._stock and not is_like(self._stock[0].revision, revision):
            self.close()
        if not self._stock:
            self._stock, answer = await self._encode(1, revision)
            if [one.hash for one in answer.pictures] != [item.hash for item in self._items]:
                raise RequestError(f"{self._sources[0].where}: it has changed between two fetches; send it again")
            if [one.num_tokens for one in answer.pictures] != [item.num_tokens for item in self._items]:
                self.close()
                raise UnavailableError(
                    f"{self._sources[0].where}: revision {revision} of the model has another number of tokens for it"
                    " than the prompt, which one that has left has made room in; send it again"
                )
        return RequestEmbeddings(self._services, self._stock.pop(), self._items)

    def close(self) -> None:
        stock, self._stock = self._stock, []
        for handles in stock:
            self._services.run_in_background(self._services.workers.release(handles.worker, handles.texts))

    async def _encode(self, copies: int, revision: str = "") -> tuple[list[_Handles], EncodeAnswer]:
        """Encode on one worker after another until one can. `revision`: that it must have; "": any."""
        recipe, tries = self._services.recipe, _Tries(self._services.recipe)
        at, pauses = secrets.randbelow(1 << 16), Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            workers = self._services.stage_workers(recipe.encoder_stage, self.generation, revision)
            try:
                if not workers:
                    needed = f" of the model's revision {revision}" if revision else ""
                    raise UnavailableError(f"no {recipe.encoder_stage} worker{needed} takes pictures now; try again")
                worker = workers[at % len(workers)]
                record = self._services.members[worker]
                answer = await self._encode_on(worker, copies)
                if self.generation is not None:
                    self.generation = record.generation
                return _handles(answer, worker, record.revision), answer
            except UnavailableError as error:
                tries.count(error)
            at += 1
            if not workers or at % len(workers) == 0:
                await asyncio.sleep(pauses.next_s())

    async def _encode_on(self, worker: str, copies: int) -> EncodeAnswer:
        sources = tuple(one.source for one in self._sources)
        request = EncodeRequest(sources=sources, copies=copies, canary=self._canary, timeout_ms=self._timeout_ms())
        request_id = secrets.token_hex(16)
        call = asyncio.ensure_future(self._services.workers.encode(worker, request, request_id))
        try:
            answer = await asyncio.shield(call)
        except asyncio.CancelledError:
            self._services.run_in_background(_abandon(self._services, worker, request_id, call))
            raise
        except BiremeError as error:
            raise self._placed(error) from None
        if len(answer.pictures) != len(self._sources):
            raise BiremeError(f"{worker}: {len(answer.pictures)} pictures came back of {len(self._sources)}")
        return answer

    def _placed(self, error: BiremeError) -> BiremeError:
        """Name the content part instead of the encoder's number of the picture."""
        text = str(error)
        match = _NUMBERED.match(text)
        if match is None or int(match.group(1)) >= len(self._sources):
            return error
        return type(error)(f"{self._sources[int(match.group(1))].where}: {text[match.end() :]}")

    def _timeout_ms(self) -> int:
        if not self._deadline:
            return 0
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceededError("the request's time limit has passed, its images were not encoded")
        return max(1, int(remaining_s * 1000))


class _Tries:
    """What has failed of one encode."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._began, self._num_losses, self._num_stalls = recipe, time.monotonic(), 0, 0

    def count(self, error: UnavailableError) -> None:
        """Raises UnavailableError when no other worker is to try."""
        pipeline = self._recipe.pipeline
        if isinstance(error, EngineLostError):
            self._num_losses += 1
            self._num_stalls += isinstance(error, EngineStalledError)  # perhaps for its sake: no third engine gets it
            if self._num_losses > pipeline.migration_limit or self._num_stalls > 1:
                tried = f"tried {self._num_losses} times (pipeline.migration_limit)"
                raise UnavailableError(f"{error}; {tried}") from error
        elif isinstance(error, UnreachableError) and not self._recipe.discovery.is_shared:
            raise error
        elif time.monotonic() - self._began > pipeline.stall_timeout_s:
            raise error


class RequestEmbeddings:
    """The handles of one attempt."""

    def __init__(self, services: Services, handles: _Handles, items: tuple[MediaItem, ...]) -> None:
        self._services, self._handles = services, handles
        pairs = zip(items, handles.texts, strict=True)
        self.multimodal = encode_multimodal(tuple(_with_handle(item, text) for item, text in pairs))

    def release(self) -> None:
        """Free what has not been fetched, in the background; may be called after all was."""
        self._services.run_in_background(self._services.workers.release(self._handles.worker, self._handles.texts))


@dataclass(frozen=True, slots=True)
class _Handles:
    worker: str
    revision: str  # of the model that made the embeddings; "": not known
    texts: tuple[str, ...]  # one a picture


def _handles(answer: EncodeAnswer, worker: str, revision: str = "") -> list[_Handles]:
    return [_Handles(worker, revision, texts) for texts in zip(*(one.handles for one in answer.pictures), strict=True)]


def _with_handle(item: MediaItem, text: str) -> MediaItem:
    return MediaItem(hash=item.hash, num_tokens=item.num_tokens, position=item.position, grid=item.grid, handle=text)


async def _abandon(services: Services, worker: str, request_id: str, call: asyncio.Future[EncodeAnswer]) -> None:
    """Stop an encode that is no longer wanted; free its results if it has ended."""
    await services.workers.abort_encode(worker, request_id)
    try:
        answer = await call
    except BiremeError:
        return
    for handles in _handles(answer, worker):
        await services.workers.release(handles.worker, handles.texts)
