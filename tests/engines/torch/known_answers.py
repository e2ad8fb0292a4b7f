"""A drafter that knows the answers and errs now and then: drafts of every length are accepted, cut and rejected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bireme.engines.torch.step import Draft, DraftOffer
from bireme.settings import SpeculativeConfig

NGRAM = SpeculativeConfig(decoding_type="NGram", max_draft_len=5)


class KnownAnswers:
    num_kinds = 1
    costs = None

    def __init__(self, errs_every: int = 7) -> None:
        """`errs_every`: of an answer's tokens one of so many is drafted wrong."""
        self._errs_every = errs_every
        self._answers: list[tuple[list[int], list[int]]] = []

    def know(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
        self._answers += [(list(prompt), list(tokens)) for prompt, tokens in zip(prompts, answers, strict=True)]

    def room(self, sequence: Any) -> int:
        return 1 << 30

    def propose(self, most: Mapping[Any, int], budget: int = 0) -> dict[Any, Draft]:
        found = {}
        for sequence, count in most.items():
            begin, split = sequence.num_output, sequence.num_prompt
            prompt, output = sequence.tokens[:split], sequence.tokens[split:]
            fitting = (own for asked, own in self._answers if asked == prompt and own[:begin] == output)
            answer = next(fitting, [])
            tokens = [token ^ 1 if at % self._errs_every == 3 else token for at, token in enumerate(answer)]
            if tokens[begin : begin + count]:
                found[sequence] = Draft(tokens[begin : begin + count])
        return found


class WholeDrafts:
    """All sequences are due, whatever it takes, and all that was proposed is verified."""

    is_open = pays = True

    def due(self, plan: Any) -> Any:
        return plan.decodes

    def choose(self, plan: Any, offers: Mapping[Any, DraftOffer]) -> dict[Any, int]:
        return {sequence: offer.num_tokens for sequence, offer in offers.items()}

    def is_hopeful(self, plan: Any, most: Mapping[Any, int]) -> bool:
        return True

    def learn(self, *_: Any) -> None:
        pass

    paid = gained = learn


def draft_known(engine: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Any:
    """Have an engine with speculative_config draft these answers; return its speculation."""
    speculation = engine.core._parts.speculation
    drafter = KnownAnswers()
    drafter.know(prompts, answers)
    speculation.drafter, speculation.lengths, speculation.is_on = drafter, WholeDrafts(), True
    return speculation
