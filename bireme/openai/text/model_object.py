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


def language_model(model: ServedModel) -> dict[str, Any]:
    capacity = model.capacity
    inputs = ["text", "image"] if model.chat.takes_pictures else ["text"]
    return _object(model.name, model.created, inputs, ["text"], capacity.max_seq_len if capacity else None)


def embedding_model(model: EmbeddingModel) -> dict[str, Any]:
    capacity = model.capacity
    return _object(model.name, model.created, ["text"], ["embedding"], capacity.max_seq_len if capacity else None)


def video_model(model: ServedVideo) -> dict[str, Any]:
    return _object(model.name, model.created, ["text"], ["video", "image"], None)


def anthropic_model(model: ServedModel | EmbeddingModel | ServedVideo) -> dict[str, Any]:
    made_at = datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    shown = {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": made_at,
        "lifecycle": "active",
    }
    capacity = None if isinstance(model, ServedVideo) else model.capacity
    return shown if capacity is None else shown | {"max_input_tokens": capacity.max_seq_len}


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


def _object(
    name: str, created: int, inputs: list[str], outputs: list[str], max_model_len: int | None
) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "bireme",
        "root": name,  # vLLM's is a path of the host, or the model below an adapter
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [
            {
                "id": f"modelperm-{name}",
                "object": "model_permission",
                "created": created,
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
