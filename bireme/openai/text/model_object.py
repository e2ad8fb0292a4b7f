"""OpenAI's model object, with facts for clients in a `bireme` object."""

from __future__ import annotations

from typing import Any

from bireme.openai.text.served_model import ServedModel
from bireme.openai.video.served_video import ServedVideo


def language_model(model: ServedModel) -> dict[str, Any]:
    capacity = model.capacity
    inputs = ["text", "image"] if model.chat.takes_pictures else ["text"]
    return _object(model.name, model.created, inputs, ["text"], capacity.max_seq_len if capacity else None)


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
        "max_model_len": max_model_len,
        "bireme": {"input_modalities": inputs, "output_modalities": outputs},
    }
