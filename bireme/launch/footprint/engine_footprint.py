"""What one torch engine takes of memory: its weights, its KV pool, its largest step, and the libraries in its process.

Everything that follows from the model is counted with the engine's own rules (dtype, limits, pool sizes).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import NamedTuple

from bireme.config import EngineConfig
from bireme.engines.torch.geometry import (
    NEWEST,
    UNSCALED,
    Capability,
    EngineLimits,
    LayerGroup,
    group_layers,
    why_no_bfloat16,
)
from bireme.engines.torch.pools.sizes import CPU_POOL_BYTES, GpuMemory, gpu_pool_bytes, pool_sizes, with_draft
from bireme.engines.torch.weights import architectures, dtypes
from bireme.engines.torch.weights.eagle_bytes import EagleWidths, eagle_bytes, gpu_bytes
from bireme.engines.torch.weights.limits import FP8, longest_sequence, narrow_windows, resolve_limits
from bireme.engines.torch.weights.plain_modules import excluded, named_plain
from bireme.errors import ConfigError
from bireme.launch.footprint.config_fields import ConfigFields
from bireme.launch.footprint.decoder_shape import DecoderShape, Parameters
from bireme.launch.footprint.kept_bytes import KeptBytes, kept_item_bytes
from bireme.launch.footprint.step_bytes import StepWidths, modules_step, packed_step
from bireme.launch.footprint.weight_files import WeightFiles
from bireme.settings import NO_QUANT

_FLOAT_BYTES = 4
_INT4_BYTES = 0.5 + 3 / 128  # with a scale and a zero point for each group
_MXFP4_GROUP = 32  # values of half a byte that share a scale of one
GPU_CONTEXT_BYTES = 600 << 20
KEPT_BYTES = 64 << 20  # of freed buffers, for the next step's: own_process.reuse_memory
# Of what oneDNN compiles for a mixture: its experts' numbers of rows fill the cache (engines/stub/environment.py).
PRODUCT_BYTES = 96 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What an engine meets on its machine."""

    gpu_bytes: int = 0  # of its GPU, all of it; 0: there is none
    capability: Capability = NEWEST  # its GPU's
    has_compiler: bool = True  # of C++: its kernels for CPUs
    shares_weights: bool = False  # with the memory service
    gpu_neighbors: tuple[float, ...] = ()

    @property
    def keeps_weights(self) -> bool:
        """Return whether there are products with weights as files have them."""
        return bool(self.gpu_bytes) or (self.has_compiler and not self.shares_weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFootprint:
    """Bytes, of the device where nothing else is said. `load`: what a load takes beyond the rest, for a while."""

    dtype: str
    kv_dtype: str
    weights: int
    pool: int  # KV
    step: int  # the largest one
    load: int
    groups: tuple[LayerGroup, ...]
    num_blocks: tuple[int, ...]  # of each group
    limits: EngineLimits

    @property
    def pool_tokens(self) -> int:
        """Return the tokens whose keys and values the pool holds; of layers with windows alone: of their windows."""
        full = [count for group, count in zip(self.groups, self.num_blocks, strict=True) if not group.window]
        return (full or [max(self.num_blocks)])[0] * self.limits.tokens_per_block

    @property
    def bytes_per_token(self) -> int:
        """Return what a token takes while all layers see it."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def total(self) -> int:
        return self.weights + self.pool + self.step


class DraftParts(NamedTuple):
    """Bytes."""

    weights: int
    load: int
    step: int
    held: int  # beside the target's steps as well
    row_bytes: tuple[int, ...]  # of a token in the pools, a layer each


class HeadSizes:
    """Of an EAGLE-3 head, by its file: it is computed in the dtype of its model."""

    def __init__(self, config: ConfigFields, num_bytes: int) -> None:
        """`num_bytes`: of its file. Raises ConfigError."""
        heads, hidden, vocab = (config.size(key) for key in ("num_attention_heads", "hidden_size", "vocab_size"))
        size = config.size("head_dim", default=max(1, hidden // heads))
        self._num_bytes = num_bytes
        self._widths = EagleWidths(
            base=config.size("target_hidden_size", default=hidden),
            hidden=hidden,
            queries=heads * size,
            row=2 * size * config.size("num_key_value_heads", default=heads),
            vocab=vocab,
            draft_vocab=config.size("draft_vocab_size", default=vocab),
        )

    def draft_parts(self, limits: EngineLimits, around: Surroundings, of_target: str) -> DraftParts:
        """`of_target`: its dtype."""
        item = dtypes.ITEM_BYTES[of_target]
        taken = eagle_bytes(self._widths, limits, item)
        held = taken.tapped + (gpu_bytes(self._widths, limits, item) if around.gpu_bytes else 0)
        return DraftParts(self._num_bytes, 0, taken.largest_pass, held, (self._widths.row * item,))


class EngineSizes:
    """Of one model under one configuration. `footprint` is asked again for other surroundings."""

    def __init__(
        self,
        config: EngineConfig,
        shape: DecoderShape,
        files: WeightFiles | None,
        blocks: KeptBytes | None = None,
        draft: EngineSizes | HeadSizes | None = None,
    ) -> None:
        """`blocks`: what stays of a GGUF file on a CPU. `draft`: of the model that drafts for it."""
        self.config, self.shape, self.files = config, shape, files if config.load_format != "dummy" else None
        self._blocks, self._draft = blocks or KeptBytes(), draft

    def footprint(self, around: Surroundings) -> EngineFootprint:
        """Raises ConfigError by the engine's own rules."""
        config, shape = self.config, self.shape
        limits = resolve_limits(config, _namespace(shape.text))
        dtype = self._dtype(around)
        windows = config.kv_cache_config.max_attention_window
        longest = shape.text.size("max_position_embeddings", "n_positions", default=0, least=0)
        is_fp8 = config.kv_cache_config.dtype == FP8
        geometry = shape.geometry(dtype, UNSCALED if is_fp8 else None)
        groups = group_layers(narrow_windows(geometry, windows, longest))
        has_decoder = shape.architecture in architectures.FAMILIES and dtype in ("bfloat16", "float32")
        weights, load = self._weights(dtype, has_decoder, limits, around)
        step = _step_bytes(shape, limits, dtype, has_decoder, around)
        if self._draft is not None:  # its passes come before the target's steps, its load after that's
            drafts = self._draft.draft_parts(limits, around, dtype)
            weights, load, step = weights + drafts.weights, max(load, drafts.load), drafts.held + max(step, drafts.step)
            groups = tuple(with_draft(groups, drafts.row_bytes))
        available = CPU_POOL_BYTES
        if around.gpu_bytes:
            free = around.gpu_bytes - GPU_CONTEXT_BYTES - weights
            memory = GpuMemory(around.gpu_bytes, free, weights, step)
            fraction = config.kv_cache_config.free_gpu_memory_fraction
            available = gpu_pool_bytes(memory, fraction, around.gpu_neighbors)
        try:
            counts = pool_sizes(config, limits, groups, available)
        except ConfigError:
            if not around.gpu_bytes or config.kv_cache_config.max_tokens is not None:
                raise
            counts = [0] * len(groups)  # by this count: the engine itself measures
        size = limits.tokens_per_block
        pool = sum((count + 1) * size * group.bytes_per_token for count, group in zip(counts, groups, strict=True))
        return EngineFootprint(
            dtype=dtype,
            kv_dtype=FP8 if is_fp8 else dtype,
            weights=weights,
            pool=pool,
            step=step,
            load=load,
            groups=groups,
            num_blocks=tuple(counts),
            limits=limits,
        )

    def _dtype(self, around: Surroundings) -> str:
        gpu = around.capability if around.gpu_bytes else None
        return dtypes.choose(self.config.dtype, self.shape.text.dtype or self.own_dtype, gpu)

    def draft_parts(self, limits: EngineLimits, around: Surroundings, of_target: str) -> DraftParts:
        """Return what it takes beside a target that has these limits: its weights are its engine's own."""
        dtype, alone = self._dtype(around), replace(around, shares_weights=False)
        longest = longest_sequence(_namespace(self.shape.text)) or limits.max_seq_len
        limits = replace(limits, max_seq_len=min(limits.max_seq_len, longest), max_draft_len=0)
        has_decoder = self.shape.architecture in architectures.FAMILIES and dtype in ("bfloat16", "float32")
        weights, load = self._weights(dtype, has_decoder, limits, alone)
        step = _step_bytes(self.shape, limits, dtype, has_decoder, around)
        return DraftParts(weights, load, step, 0, tuple(layer.row_bytes for layer in self.shape.geometry(dtype)))

    @property
    def own_dtype(self) -> str | None:
        """Return the dtype of the files' matrices; None: it is not known."""
        names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
        found = {names.get(name) for name in self.files.dtypes} if self.files is not None else set()
        return found.pop() if len(found) == 1 else None

    @property
    def parameters(self) -> Parameters:
        return self.shape.parameters if self.files is None else self.files.parameters

    def _weights(self, dtype: str, has_decoder: bool, limits: EngineLimits, around: Surroundings) -> tuple[int, int]:
        """Return the weights' bytes once they are loaded, and what the load takes beyond these."""
        count, size = self.parameters, dtypes.ITEM_BYTES[dtype]
        tables = _table_bytes(self.shape, limits) if has_decoder else 0
        plain = count.total * size + tables
        own, kept = self.own_dtype, self._kept(has_decoder, around, dtype)
        if around.gpu_bytes:
            saved = kept.products * size - kept.product_bytes
            return plain - (saved or self._rounded_bytes(size)), 0
        if not has_decoder or around.shares_weights:
            return plain, 0
        packed_size = 2 if size == _FLOAT_BYTES and own == "bfloat16" and around.has_compiler else size
        packed, head = _packed_bytes(count, kept, size, packed_size) + tables, count.head or count.embeddings
        read = plain * (not self._is_mapped(dtype))
        return packed, max(0, read + (count.embeddings + 2 * head) * size - packed)

    def _is_mapped(self, dtype: str) -> bool:
        """Return whether the files are mapped as the model's weights, which take no memory of their own then."""
        return self.files is not None and self.own_dtype == dtype

    def _kept(self, has_decoder: bool, around: Surroundings, dtype: str) -> KeptBytes:
        """Return what stays as the files have it: projections of dense layers, or on a GPU gpt-oss' experts."""
        told, shape, is_gpu = self.shape.text.block("quantization_config"), self.shape, bool(around.gpu_bytes)
        if not has_decoder or not self._keeps(around):
            return KeptBytes()
        if is_gpu and not why_no_bfloat16(around.capability) and (values := _kept_experts(shape, told)):
            return KeptBytes(products=values, product_bytes=values // 2 + values // _MXFP4_GROUP)
        size = kept_item_bytes(told, is_gpu, dtype, around.capability)
        if told is None or size is None or shape.num_experts:
            return KeptBytes() if is_gpu else self._kept_blocks()
        products = self.parameters.products - self._weights_of(named_plain(told.tree, len(shape.windows)))
        return KeptBytes(products=products, product_bytes=round(products * size))

    def _keeps(self, around: Surroundings) -> bool:
        """Return whether weights may stay. In few bits they are made up on GPUs alone."""
        is_made_up = self.config.load_format == "dummy"
        is_asked = around.keeps_weights and self.config.quant_config.quant_algo != NO_QUANT
        return is_asked and (bool(around.gpu_bytes) or not is_made_up)

    def _kept_blocks(self) -> KeptBytes:
        """Return what stays of a GGUF file; of layers with experts nothing does."""
        return replace(self._blocks, products=0, product_bytes=0) if self.shape.num_experts else self._blocks

    def _rounded_bytes(self, size: int) -> int:
        """Return what quant_config saves on a GPU of weights of so many bytes each."""
        algo, patterns = self.config.quant_config.quant_algo, self.config.quant_config.exclude_modules
        if not algo or algo == NO_QUANT:
            return 0
        left = self._weights_of(excluded(patterns, len(self.shape.windows))) if patterns else 0
        own = _INT4_BYTES if algo.startswith("W4A16") else 1.0
        return round((self.parameters.products - left) * (size - own))

    def _weights_of(self, projections: Collection[str]) -> int:
        sizes = self.shape.projection_sizes() if projections else {}
        return sum(sizes[name] for name in projections)


def _packed_bytes(count: Parameters, kept: KeptBytes, size: int, packed_size: int) -> int:
    """Of a CPU's decoder: its embeddings stay as they are, so that a tied head is a second copy of them."""
    products = (count.products - kept.products) * packed_size + kept.product_bytes
    embeddings = count.embeddings * size if kept.embedding_bytes is None else kept.embedding_bytes
    head = (count.head or count.embeddings) * packed_size if kept.head_bytes is None else kept.head_bytes
    return products + embeddings + head + count.rest * _FLOAT_BYTES


def _kept_experts(shape: DecoderShape, told: ConfigFields | None) -> int:
    """Return how many weights of gpt-oss' experts stay MXFP4 on a GPU."""
    if shape.architecture != "GptOssForCausalLM" or told is None or told.tree.get("quant_method") != "mxfp4":
        return 0
    return 3 * len(shape.windows) * shape.num_experts * shape.expert_width * shape.hidden


def _namespace(text: ConfigFields) -> SimpleNamespace:
    """Return what the engine's rules ask of transformers' configuration. Raises ConfigError."""
    longest = text.size("max_position_embeddings", "n_positions", default=0, least=0)
    ropes = {}
    for name in ("rope_parameters", "rope_scaling"):
        if (block := text.block(name)) is not None:
            for nested in [block, *(block.block(key) for key in block.tree if isinstance(block.tree[key], dict))]:
                assert nested is not None
                nested.size("original_max_position_embeddings", default=0, least=0)
            ropes[name] = block.tree
    return SimpleNamespace(max_position_embeddings=longest, vocab_size=text.size("vocab_size"), **ropes)


def _table_bytes(shape: DecoderShape, limits: EngineLimits) -> int:
    """Return the cosines and sines of all positions, of each kind of layer that has its own."""
    kinds = len(set(shape.windows)) if shape.architecture == "Gemma3ForCausalLM" else 1
    return kinds * limits.max_seq_len * shape.key_sizes[0][1] * _FLOAT_BYTES


def _step_bytes(shape: DecoderShape, limits: EngineLimits, dtype: str, has_decoder: bool, around: Surroundings) -> int:
    on = StepWidths(limits.max_num_tokens, limits.max_seq_len, limits.most_sampled_rows, dtypes.ITEM_BYTES[dtype])
    if around.gpu_bytes:
        return modules_step(shape, on, True)
    step = packed_step(shape, on, around.has_compiler) if has_decoder else modules_step(shape, on, False)
    products = PRODUCT_BYTES if shape.num_experts and dtype == "bfloat16" else 0
    return step + min(2 * step, KEPT_BYTES) + products
