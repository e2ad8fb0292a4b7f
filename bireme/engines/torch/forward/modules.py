"""An unmodified transformers model whose attention reads and writes our pools.

The pools are allocated from what a probe pass sees in the attention calls, not from names in the configuration:
families spell heads and windows in too many ways.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bireme.engines.torch.forward import attention
from bireme.engines.torch.forward.attention import AttentionStep, PagedStep, ProbeStep, SizingStep
from bireme.engines.torch.forward.flash_attention import FlashAttention
from bireme.engines.torch.forward.tapped import TappedRows
from bireme.engines.torch.geometry import EngineLimits, LayerGeometry
from bireme.engines.torch.pools.kv_store import KvStore
from bireme.engines.torch.step import Batch
from bireme.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def route_attention(model: Any) -> None:
    """Have the model call our attention. Raises ConfigError."""
    attention.register()
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ConfigError(f"{type(model).__name__}: its forward has no logits_to_keep, which the torch engine needs")
    model.set_attn_implementation(attention.NAME)


def probe(model: Any, device: torch.device) -> list[LayerGeometry]:
    """Return the geometry of every layer of a model that calls our attention. Raises ConfigError."""
    name, step = type(model).__name__, ProbeStep()
    tokens = torch.tensor([[0, 1]], device=device)
    try:
        _forward(model, step, tokens, tokens, torch.tensor([1], device=device))
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{name}: a probe pass failed: {type(error).__name__}: {error}") from error
    return _complete(step.seen, int(model.config.num_hidden_layers), name)


def _complete(seen: dict[int, LayerGeometry], num_layers: int, name: str) -> list[LayerGeometry]:
    silent = [layer for layer in range(num_layers) if layer not in seen]
    if silent or len(seen) != num_layers:
        raise ConfigError(
            f"{name}: {len(silent)} of {num_layers} layers (first: {silent[:1]}) never call the attention interface;"
            " the torch engine can't keep their state"
        )
    unknown = sorted({argument for layer in seen.values() for argument in layer.unknown})
    if unknown:
        raise ConfigError(f"{name}: passes attention arguments that the torch engine does not honour: {unknown}")
    return [seen[layer] for layer in range(num_layers)]


def peak_bytes(model: Any, geometry: Sequence[LayerGeometry], limits: EngineLimits, device: torch.device) -> int:
    """Return what the largest step takes of a GPU beyond weights and pools. Raises ConfigError if it does not fit."""
    before: int = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    tokens = torch.zeros(1, limits.max_num_tokens, dtype=torch.int64, device=device)
    most = min(limits.max_num_tokens, limits.most_sampled_rows + limits.max_logprob_rows)
    rows = torch.arange(most, device=device)
    try:
        _forward(model, SizingStep(), tokens, tokens, rows).float().log_softmax(-1)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"max_num_tokens: a step of {limits.max_num_tokens} tokens does not fit beside the weights; lower it, or"
            " free memory"
        ) from error
    peak: int = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    # Beside it the KV of a prefix, gathered in one layer, and what it is computed in.
    return peak + limits.max_seq_len * max(layer.gathered_row_bytes for layer in geometry)


class Modules:
    """transformers' own, over our pools. Used by the engine's thread."""

    def __init__(
        self, model: Any, store: KvStore, uses_kernels: bool = False, flash: FlashAttention | None = None
    ) -> None:
        """`uses_kernels`: batches are built for KernelStep, which takes `flash` for prompts."""
        self.device, self.dtype, self.uses_kernels = store.device, store.dtype, uses_kernels
        self._model, self._store = model, store
        self._make_step: Any = PagedStep
        if uses_kernels:
            # Triton's language comes with CUDA builds alone.
            from bireme.engines.torch.forward.kernel_step import KernelStep

            self._make_step = partial(KernelStep, flash=flash or FlashAttention(), scales=store.scales)

    @property
    def vocab_size(self) -> int:
        """Ids that it has embeddings of."""
        return int(self._model.get_input_embeddings().weight.shape[0])

    @property
    def layers(self) -> Any:
        """Of a decoder as Llama's."""
        return self._model.model.layers

    def embed(self, ids: Tensor) -> Tensor:
        found: Tensor = self._model.get_input_embeddings()(ids)
        return found

    def tap(self, tapped: TappedRows) -> None:
        """Have the model keep its layers' outputs from now on. Raises ConfigError where it has none by number."""
        layers = layers_of(self._model)
        for layer in tapped.layers:
            layers[layer].register_forward_hook(partial(_keep, tapped, layer))

    def compute(self, batch: Batch) -> Tensor:
        """Any step: writes its KV rows, returns logits (rows wanted, vocabulary)."""
        assert batch.logits_rows is not None
        groups = [batch.groups[group] for group in self._store.group_of]
        step = self._make_step(self._store.keys, self._store.values, groups, self._store.tokens_per_block)
        return _forward(self._model, step, batch.ids, batch.positions, batch.logits_rows, batch.embeddings)


def layers_of(model: Any) -> Any:
    """Return a model's decoder layers, by whatever name its family has for them. Raises ConfigError."""
    number = int(model.config.num_hidden_layers)
    for part in model.get_decoder().modules():
        if isinstance(part, torch.nn.ModuleList) and len(part) == number:
            return part
    raise ConfigError(f"{type(model).__name__}: its {number} layers are no list; their outputs can't be read")


def _keep(tapped: TappedRows, layer: int, _module: Any, _given: Any, output: Any) -> None:
    rows: Tensor = output[0] if isinstance(output, tuple) else output
    tapped.keep(layer, rows[0])


def _forward(
    model: Any,
    step: AttentionStep,
    ids: Tensor,
    positions: Tensor,
    logits_rows: Tensor,
    embeddings: Sequence[tuple[int, Tensor]] = (),
) -> Tensor:
    """`embeddings` (of pictures) replace those of the ids, from the given place on."""
    with torch.inference_mode(), _entered(step):
        inputs = {"input_ids": ids}
        if embeddings:
            embedded = model.embed(ids).clone()
            for begin, rows in embeddings:
                embedded[0, begin : begin + len(rows)] = rows
            inputs = {"inputs_embeds": embedded}
        output = model(**inputs, position_ids=positions, use_cache=False, return_dict=True, logits_to_keep=logits_rows)
        logits: Tensor = output.logits[0]
        return logits


@contextmanager
def _entered(step: AttentionStep) -> Iterator[None]:
    token = attention.current.set(step)
    try:
        yield
    finally:
        attention.current.reset(token)
