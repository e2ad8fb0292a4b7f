"""A scheduler that a test steps by itself, without an engine."""

from __future__ import annotations

from typing import Any

from bireme.disagg import DisaggregatedParams
from bireme.engines.torch.geometry import EngineLimits
from bireme.engines.torch.scheduling.scheduler import Scheduler
from bireme.engines.torch.scheduling.step_costs import StepCosts
from bireme.engines.torch.step import SchedulerOutput, Sequence
from bireme.kv.blocks.block_manager import BlockManager, GroupSpec
from bireme.messages import EngineRequest, SamplingParams
from bireme.serving_options import ServingOptions

STEP_S = 0.01


class Steps:
    """A scheduler whose steps take STEP_S of a clock of its own, and choose token 7."""

    def __init__(
        self,
        may_preempt: bool = False,
        num_blocks: int = 40_000,
        share: float = 0.1,
        enable_reuse: bool = False,
        costs: StepCosts | None = None,
        can_start: bool = False,
        **limits: Any,
    ) -> None:
        self.manager = BlockManager([GroupSpec(0, num_blocks)], 4, model="m", enable_reuse=enable_reuse)
        known = {"max_batch_size": 8, "max_num_tokens": 64, "max_seq_len": 4096, "max_input_len": 4096}
        known |= {"tokens_per_block": 4, "enable_chunked_prefill": True, "max_logprob_rows": 64, "max_queue_size": 64}
        known |= {"max_queue_time_s": 0.0, "best_effort_share": share, "may_preempt": may_preempt}
        self.now = 100.0
        self.scheduler = Scheduler(
            self.manager, EngineLimits(**(known | limits)), lambda: self.now, costs, lambda plan: can_start
        )
        self.num_added = 0

    def add(self, num_prompt: int = 4, max_tokens: int = 2_000, priority: float = 0.5) -> Sequence:
        asked = EngineRequest(prompt=b"", sampling=SamplingParams(), options=ServingOptions(priority=priority))
        tokens, self.num_added = list(range(num_prompt)), self.num_added + 1
        made = Sequence(
            (0, self.num_added), asked, tokens, num_prompt, max_tokens, frozenset(), 0.0, self.manager.open()
        )
        made.number = self.num_added
        self.scheduler.waiting.push(made)
        return made

    def add_import(self, num_prompt: int = 4, max_tokens: int = 2_000) -> Sequence:
        """Add a request whose KV comes from prefill."""
        made = self.add(num_prompt, max_tokens)
        made.params = DisaggregatedParams(worker="prefill", life=1, lease_id=1, generation=1, num_tokens=num_prompt)
        return made

    def line(self, num_prompt: int = 4, max_tokens: int = 2_000) -> Sequence:
        return self.add(num_prompt, max_tokens, priority=0.0)

    def step(self) -> list[Sequence]:
        """Return who took part."""
        plan = self.scheduler.schedule()
        self.now += STEP_S
        self.end(plan)
        return self.members(plan)

    def end(self, plan: SchedulerOutput) -> None:
        for sequence, count in [*((one, 1) for one in plan.decodes), *plan.chunks]:
            sequence.computed += count
            self.manager.commit(sequence.table, sequence.tokens, sequence.computed)
            if sequence.computed == len(sequence.tokens):
                sequence.tokens.append(7)
                sequence.first_token_at = sequence.first_token_at or self.now
                if sequence.num_output == sequence.max_tokens:
                    self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.manager.release(sequence.table)

    def members(self, plan: SchedulerOutput) -> list[Sequence]:
        return [*plan.decodes, *(sequence for sequence, _ in plan.chunks)]


class Overlapping(Steps):
    """Steps that are started before the tokens of the one before are known."""

    started: SchedulerOutput | None = None
    admitted: list[Sequence]  # in the last step, of those whose KV comes from prefill

    def step(self) -> list[Sequence]:
        plan = self.started or self.scheduler.schedule()
        self.started = self.scheduler.follow(plan) if plan.has_tokens else None
        self.admitted = plan.imports
        if self.started is not None:
            self.admitted = [*self.started.imports, *self.scheduler.admit_imports().imports]
        self.now += STEP_S
        self.end(plan)
        if self.started is not None:
            self.started.ahead.clear()
        return self.members(plan)
