"""The router of a pipeline or frontend, as its recipe wants it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from bireme.config import Recipe
from bireme.discovery import run_folder
from bireme.discovery.records import WorkerRecord
from bireme.kv.blocks import hashing
from bireme.kv.kernels.arrays import Hashes
from bireme.kv.routing.placement import HashPrompt, RoutingRequest, WorkerFollower
from bireme.kv.routing.router import WorkerRouter
from bireme.kv.routing.targets import DEFAULT_TOKENS_PER_BLOCK
from bireme.metrics import Registry


def make_router(recipe: Recipe, metrics: Registry, folder: Path | None = None) -> WorkerRouter:
    """Return a router over the recipe's workers, until it gets others. Raises ConfigError for a key that is none.

    `folder`: the run folder, with the key of workers' events and load; None: BIREME_KEY, else the router knows what it
    has sent itself. Loading its index takes a second where numba is installed.
    """
    key = run_folder.deployment_key(folder or Path()) if folder is not None or os.environ.get("BIREME_KEY") else None
    holdings, hash_prompt, loads = None, None, None
    followers: list[WorkerFollower] = []
    if recipe.has_kv_routing:
        from bireme.kv.following.holdings import IndexHoldings

        holdings, hash_prompt = IndexHoldings(recipe.router, metrics), prompt_hashes(key)
        followers.append(holdings)
    if recipe.has_load_routing:
        loads = {}
        if key is not None:
            from bireme.kv.following.feed import KvFeed

            index, lock = (holdings.index, holdings.lock) if holdings is not None else (None, None)
            feed = KvFeed(index, key, metrics, lock, recipe.kv_events)
            feed.start()
            loads = feed.loads
            followers.append(feed)
    router = WorkerRouter(
        recipe.router,
        recipe.routing_mode,
        enforce_disaggregation=recipe.pipeline.enforce_disaggregation,
        holdings=holdings,
        hash_prompt=hash_prompt,
        loads=loads,
        followers=followers,
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


def prompt_hashes(key: bytes | None) -> HashPrompt:
    """Return what makes the hashes of a prompt's full blocks, as workers' events have them.

    `key`: the deployment's; without it salted prompts' blocks have no known hashes.
    """
    from bireme.kv.routing.prompt_hashing import PromptHasher

    # One is made now: the first of a process loads compiled code, for which no request should wait.
    hashers = {DEFAULT_TOKENS_PER_BLOCK: PromptHasher(DEFAULT_TOKENS_PER_BLOCK)}
    salt_key = hashing.salt_key(key) if key is not None else None

    def hash_prompt(request: RoutingRequest, tokens_per_block: int) -> Hashes:
        options = request.options
        if options.cache_salt and salt_key is None:
            return np.zeros(0, np.uint64)
        if (hasher := hashers.get(tokens_per_block)) is None:
            hasher = hashers[tokens_per_block] = PromptHasher(tokens_per_block)
        seed = hashing.event_seed(options.lora_name, options.cache_salt)
        return hasher(request.prompt, seed, request.media, salt_key if options.cache_salt else None)

    return hash_prompt
