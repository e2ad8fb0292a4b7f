"""What the models of a frontend make, and which endpoints are theirs: for a request that went to another kind's."""

from __future__ import annotations

from dataclasses import dataclass

from bireme.openai.http.error_replies import HttpError


@dataclass(frozen=True, slots=True)
class ModelKind:
    makes: str
    endpoints: str


TEXT = ModelKind("text", "POST /v1/chat/completions or /v1/completions")
EMBEDDINGS = ModelKind("embeddings", "POST /v1/embeddings, /v1/score or /v1/rerank")
VIDEO = ModelKind("videos and pictures", "POST /v1/videos, /v1/videos/generations or /v1/images/generations")


def wrong_endpoint(name: str, kind: ModelKind, asked: ModelKind) -> HttpError:
    """Return the error of a model of one kind that was asked for what another makes."""
    return HttpError(
        400, f"model: {name} makes {kind.makes}, no {asked.makes}; send it to {kind.endpoints}", code="wrong_endpoint"
    )
