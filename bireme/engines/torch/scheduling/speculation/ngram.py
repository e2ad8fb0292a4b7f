"""Drafts of a sequence's own tokens, and of the output that its request predicts: what followed the same few before.

TensorRT-LLM's `NGram` with a pool of each request's own: the longest match of the last tokens counts, up to
`max_matching_ngram_size`, and of several the oldest or the newest. What an answer copies or edits comes back this way.
A predicted output stands before all other tokens, so it is the oldest.
"""

from __future__ import annotations

from collections.abc import Mapping

from bireme.engines.torch.scheduling.speculation.drafter import PassCosts, drafting_of
from bireme.engines.torch.step import Draft, Sequence, TokenIds

_FEW = 16  # places, of which Python compares the tokens before them as quickly as numpy


class NgramDrafter:
    def __init__(self, max_matching_ngram_size: int, is_use_oldest: bool) -> None:
        # By the tokens that matched, of the sequence or of what its request predicts.
        self.num_kinds = 2 * (max_matching_ngram_size + 1)
        self.costs: PassCosts | None = None
        self._most, self._is_oldest = max_matching_ngram_size, is_use_oldest

    def room(self, sequence: Sequence) -> int:
        return sequence.max_tokens

    def propose(self, most: Mapping[Sequence, int], budget: int = 0) -> dict[Sequence, Draft]:
        found = {}
        for sequence, count in most.items():
            drafting = sequence.drafting or drafting_of(sequence)
            known = drafting.learn(sequence.tokens)
            matched, at = self._match(known, sequence.tokens[-1])
            if matched:
                is_predicted = at <= drafting.num_predicted
                kind = matched + is_predicted * (self._most + 1)
                found[sequence] = Draft(_from(known, at, count), kind)
        return found

    def _match(self, known: TokenIds, last: int) -> tuple[int, int]:
        """Return how many of the last tokens stand elsewhere too, and where what follows them begins."""
        (ends,) = (known == last).nonzero()  # the last one among them
        if len(ends) == 1:
            return 0, 0
        ends = ends[:-1]
        if len(ends) <= _FEW:
            return self._match_few(known, ends.tolist())
        matched = 1
        while matched < min(self._most, len(known) - 1):
            longer = ends[ends >= matched]
            longer = longer[known[longer - matched] == known[-1 - matched]]
            if not longer.size:
                break
            ends = longer
            matched += 1
        return matched, int(ends[0] if self._is_oldest else ends[-1]) + 1

    def _match_few(self, known: TokenIds, ends: list[int]) -> tuple[int, int]:
        last, token_at = known[-self._most :].tolist(), known.item
        most, best, at = len(last), 0, 0
        for end in ends if self._is_oldest else reversed(ends):
            matched = 1
            while matched < most and matched <= end and token_at(end - matched) == last[-1 - matched]:
                matched += 1
            if matched > best:
                best, at = matched, end + 1
                if best == most:
                    break
        return best, at


def _from(known: TokenIds, at: int, count: int) -> list[int]:
    """Return tokens from a place on; what would come after the last one repeats, as it does in a loop."""
    tokens: list[int] = known[at : at + count].tolist()
    period = len(tokens)
    return tokens if period == count else [tokens[number % period] for number in range(count)]
