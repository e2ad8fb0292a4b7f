"""OpenAI's model object, with vLLM's fields and facts for clients in a `bireme` object."""

from __future__ import annotations

from typing import Any

from bireme.openai.text.embedding_model import EmbeddingModel
from bireme.openai.text.served_model import ServedModel
from bireme.openai.video.served_video import ServedVideo


def language_model(model: ServedModel) -> dict[str, Any]:
    capacity = model.capacity
    inputs = ["text", "image"] if model.chat.takes_pictures else ["text"]
    return _object(model.name, model.created, inputs, ["text"], capacity.max_seq_len if capacity else None)


def embedding_model(model: EmbeddingModel) -> dict[str, Any]:
    capacity = model.capacity
    return _object(model.name, model.created, ["text"], ["embedding"], capacity.max_seq_len if capacity else None)


def video_model(model: ServedVideo) -> dict[str, Any]:
    return _object(model.name, model.created, ["text"], ["video", "image"], None)


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
