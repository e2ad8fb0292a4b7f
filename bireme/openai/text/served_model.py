"""A model that a frontend serves: its recipe, its workers on one tritonserver or several, its name."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bireme.config import Recipe
from bireme.discovery import run
from bireme.discovery.view import Discovery, discover
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
    """One language model."""

    def __init__(
        self, recipe: Recipe, workers: WorkerClient, tokenizer: TextTokenizer, metrics: Registry,
        discovery: Discovery | None = None, folder: Path | None = None,
    ) -> None:  # fmt: skip
        """`discovery`: of its workers; None: they are the recipe's. `folder`: the launch's run directory, in reach."""
        check_defaults(recipe)
        self.recipe, self.workers, self.tokenizer = recipe, workers, tokenizer
        self._discovery = discovery
        self.name = recipe.served_name
        self.created = int(time.time())
        self.services = Services(recipe, workers, make_router(recipe, metrics, folder), metrics)
        self.chat = ChatService(self.services, tokenizer)

    @property
    def capacity(self) -> Capacity | None:
        """What the first decode worker takes, once it is known."""
        return self.services.capacity()

    def start(self) -> None:
        """Begin to follow its workers, on the loop that will serve."""
        if self._discovery is not None:
            self.services.follow(self._discovery)

    def discovery_report(self) -> dict[str, Any]:
        """Return how its workers on other servers are followed; {} where there are none to follow."""
        return self._discovery.report() if self._discovery is not None else {}

    async def close(self) -> None:
        self.chat.close()
        await self.services.close()


def connect(recipe: Recipe, address: str | None, metrics: Registry) -> ServedModel:
    """Return a model whose workers are found from `start` on; connections open with the first request.

    `address`: gRPC endpoint of a tritonserver that has the recipe's workers; None: all are the recipe's discovery's.
    Raises ConfigError.
    """
    tokenizer = recipe_tokenizer(recipe)
    tokenizer.detokenizer()  # tabulates the vocabulary now
    server, folder = address, None
    if address is not None and address == os.environ.get("BIREME_GRPC"):  # of this launch
        server, folder = run.own_address(), Path(named) if (named := os.environ.get("BIREME_RUN_DIR")) else None
    discovery = discover(recipe, server, folder, metrics)
    channel = GrpcChannel(address) if address is not None else None
    workers = Workers(channel, recipe.pipeline.stall_timeout_s, metrics)
    return ServedModel(recipe, workers, tokenizer, metrics, discovery, folder)


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
