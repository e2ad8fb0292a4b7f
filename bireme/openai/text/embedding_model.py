"""An embedding model that a frontend serves, and all of them by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from bireme.config import Recipe
from bireme.discovery.view import Discovery
from bireme.errors import ConfigError
from bireme.metrics import Registry
from bireme.openai.http.error_replies import HttpError
from bireme.openai.model_kinds import EMBEDDINGS, ModelKind, wrong_endpoint
from bireme.openai.text.served_model import FollowedModel, connection_of
from bireme.pipelines.embedding_service import STAGE, EmbeddingService
from bireme.text.tokenizer import TextTokenizer, recipe_tokenizer
from bireme.workers.base import WorkerClient


class EmbeddingModel(FollowedModel):
    """One embedding model."""

    stages = (STAGE,)

    def __init__(
        self, recipe: Recipe, workers: WorkerClient, tokenizer: TextTokenizer, metrics: Registry,
        discovery: Discovery | None = None, folder: Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(recipe, workers, tokenizer, metrics, discovery, folder)
        self.embeddings = EmbeddingService(self.services, tokenizer, metrics)

    async def close(self) -> None:
        self.embeddings.close()
        await super().close()


def connect_embedding(recipe: Recipe, address: str | None, metrics: Registry) -> EmbeddingModel:
    """Return a model whose workers are found from `start` on. Raises ConfigError."""
    way = connection_of(recipe, address, metrics)
    return EmbeddingModel(recipe, way.workers, recipe_tokenizer(recipe), metrics, way.discovery, way.folder)


class EmbeddingModels:
    """All embedding models of a frontend, by name."""

    def __init__(self, models: list[EmbeddingModel]) -> None:
        self._models: dict[str, EmbeddingModel] = {}
        self._others: Mapping[str, ModelKind] = {}
        for model in models:
            if model.name in self._models:
                raise ConfigError(f"two recipes serve the name {model.name}; set served_model_name in one of them")
            self._models[model.name] = model

    def know_others(self, names: Mapping[str, ModelKind]) -> None:
        """Take what the models of other kinds are called, for errors."""
        self._others = names

    def __iter__(self) -> Iterator[EmbeddingModel]:
        return iter(self._models.values())

    def __contains__(self, name: object) -> bool:
        return name in self._models

    def get(self, name: str) -> EmbeddingModel:
        """Raises HttpError 404, or 400 without a name or for a model of another kind."""
        if name in self._models:
            return self._models[name]
        if name in self._others:
            raise wrong_endpoint(name, self._others[name], EMBEDDINGS)
        if not self._models:
            raise HttpError(404, "no embedding model is served here; GET /v1/models lists what there is",
                            code="not_found")  # fmt: skip
        if not name:
            raise HttpError(400, f"model: missing; send one of {', '.join(self._models)}", code="missing_model")
        raise HttpError(404, f"The model `{name[:100]}` does not exist; GET /v1/models lists what there is",
                        code="model_not_found")  # fmt: skip
