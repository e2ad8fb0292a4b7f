"""What a text pipeline inside Triton needs before it serves: tokenizer, workers, services."""

from __future__ import annotations

from bireme.discovery import run_folder
from bireme.discovery.records import own_address
from bireme.discovery.view import discover
from bireme.errors import UnavailableError
from bireme.observability.entry import open_traces
from bireme.pipelines.routing import make_router
from bireme.pipelines.services import Services
from bireme.sampling import check_defaults
from bireme.text.tokenizer import TextTokenizer, recipe_tokenizer
from bireme.types import StageContext
from bireme.workers.base import WorkerClient
from bireme.workers.client import Workers
from bireme.workers.grpc import GrpcChannel
from bireme.workers.grpc_tls import GrpcTls


def make_services(
    context: StageContext, workers: WorkerClient | None, tokenizer: TextTokenizer | None
) -> tuple[Services, TextTokenizer]:
    """Return the services, tokenizer and workers of a pipeline; made here unless tests give them.

    Raises ConfigError for a recipe or model folder that can't be served, UnavailableError outside of a server.
    """
    recipe, metrics = context.recipe, context.metrics
    check_defaults(recipe)
    traces = open_traces(recipe, metrics)
    tokenizer = tokenizer or recipe_tokenizer(recipe)
    tokenizer.detokenizer()  # tabulates the vocabulary now
    if workers is None:
        if context.call_async is None:
            raise UnavailableError(f"{context.model_name}: no way to call other models")
        tls, stall_timeout_s = GrpcTls.of(recipe), recipe.pipeline.stall_timeout_s
        workers = Workers(GrpcChannel(tls=tls), stall_timeout_s, metrics, context.call_async, tls)
        folder = run_folder.locate()
        services = Services(recipe, workers, make_router(recipe, metrics, folder), metrics, traces=traces)
        services.follow(discover(recipe, own_address(), folder, metrics))
        return services, tokenizer
    return Services(recipe, workers, make_router(recipe, metrics), metrics, traces=traces), tokenizer
