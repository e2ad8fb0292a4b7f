"""Embeddings from the workers of one model, for the frontend."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import Sequence

import numpy as np

from bireme.errors import EngineStalledError, UnavailableError
from bireme.gathering import all_results
from bireme.kv.routing.generations import choose, weights_of
from bireme.messages import EmbedRequest
from bireme.metrics import Registry
from bireme.pipelines.services import Services
from bireme.request import Ids
from bireme.request_trace import RequestTrace
from bireme.text.embedding_encoder import EmbeddingEncoder, NameOf
from bireme.text.tokenizer import TextTokenizer
from bireme.types import Floats

STAGE = "embedding"
_PART_BYTES = 8 << 20  # of the embeddings of one call: they pass through shared memory, which may be small
_USUAL_SIZE = 4096  # while the model's is not known


class EmbeddingService:
    """Used on one loop."""

    def __init__(self, services: Services, tokenizer: TextTokenizer, metrics: Registry) -> None:
        """Raises ConfigError."""
        self._services = services
        self._encoder = EmbeddingEncoder(tokenizer, services.recipe, metrics)
        self.texts = self._encoder.texts
        self._draw = random.Random()
        self._num_tokens: Counter[str] = Counter()  # under way, by worker
        self._num_asked: Counter[str] = Counter()  # requests that it was given so far, by worker

    async def encode(self, texts: Sequence[str | Ids], prompt_name: str | None, name_of: NameOf) -> list[Ids]:
        """Return each text's ids. Raises RequestError."""
        capacity = self._services.capacity(STAGE)
        return await self._encoder.encode(texts, prompt_name, capacity.max_seq_len if capacity else None, name_of)

    async def embed(
        self, texts: Sequence[Ids], dimensions: int = 0, canary: str = "", trace: RequestTrace | None = None
    ) -> Floats:
        """Return (texts, dimensions). `canary`: the launch's mark, if it asks. Raises errors of errors.py."""
        capacity = self._services.capacity(STAGE)
        size = dimensions or (capacity.embedding_size if capacity else _USUAL_SIZE)
        count = max(1, _PART_BYTES // (4 * size))
        parts = [texts[at : at + count] for at in range(0, len(texts), count)]
        generation, *others = self._generations()
        while True:  # all vectors of a request are of one generation, since they are compared
            calls = (self._embed_part(part, dimensions, canary, trace, generation) for part in parts)
            try:
                return np.concatenate(await all_results(calls))
            except UnavailableError as error:
                if isinstance(error, EngineStalledError) or not others:
                    raise
                generation = others.pop(0)

    async def _embed_part(
        self, texts: Sequence[Ids], dimensions: int, canary: str, trace: RequestTrace | None, generation: int | None
    ) -> Floats:
        """Ask the worker with the fewest tokens under way, of equals in turn; another one when that is down."""
        request = EmbedRequest(
            prompts=tuple(text.tobytes() for text in texts),
            dimensions=dimensions,
            timeout_ms=int(self._services.recipe.pipeline.request_timeout_s * 1000),
            canary=canary,
        )
        num_tokens = sum(map(len, texts))
        failure = UnavailableError("no embedding worker takes requests now; try again")
        workers = self._services.stage_workers(STAGE, generation)
        for worker in sorted(workers, key=lambda name: (self._num_tokens[name], self._num_asked[name])):
            self._num_tokens[worker] += num_tokens
            self._num_asked[worker] += 1
            try:
                if trace is None:
                    return await self._ask(worker, request)
                with trace.span("embed", worker=worker, texts=len(texts), tokens=num_tokens):
                    return await self._ask(worker, request)
            except UnavailableError as error:
                if isinstance(error, EngineStalledError) and isinstance(failure, EngineStalledError):
                    raise  # a second one, so it may be for its sake: no third engine gets it
                failure = error
            finally:
                self._num_tokens[worker] -= num_tokens
        raise failure

    def _generations(self) -> list[int | None]:
        """Return those to try, one after the other; None: there is only one."""
        if self._services.num_generations == 1:
            return [None]
        weights = weights_of(one for one in self._services.members.values() if one.stage == STAGE)
        if not weights:
            return [None]
        first = choose(weights, "", self._draw)
        return [first, *sorted(weights.keys() - {first}, reverse=True)]

    def close(self) -> None:
        self._encoder.close()

    async def _ask(self, worker: str, request: EmbedRequest) -> Floats:
        request_id = secrets.token_hex(16)
        try:
            return await self._services.workers.embed(worker, request, request_id)
        except asyncio.CancelledError:
            self._services.run_in_background(self._services.workers.abort_embed(worker, request_id))
            raise
