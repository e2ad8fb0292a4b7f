"""Which path a step takes, and the one object that takes it. Nothing outside this folder chooses.

| device | model | step | path |
|---|---|---|---|
| CPU | of `architectures.FAMILIES`, without pictures | any | `packed`: PackedDecoder |
| CPU | the same, of a GGUF file | any | `quantized`: PackedDecoder with the file's blocks |
| CPU | any other | any | `modules`: transformers' own, attention by PagedStep |
| GPU | of these families, without pictures | decodes alone | `resident`: ResidentDecode, and its graph of that size |
| GPU | the same | decodes alone, with drafts | `verify`: ResidentDecode's steps of that kind |
| GPU | the same | decodes, few tokens of chunks together | `mixed`: MixedSteps, its graph of that many rows |
| GPU | the same | one short chunk behind many tokens, alone | `prompt_graph`: PromptGraphs of the fused decoder |
| GPU | the same | any other | `fused`: FusedDecoder, kernel by kernel |
| GPU | any other | decodes alone | `decode_graph`: DecodeGraphs of the modules |
| GPU | the same | one short chunk alone | `prompt_graph`: PromptGraphs of the modules |
| GPU | the same | any other | `modules`: transformers' own, attention by KernelStep |

Where layers' outputs are kept (`tapped.py`), a GPU's steps of models that the fused decoder does not have are those of
the last row. A head's own passes on a GPU (`eagle_passes.py`):

| its sequences | path |
|---|---|
| draft, and have few places that it has not seen; no bias, bans | EagleRounds: all passes of a round are one graph |
| others, prompts, models that the fused decoder does not have | plain torch and KernelStep, kernel by kernel |

What attends to prompts' chunks in steps of the last row, and of `modules` on a GPU, kernel by kernel:

| chunk | `prompt_attention` |
|---|---|
| few tokens behind many; float32, softcap, sinks, unusual sizes of heads | `packed`: kernels/packed_prefill.py |
| bfloat16 on Hopper, no window that hides anything, where the wheel fa3-fwd works | `fa3`: FlashAttention 3 |
| any other | `torch`: FlashAttention 2 |

`opening.py` makes what the table names. What does not work on a machine is left out, as the log says: a decoder of ours
that differs from the modules, graphs that can't be made or are off. Its steps take the last row of their model. On a
GPU without Triton's language all is `modules`, with PagedStep.
"""

from __future__ import annotations

import enum
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from bireme.engines.torch.forward.batch import BatchBuilder
from bireme.engines.torch.forward.flash_attention import FlashAttention, PromptAttention
from bireme.engines.torch.forward.modules import Modules
from bireme.engines.torch.forward.tapped import TappedRows
from bireme.engines.torch.step import Batch, SchedulerOutput
from bireme.engines.torch.storage import WeightForm

if TYPE_CHECKING:  # Triton's language comes with CUDA builds alone
    from bireme.engines.torch.forward.eagle_rounds import EagleRounds
    from bireme.engines.torch.forward.flight import Flight
    from bireme.engines.torch.forward.mixed_steps import MixedSteps
    from bireme.engines.torch.forward.resident_decode import ResidentDecode, RowOf


logger = logging.getLogger("bireme.engines.torch")


class StepPath(enum.StrEnum):
    """Names in the log and of the metric's label."""

    MODULES = enum.auto()
    PACKED = enum.auto()
    QUANTIZED = enum.auto()
    FUSED = enum.auto()
    RESIDENT = enum.auto()
    VERIFY = enum.auto()
    MIXED = enum.auto()
    DECODE_GRAPH = enum.auto()
    PROMPT_GRAPH = enum.auto()


class Decoder(Protocol):
    def compute(self, batch: Batch) -> Tensor:
        """Any step: writes its KV rows, returns logits (rows wanted, vocabulary)."""

    def embed(self, ids: Tensor) -> Tensor:
        """ids (n,) -> (n, hidden), what its first layer is given."""

    def tap(self, tapped: TappedRows) -> None:
        """Keep the outputs of its layers there, step by step from now on."""


class Resident(Protocol):
    """Starts steps whose tokens are chosen on the GPU."""

    def start(self, plan: SchedulerOutput, row_of: RowOf, ahead: int = 0) -> Flight:
        """`ahead`: tokens of each sequence that have been started and not been read."""


class Graphs(Protocol):
    def size_for(self, batch: Batch) -> int:
        """Return the size of the graph that holds this step; 0: none does."""

    def replay(self, batch: Batch, size: int) -> Tensor:
        """Return the step's logits, which the next call overwrites."""

    def make_next_graph(self) -> bool:
        """Make one that is still to be made; False: there is none."""


@dataclass(slots=True)
class Computed:
    path: StepPath
    batch: Batch
    logits: Tensor  # (rows wanted, vocabulary), until the next step


class Forward:
    """Used by the engine's thread."""

    def __init__(self, modules: Modules, builder: BatchBuilder, flash: FlashAttention | None = None) -> None:
        """`flash`: of the modules; decoders of ours take it, too."""
        self.modules = modules
        self.flash = flash or FlashAttention()
        self.decoder: Decoder = modules
        self.builder = builder
        self.form = WeightForm.PLAIN  # of the layers' projections
        self.resident: ResidentDecode | None = None
        self.verifying: ResidentDecode | None = None  # of an engine that has drafts
        self.mixed: MixedSteps | None = None
        self.rounds: EagleRounds | None = None  # of a head that drafts
        self.graphs: dict[StepPath, Graphs] = {}
        self._path = StepPath.MODULES  # the decoder's
        self._last_step: torch.cuda.Event | None = None  # of which nothing was read back
        self.tapped: TappedRows | None = None

    @property
    def paths(self) -> list[StepPath]:
        """The paths that this engine has, the most special first."""
        own = {StepPath.RESIDENT: self.resident, StepPath.VERIFY: self.verifying, StepPath.MIXED: self.mixed}
        return [*(path for path, steps in own.items() if steps is not None), *self.graphs, self._path]

    @property
    def prompt_attention(self) -> list[PromptAttention]:
        """What attends to prompts' chunks on the last of these paths, the most special first; none on a CPU."""
        return self.flash.names if self.modules.uses_kernels else []

    def use(self, path: StepPath, decoder: Decoder, builder: BatchBuilder) -> None:
        """Have a decoder of ours compute the steps, in place of the model's modules."""
        self._path, self.decoder, self.builder = path, decoder, builder

    def tap(self, tapped: TappedRows) -> None:
        """Have the decoder's steps keep their layers' outputs. Raises ConfigError where the layers can't be told apart.

        The fused decoder's graphs keep them as well, if it has been asked before they are made.
        """
        self.tapped = tapped
        self.decoder.tap(tapped)

    def begin(self) -> None:
        """Make what CUDA's libraries have a thread make at its first product, of the thread that computes steps."""
        device, dtype = self.modules.device, self.modules.dtype
        if device.type == "cuda":
            small = torch.zeros(8, 8, dtype=dtype, device=device)
            torch.addmm(small, small, small)

    def resident_for(self, plan: SchedulerOutput) -> tuple[StepPath, Resident] | None:
        """Return what starts this step and chooses its tokens on the GPU; None: `run` it."""
        if plan.chunks:
            mixed = self.mixed
            return (StepPath.MIXED, mixed) if mixed is not None and mixed.takes(plan) else None
        path, steps = (StepPath.VERIFY, self.verifying) if plan.drafts else (StepPath.RESIDENT, self.resident)
        return (path, steps) if steps is not None and plan.num_decode_rows <= steps.most_rows else None

    def room_for_drafts(self, plan: SchedulerOutput) -> int:
        """Return how many rows of drafts a planned step takes without leaving the quickest path that it has.

        None where one launch holds a prompt's tokens as well: for those somebody waits, and looking for drafts, which
        comes before the launch, would be a tenth of that time.
        """
        if self.verifying is None:
            return plan.budget
        if not plan.chunks:
            return max(0, self.verifying.most_rows - len(plan.decodes))
        return 0 if self.mixed is not None and self.mixed.takes(plan) else plan.budget

    def run(self, plan: SchedulerOutput) -> Computed:
        batch = self.builder.build(plan)
        path, logits = self.compute(batch)
        return Computed(path, batch, logits)

    def compute(self, batch: Batch) -> tuple[StepPath, Tensor]:
        for path, graphs in self.graphs.items():
            if size := graphs.size_for(batch):
                return path, graphs.replay(batch, size)
        return self._path, self.decoder.compute(batch)

    def make_first_graphs(self, most_s: float) -> None:
        """Have each form of the kernels compiled, and then make graphs that the first requests need, as many as so many
        seconds are enough for.
        """
        steps = (self.mixed, self.resident, self.verifying, self.rounds)
        sized = [each.graphs for each in steps if each is not None]
        for graphs in sized:
            graphs.compile_forms()
        began, waiting, count, last = time.monotonic(), list(sized), 0, 0.0
        while waiting and (before := time.monotonic()) - began + last <= most_s:
            graphs = waiting.pop(0)  # in turns: a request needs one of each
            if graphs.make_first():
                waiting.append(graphs)
                count += 1
                last = time.monotonic() - before  # not the longest, which is the first
        for graphs in sized:
            graphs.judge()
        if count:
            left = sum(len(graphs.to_make) for graphs in sized)
            logger.info("first_graphs_made count=%d left=%d s=%.3f", count, left, time.monotonic() - began)

    def make_next_graph(self) -> bool:
        """Make a graph that later steps will want, while nothing runs; False: there is none left."""
        makers: list[Any] = [self.mixed, self.resident, self.verifying, self.rounds, *self.graphs.values()]
        return any(maker.make_next_graph() for maker in makers if maker is not None)

    def keep_pace(self) -> None:
        """Wait until a GPU has done the step before this one, of which nothing is read back.

        A host that runs further ahead evicts blocks whose copies to lower tiers have not begun, and sees aborts late.
        """
        if self.modules.device.type == "cuda":
            before, self._last_step = self._last_step, torch.cuda.Event(blocking=True)
            self._last_step.record()
            if before is not None:
                before.synchronize()
