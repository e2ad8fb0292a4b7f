"""POST /v1/embeddings, /v1/score and /v1/rerank: what an embedding model makes of texts, and how alike they are."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from bireme.canary_mark import is_canary
from bireme.errors import RequestError
from bireme.openai.http.call import Call
from bireme.openai.text.answering import counted
from bireme.openai.text.embedding_model import EmbeddingModel, EmbeddingModels
from bireme.openai.text.embedding_request import (
    RANK_REFUSED,
    REFUSED,
    EmbeddingsBody,
    RerankBody,
    ScoreBody,
    documents_of,
    pairs_of,
    texts_of,
)
from bireme.pipelines.chat_answer import encode_json
from bireme.pipelines.json_body import decode_body
from bireme.request import Ids
from bireme.types import Floats

_ROWS_AT_ONCE = 32  # whose numbers are written before the loop has a turn: about a millisecond
Similarity = Callable[[Floats, Floats], Floats]  # (texts, size) of firsts and seconds -> (texts,)


_SIMILARITIES: dict[str, Similarity] = {
    "cosine": lambda firsts, seconds: (firsts * seconds).sum(1) / np.maximum(_length(firsts) * _length(seconds), 1e-12),
    "dot": lambda firsts, seconds: (firsts * seconds).sum(1),
    "euclidean": lambda firsts, seconds: -_length(firsts - seconds),
    "manhattan": lambda firsts, seconds: -np.abs(firsts - seconds).sum(1),
}


def _length(rows: Floats) -> Floats:
    lengths: Floats = np.linalg.norm(rows, axis=1)
    return lengths


class Embeddings:
    def __init__(self, models: EmbeddingModels) -> None:
        self._models = models

    async def embed(self, call: Call, data: bytes) -> None:
        body = decode_body(data, EmbeddingsBody, REFUSED)
        model = self._models.get(body.model)
        with counted(call, model):
            _check_dimensions(model, body.dimensions)
            texts = texts_of(body, model.recipe.limits)
            name_of = _one("input") if isinstance(body.input, str) or isinstance(body.input[0], int) else _many("input")
            ids = await model.embeddings.encode(texts, body.prompt_name, name_of)
            num_tokens = _take_tokens(call, ids)
            call.is_canary = is_canary(body.user or "")
            canary = body.user or "" if call.is_canary else ""
            rows = await call.unless_gone(model.embeddings.embed(ids, body.dimensions or 0, canary, call.trace))
            _charge(call, model, num_tokens)
            data = await _embeddings_json(rows, body.encoding_format == "base64")
            call.notes["outcome"] = "stop"
            usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
            reply = {"object": "list", "data": msgspec.Raw(data), "model": model.name, "usage": usage}
            await call.reply(200, encode_json(reply))

    async def score(self, call: Call, data: bytes) -> None:
        body = decode_body(data, ScoreBody, REFUSED)
        model = self._models.get(body.model)
        with counted(call, model):
            firsts, seconds = pairs_of(body)
            is_single = isinstance(body.text_1, str), isinstance(body.text_2, str)
            names = [_one(name) if single else _many(name)
                     for name, single in zip(("text_1", "text_2"), is_single, strict=True)]  # fmt: skip
            scores, num_tokens = await _scores(call, model, firsts, seconds, names)
            rows = [{"index": at, "object": "score", "score": score} for at, score in enumerate(scores)]
            reply = {
                "id": f"score-{secrets.token_hex(12)}",
                "object": "list",
                "created": int(time.time()),
                "model": model.name,
                "data": rows,
                "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            }
            await call.reply(200, encode_json(reply))

    async def rerank(self, call: Call, data: bytes) -> None:
        body = decode_body(data, RerankBody, RANK_REFUSED)
        model = self._models.get(body.model)
        with counted(call, model):
            texts = documents_of(body)
            scores, num_tokens = await _scores(call, model, [body.query], texts, [_one("query"), _many("documents")])
            best = sorted(range(len(texts)), key=lambda at: (-scores[at], at))[: body.top_n]
            results: list[dict[str, Any]] = [{"index": at, "relevance_score": scores[at]} for at in best]
            if body.return_documents:
                results = [one | {"document": {"text": texts[one["index"]]}} for one in results]
            reply = {
                "id": f"rerank-{secrets.token_hex(12)}",
                "model": model.name,
                "results": results,
                "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            }
            await call.reply(200, encode_json(reply))


def _check_dimensions(model: EmbeddingModel, dimensions: int | None) -> None:
    capacity = model.capacity
    if dimensions is not None and capacity is not None and dimensions > capacity.embedding_size:
        raise RequestError(f"dimensions: {dimensions}; this model has 1 to {capacity.embedding_size}")


def _take_tokens(call: Call, ids: Sequence[Ids]) -> int:
    """Count the tokens, and take them from the key's. Raises RateLimitError."""
    num_tokens = sum(map(len, ids))
    call.tenant.take_prompt(num_tokens)
    call.notes["prompt_tokens"] = num_tokens
    return num_tokens


def _charge(call: Call, model: EmbeddingModel, num_tokens: int) -> None:
    """Put them on the account of the key, if it has one."""
    if model.services.observer is not None and not call.is_canary:
        model.services.observer.embedded(call.tenant.name, num_tokens)


async def _scores(
    call: Call, model: EmbeddingModel, firsts: list[str], seconds: list[str], names: list[Callable[[int], str]]
) -> tuple[list[float], int]:
    """Return a score for each second text, and the tokens of all; the first ones are queries."""
    known = model.embeddings.texts.prompts
    query = "query" if "query" in known else None
    document = next((name for name in ("document", "passage") if name in known), None)
    ids = await model.embeddings.encode(list(firsts), query, names[0])
    ids += await model.embeddings.encode(list(seconds), document, names[1])
    num_tokens = _take_tokens(call, ids)
    if len(ids) > (limit := model.recipe.limits.max_embedding_inputs):
        raise RequestError(f"{len(ids)} texts; limits.max_embedding_inputs is {limit}, send fewer")
    rows = await call.unless_gone(model.embeddings.embed(ids, trace=call.trace))
    _charge(call, model, num_tokens)
    alike = _SIMILARITIES[model.embeddings.texts.similarity]
    scores: list[float] = alike(rows[: len(firsts)], rows[len(firsts) :]).tolist()
    call.notes["outcome"] = "stop"
    return scores, num_tokens


async def _embeddings_json(rows: Floats, in_base64: bool) -> bytes:
    """Return the list of embeddings as JSON, written in parts: thousands of numbers take a core for a while."""
    parts: list[bytes] = []
    for at, row in enumerate(rows):
        shown = base64.b64encode(row.astype("<f4", copy=False).tobytes()).decode() if in_base64 else row.tolist()
        parts.append(encode_json({"object": "embedding", "index": at, "embedding": shown}))
        if at % _ROWS_AT_ONCE == _ROWS_AT_ONCE - 1:
            await asyncio.sleep(0)
    return b"[" + b",".join(parts) + b"]"


def _one(name: str) -> Callable[[int], str]:
    return lambda at: name


def _many(name: str) -> Callable[[int], str]:
    return lambda at: f"{name}[{at}]"
