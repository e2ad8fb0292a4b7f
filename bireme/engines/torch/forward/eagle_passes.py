"""An EAGLE-3 head: loaded and counted before there are pools, then computed by plans of steps.

Its keys and values lie in the model's blocks, as one layer more (`KvStore.head`).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bireme.engines.child.lost_device import raise_if_lost
from bireme.engines.torch.forward.attention import AttentionStep, Extras, PagedStep
from bireme.engines.torch.forward.batch import BatchBuilder
from bireme.engines.torch.forward.eagle_head import EagleHead
from bireme.engines.torch.forward.flash_attention import FlashAttention
from bireme.engines.torch.forward.forward import Forward
from bireme.engines.torch.forward.opening import StepModel
from bireme.engines.torch.forward.tapped import TappedPlaces, TappedRows
from bireme.engines.torch.forward.warmup import first_plans
from bireme.engines.torch.geometry import EngineLimits, HeadLayer, group_layers
from bireme.engines.torch.pools.kv_store import HeadRows, KvStore
from bireme.engines.torch.step import DraftedSequence, SchedulerOutput, Sequence
from bireme.engines.torch.weights.checkpoint import files_digest
from bireme.engines.torch.weights.eagle_bytes import KEPT_BYTES, eagle_bytes, gpu_bytes
from bireme.engines.torch.weights.eagle_checkpoint import WEIGHTS, read_eagle
from bireme.engines.torch.weights.setup import Setup
from bireme.errors import ConfigError
from bireme.kv.blocks.block_manager import BlockManager, BlockTable, GroupSpec
from bireme.logits.rows import Row
from bireme.logits.sending import send
from bireme.messages import EngineRequest, SamplingParams
from bireme.settings import EAGLE

if TYPE_CHECKING:  # Triton's language: CUDA builds alone
    from bireme.engines.torch.forward.eagle_rounds import EagleRounds

logger = logging.getLogger("bireme.engines.torch")
_FEW = 16  # places of a sequence, that are kept however wide a model is
_COMPARED = 5  # places of one, that rounds are compared on
_MOST_ERROR = {torch.bfloat16: 0.1, torch.float32: 1e-3}  # of logits, relative


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head with its weights, before it has pools."""

    setup: Setup
    head: EagleHead
    uses_kernels: bool
    identity: str  # of weights and dtype

    @property
    def layer(self) -> HeadLayer:
        return HeadLayer(self.head.geometry, self.identity)

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """Return what a token's keys and values take."""
        return (self.head.geometry.row_bytes,)

    @property
    def taps(self) -> tuple[int, ...]:
        """Return the model's layers whose outputs it reads."""
        return self.head.shape.taps

    def peak_beside(self, step: int) -> int:
        """Return what the largest step takes beyond weights and pools. `step`: that of the model alone."""
        sizes = self.head.shape.widths, self.setup.limits, self.head.geometry.dtype.itemsize
        return eagle_bytes(*sizes).beside(step) + gpu_bytes(*sizes)

    def open(self, forward: Forward, store: KvStore) -> EaglePasses:
        """Do its first passes. `forward`: its steps keep what the head reads. `store`: has its layer, without rows."""
        limits, rows, tapped = self.setup.limits, store.head, forward.tapped
        assert rows is not None and tapped is not None
        shape = rows.windows, rows.tokens_per_block, limits.max_batch_size, limits.max_seq_len, rows.device
        builder = BatchBuilder(*shape, uses_kernels=self.uses_kernels)
        logger.info("eagle_head_loaded taps=%s kv_mib=%d", self.taps, rows.num_bytes >> 20)
        passes = EaglePasses(self.head, rows, builder, forward.decoder.embed, tapped, limits, forward.flash)
        drafts = self.setup.context.stage != "prefill"
        if drafts and forward.verifying is not None and tapped.places is not None:
            try:
                forward.rounds = passes.rounds = self._open_rounds(forward, passes, rows, tapped.places)
            except Exception as error:  # a head's passes are launched kernel by kernel
                raise_if_lost(error, "the first rounds of a head's drafts")
                logger.warning("rounds_off reason=%s: %s", type(error).__name__, str(error).partition("\n")[0])
        num_blocks = len(rows.keys[0]) // rows.tokens_per_block - 1
        of_start = BlockManager([GroupSpec(0, num_blocks)], rows.tokens_per_block, enable_reuse=False)
        for plan in first_plans(of_start, store, limits, self.uses_kernels):
            passes.compute(plan, self.head.fuse(self.head.fc.new_zeros(plan.num_tokens, self.head.fc.shape[1])))
        return passes

    def _open_rounds(self, forward: Forward, passes: EaglePasses, store: HeadRows, places: TappedPlaces) -> EagleRounds:
        """Return them, compared with passes of plain torch. Raises RuntimeError."""
        from bireme.engines.torch.forward.eagle_rounds import EagleRounds

        assert forward.resident is not None
        weights, own = forward.resident.decoder.weights, self.head.embeddings
        embeddings, scale = (weights.embeddings, forward.resident.decoder.scale) if own is None else (own, 1.0)
        has_graphs = self.setup.config.cuda_graph_config is not None and store.device.type == "cuda"
        drafted = forward.resident.drafted
        rounds = EagleRounds(self.head, store, places, embeddings, scale, self.setup.limits, has_graphs, drafted)
        passes.compare(rounds, places, self.setup.limits.max_draft_len)
        return rounds


class EaglePasses:
    """Used by the engine's thread. A pass has a row for each pair of a token's place and the token that follows."""

    def __init__(
        self,
        head: EagleHead,
        store: HeadRows,
        builder: BatchBuilder,
        embed: Callable[[Tensor], Tensor],
        tapped: TappedRows,
        limits: EngineLimits,
        flash: FlashAttention,
    ) -> None:
        self._head, self._store, self._builder, self._embed, self._tapped = head, store, builder, embed, tapped
        own = head.embeddings
        if own is not None:
            self._embed = partial(torch.nn.functional.embedding, weight=own)
        self._cos, self._sin = head.rotary(limits.max_seq_len).cos_sin.chunk(2, 1)
        row_bytes = len(head.shape.taps) * head.shape.hidden_size * store.keys[0].element_size()
        self.most_rows = limits.max_num_tokens  # of a pass
        held = KEPT_BYTES // (row_bytes * limits.max_batch_size)
        self.most_unseen = min(max(_FEW, held), self.most_rows)  # places of a sequence, that may be kept
        self.places = tapped.places  # None: what the model makes is kept of its last step alone
        self.rounds: EagleRounds | None = None
        if tapped.places is not None:  # a step's rows are there before anybody counts them, and those of one ahead
            self.most_unseen = tapped.places.num_places - limits.max_draft_len - 2
        self._make_step: Any = PagedStep
        if builder.uses_kernels:
            from bireme.engines.torch.forward.kernel_step import KernelStep

            self._make_step = partial(KernelStep, flash=flash, scales=store.scales)

    @property
    def device(self) -> torch.device:
        return self._store.device

    @property
    def vocab_size(self) -> int:
        return self._head.shape.vocab_size

    def taps(self, num_rows: int) -> list[Tensor]:
        """Return what the model made of its last step of so many rows, (rows, b) of each layer.

        On a CPU later steps leave it as it is.
        """
        return self._tapped.parts(num_rows)

    def fused(self, unseen: list[tuple[list[Tensor], slice]]) -> Tensor:
        """Return what the head reads of rows of several steps, (rows, h). `unseen`: `taps` and which rows of them."""
        layers, places = range(len(self._head.shape.taps)), self.places
        with torch.inference_mode():
            if places is not None and all(parts is places.parts for parts, _ in unseen):
                cells = np.array([at for _, rows in unseen for at in range(rows.start, rows.stop)])
                return self._head.fuse(places.rows.index_select(0, send(cells, self.device)))
            joined = [torch.cat([parts[layer][rows] for parts, rows in unseen]) for layer in layers]
            found: Tensor = self._head.fuse(torch.cat(joined, -1))
            return found

    def compute(self, plan: SchedulerOutput, hidden: Tensor) -> tuple[list[Sequence], Tensor, Tensor]:
        """Return the sequences that were computed to their ends, and of each the row that stands for what the model
        will make of its follower, (count, h), and float32 logits of what comes after that, (count, vocabulary).

        hidden (T, h), in the order of the plan's rows.
        """
        batch, store = self._builder.build(plan), self._store
        step = self._make_step(store.keys, store.values, batch.groups, store.tokens_per_block)
        with torch.inference_mode():
            attend = partial(self._attend, step)
            rows = self._embed(batch.ids[0]).to(hidden.dtype)
            x, logits = self._head(rows, hidden, batch.positions[0], attend, batch.logits_rows)
            whole = torch.full((len(logits), self.vocab_size), -torch.inf, device=logits.device)
            whole[:, self._head.base_ids] = logits.float()
        return batch.sampled, x, whole

    def compare(self, rounds: EagleRounds, places: TappedPlaces, length: int) -> None:
        """Compare a round of `length` tokens with passes of these. Nobody has a block yet. Raises RuntimeError."""
        count, size = min(_COMPARED, rounds.most_rows), self._store.tokens_per_block
        table = BlockTable([list(range(1, 2 + (count + length) // size))], [], [], b"", 0, "", "")
        request = EngineRequest(prompt=b"", sampling=SamplingParams())
        tokens = [at % self.vocab_size for at in range(7, 7 + count)]
        own = Sequence((0, 0), request, tokens, count, 1, frozenset(), 0.0, table)
        own.slot, own.mirrored = 0, [0]
        follower = DraftedSequence(own, Row(SamplingParams(), (), (), (), self.vocab_size))
        cells = slice(0, count)
        generator = torch.Generator().manual_seed(1)
        places.rows[cells] = torch.randn(count, places.rows.shape[1], generator=generator).to(places.rows)
        follower.add(places.parts, cells)
        (drafted,) = rounds.draft([(follower, length)])
        _, hidden, logits = self.compute(SchedulerOutput(chunks=[(own, count)]), self.fused(follower.unseen))
        own.computed = count
        for token in drafted[:-1]:
            own.tokens.append(token)
            _, hidden, logits = self.compute(SchedulerOutput(decodes=[own]), hidden)
            own.computed += 1
        places.rows[cells] = 0
        expected = logits[:, self._head.base_ids]
        error = float((rounds.logits[:1] - expected).norm() / expected.norm())
        if not error <= _MOST_ERROR.get(places.rows.dtype, _MOST_ERROR[torch.bfloat16]):
            raise RuntimeError(f"its logits after {length} passes are {error:.3g} off what plain torch makes")

    def _attend(self, step: AttentionStep, qkv: Tensor, positions: Tensor) -> Tensor:
        shape = self._head.shape
        parts = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        query, key, value = qkv.view(1, len(qkv), -1, shape.head_size).transpose(1, 2).split(parts, 1)
        query, key = self._turned(query, positions), self._turned(key, positions)
        return step.attend(0, query, key, value, Extras(self._head.scaling)).flatten(2)[0]

    def _turned(self, heads: Tensor, positions: Tensor) -> Tensor:
        """heads (1, H, n, K) -> the same, turned by position."""
        cos, sin = self._cos[positions], self._sin[positions]
        first, second = heads.float().chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(heads.dtype)


def load_head(setup: Setup, target: StepModel) -> LoadedHead | None:
    """Return the head that the settings name; None: they name none. Of a prefill worker it sees prompts alone.

    Raises ConfigError.
    """
    speculation = setup.config.speculative_config
    if speculation is None or speculation.decoding_type not in EAGLE:
        return None
    key, folder = "speculative_config.speculative_model", Path(speculation.speculative_model or "")
    if not folder.is_dir():
        raise ConfigError(f"{key}: {folder} does not exist; name the head's folder")
    if window := group_layers(target.geometry)[0].window:
        raise ConfigError(f"{key}: {folder.name}; a head sees all of a sequence, the model's layers {window} tokens")
    checkpoint = read_eagle(folder, setup.checkpoint.text_config)
    dtype = target.geometry[0].dtype
    head = EagleHead.of(checkpoint, dtype, setup.device)
    identity = hashlib.sha256(f"{files_digest(folder, (folder / WEIGHTS,))} {dtype}".encode()).hexdigest()
    return LoadedHead(setup, head, target.uses_kernels, identity)
