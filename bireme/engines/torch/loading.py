"""From a model folder to a core that is ready to serve: check, load, probe, allocate, warm up."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from bireme.config import EngineConfig
from bireme.engines.base import EngineContext, RequestKey
from bireme.engines.torch import kernels
from bireme.engines.torch.forward.batch import BatchBuilder
from bireme.engines.torch.forward.decoder_ops import choose_ops
from bireme.engines.torch.forward.decoder_weights import DecoderWeights, fuse, why_not_fused
from bireme.engines.torch.forward.findings import Findings
from bireme.engines.torch.forward.packed_decoder import PackedDecoder
from bireme.engines.torch.forward.runner import HfRunner, peak_bytes, probe, route_attention
from bireme.engines.torch.forward.warmup import FirstPasses, check_packed, check_resident, warm_up
from bireme.engines.torch.geometry import EngineLimits, LayerGeometry
from bireme.engines.torch.pools.block_mover import BlockMover
from bireme.engines.torch.pools.kv_store import KvStore, group_layers
from bireme.engines.torch.scheduling.admission import Admission
from bireme.engines.torch.scheduling.core import EngineCore, Parts
from bireme.engines.torch.scheduling.disaggregation import TorchExporter, TorchImporter
from bireme.engines.torch.scheduling.guides import TorchGuides
from bireme.engines.torch.scheduling.metrics import TorchMetrics
from bireme.engines.torch.step import Post
from bireme.engines.torch.weights import limits as limit
from bireme.engines.torch.weights.architectures import is_picture_model
from bireme.engines.torch.weights.checkpoint import Checkpoint, eos_token_ids, open_checkpoint
from bireme.engines.torch.weights.shared_weights import SharedModel, load_own, load_shared, weights_id
from bireme.errors import ConfigError
from bireme.kv.blocks.block_manager import BlockManager, GroupSpec
from bireme.kv.blocks.block_pool import DEFAULT_PRIORITY
from bireme.kv.blocks.disk_blocks import DiskBlocks
from bireme.kv.blocks.events import EventBuffer
from bireme.logits.sampler import DrawRows, Sampler
from bireme.messages import Capacity
from bireme.own_work import Work

if TYPE_CHECKING:
    from bireme.engines.torch.forward.prompt_graphs import PromptGraphs
    from bireme.engines.torch.forward.resident_decode import ResidentDecode
    from bireme.engines.torch.images.picture_side import PictureSide

logger = logging.getLogger("bireme.engines.torch")


class LoadedEngine:
    """A core, its capacity, and the admission of its requests."""

    def __init__(self, context: EngineContext, post: Post) -> None:
        phases = _Phases()
        torch.set_num_threads(context.num_threads)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config = context.config
        checkpoint = open_checkpoint(context.model_path, config.trust_remote_code, config.load_format)
        # cuDNN's attention makes a plan for every shape, 30 to 40 ms of host time each.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.limits = limit.resolve_limits(context.config, checkpoint.text_config)
        phases.end("checkpoint")
        self.weights = weights_of(context, checkpoint, device)
        phases.end("weights")
        model = self.weights.model
        pictures = _picture_side(context, checkpoint, model, device, post, self.limits)
        self.encoder = pictures.encoder if pictures else None
        if pictures:
            model = pictures.language_model
        findings = _findings(context, checkpoint, device)
        geometry = _geometry(context, model, checkpoint, device, findings)
        uses_kernels = kernels.is_usable(device)
        is_fused = _is_fused(model, pictures)
        weights = fuse(model, self.limits.max_seq_len) if uses_kernels and is_fused else None
        phases.end("probe")
        store, manager = _pools(
            context, model, geometry, self.limits, checkpoint, device, self.weights.num_bytes, findings
        )
        phases.end("pools")
        self.events = manager.events
        self.num_blocks = manager.num_blocks
        eos_ids, vocab_size = eos_token_ids(checkpoint), int(model.config.vocab_size)
        sampler: Sampler[RequestKey] = Sampler(
            vocab_size,
            device,
            context.max_processor_ms / 1e3,
            _draw_rows(uses_kernels),
            partial(context.own_work.mark, work=Work.PROCESSORS),
        )
        self.guides = TorchGuides(checkpoint.folder, vocab_size, eos_ids, context.config, post, context.own_work)
        self.admission = Admission(
            self.limits,
            manager,
            sampler,
            eos_ids,
            self.guides,
            pictures.store if pictures else None,
            pictures.merge_size if pictures else 0,
        )
        block_bytes = [group.bytes_per_token * self.limits.tokens_per_block for group in store.groups]
        accounts = TorchMetrics(context.metrics, context.worker, block_bytes)
        has_grid_positions = pictures is not None and pictures.merge_size > 0
        if device.type == "cuda" and not uses_kernels:
            logger.warning("kernels_off reason=triton is not installed: attention copies each step's whole context")
        runner = HfRunner(model, store, uses_kernels)
        builder = _builder(store, self.limits, device, has_grid_positions, uses_kernels)
        first = FirstPasses(runner, builder, manager, store, self.limits, findings)
        resident = None
        if weights is not None:
            resident = _resident(weights, first, context.config, vocab_size)
        elif device.type == "cpu" and is_fused:
            first = replace(first, builder=_packed(model, first, self.weights.is_shared))
        phases.end("decoder")
        warm_up(first)
        phases.end("warm_up")
        self.mover = _mover(store, manager, context.config)
        prompt_graphs = None
        if uses_kernels and device.type == "cuda":
            graphs = (runner, store, self.limits, config, has_grid_positions)
            if resident is not None or _make_graphs(*graphs):
                prompt_graphs = _prompt_graphs(*graphs)
        self.core = EngineCore(
            Parts(
                worker=context.worker,
                life=context.life,
                post=post,
                limits=self.limits,
                runner=runner,
                builder=first.builder,
                manager=manager,
                sampler=sampler,
                admission=self.admission,
                accounts=accounts,
                guides=self.guides,
                exporter=TorchExporter(context.transfer, manager, store, post) if context.transfer else None,
                importer=TorchImporter(context.transfer, manager, store, post) if context.transfer else None,
                mover=self.mover,
                pictures=pictures.store if pictures else None,
                resident=resident,
                prompt_graphs=prompt_graphs,
            )
        )
        if context.transfer is not None:
            if device.type == "cuda":
                context.metrics.set("bireme_kv_staging_bytes", store.copies.staging_bytes, store.copies.kind)
            context.transfer.start(store.layout(checkpoint.digest), store)
        findings.keep()
        phases.end("rest")
        load_s = sum(phases.seconds.values())
        accounts.started(manager, load_s)
        self.capacity = _capacity(self.limits, manager, model, eos_ids, load_s, pictures)
        _tell(model, store, manager, self.capacity)
        logger.info("load_seconds %s", " ".join(f"{name}={value:.2f}" for name, value in phases.seconds.items()))


class _Phases:
    """Where the time of a load goes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.monotonic()

    def end(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self._began = now - self._began, now


def weights_of(context: EngineContext, checkpoint: Checkpoint, device: torch.device) -> SharedModel:
    """Return the model, its weights shared where the recipe has a memory service. Raises ConfigError."""
    dtype = context.config.dtype
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


def _picture_side(
    context: EngineContext, checkpoint: Checkpoint, model: Any, device: torch.device, post: Post, limits: EngineLimits
) -> PictureSide | None:
    """Return None for a model of text alone. Raises ConfigError."""
    if not is_picture_model(checkpoint.name):
        return None
    try:
        from bireme.engines.torch.images.picture_side import make_picture_side
    except ModuleNotFoundError as error:
        raise ConfigError(f"{checkpoint.name}: pictures need {error.name}; pip install -e .[multimodal]") from error
    return make_picture_side(context, checkpoint, model, device, post, limits)


def _tell(model: Any, store: KvStore, manager: BlockManager, capacity: Capacity) -> None:
    logger.info(
        "engine_loaded model=%s dtype=%s device=%s kv_mib=%d kv_blocks=%d windows=%s load_s=%.1f",
        type(model).__name__,
        capacity.dtype,
        store.device.type,
        store.num_bytes >> 20,
        manager.num_blocks,
        ",".join(str(group.window) for group in store.groups),
        capacity.load_s,
    )


def _draw_rows(uses_kernels: bool) -> DrawRows | None:
    if not uses_kernels:
        return None
    from bireme.engines.torch.kernels.draw import draw_rows

    return draw_rows


def _builder(
    store: KvStore,
    limits: EngineLimits,
    device: torch.device,
    has_grid_positions: bool = False,
    uses_kernels: bool = False,
    uses_tables: bool = False,
) -> BatchBuilder:
    return BatchBuilder(
        [group.window for group in store.groups],
        limits.tokens_per_block,
        limits.max_batch_size,
        limits.max_seq_len,
        device,
        has_grid_positions,
        uses_kernels,
        uses_tables,
    )


def _is_fused(model: Any, pictures: PictureSide | None) -> bool:
    """Return whether a decoder of this engine takes the place of the model's modules."""
    reason = "the model takes pictures" if pictures is not None else why_not_fused(model)
    if reason:
        logger.info("fused_off reason=%s", reason)
    return not reason


def _packed(model: Any, on: FirstPasses, is_shared: bool) -> BatchBuilder:
    """Put the packed decoder in place of the model's modules, which are emptied, and return its batches' builder.

    If it does not compute what they do they stay, and so does their builder. Shared weights are not packed: that
    would be a copy for each engine.
    """
    make_ops = choose_ops()
    decoder = PackedDecoder(fuse(model, on.limits.max_seq_len), on.store, make_ops, is_shared)
    builder = _builder(on.store, on.limits, on.store.device, uses_tables=decoder.ops.uses_tables)
    try:
        check_packed(decoder, builder, on)
    except Exception as error:  # whatever is wrong with it on this CPU: the model's own modules still run
        on.findings.doubt()
        logger.warning("fused_off reason=%s: %s", type(error).__name__, str(error).partition("\n")[0])
        return on.builder
    if not is_shared and (reason := decoder.pack(model)):
        logger.warning("weights_not_packed reason=%s: steps of few rows are slower", reason)
    on.runner.use_decoder(decoder)
    return builder


def _resident(weights: DecoderWeights, on: FirstPasses, config: EngineConfig, vocab_size: int) -> ResidentDecode | None:
    """Put the fused decoder in place of the model's modules; None: it does not compute what they do."""
    from bireme.engines.torch.forward.decode_graphs import bucket_sizes, graph_sizes
    from bireme.engines.torch.forward.decode_state import DecodeState
    from bireme.engines.torch.forward.fused_decoder import FusedDecoder
    from bireme.engines.torch.forward.resident_decode import ResidentDecode

    store, limits = on.store, on.limits
    decoder, most = FusedDecoder(weights, store), limits.max_batch_size
    graphs = graph_sizes(config.cuda_graph_config, most) if store.device.type == "cuda" else []
    is_padded = config.cuda_graph_config is None or config.cuda_graph_config.enable_padding
    try:
        state = DecodeState(weights, store, most, -(-limits.max_seq_len // limits.tokens_per_block) + 1, most)
        sizes = sorted({*graphs, *bucket_sizes(most)})
        resident = ResidentDecode(decoder, state, vocab_size, sizes, graphs, is_padded)
        check_resident(resident, on)
    except Exception as error:  # whatever is wrong with a kernel on this GPU: the model's own modules still run
        on.findings.doubt()
        logger.warning("fused_off reason=%s: %s", type(error).__name__, str(error).partition("\n")[0])
        return None
    on.runner.use_decoder(decoder)
    return resident


def _make_graphs(
    runner: HfRunner, store: KvStore, limits: EngineLimits, config: EngineConfig, has_grid_positions: bool
) -> bool:
    """Return whether the model's steps can be graphs, and are to be."""
    from bireme.engines.torch.forward.decode_graphs import DecodeGraphs, graph_sizes

    windows, columns = [group.window for group in store.groups], -(-limits.max_seq_len // limits.tokens_per_block) + 1
    sizes, settings = graph_sizes(config.cuda_graph_config, limits.max_batch_size), config.cuda_graph_config
    if settings is None or not sizes:
        return False
    try:
        made = DecodeGraphs(runner.compute, windows, columns, sizes, has_grid_positions, settings.enable_padding)
        runner.use(made)
    except Exception as error:  # of whatever the model does that a graph can't hold: it still runs, more slowly
        logger.warning("graphs_off reason=%s: %s", type(error).__name__, str(error).partition("\n")[0])
        torch.cuda.empty_cache()
        return False
    return True


def _prompt_graphs(
    runner: HfRunner, store: KvStore, limits: EngineLimits, config: EngineConfig, has_grid_positions: bool
) -> PromptGraphs | None:
    """Have the runner use graphs of short prompts, which are still to be made. None: graphs are off, or not padded."""
    from bireme.engines.torch.forward.prompt_graphs import PromptGraphs

    if config.cuda_graph_config is None or not config.cuda_graph_config.enable_padding:
        return None
    windows = [group.window for group in store.groups]
    made = PromptGraphs(runner.compute, windows, limits, store.device, has_grid_positions)
    runner.use(made)
    return made


def _findings(context: EngineContext, checkpoint: Checkpoint, device: torch.device) -> Findings:
    config = context.config
    return Findings(context.findings_path, weights_id(checkpoint, config.dtype, device), msgspec.json.encode(config))


def _geometry(
    context: EngineContext, model: Any, checkpoint: Checkpoint, device: torch.device, findings: Findings
) -> list[LayerGeometry]:
    route_attention(model)
    geometry = findings.geometry(lambda: probe(model, device))
    limit.check_kv_dtype(context.config.kv_cache_config.dtype, geometry[0].dtype)
    longest = int(getattr(checkpoint.text_config, "max_position_embeddings", 0) or 0)
    return limit.narrow_windows(geometry, context.config.kv_cache_config.max_attention_window, longest)


def _pools(
    context: EngineContext,
    model: Any,
    geometry: list[LayerGeometry],
    limits: EngineLimits,
    checkpoint: Checkpoint,
    device: torch.device,
    shared_bytes: int,
    findings: Findings,
) -> tuple[KvStore, BlockManager]:
    cache = context.config.kv_cache_config
    groups = group_layers(geometry)
    if device.type == "cuda" and cache.max_tokens is None:
        peak = findings.peak_bytes(lambda: peak_bytes(model, geometry, limits, device))
        free, total = torch.cuda.mem_get_info(device)
        memory = limit.GpuMemory(total, free, torch.cuda.memory_allocated(device) + shared_bytes, peak)
        available = limit.gpu_pool_bytes(memory, cache.free_gpu_memory_fraction, context.gpu_neighbors)
        num_blocks = limit.pool_sizes(context.config, limits, groups, available)
    else:
        num_blocks = limit.pool_sizes(context.config, limits, groups)
    is_shared = context.transfer is not None
    store = KvStore(geometry, groups, num_blocks, limits.tokens_per_block, device, is_shared)
    lower = limit.tier_sizes(context.config, groups)
    manager = BlockManager(
        [GroupSpec(group.window, count, below) for group, count, below in zip(groups, num_blocks, lower, strict=True)],
        limits.tokens_per_block,
        model=checkpoint.digest,
        enable_reuse=cache.enable_block_reuse,
        events=EventBuffer(cache.event_buffer_max_size) if cache.event_buffer_max_size else None,
        # Two steps' worth: copies of the one are made during the other.
        margin=2 * (-(-limits.max_num_tokens // limits.tokens_per_block) + limits.max_batch_size),
        min_priority=DEFAULT_PRIORITY
        if cache.secondary_offload_min_priority is None
        else cache.secondary_offload_min_priority,
    )
    return store, manager


def _mover(store: KvStore, manager: BlockManager, config: EngineConfig) -> BlockMover | None:
    """Return what copies blocks between tiers; None: there is only the device. Raises ConfigError."""
    cache, lower = config.kv_cache_config, [spec.lower for spec in manager.groups]
    if not lower[0]:
        return None
    disk = None
    if len(lower[0]) > 1 and cache.disk_cache_path:
        folder = os.path.expanduser(os.path.expandvars(cache.disk_cache_path))
        sizes = [group.bytes_per_token * manager.tokens_per_block for group in store.groups]
        disk = DiskBlocks(folder, [counts[1] for counts in lower], sizes)
    return BlockMover(store, [counts[0] for counts in lower], disk)


def _capacity(
    limits: EngineLimits,
    manager: BlockManager,
    model: Any,
    eos_ids: tuple[int, ...],
    load_s: float,
    pictures: PictureSide | None,
) -> Capacity:
    full = [spec.num_blocks for spec in manager.groups if not spec.window]
    capacity = Capacity(
        max_seq_len=limits.max_seq_len,
        max_batch_size=limits.max_batch_size,
        max_num_tokens=limits.max_num_tokens,
        max_queue_size=limits.max_queue_size,
        tokens_per_block=limits.tokens_per_block,
        num_blocks=full[0] if full else manager.num_blocks,
        vocab_size=int(model.config.vocab_size),
        eos_token_ids=eos_ids,
        load_s=load_s,
        dtype=str(model.dtype).removeprefix("torch."),
        image_token_id=pictures.placeholder if pictures else None,
        encodes_images=pictures is not None and pictures.encoder is not None,
    )
    return capacity.within_pool() if full else capacity  # windows alone keep the end of a sequence
