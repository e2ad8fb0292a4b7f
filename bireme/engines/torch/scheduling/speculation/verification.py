"""Finds which drafts of a step are right, and takes what was drawn: where one is, its sequence goes on at the next row.

Rows that nothing but their own logits chooses have all been drawn when a step is read: `take_drawn`. Those whose choice
needs the host, and all of a step on a CPU, are drawn position by position: `deliver_verified`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens

from bireme.engines.base import RequestKey
from bireme.engines.torch.scheduling.delivery import TokenDelivery
from bireme.engines.torch.scheduling.speculation.drafter import drafting_of
from bireme.engines.torch.step import SchedulerOutput, Sequence, SequenceStatus, Trial
from bireme.logits.sampler import Sampled, Sampler

Draw = Callable[[list[Sequence], list[int]], Sampled]  # tokens of sequences, each from a row of the step's logits
Advance = Callable[[Sequence, int], None]  # the KV of so many tokens more is in the pools


def draft_rows(plan: SchedulerOutput, begin: int) -> dict[Sequence, int]:
    """Return where in the step's logits the rows of each draft begin; `begin`: of the first."""
    rows = {}
    for one, ids in plan.drafts.items():
        rows[one] = begin
        begin += len(ids)
    return rows


def take_drawn(
    plan: SchedulerOutput,
    batch: list[Sequence],
    tokens: list[int],
    rows: dict[Sequence, int],
    now: float,
    sampler: Sampler[RequestKey],
    delivery: TokenDelivery,
    advance: Advance,
    trials: list[Trial],
) -> tuple[int, list[int]]:
    """Deliver what a step has drawn, as far as nobody but its rows had a say; return how many tokens that is, and the
    places in the batch of the others.

    `tokens`: of the batch, then of drafts, which begin at `rows`. Adds what became of these to `trials`.
    """
    drafts, late, running = plan.drafts, sampler.late, SequenceStatus.RUNNING
    total, others, prompts = 0, [], {one for one, _ in plan.chunks}
    for at, one in enumerate(batch):
        if one.state is not running:
            continue  # aborted meanwhile
        ids = drafts.get(one)
        burst = [tokens[at]] if ids is None else _burst(one, tokens, at, ids, rows[one])
        if one.key in late or burst[-1] < 0:  # without a token nothing follows
            others.append(at)
            continue
        count = len(burst)
        total += count
        sampler.accept_simple(one.key, count)
        if ids is not None:  # usage tells it, if the request ends here
            drafting = one.drafting or drafting_of(one)
            drafting.num_drafted += len(ids)
            drafting.num_accepted += count - 1
        delivery.accept_burst(one, burst, now, 0 if one in prompts else count, advance)
        if ids is not None:
            trials.append(Trial(one, drafting.kind, len(ids), count - 1, one.state is not running))
    return total, others


def _burst(one: Sequence, tokens: list[int], at: int, ids: Tokens[int], begin: int) -> list[int]:
    """Return the token that was drawn at a place, and those behind right ones of a draft, whose rows begin there."""
    right, stop_ids, token = drafting_of(one).num_right, one.stop_ids, tokens[at]
    burst = [token]
    for depth, drafted in enumerate(ids):
        if (token != drafted if right is None else depth >= right) or token in stop_ids or token < 0:
            break
        token = tokens[begin + depth]
        burst.append(token)
    return burst


def deliver_verified(
    plan: SchedulerOutput,
    sequences: list[Sequence],
    sampled: Sampled,
    now: float,
    draw: Draw,
    delivery: TokenDelivery,
    advance: Advance,
    rows: dict[Sequence, int],
    trials: list[Trial],
) -> int:
    """Deliver a step with drafts, of which each of these sequences' first token has been drawn; return how many tokens
    there were. Adds what became of drafts, which begin at `rows`, to `trials`.
    """
    total, depth = 0, 0
    going = _tried(plan, sequences)
    accepted = dict.fromkeys(going, 0)
    while True:
        going = _right(plan, going, depth, dict(zip(sequences, sampled.tokens, strict=False)), accepted)
        delivery.accept_all(sequences, sampled, now)
        total += len(sequences)
        sequences = going = [one for one in going if one.state is SequenceStatus.RUNNING]
        if not going:
            break
        for one in going:
            advance(one, 1)
        sampled = draw(going, [rows[one] + depth for one in going])
        depth += 1
    for one, count in accepted.items():
        is_cut = one.state is not SequenceStatus.RUNNING
        trials.append(Trial(one, drafting_of(one).kind, len(plan.drafts[one]), count, is_cut))
    return total


def _tried(plan: SchedulerOutput, sequences: list[Sequence]) -> list[Sequence]:
    """Return those that have drafts, which are counted."""
    found = [one for one in sequences if one in plan.drafts]
    for one in found:
        drafting_of(one).num_drafted += len(plan.drafts[one])
    return found


def _right(
    plan: SchedulerOutput, going: list[Sequence], depth: int, drawn: dict[Sequence, int], accepted: dict[Sequence, int]
) -> list[Sequence]:
    """Return those whose drafts say at this depth what was drawn, and count what of it is delivered."""
    right = []
    for one in going:
        ids, drafting = plan.drafts[one], drafting_of(one)
        if depth >= len(ids) or one.state is not SequenceStatus.RUNNING:
            continue
        verdict = drafting.num_right
        if drawn[one] == ids[depth] if verdict is None else depth < verdict:
            right.append(one)
            if drawn[one] not in one.stop_ids:
                accepted[one] += 1
                drafting.num_accepted += 1
    return right
