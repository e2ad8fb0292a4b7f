"""An embedding model that a frontend serves."""

from __future__ import annotations

from pathlib import Path

from bireme.config import Recipe
from bireme.discovery.view import WorkerView
from bireme.metrics import Registry
from bireme.openai.model_kinds import EMBEDDINGS, ModelsByName
from bireme.openai.text.served_model import FollowedModel
from bireme.pipelines.embedding_service import STAGE, EmbeddingService
from bireme.text.tokenizer import TextTokenizer
from bireme.workers.base import WorkerClient


class EmbeddingModel(FollowedModel):
    stages = (STAGE,)

    def __init__(
        self, recipe: Recipe, workers: WorkerClient, tokenizer: TextTokenizer, metrics: Registry,
        discovery: WorkerView | None = None, folder: Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(recipe, workers, tokenizer, metrics, discovery, folder)
        self.embeddings = EmbeddingService(self.services, tokenizer, metrics)

    async def close(self) -> None:
        self.embeddings.close()
        await super().close()


class EmbeddingModels(ModelsByName[EmbeddingModel]):
    kind = EMBEDDINGS
