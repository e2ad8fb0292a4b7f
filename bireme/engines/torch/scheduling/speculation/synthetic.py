"""Drafts whose verdict is set beforehand: where there are no weights, they measure what drafts of a given quality gain.

Which tokens of a draft count as right is drawn by the request's seed and the token's place, whatever the model draws
from their rows. The whole path is run, and the tokens that it draws are delivered; but the rows behind the first have
seen the draft's tokens in their place. So what is said is not the model's, which is why settings refuse this where
there are weights.
"""

from __future__ import annotations

from collections.abc import Mapping

from bireme.engines.torch.scheduling.speculation.drafter import PassCosts
from bireme.engines.torch.step import Draft, Sequence

_MASK = (1 << 64) - 1


class SyntheticDrafter:
    num_kinds = 1

    def __init__(self, acceptance_rate: float) -> None:
        """`acceptance_rate`: of tokens that are verified behind right ones, the share that is right, 0 to 1."""
        self.acceptance_rate = acceptance_rate
        self.costs: PassCosts | None = None

    def room(self, sequence: Sequence) -> int:
        return sequence.max_tokens

    def propose(self, most: Mapping[Sequence, int], budget: int = 0) -> dict[Sequence, Draft]:
        return {
            sequence: Draft([sequence.tokens[-1]] * count, num_right=self._num_right(sequence, count))
            for sequence, count in most.items()
        }

    def _num_right(self, sequence: Sequence, count: int) -> int:
        seed, first = sequence.sampling.seed or sequence.number, len(sequence.tokens)
        for at in range(count):
            if _share(seed, first + at) >= self.acceptance_rate:
                return at
        return count


def _share(seed: int, position: int) -> float:
    """Return a number from 0 to below 1 by seed and position, by the mixing of SplitMix64 (Steele et al., 2014)."""
    word = (seed * 0xD1342543DE82EF95 + position * 0x9E3779B97F4A7C15) & _MASK
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _MASK
    return float((word ^ word >> 31) >> 11) / (1 << 53)
