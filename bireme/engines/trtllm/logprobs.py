"""TensorRT-LLM's log probabilities in the form of ours: the chosen token first, then the likeliest, best first.

An entry of theirs is a dict token -> Logprob(logprob, rank), whose ranks may be missing or 0, or a bare number
for the chosen token. The chosen token may be missing from a dict: it then gets MISSING, never the best value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bireme.messages import TokenLogprob, TokenLogprobs

MISSING = -9999.0


def token_logprobs(entry: Any, token: int, count: int | None = None) -> TokenLogprobs:
    """Return one position; `count`: of the likeliest, at most so many."""
    if isinstance(entry, (int, float)):
        return [TokenLogprob(token, float(entry))]
    given = [
        TokenLogprob(int(key), float(getattr(value, "logprob", value)), getattr(value, "rank", 0) or 0)
        for key, value in entry.items()
    ]
    best = sorted(given, key=lambda item: -item.logprob)
    chosen = next((item for item in given if item.token == token), TokenLogprob(token, MISSING))
    return [chosen, *(best if count is None else best[:count])]


def prompt_logprobs(entries: Sequence[Any], prompt: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Return one position for each prompt token but the first.

    Theirs are about the token that follows (so the last is about the first generated one) and hold the likeliest
    alone: a prompt token that is not among them gets MISSING. Other releases begin with None for the first token.
    """
    given = list(entries)
    if given and not given[0]:
        del given[0]
    return [token_logprobs(entry, token, count) for entry, token in zip(given, prompt[1:], strict=False)]
