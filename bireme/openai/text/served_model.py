"""A model that a frontend serves: its recipe, its workers on one tritonserver or several, its name."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bireme.config import Recipe
from bireme.discovery import run
from bireme.discovery.view import Discovery, discover
from bireme.errors import ConfigError
from bireme.messages import Capacity
from bireme.metrics import Registry
from bireme.openai.http.error_replies import HttpError
from bireme.openai.model_kinds import TEXT, ModelKind, wrong_endpoint
from bireme.pipelines.chat_service import ChatService
from bireme.pipelines.routing import make_router
from bireme.pipelines.services import Services
from bireme.sampling import check_defaults
from bireme.text.tokenizer import TextTokenizer, recipe_tokenizer
from bireme.workers.base import WorkerClient
from bireme.workers.client import Workers
from bireme.workers.grpc import GrpcChannel
from bireme.workers.grpc_tls import GrpcTls


class FollowedModel:
    """A model of token workers, whatever they make: its name, and its workers as discovery tells of them."""

    stages: tuple[str, ...]  # whose workers serve it, the first without fail

    def __init__(
        self, recipe: Recipe, workers: WorkerClient, tokenizer: TextTokenizer, metrics: Registry,
        discovery: Discovery | None = None, folder: Path | None = None,
    ) -> None:  # fmt: skip
        """`discovery`: of its workers; None: they are the recipe's. `folder`: the launch's run directory, in reach."""
        self.recipe, self.workers, self.tokenizer = recipe, workers, tokenizer
        self._discovery = discovery
        self.name = recipe.served_name
        self.created = int(time.time())
        self.services = Services(recipe, workers, make_router(recipe, metrics, folder), metrics)

    @property
    def capacity(self) -> Capacity | None:
        """What the first of its workers takes, once it is known."""
        return self.services.capacity(self.stages[0])

    @property
    def needed_stages(self) -> frozenset[str]:
        """The stages of which a worker must be ready."""
        return frozenset(self.stages[:1])

    def start(self) -> None:
        """Begin to follow its workers, on the loop that will serve."""
        if self._discovery is not None:
            self.services.follow(self._discovery)

    def discovery_report(self) -> dict[str, Any]:
        """Return how its workers on other servers are followed; {} where there are none to follow."""
        return self._discovery.report() if self._discovery is not None else {}

    async def close(self) -> None:
        await self.services.close()


class ServedModel(FollowedModel):
    """One language model."""

    stages = ("decode", "prefill")

    def __init__(
        self, recipe: Recipe, workers: WorkerClient, tokenizer: TextTokenizer, metrics: Registry,
        discovery: Discovery | None = None, folder: Path | None = None,
    ) -> None:  # fmt: skip
        check_defaults(recipe)
        super().__init__(recipe, workers, tokenizer, metrics, discovery, folder)
        self.chat = ChatService(self.services, tokenizer)

    @property
    def needed_stages(self) -> frozenset[str]:
        needs_prefill = "prefill" in self.recipe.workers and self.recipe.pipeline.enforce_disaggregation
        return frozenset(self.stages if needs_prefill else self.stages[:1])

    async def close(self) -> None:
        self.chat.close()
        await super().close()


@dataclass(frozen=True, slots=True)
class RecipeConnection:
    """How a frontend reaches a recipe's workers; connections open with the first request."""

    workers: Workers
    discovery: Discovery
    folder: Path | None  # the launch's run directory, in reach


def connect(recipe: Recipe, address: str | None, metrics: Registry) -> ServedModel:
    """Return a language model whose workers are found from `start` on. Raises ConfigError."""
    tokenizer = recipe_tokenizer(recipe)
    tokenizer.detokenizer()  # tabulates the vocabulary now
    way = connection_of(recipe, address, metrics)
    return ServedModel(recipe, way.workers, tokenizer, metrics, way.discovery, way.folder)


def connection_of(recipe: Recipe, address: str | None, metrics: Registry) -> RecipeConnection:
    """`address`: gRPC endpoint of a tritonserver that has the recipe's workers; None: all are the recipe's discovery's.

    Raises ConfigError.
    """
    server, folder = address, None
    if address is not None and address == os.environ.get("BIREME_GRPC"):  # of this launch
        server, folder = run.own_address(), Path(named) if (named := os.environ.get("BIREME_RUN_DIR")) else None
    discovery = discover(recipe, server, folder, metrics)
    tls = GrpcTls.of(recipe)
    channel = GrpcChannel(address, tls) if address is not None else None
    workers = Workers(channel, recipe.pipeline.stall_timeout_s, metrics, tls=tls)
    return RecipeConnection(workers, discovery, folder)


class Models:
    """All language models of a frontend, by name."""

    def __init__(self, models: list[ServedModel]) -> None:
        self._models: dict[str, ServedModel] = {}
        self._others: Mapping[str, ModelKind] = {}
        for model in models:
            if model.name in self._models:
                raise ConfigError(f"two recipes serve the name {model.name}; set served_model_name in one of them")
            self._models[model.name] = model

    def know_others(self, names: Mapping[str, ModelKind]) -> None:
        """Take what the models of other kinds are called, for errors."""
        self._others = names

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def get(self, name: str) -> ServedModel:
        """Raises HttpError 404, or 400 without a name."""
        if not name:
            raise HttpError(400, f"model: missing; send one of {', '.join(self._models)}", code="missing_model")
        model = self._models.get(name)
        if model is None and name in self._others:
            raise wrong_endpoint(name, self._others[name], TEXT)
        if model is None:
            raise HttpError(
                404, f"The model `{name[:100]}` does not exist; GET /v1/models lists what there is",
                code="model_not_found",
            )  # fmt: skip
        return model
