"""A model that a frontend serves: its recipe, its workers on one tritonserver or several, its name."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Self

from bireme.config import Recipe
from bireme.discovery.records import own_address
from bireme.discovery.view import WorkerView, discover
from bireme.messages import Capacity
from bireme.metrics import Registry
from bireme.openai.model_kinds import TEXT, ModelsByName
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
        discovery: WorkerView | None = None, folder: Path | None = None,
    ) -> None:  # fmt: skip
        """`discovery`: of its workers; None: they are the recipe's. `folder`: the launch's run folder, in reach."""
        self.recipe, self.workers, self.tokenizer = recipe, workers, tokenizer
        self._discovery, self.run_folder = discovery, folder
        self.name = recipe.served_name
        self.created = int(time.time())
        self.services = Services(recipe, workers, make_router(recipe, metrics, folder), metrics)

    @classmethod
    def connect(cls, recipe: Recipe, address: str | None, metrics: Registry) -> Self:
        """Return a model whose workers are found from `start` on; connections open with the first request.

        `address`: of a tritonserver that has the recipe's workers; None: discovery has all. Raises ConfigError.
        """
        server, folder = address, None
        if address is not None and address == os.environ.get("BIREME_GRPC"):  # of this launch
            server, folder = own_address(), Path(named) if (named := os.environ.get("BIREME_RUN_DIR")) else None
        tls = GrpcTls.of(recipe)
        channel = GrpcChannel(address, tls) if address is not None else None
        workers = Workers(channel, recipe.pipeline.stall_timeout_s, metrics, tls=tls)
        discovery = discover(recipe, server, folder, metrics)
        return cls(recipe, workers, recipe_tokenizer(recipe), metrics, discovery, folder)

    @property
    def capacity(self) -> Capacity | None:
        """What the first of its workers takes, once it is known."""
        return self.services.capacity(self.stages[0])

    @property
    def rests_lines(self) -> bool:
        """Whether its engines let lines of batches rest beside other requests."""
        return False

    @property
    def needed_stages(self) -> frozenset[str]:
        """The stages of which a worker must be ready."""
        return frozenset(self.stages[:1])

    def start(self) -> None:
        if self._discovery is not None:
            self.services.follow(self._discovery)

    def discovery_report(self) -> dict[str, Any]:
        """Return how its workers on other servers are followed; {} where there are none to follow."""
        return self._discovery.report() if self._discovery is not None else {}

    async def close(self) -> None:
        await self.services.close()


class ServedModel(FollowedModel):
    stages = ("decode", "prefill")

    def __init__(
        self, recipe: Recipe, workers: WorkerClient, tokenizer: TextTokenizer, metrics: Registry,
        discovery: WorkerView | None = None, folder: Path | None = None,
    ) -> None:  # fmt: skip
        check_defaults(recipe)
        super().__init__(recipe, workers, tokenizer, metrics, discovery, folder)
        tokenizer.detokenizer()  # tabulates the vocabulary now
        self.chat = ChatService(self.services, tokenizer)

    @property
    def rests_lines(self) -> bool:
        workers = self.recipe.workers
        return all(workers[stage].kind.rests_best_effort for stage in self.stages if stage in workers)

    @property
    def needed_stages(self) -> frozenset[str]:
        needs_prefill = "prefill" in self.recipe.workers and self.recipe.pipeline.enforce_disaggregation
        return frozenset(self.stages if needs_prefill else self.stages[:1])

    async def close(self) -> None:
        self.chat.close()
        await super().close()


class Models(ModelsByName[ServedModel]):
    kind = TEXT
