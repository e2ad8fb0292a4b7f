"""The router of a pipeline or frontend, as its recipe wants it."""

from __future__ import annotations

from bireme.config import Recipe
from bireme.discovery.run import WorkerRecord
from bireme.kv import hashing
from bireme.kv.placement import Hashes, HashPrompt, RoutingRequest
from bireme.kv.router import WorkerRouter


def make_router(recipe: Recipe) -> WorkerRouter:
    """Return a router over the recipe's workers, until it is told of others.

    Where it counts what workers hold, this loads the index, which takes a second where numba is installed.
    """
    holdings, hash_prompt = None, None
    if recipe.has_kv_routing:
        from bireme.kv.holdings import IndexHoldings

        holdings, hash_prompt = IndexHoldings(recipe.router), prompt_hashes()
    router = WorkerRouter(
        recipe.router,
        recipe.routing_mode,
        enforce_disaggregation=recipe.pipeline.enforce_disaggregation,
        holdings=holdings,
        hash_prompt=hash_prompt,
        loads={} if recipe.has_load_routing else None,
    )
    router.set_workers(recipe_workers(recipe))
    return router


def recipe_workers(recipe: Recipe) -> dict[str, WorkerRecord]:
    """Return the workers that a recipe has, as far as it tells."""
    return {
        name: WorkerRecord(worker=name, tokens_per_block=entry.engine_config.kv_cache_config.tokens_per_block)
        for stage, entry in recipe.workers.items()
        for name in recipe.replicas(stage)
    }


def prompt_hashes() -> HashPrompt:
    """Return the function that makes the public hashes of a prompt's full blocks, as workers tell of them."""
    from bireme.kv.prompt_hashing import PromptHasher

    hashers: dict[int, PromptHasher] = {}

    def hash_prompt(request: RoutingRequest, tokens_per_block: int) -> Hashes:
        if (hasher := hashers.get(tokens_per_block)) is None:
            hasher = hashers[tokens_per_block] = PromptHasher(tokens_per_block)
        seed = hashing.event_seed(request.lora_name, request.cache_salt)
        return hasher(request.prompt, seed, request.media)

    return hash_prompt
