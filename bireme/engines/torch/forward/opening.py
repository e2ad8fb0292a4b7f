"""Makes the paths of an engine's steps when it starts, as far as they work there; `forward.py` has the table."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from bireme.config import CudaGraphConfig
from bireme.engines.child.lost_device import raise_if_lost
from bireme.engines.torch import kernels
from bireme.engines.torch.forward.batch import BatchBuilder
from bireme.engines.torch.forward.decoder_ops import choose_ops
from bireme.engines.torch.forward.decoder_weights import DecoderWeights, fuse, why_not_fused
from bireme.engines.torch.forward.flash_attention import open_flash_attention
from bireme.engines.torch.forward.forward import Forward, StepPath
from bireme.engines.torch.forward.kept_weights import kept_weights
from bireme.engines.torch.forward.modules import Modules, peak_bytes, probe, route_attention
from bireme.engines.torch.forward.packed_decoder import PackedDecoder
from bireme.engines.torch.forward.tapped import TappedRows
from bireme.engines.torch.forward.warmup import (
    FirstPasses,
    check_mixed,
    check_packed,
    check_resident,
    check_verifying,
)
from bireme.engines.torch.geometry import EngineLimits, KvScales, LayerGeometry
from bireme.engines.torch.pools.kv_store import KvStore
from bireme.engines.torch.storage import WeightForm
from bireme.engines.torch.weights.eagle_bytes import places_of
from bireme.engines.torch.weights.limits import (
    FP8,
    FP8_REMEDY,
    check_kv_dtype,
    narrow_windows,
    why_no_fp8_kv,
)
from bireme.engines.torch.weights.setup import Setup
from bireme.errors import ConfigError
from bireme.kv.blocks.block_manager import BlockManager
from bireme.logits.sampler import DrawRows
from bireme.settings import NO_QUANT

if TYPE_CHECKING:  # Triton's language: CUDA builds alone
    from bireme.engines.torch.forward.fused_decoder import FusedDecoder

logger = logging.getLogger("bireme.engines.torch")


@dataclass(frozen=True, slots=True)
class StepModel:
    """A model that calls our attention, before there are pools."""

    modules: Any
    geometry: list[LayerGeometry]
    uses_kernels: bool  # of Triton's language
    aim: StepPath  # what is to compute its steps
    fused: DecoderWeights | None  # of a model that aims at that
    has_grid_positions: bool

    @property
    def form(self) -> WeightForm:
        """What most weights of the layers are stored in."""
        return WeightForm.PLAIN if self.fused is None else self.fused.stored_form

    @property
    def num_heads(self) -> int:
        """0: its configuration does not say."""
        return int(getattr(self.modules.config, "num_attention_heads", 0))

    @property
    def vocab_size(self) -> int:
        return int(self.modules.config.vocab_size)

    def peak_bytes(self, setup: Setup) -> int:
        """Return what the largest step takes of a GPU beyond weights and pools. Raises ConfigError."""
        return setup.findings.peak_bytes(lambda: peak_bytes(self.modules, self.geometry, setup.limits, setup.device))

    def draw_rows(self) -> DrawRows | None:
        """Return what draws a step's tokens beside the logits; None: the sampler does."""
        if not self.uses_kernels:
            return None
        from bireme.engines.torch.kernels.draw import draw_rows

        return draw_rows


def check_kv(setup: Setup) -> None:
    """Raise ConfigError where KV is to be 8-bit floats and nothing here attends to them, before weights are loaded."""
    if setup.kv_scales is None:
        return
    if why := why_no_fp8_kv(kernels.is_usable(setup.device)) or kernels.why_no_fp8(setup.device):
        raise ConfigError(f"kv_cache_config.dtype: {FP8!r} on engine torch: {why}; {FP8_REMEDY}")


def open_model(setup: Setup, modules: Any, takes_pictures: bool, has_grid_positions: bool) -> StepModel:
    """Find out how its layers attend, and choose its decoder. Raises ConfigError."""
    cache, device = setup.config.kv_cache_config, setup.device
    route_attention(modules)
    found = setup.findings.geometry(lambda: probe(modules, device))
    check_kv_dtype(cache.dtype, found[0].dtype)
    longest = int(getattr(setup.checkpoint.text_config, "max_position_embeddings", 0) or 0)
    geometry = _scaled(narrow_windows(found, cache.max_attention_window, longest), setup.kv_scales)
    uses_kernels = kernels.is_usable(device)
    if device.type == "cuda" and not uses_kernels:
        logger.warning("kernels_off reason=triton is not installed: attention copies each step's whole context")
    aim = StepPath.FUSED if uses_kernels else StepPath.MODULES if device.type == "cuda" else StepPath.PACKED
    if obstacle := "the model takes pictures" if takes_pictures else why_not_fused(modules):
        if setup.checkpoint.stored_as is not None:
            raise ConfigError(f"weights stored as {setup.checkpoint.stored_as.algo}: {obstacle}")
        logger.info("fused_off reason=%s", obstacle)
        aim = StepPath.MODULES
    fused = fuse(modules, setup.limits.max_seq_len) if aim is StepPath.FUSED else None
    return StepModel(modules, geometry, uses_kernels, aim, fused, has_grid_positions)


def _scaled(geometry: list[LayerGeometry], scales: Sequence[KvScales] | None) -> list[LayerGeometry]:
    """Return it with what KV is kept in."""
    if scales is None:
        return geometry
    return [replace(layer, scales=own) for layer, own in zip(geometry, scales, strict=True)]


def open_forward(
    setup: Setup,
    model: StepModel,
    store: KvStore,
    manager: BlockManager,
    is_shared: bool,
    taps: Sequence[int] = (),
) -> Forward:
    """Return it with its decoder. `is_shared`: other engines map the same weights. `taps`: layers whose outputs steps
    are to keep. Raises ConfigError where the model's layers can't be told apart.
    """
    flash = open_flash_attention(model.geometry, model.num_heads, store.device)
    forward = Forward(Modules(model.modules, store, model.uses_kernels, flash), _builder(setup, model, store), flash)
    on = FirstPasses(forward, manager, store, setup.limits, setup.findings)
    try:
        if model.fused is not None:
            _use_fused(setup, model, model.fused, on, taps)
        elif model.aim is StepPath.PACKED:
            _use_packed(setup, model, on, is_shared)
    except Exception as error:  # whatever is wrong with it on this machine: the model's own modules still run
        raise_if_lost(error, f"the first passes of the {model.aim} decoder")
        setup.findings.doubt()
        logger.warning("fused_off reason=%s: %s", type(error).__name__, str(error).partition("\n")[0])
    if taps and forward.tapped is None:
        forward.tap(TappedRows(taps))
    forward.form = model.form
    if isinstance(forward.decoder, PackedDecoder) and not is_shared:
        _pack(setup, model, forward, forward.decoder)
    return forward


def kv_model(setup: Setup, forward: Forward) -> str:
    """Return the digest that the engine's KV is named by. Blocks that stay make other KV than what they stand for."""
    digest = setup.checkpoint.digest
    if StepPath.QUANTIZED not in forward.paths:
        return digest
    return hashlib.sha256(f"{digest} {forward.form}".encode()).hexdigest()


def _pack(setup: Setup, model: StepModel, forward: Forward, decoder: PackedDecoder) -> None:
    """Put the decoder's weights in order; some stay as their file has them, unless the recipe says NO_QUANT."""
    kept = None if setup.config.quant_config.quant_algo == NO_QUANT else kept_weights(setup.checkpoint)
    if why := decoder.pack(model.modules, kept):
        logger.warning("weights_not_packed reason=%s: steps of few rows are slower", why)
    if decoder.form is not WeightForm.PLAIN:
        forward.form = decoder.form
        forward.use(StepPath.QUANTIZED, decoder, forward.builder)


def _builder(setup: Setup, model: StepModel, store: KvStore, uses_tables: bool = False) -> BatchBuilder:
    limits = setup.limits
    return BatchBuilder(
        store.windows,
        limits.tokens_per_block,
        limits.max_batch_size,
        limits.max_seq_len,
        store.device,
        model.has_grid_positions,
        model.uses_kernels,
        uses_tables,
    )


def _use_packed(setup: Setup, model: StepModel, on: FirstPasses, is_shared: bool) -> None:
    """Shared weights are not packed: that would be a copy for each engine."""
    decoder = PackedDecoder(
        fuse(model.modules, on.limits.max_seq_len, for_kernels=False), on.store, choose_ops(), is_shared
    )
    builder = _builder(setup, model, on.store, decoder.ops.uses_tables)
    check_packed(decoder, builder, on)
    on.forward.use(StepPath.PACKED, decoder, builder)


def _use_fused(setup: Setup, model: StepModel, weights: DecoderWeights, on: FirstPasses, taps: Sequence[int]) -> None:
    from bireme.engines.torch.forward.decode_graphs import bucket_sizes, graph_sizes, verify_sizes
    from bireme.engines.torch.forward.decode_state import DecodeState
    from bireme.engines.torch.forward.fused_decoder import FusedDecoder
    from bireme.engines.torch.forward.mixed_steps import MixedSteps
    from bireme.engines.torch.forward.resident_decode import ResidentDecode

    store, most, config = on.store, on.limits.max_batch_size, setup.config.cuda_graph_config
    most_verified = on.limits.most_verified_rows
    graphs = graph_sizes(config, most) if store.device.type == "cuda" else []
    sizes, is_padded = sorted({*graphs, *bucket_sizes(most)}), config is None or config.enable_padding
    decoder, state = (
        FusedDecoder(weights, store, on.forward.flash),
        DecodeState(weights, store, most, on.limits.most_blocks, max(most, most_verified), on.limits.max_draft_len),
    )
    tapped = _tap(decoder, taps, on.limits)  # before there are graphs
    resident = ResidentDecode(decoder, state, model.vocab_size, sizes, graphs, is_padded)
    check_resident(resident, on)
    on.forward.use(StepPath.FUSED, decoder, on.forward.builder)
    on.forward.tapped = tapped
    on.forward.resident = resident
    if most_verified:
        sizes = verify_sizes(most_verified)
        verifying = ResidentDecode(
            decoder, state, model.vocab_size, sizes, sizes if graphs else [], is_padded, has_drafts=True
        )
        try:
            check_verifying(verifying, on)
        except Exception as error:  # steps with drafts are launched kernel by kernel
            raise_if_lost(error, "the first steps with drafts")
            logger.warning("verify_off reason=%s: %s", type(error).__name__, str(error).partition("\n")[0])
        else:
            on.forward.verifying = verifying
    if config is not None and config.enable_padding:
        mixed = MixedSteps(decoder, state, model.vocab_size, on.limits.max_num_tokens, bool(graphs))
        try:
            check_mixed(mixed, resident, on)
        except Exception as error:  # steps with prompts are launched kernel by kernel
            raise_if_lost(error, "the first mixed steps")
            logger.warning("mixed_off reason=%s: %s", type(error).__name__, str(error).partition("\n")[0])
        else:
            on.forward.mixed = mixed


def _tap(decoder: FusedDecoder, taps: Sequence[int], limits: EngineLimits) -> TappedRows | None:
    """Have its steps keep these layers' outputs, and allocate what they go to; None: there are none."""
    if not taps:
        return None
    embeddings, tapped = decoder.weights.embeddings, TappedRows(taps)
    width = embeddings.shape[1]
    count = places_of(limits, len(taps) * width * embeddings.element_size())
    tapped.hold(limits.max_batch_size, count, width, embeddings.dtype, embeddings.device)
    decoder.tap(tapped)
    return tapped


def add_graphs(setup: Setup, model: StepModel, forward: Forward, store: KvStore) -> None:
    """Make graphs of the modules' decode steps, and have those of prompts made while nothing runs."""
    config = setup.config.cuda_graph_config
    if config is None or not model.uses_kernels or store.device.type != "cuda":
        return
    from bireme.engines.torch.forward.prompt_graphs import PromptGraphs

    if forward.resident is None and forward.tapped is not None:
        return  # what modules' layers give is read by hooks, which a graph does not run
    if forward.resident is None and not _add_decode_graphs(setup.limits, config, model, forward, store):
        return
    if config.enable_padding:
        shape = (store.windows, setup.limits, store.device, model.has_grid_positions)
        forward.graphs[StepPath.PROMPT_GRAPH] = PromptGraphs(forward.decoder.compute, *shape)


def _add_decode_graphs(
    limits: EngineLimits, config: CudaGraphConfig, model: StepModel, forward: Forward, store: KvStore
) -> bool:
    """Return whether the model's steps can be graphs, and are to be."""
    from bireme.engines.torch.forward.decode_graphs import DecodeGraphs, graph_sizes

    if not (sizes := graph_sizes(config, max(limits.max_batch_size, limits.most_verified_rows))):
        return False
    try:
        shape = (store.windows, limits.most_blocks, sizes, model.has_grid_positions, config.enable_padding)
        forward.graphs[StepPath.DECODE_GRAPH] = DecodeGraphs(forward.decoder.compute, *shape)
    except Exception as error:  # of whatever the model does that a graph can't hold: it still runs, more slowly
        raise_if_lost(error, "graphs of the modules' decode steps")
        logger.warning("graphs_off reason=%s: %s", type(error).__name__, str(error).partition("\n")[0])
        torch.cuda.empty_cache()
        return False
    return True
