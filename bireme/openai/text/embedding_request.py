"""Requests for embeddings (OpenAI's), scores (vLLM's) and rankings (Cohere's and Jina's), as JSON and checked."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from bireme.config import Limits
from bireme.errors import RequestError
from bireme.openai.text.listed_texts import ListedTexts
from bireme.pipelines.chat_request import check_metadata
from bireme.request import Ids, check_ids

_INPUT = ListedTexts("input", "a text", "texts", "limits.max_embedding_inputs")
_CUTS = "texts are not cut here: a part's embedding would pass for the whole's; shorten or split them"
REFUSED = {
    "messages": "conversations are not embedded; send input",
    "add_special_tokens": "the tokenizer decides; send token ids for a text without them",
    "truncate_prompt_tokens": _CUTS,
    "truncate": _CUTS,
    "normalize": "as the model's files say; remove it",
    "input_type": "send prompt_name, one of the model's prompts (query, document)",
    "task": "send prompt_name, one of the model's prompts (query, document)",
    "stream": "the answer comes whole; remove it",
}
RANK_REFUSED = REFUSED | {
    "max_tokens_per_doc": _CUTS,
    "max_chunks_per_doc": _CUTS,
    "rank_fields": "documents are texts; send the text to rank by",
}


class EmbeddingsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    prompt_name: str | None = None


class ScoreBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/score: of one text with each of others, or of pairs."""

    model: str
    text_1: str | list[str]
    text_2: str | list[str]
    user: str | None = None


class RankedText(msgspec.Struct, forbid_unknown_fields=True):
    text: str


class RerankBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/rerank."""

    model: str
    query: str
    documents: list[str | RankedText]
    top_n: int | None = None
    return_documents: bool = True
    user: str | None = None


def texts_of(body: EmbeddingsBody, limits: Limits) -> list[str | Ids]:
    """Return the texts, or their ids. Raises RequestError."""
    check_metadata(body.metadata)
    if body.dimensions is not None and body.dimensions < 1:
        raise RequestError(f"dimensions: {body.dimensions}; at least 1")
    given = _INPUT.split(body.input, limits.max_embedding_inputs)
    return [one if isinstance(one, str) else check_ids(where, np.array(one, object)) for where, one in given]


def pairs_of(body: ScoreBody) -> tuple[list[str], list[str]]:
    """Return the first and second texts; one first text stands for each pair. Raises RequestError."""
    firsts = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    seconds = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    for name, texts in (("text_1", firsts), ("text_2", seconds)):
        if not texts:
            raise RequestError(f"{name}: empty; send at least one text")
    if len(firsts) not in (1, len(seconds)):
        raise RequestError(f"text_1: {len(firsts)} texts, text_2 {len(seconds)}; send one, or as many as text_2")
    return firsts, seconds


def documents_of(body: RerankBody) -> list[str]:
    """Raises RequestError."""
    if not body.documents:
        raise RequestError("documents: empty; send at least one")
    if body.top_n is not None and body.top_n < 1:
        raise RequestError(f"top_n: {body.top_n}; at least 1")
    return [one if isinstance(one, str) else one.text for one in body.documents]
