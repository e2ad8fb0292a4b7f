"""Bireme's own logits processors: what every sampling parameter means, in its plainest form.

Requests name them in `logits_processors`. For sampling parameters the sampler does the same for all rows at once; tests
hold both equal to each other and to transformers' classes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bireme.errors import RequestError
from bireme.logits import filters
from bireme.logits.base import ProcessorContext, ProcessorFactory

if TYPE_CHECKING:
    import torch

_MINUS_INFINITY = float("-inf")


class Temperature:
    reads_token_ids = False

    def __init__(self, context: ProcessorContext, /, temperature: float) -> None:
        self._temperature = _number("temperature", temperature, above=0.0)

    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        logits.div_(self._temperature)


class _Penalty:
    def __init__(self, context: ProcessorContext, /, penalty: float) -> None:
        self._num_prompt = context.num_prompt_tokens
        self._penalty = _number("penalty", penalty)


class RepetitionPenalty:
    """Divides positive and multiplies negative logits of every token seen, in the prompt or since."""

    def __init__(self, context: ProcessorContext, /, penalty: float) -> None:
        self._vocab_size = context.vocab_size
        self._penalty = _number("penalty", penalty, above=0.0)

    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        seen = _index(sorted({token for token in token_ids if 0 <= token < self._vocab_size}), logits)
        values = logits[seen]
        logits[seen] = (values / self._penalty).where(values > 0, values * self._penalty)


class PresencePenalty(_Penalty):
    """Subtracts once from every token generated."""

    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        logits[_index(sorted(set(token_ids[self._num_prompt :])), logits)] -= self._penalty


class FrequencyPenalty(_Penalty):
    """Subtracts from every token generated, for each time."""

    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        counts = Counter(token_ids[self._num_prompt :])
        ids = _index(list(counts), logits)
        logits[ids] -= logits.new_tensor(list(counts.values())) * self._penalty


class LogitBias:
    reads_token_ids = False

    def __init__(self, context: ProcessorContext, /, bias: Mapping[int | str, float]) -> None:
        if not isinstance(bias, Mapping):
            raise RequestError(f"bias: {bias!r}; an object of token id: value is needed")
        self._ids = _token_ids("bias", [_token(token) for token in bias], context)
        self._values = [_number("bias", value) for value in bias.values()]

    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        logits.index_add_(0, _index(self._ids, logits), logits.new_tensor(self._values))


class BadWords:
    """Masks the last token of sequences whose others have just come."""

    def __init__(self, context: ProcessorContext, /, sequences: Sequence[Sequence[int]]) -> None:
        self._sequences = [_token_ids("sequences", ids, context) for ids in sequences]
        if not all(self._sequences):
            raise RequestError("sequences: one of them is empty; give at least one token each")

    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        banned = [ids[-1] for ids in self._sequences if _ends_with(token_ids, ids[:-1])]
        logits[_index(banned, logits)] = _MINUS_INFINITY


class MinTokens:
    """Masks the end-of-sequence ids, and others given, until so many tokens have come."""

    def __init__(self, context: ProcessorContext, /, min_tokens: int, stop_token_ids: Sequence[int] = ()) -> None:
        self._until = context.num_prompt_tokens + int(_number("min_tokens", min_tokens, least=0))
        self._ids = _token_ids("stop_token_ids", [*context.eos_ids, *stop_token_ids], context)

    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        if len(token_ids) < self._until:
            logits[_index(self._ids, logits)] = _MINUS_INFINITY


class TopK:
    """Keeps the k likeliest, and ties with the last."""

    reads_token_ids = False

    def __init__(self, context: ProcessorContext, /, top_k: int) -> None:
        self._top_k = min(int(_number("top_k", top_k, least=1)), context.vocab_size)

    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        logits[logits < logits.topk(self._top_k).values[-1]] = _MINUS_INFINITY


class TopP:
    """Keeps the likeliest tokens whose probabilities just reach p, and ties with the last."""

    reads_token_ids = False

    def __init__(self, context: ProcessorContext, /, top_p: float) -> None:
        self._top_p = _number("top_p", top_p, least=0.0, most=1.0)

    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        if self._top_p < 1:
            scaled = (logits - logits.max()).unsqueeze(0)
            whole = _index([scaled.shape[1]], logits).unsqueeze(0)
            threshold = filters.nucleus_of_batch(scaled, whole, scaled.new_tensor([[self._top_p]]))
            logits[scaled[0] < threshold[0]] = _MINUS_INFINITY


class MinP:
    """Keeps tokens at least min_p times as likely as the likeliest."""

    reads_token_ids = False

    def __init__(self, context: ProcessorContext, /, min_p: float) -> None:
        self._min_p = _number("min_p", min_p, least=0.0, most=1.0)

    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        if self._min_p:
            logits[logits < logits.max() + math.log(self._min_p)] = _MINUS_INFINITY


class AllowedTokens:
    """Masks everything else: classification, multiple choice."""

    reads_token_ids = False

    def __init__(self, context: ProcessorContext, /, token_ids: Sequence[int]) -> None:
        self._ids = _token_ids("token_ids", token_ids, context)
        if not self._ids:
            raise RequestError("token_ids: empty; at least one token must stay allowed")

    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        allowed = _index(self._ids, logits)
        kept = logits[allowed]
        logits.fill_(_MINUS_INFINITY)
        logits[allowed] = kept


class ForcedSequence:
    """Forces tokens one after the other, then the end: a smoke test of the hook."""

    def __init__(self, context: ProcessorContext, /, token_ids: Sequence[int]) -> None:
        if not context.eos_ids:
            raise RequestError("forced_sequence needs an end-of-sequence id; set end_id, or eos_token_id in the model")
        self._ids = [*_token_ids("token_ids", token_ids, context), context.eos_ids[0]]
        self._num_prompt = context.num_prompt_tokens

    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        step = min(len(token_ids) - self._num_prompt, len(self._ids) - 1)
        logits.fill_(_MINUS_INFINITY)
        logits[self._ids[step]] = 0.0


BUILT_IN: dict[str, ProcessorFactory] = {
    "temperature": Temperature,
    "repetition_penalty": RepetitionPenalty,
    "presence_penalty": PresencePenalty,
    "frequency_penalty": FrequencyPenalty,
    "logit_bias": LogitBias,
    "bad_words": BadWords,
    "min_tokens": MinTokens,
    "top_k": TopK,
    "top_p": TopP,
    "min_p": MinP,
    "allowed_tokens": AllowedTokens,
    "forced_sequence": ForcedSequence,
}


def _number(
    name: str, value: object, *, above: float | None = None, least: float | None = None, most: float | None = None
) -> float:
    """Return a finite number within its limits. Raises RequestError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RequestError(f"{name}: {value!r}; a finite number is needed")
    if above is not None and value <= above:
        raise RequestError(f"{name}: {value}; it must be above {above:g}")
    if least is not None and value < least:
        raise RequestError(f"{name}: {value}; at least {least:g}")
    if most is not None and value > most:
        raise RequestError(f"{name}: {value}; at most {most:g}")
    return value


def _token(text: object) -> object:
    return int(text) if isinstance(text, str) and text.isdecimal() else text


def _token_ids(name: str, tokens: Sequence[object], context: ProcessorContext) -> list[int]:
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise RequestError(f"{name}: {tokens!r}; a list of token ids is needed")
    checked = []
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < context.vocab_size:
            raise RequestError(f"{name}: {token!r} is not a token id, 0 to {context.vocab_size - 1}")
        checked.append(token)
    return checked


def _ends_with(token_ids: Sequence[int], ending: Sequence[int]) -> bool:
    return not ending or list(token_ids[-len(ending) :]) == list(ending)


def _index(ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.tensor(ids, dtype=torch.int64, device=logits.device)
