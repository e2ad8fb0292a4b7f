"""A model that a frontend serves: its recipe, its workers on one tritonserver, its name."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from bireme.config import Recipe
from bireme.errors import ConfigError
from bireme.messages import Capacity
from bireme.metrics import Registry
from bireme.openai.http.error_replies import HttpError
from bireme.pipelines.chat_service import ChatService
from bireme.pipelines.routing import make_router
from bireme.pipelines.services import Services
from bireme.sampling import check_defaults
from bireme.text.tokenizer import TextTokenizer, recipe_tokenizer
from bireme.workers.base import WorkerClient
from bireme.workers.client import Workers
from bireme.workers.grpc import GrpcChannel


class ServedModel:
    """One tritonserver's language model."""

    def __init__(self, recipe: Recipe, workers: WorkerClient, tokenizer: TextTokenizer, metrics: Registry) -> None:
        check_defaults(recipe)
        self.recipe, self.workers, self.tokenizer = recipe, workers, tokenizer
        self.name = recipe.served_model_name or recipe.name
        self.created = int(time.time())
        self.services = Services(recipe, workers, make_router(recipe), metrics)
        self.chat = ChatService(self.services, tokenizer)

    @property
    def capacity(self) -> Capacity | None:
        """What the first decode worker takes, once it is known."""
        return self.services.capacity()

    async def close(self) -> None:
        self.chat.close()
        await self.services.close()


def connect(recipe: Recipe, address: str, metrics: Registry) -> ServedModel:
    """Return a model at a tritonserver's gRPC address; connections open with the first request."""
    tokenizer = recipe_tokenizer(recipe)
    tokenizer.detokenizer()  # tabulates the vocabulary now
    workers = Workers(GrpcChannel(address), recipe.pipeline.stall_timeout_s, metrics)
    return ServedModel(recipe, workers, tokenizer, metrics)


class Models:
    """All models of a frontend, by name."""

    def __init__(self, models: list[ServedModel]) -> None:
        self._models: dict[str, ServedModel] = {}
        self._videos: frozenset[str] = frozenset()
        for model in models:
            if model.name in self._models:
                raise ConfigError(f"two recipes serve the name {model.name}; set served_model_name in one of them")
            self._models[model.name] = model

    def know_videos(self, names: Iterable[str]) -> None:
        """Add the names of the video models, for errors."""
        self._videos = frozenset(names)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def get(self, name: str) -> ServedModel:
        """Raises HttpError 404, or 400 without a name."""
        if not name:
            raise HttpError(400, f"model: missing; send one of {', '.join(self._models)}", code="missing_model")
        model = self._models.get(name)
        if model is None and name in self._videos:
            raise HttpError(
                400, f"model: {name} makes videos and pictures, no text; send it to POST /v1/videos, "
                "/v1/videos/generations or /v1/images/generations", code="wrong_endpoint",
            )  # fmt: skip
        if model is None:
            raise HttpError(
                404, f"The model `{name[:100]}` does not exist; GET /v1/models lists what there is",
                code="model_not_found",
            )  # fmt: skip
        return model
