"""From an engine YAML to an LLM that is ready to serve, and its capacity."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bireme.engines.base import EngineContext
from bireme.engines.trtllm import api as api_of
from bireme.engines.trtllm import lifecycle
from bireme.engines.trtllm.adapters import Adapters
from bireme.engines.trtllm.api import Api
from bireme.engines.trtllm.arguments import Arguments, backend_of, complete
from bireme.engines.trtllm.config import llm_arguments
from bireme.engines.trtllm.disaggregation import RequestIds
from bireme.engines.trtllm.guides import TrtllmGuides
from bireme.engines.trtllm.iterations import Iterations
from bireme.engines.trtllm.kv_events import PicturePlaces
from bireme.engines.trtllm.launchers import drop_launchers
from bireme.engines.trtllm.model_files import ModelFacts, read_facts
from bireme.engines.trtllm.planning import Planner
from bireme.engines.trtllm.series import SeriesRelay
from bireme.messages import Capacity

if TYPE_CHECKING:
    from bireme.engines.trtllm.pictures import PictureIntake

logger = logging.getLogger("bireme.engines.trtllm")


@dataclass(slots=True)
class Loaded:
    api: Api
    arguments: Arguments
    llm: Any
    planner: Planner
    iterations: Iterations
    capacity: Capacity
    leases: Callable[[], int]  # numbers of exports, one each
    pictures: PictureIntake | None = None  # None: the model takes text alone

    @property
    def llms(self) -> tuple[Any, ...]:
        """To be shut down: an encoder beside the LLM, too."""
        tower = self.pictures.tower if self.pictures is not None else None
        return (self.llm,) if tower is None else (tower.llm, self.llm)

    @property
    def num_places(self) -> int:
        """Requests that can be in the batch at once."""
        return self.arguments.max_batch_size * self.arguments.attention_dp_size


def load(context: EngineContext, post: Callable[[Callable[[], None]], Any]) -> Loaded:
    """Takes minutes. `post`: puts work on the event loop, from any thread. Raises ConfigError."""
    began = time.monotonic()
    drop_launchers(os.environ)
    api = api_of.load(backend_of(context.config.llm_args))
    given = llm_arguments(context.config, context.model_path, context.stage, api.version)
    has_pictures = context.share is not None and _takes_pictures(context, backend_of(given))
    arguments = complete(given, takes_pictures=has_pictures, traces_endpoint=context.traces_endpoint)
    # Errors in files are reported before the long load.
    read_facts(context.model_path, None)
    adapters = Adapters(arguments.block("lora_config").get("lora_dir") or (), api.lora_request)
    make_side = _prepare_pictures(context, api, post) if has_pictures else None
    llm = lifecycle.make_llm(api, arguments)
    pictures = make_side(llm) if make_side is not None else None
    arguments = arguments.as_loaded(llm.args)
    facts = read_facts(context.model_path, getattr(llm.args, "max_seq_len", None))
    layout = context.config.guided_decoding_config
    guides = TrtllmGuides(arguments.values.get("guided_decoding_backend"), layout.any_whitespace)
    planner = Planner(api, arguments, facts, adapters, RequestIds(context.worker, context.life), guides, pictures)
    load_s = time.monotonic() - began
    context.metrics.set("bireme_engine_load_seconds", load_s)
    return Loaded(
        api=api,
        arguments=arguments,
        llm=llm,
        planner=planner,
        iterations=_iterations(context, api, arguments, llm, _places(pictures, facts)),
        capacity=_capacity(context, arguments, facts, llm, adapters, load_s, pictures),
        leases=itertools.count(1).__next__,
        pictures=pictures,
    )


def _takes_pictures(context: EngineContext, backend: str) -> bool:
    from bireme.engines.trtllm.pictures import takes_pictures

    return takes_pictures(context, backend)


def _prepare_pictures(
    context: EngineContext, api: Api, post: Callable[[Callable[[], None]], Any]
) -> Callable[[Any], PictureIntake | None]:
    """Before the LLM takes what memory is left; return what makes the rest beside it."""
    from bireme.engines.trtllm.pictures import load_tower, make_intake

    tower = load_tower(context)
    return lambda llm: make_intake(context, api, llm, tower, post)


def _places(pictures: PictureIntake | None, facts: ModelFacts) -> PicturePlaces | None:
    return PicturePlaces(pictures.model.placeholder, facts.vocab_size) if pictures is not None else None


def _iterations(
    context: EngineContext, api: Api, arguments: Arguments, llm: Any, places: PicturePlaces | None = None
) -> Iterations:
    kv = arguments.block("kv_cache_config")
    has_reuse = kv.get("enable_block_reuse", True)
    return Iterations(
        llm,
        context.metrics,
        SeriesRelay(context.metrics, context.worker, Path(context.model_path).name),
        arguments.tokens_per_block,
        int(kv.get("event_buffer_max_size") or 0) if has_reuse else 0,
        bool(arguments.values["enable_iter_perf_stats"]),
        api.events_name_owners,
        places,
        context.steps,
    )


def measured(loaded: Loaded, timeout_s: float) -> Capacity:
    """Return the capacity with what only the running engine knows: a pool smaller than max_seq_len limits it.

    TensorRT-LLM applies that limit with a warning in the worker's log, and from then on ends requests early. Where
    attention windows are narrower than the context, a sequence may be longer than the pool.
    """
    num_blocks = loaded.capacity.num_blocks or loaded.iterations.pool_size(timeout_s)
    capacity = msgspec.structs.replace(loaded.capacity, num_blocks=num_blocks)
    if loaded.arguments.block("kv_cache_config").get("max_attention_window"):
        return capacity
    served, longest = capacity.within_pool(), capacity.max_seq_len
    if served is not capacity:
        logger.warning("max_seq_len_cut from=%d to=%d reason=the KV pool holds no more", longest, served.max_seq_len)
    return served


def _capacity(
    context: EngineContext,
    arguments: Arguments,
    facts: ModelFacts,
    llm: Any,
    adapters: Adapters,
    load_s: float,
    pictures: PictureIntake | None,
) -> Capacity:
    return Capacity(
        max_seq_len=facts.max_seq_len,
        max_batch_size=arguments.max_batch_size,
        max_num_tokens=arguments.max_num_tokens,
        max_queue_size=context.config.scheduler_config.max_queue_size,
        tokens_per_block=arguments.tokens_per_block,
        num_blocks=lifecycle.num_blocks(llm, arguments),
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_ids,
        load_s=load_s,
        dtype=str(arguments.values.get("dtype") or "auto"),
        attention_dp_size=arguments.attention_dp_size,
        lora_names=adapters.names,
        image_token_id=pictures.model.placeholder if pictures is not None else None,
        encodes_images=pictures is not None and pictures.tower is not None,
        nextn=arguments.draft_len,
    )
