"""From a model folder to a core that is ready to serve: check, load, probe, allocate, warm up."""

from __future__ import annotations

import logging
import os
import time
from functools import partial

import msgspec
import torch

from bireme.engines.base import EngineContext, RequestKey
from bireme.engines.torch.forward.eagle_passes import LoadedHead, load_head
from bireme.engines.torch.forward.forward import Forward
from bireme.engines.torch.forward.library_loading import LoadedLibraries
from bireme.engines.torch.forward.loaded_draft import LoadedDraft, load_draft
from bireme.engines.torch.forward.opening import (
    StepModel,
    add_graphs,
    check_kv,
    kv_model,
    open_forward,
    open_model,
)
from bireme.engines.torch.forward.warmup import warm_up
from bireme.engines.torch.forward.weight_form import choose_form
from bireme.engines.torch.geometry import group_layers
from bireme.engines.torch.images.picture_side import PictureSide, open_pictures
from bireme.engines.torch.pools.block_mover import BlockMover
from bireme.engines.torch.pools.kv_store import KvStore
from bireme.engines.torch.pools.sizes import (
    CPU_POOL_BYTES,
    GpuMemory,
    gpu_pool_bytes,
    pool_sizes,
    tier_sizes,
    with_draft,
)
from bireme.engines.torch.scheduling.admission import Admission
from bireme.engines.torch.scheduling.core import EngineCore
from bireme.engines.torch.scheduling.disaggregation import TorchExporter, TorchImporter
from bireme.engines.torch.scheduling.guides import TorchGuides
from bireme.engines.torch.scheduling.metrics import TorchMetrics
from bireme.engines.torch.scheduling.parts import Parts
from bireme.engines.torch.scheduling.speculation.draft_model import DraftModel
from bireme.engines.torch.scheduling.speculation.eagle import EagleDrafter
from bireme.engines.torch.scheduling.speculation.followers import GROUP
from bireme.engines.torch.scheduling.speculation.speculation import open_speculation
from bireme.engines.torch.scheduling.step_costs import StepCosts, StepWork
from bireme.engines.torch.scheduling.step_prices import NOTHING, prices_of
from bireme.engines.torch.scheduling.step_times import StepTimesFile
from bireme.engines.torch.step import Post
from bireme.engines.torch.weights.checkpoint import eos_token_ids
from bireme.engines.torch.weights.setup import Setup, settle
from bireme.engines.torch.weights.shared_weights import SharedModel, load_own, load_shared, weights_id
from bireme.kv.blocks.block_manager import BlockManager, GroupSpec
from bireme.kv.blocks.block_pool import DEFAULT_PRIORITY
from bireme.kv.blocks.disk_blocks import DiskBlocks
from bireme.kv.blocks.events import EventBuffer
from bireme.kv.transfer.base import KvLayout
from bireme.kv.transfer.host_pool import mapped_host_pool
from bireme.kv.wire.event_wire import WorkerPrices
from bireme.logits.sampler import Sampler
from bireme.messages import Capacity
from bireme.own_work import Work

logger = logging.getLogger("bireme.engines.torch")

_FIRST_GRAPHS_S, _FIRST_GRAPHS_SHARE = 0.4, 0.03  # a start takes longer for them, at most: the larger of the two


class LoadedEngine:
    """A core, its capacity, and the admission of its requests."""

    def __init__(self, context: EngineContext, post: Post) -> None:
        phases = _Phases()
        torch.set_num_threads(context.num_threads)
        # cuDNN's attention makes a plan for every shape, 30 to 40 ms of host time each.
        torch.backends.cuda.enable_cudnn_sdp(False)
        setup = settle(context, post, choose_form)
        check_kv(setup)
        phases.end("checkpoint")
        with LoadedLibraries(setup.device) as libraries:  # until there are graphs: nothing may happen while one is made
            self.weights = _load_weights(setup)
            if not setup.findings.are_there:
                libraries.wait()  # the probe makes products: a second handle of cuBLAS would take memory of its own
            phases.end("weights")
            pictures = open_pictures(setup, self.weights.model)
            model = open_model(setup, pictures.language_model, pictures.store is not None, pictures.merge_size > 0)
        phases.end("probe")
        draft = load_draft(setup, model) or load_head(setup, model)
        phases.end("draft")
        store, manager = _open_pools(setup, model, self.weights.num_bytes, draft)
        phases.end("pools")
        taps = draft.taps if isinstance(draft, LoadedHead) else ()
        forward = open_forward(setup, model, store, manager, self.weights.is_shared, taps)
        layout = store.layout(kv_model(setup, forward))
        manager.rename(layout.identity)
        phases.end("decoder")
        warm_up(forward, manager, store, setup.limits)
        phases.end("warm_up")
        self.mover = _open_mover(setup, store, manager)
        add_graphs(setup, model, forward, store)
        eos_ids = eos_token_ids(setup.checkpoint)
        sampler: Sampler[RequestKey] = Sampler(
            model.vocab_size,
            setup.device,
            context.max_processor_ms / 1e3,
            model.draw_rows(),
            partial(context.own_work.mark, work=Work.PROCESSORS),
            context.num_threads,
        )
        self.limits, self.encoder = setup.limits, pictures.encoder
        self.events, self.num_blocks = manager.events, manager.num_blocks
        self.guides = TorchGuides(
            setup.checkpoint.folder, model.vocab_size, eos_ids, context.config, post, context.own_work
        )
        self.admission = Admission(
            setup.limits, manager, sampler, eos_ids, self.guides, pictures.store, pictures.merge_size
        )
        self.step_times = _open_step_times(setup)
        costs = StepCosts(self.step_times.read())
        accounts = TorchMetrics(context.metrics, context.worker, store.block_bytes)
        self.core = EngineCore(
            Parts(
                worker=context.worker,
                life=context.life,
                post=post,
                limits=setup.limits,
                forward=forward,
                manager=manager,
                sampler=sampler,
                admission=self.admission,
                accounts=accounts,
                guides=self.guides,
                costs=costs,
                exporter=TorchExporter(context.transfer, manager, store, post) if context.transfer else None,
                importer=TorchImporter(context.transfer, manager, store, post, context.metrics)
                if context.transfer
                else None,
                mover=self.mover,
                pictures=pictures.store,
                speculation=open_speculation(
                    context.config.speculative_config,
                    _open_drafter(draft, model, forward, manager, store) if draft is not None else None,
                    manager,
                    context.metrics,
                    costs,
                    setup.device.type == "cuda",
                    setup.limits.max_stream_gap_s,
                    is_prefill=context.stage == "prefill",
                ),
                steps=context.steps,
            )
        )
        _start_transfer(setup, store, layout)
        setup.findings.keep()
        self.step_times.start(costs)
        self._costs, self._stage, self._transfer = costs, context.stage, context.transfer
        phases.end("rest")
        forward.make_first_graphs(max(_FIRST_GRAPHS_S, _FIRST_GRAPHS_SHARE * sum(phases.seconds.values())))
        phases.end("graphs")
        load_s = sum(phases.seconds.values())
        accounts.started(manager, self.core.scheduler, load_s)
        capacity = _capacity(setup, manager, model, eos_ids, load_s, pictures)
        self.capacity = msgspec.structs.replace(
            capacity,
            step_paths=tuple(map(str, forward.paths)),
            prompt_attention=tuple(map(str, forward.prompt_attention)),
        )
        context.metrics.set("bireme_weights_form", 1, forward.form)
        context.metrics.set("bireme_kv_form", 1, store.form)
        for kernel in self.capacity.prompt_attention[:1]:
            context.metrics.set("bireme_prompt_attention", 1, kernel)
        logger.info(
            "engine_loaded model=%s dtype=%s weights=%s kv=%s device=%s kv_mib=%d kv_blocks=%d windows=%s load_s=%.1f",
            type(model.modules).__name__,
            self.capacity.dtype,
            forward.form,
            store.form,
            setup.device.type,
            store.num_bytes >> 20,
            manager.num_blocks,
            ",".join(map(str, store.windows)),
            load_s,
        )
        logger.info("step_paths %s", ",".join(self.capacity.step_paths))
        logger.info("prompt_attention %s", ",".join(self.capacity.prompt_attention) or "of the path")
        logger.info("load_seconds %s", " ".join(f"{name}={value:.2f}" for name, value in phases.seconds.items()))

    def prices(self) -> WorkerPrices | None:
        """Return what the engine takes beside what it does now, from any thread; None: it has computed too little."""
        beside = NOTHING
        if self._stage != "prefill":
            beside = StepWork(self.core.num_running, 0, self.core.num_blocks_used * self.limits.tokens_per_block)
        transfer_ms = self._transfer.line_ms if self._transfer is not None else None
        return prices_of(self._costs, beside, self.limits.max_num_tokens, transfer_ms)


class _Phases:
    """Where the time of a load goes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.monotonic()

    def end(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self._began = now - self._began, now


def _load_weights(setup: Setup) -> SharedModel:
    """Return the model, its weights shared where the recipe has a memory service. Raises ConfigError."""
    context, checkpoint, device, dtype = setup.context, setup.checkpoint, setup.device, setup.config.dtype
    if context.hold_weights is None:
        weights = load_own(checkpoint, dtype, device)
    else:
        hold = context.hold_weights(weights_id(checkpoint, dtype, device))
        weights = load_shared(checkpoint, dtype, device, hold, context.hold_wait_s)
    metrics = context.metrics
    metrics.add("bireme_weights_loads_total", 1, "checkpoint" if weights.has_loaded else "memory_service")
    metrics.set("bireme_weights_load_seconds", weights.load_s)
    metrics.set("bireme_weights_attach_seconds", weights.attach_s)
    metrics.set("bireme_weights_shared_bytes", weights.num_bytes)
    if weights.hold is not None:
        weights.hold.keep(lambda num_engines: metrics.set("bireme_weights_engines", num_engines))
    return weights


def _open_pools(
    setup: Setup, model: StepModel, shared_bytes: int, draft: LoadedDraft | LoadedHead | None
) -> tuple[KvStore, BlockManager]:
    context, cache, limits, device = setup.context, setup.config.kv_cache_config, setup.limits, setup.device
    groups, available = group_layers(model.geometry), CPU_POOL_BYTES
    if device.type == "cuda" and cache.max_tokens is None:
        peak = model.peak_bytes(setup)
        if draft is not None:
            peak = draft.peak_beside(peak)
        free, total = torch.cuda.mem_get_info(device)
        memory = GpuMemory(total, free, torch.cuda.memory_allocated(device) + shared_bytes, peak)
        available = gpu_pool_bytes(memory, cache.free_gpu_memory_fraction, context.gpu_neighbors)
    num_blocks = pool_sizes(setup.config, limits, with_draft(groups, draft.row_bytes if draft else ()), available)
    is_shared = context.transfer is not None
    head = draft.layer if isinstance(draft, LoadedHead) else None
    store = KvStore(model.geometry, groups, num_blocks, limits.tokens_per_block, device, is_shared, head)
    lower, lowest = tier_sizes(setup.config, store.block_bytes), cache.secondary_offload_min_priority
    manager = BlockManager(
        [GroupSpec(group.window, count, below) for group, count, below in zip(groups, num_blocks, lower, strict=True)],
        limits.tokens_per_block,
        enable_reuse=cache.enable_block_reuse,
        events=EventBuffer(cache.event_buffer_max_size) if cache.event_buffer_max_size else None,
        # Two steps' worth: copies of the one are made during the other.
        margin=2 * (-(-limits.max_num_tokens // limits.tokens_per_block) + limits.max_batch_size),
        min_priority=DEFAULT_PRIORITY if lowest is None else lowest,
    )
    return store, manager


def _open_drafter(
    draft: LoadedDraft | LoadedHead, model: StepModel, forward: Forward, manager: BlockManager, store: KvStore
) -> DraftModel | EagleDrafter:
    num_blocks, limits = manager.groups[0].num_blocks, draft.setup.limits
    if isinstance(draft, LoadedHead):
        passes = draft.open(forward, store)
        rows: Sampler[RequestKey] = Sampler(passes.vocab_size, draft.setup.device, draw=model.draw_rows())
        return EagleDrafter(passes, rows, manager.pools[GROUP], limits.tokens_per_block, limits.max_seq_len)
    of_draft = draft.open(num_blocks)
    sampler: Sampler[RequestKey] = Sampler(draft.model.vocab_size, draft.setup.device, draw=draft.model.draw_rows())
    shape = (len(draft.groups), num_blocks, limits.tokens_per_block, limits.max_seq_len)
    return DraftModel(of_draft, sampler, *shape)


def _open_mover(setup: Setup, store: KvStore, manager: BlockManager) -> BlockMover | None:
    """Return what copies blocks between tiers; None: there is only the device. Raises ConfigError."""
    cache, lower = setup.config.kv_cache_config, [spec.lower for spec in manager.groups]
    if not lower[0]:
        return None
    disk = None
    if len(lower[0]) > 1 and cache.disk_cache_path:
        folder = os.path.expanduser(os.path.expandvars(cache.disk_cache_path))
        disk = DiskBlocks(folder, [counts[1] for counts in lower], store.block_bytes)
    return BlockMover(store, [counts[0] for counts in lower], disk)


def _open_step_times(setup: Setup) -> StepTimesFile:
    context, kept = setup.context, setup.context.findings_path
    path = kept.with_name(f"{context.worker}.step_times.json") if kept is not None else None
    weights = weights_id(setup.checkpoint, setup.config.dtype, setup.device)
    return StepTimesFile(path, setup.device, weights, msgspec.json.encode(setup.config))


def _start_transfer(setup: Setup, store: KvStore, layout: KvLayout) -> None:
    context = setup.context
    if context.transfer is None:
        return
    if setup.device.type == "cuda":

        def tell() -> None:
            for kind, num_bytes in store.copies.staging_bytes.items():
                context.metrics.set("bireme_kv_staging_bytes", num_bytes, kind)

        store.copies.on_change = tell
        tell()
    elif context.takes_kv:
        mapped_host_pool()  # what it loads, the first request does not wait for
    context.transfer.start(layout, store)


def _capacity(
    setup: Setup,
    manager: BlockManager,
    model: StepModel,
    eos_ids: tuple[int, ...],
    load_s: float,
    pictures: PictureSide,
) -> Capacity:
    limits = setup.limits
    full = [spec.num_blocks for spec in manager.groups if not spec.window]
    capacity = Capacity(
        max_seq_len=limits.max_seq_len,
        max_batch_size=limits.max_batch_size,
        max_num_tokens=limits.max_num_tokens,
        max_queue_size=limits.max_queue_size,
        tokens_per_block=limits.tokens_per_block,
        num_blocks=full[0] if full else manager.num_blocks,
        vocab_size=model.vocab_size,
        eos_token_ids=eos_ids,
        load_s=load_s,
        dtype=str(model.modules.dtype).removeprefix("torch."),
        image_token_id=pictures.placeholder,
        encodes_images=pictures.encoder is not None,
        nextn=limits.max_draft_len,
    )
    return capacity.within_pool() if full else capacity  # windows alone keep the end of a sequence
