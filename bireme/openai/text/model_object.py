"""OpenAI's model object, with vLLM's fields and facts for clients in a `bireme` object, and Anthropic's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from bireme.errors import RequestError
from bireme.openai.http.call import Call
from bireme.openai.http.query import limit_of, query_of
from bireme.openai.text.embedding_model import EmbeddingModel
from bireme.openai.text.served_model import ServedModel
from bireme.openai.video.served_video import ServedVideo

_PAGE, _MAX_PAGE = 20, 1000  # of Anthropic's lists


AnyModel = ServedModel | EmbeddingModel | ServedVideo


def anthropic_model(model: AnyModel) -> dict[str, Any]:
    made_at = datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    shown = {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": made_at,
        "lifecycle": "active",
    }
    context = _context(model)
    return shown if context is None else shown | {"max_input_tokens": context}


def _context(model: AnyModel) -> int | None:
    capacity = None if isinstance(model, ServedVideo) else model.capacity
    return None if capacity is None else capacity.max_seq_len


def anthropic_page(models: list[dict[str, Any]], call: Call) -> dict[str, Any]:
    """Return the page of models that the query asks for. Raises RequestError."""
    query = query_of(call, ("limit", "after_id", "before_id"))
    limit, ids = limit_of(query, _PAGE, _MAX_PAGE), [model["id"] for model in models]
    for name in ("after_id", "before_id"):
        if name in query and query[name] not in ids:
            raise RequestError(f"{name}: {query[name][:80]}; no such model, send an id of a page")
    begin = ids.index(query["after_id"]) + 1 if "after_id" in query else 0
    end = ids.index(query["before_id"]) if "before_id" in query else len(ids)
    page = models[max(begin, end - limit) : end] if "before_id" in query else models[begin : begin + limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"data": page, "has_more": len(page) < end - begin, "first_id": first, "last_id": last}


def openai_model(model: AnyModel) -> dict[str, Any]:
    inputs, outputs = ["text"], ["text"]
    if isinstance(model, ServedVideo):
        outputs = ["video", "image"]
    elif isinstance(model, EmbeddingModel):
        outputs = ["embedding"]
    elif model.chat.takes_pictures:
        inputs = ["text", "image"]
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "bireme",
        "root": model.name,  # vLLM's is a path of the host, or the model below an adapter
        "parent": None,
        "max_model_len": _context(model),
        "permission": [
            {
                "id": f"modelperm-{model.name}",
                "object": "model_permission",
                "created": model.created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
        "bireme": {"input_modalities": inputs, "output_modalities": outputs},
    }
