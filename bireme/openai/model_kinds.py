"""The models of a frontend by kind and name: what each kind makes, and which endpoints are its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from bireme.errors import ConfigError
from bireme.openai.http.error_replies import HttpError


@dataclass(frozen=True, slots=True)
class ModelKind:
    noun: str
    makes: str
    endpoints: str
    name_key: str = "served_model_name"  # of a recipe
    needs_name: bool = True  # a request without a name is not for the only model


TEXT = ModelKind("language", "text", "POST /v1/chat/completions or /v1/completions")
EMBEDDINGS = ModelKind("embedding", "embeddings", "POST /v1/embeddings, /v1/score or /v1/rerank")
VIDEO = ModelKind(
    "video",
    "videos and pictures",
    "POST /v1/videos, /v1/videos/generations or /v1/images/generations",
    name_key="video.served_model_name",
    needs_name=False,
)


class NamedModel(Protocol):
    name: str


Model = TypeVar("Model", bound=NamedModel)


class ModelsByName(Generic[Model]):
    """All models of one kind that a frontend serves."""

    kind: ModelKind

    def __init__(self, models: Iterable[Model] = ()) -> None:
        """Raises ConfigError when two have one name."""
        self._models: dict[str, Model] = {}
        self._others: Mapping[str, ModelKind] = {}
        for model in models:
            if model.name in self._models:
                raise ConfigError(f"two recipes serve the name {model.name}; set {self.kind.name_key} in one of them")
            self._models[model.name] = model

    def know_others(self, names: Mapping[str, ModelKind]) -> None:
        """Take what the models of other kinds are called, for errors."""
        self._others = names

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    def __contains__(self, name: object) -> bool:
        return name in self._models

    def get(self, name: str) -> Model:
        """Raises HttpError 404, or 400 without a name or for a model of another kind."""
        if name in self._models:
            return self._models[name]
        if name in self._others:
            theirs = self._others[name]
            raise HttpError(
                400, f"model: {name} makes {theirs.makes}, no {self.kind.makes}; send it to {theirs.endpoints}",
                code="wrong_endpoint",
            )  # fmt: skip
        if not self._models:
            text = f"no {self.kind.noun} model is served here; GET /v1/models lists what there is"
            raise HttpError(404, text, code="not_found")
        if not name and not self.kind.needs_name and len(self._models) == 1:
            return next(iter(self))
        if not name:
            raise HttpError(400, f"model: missing; send one of {', '.join(self._models)}", code="missing_model")
        text = f"The model `{name[:100]}` does not exist; GET /v1/models lists what there is"
        raise HttpError(404, text, code="model_not_found")
