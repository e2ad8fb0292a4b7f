"""What the sampler keeps of one sequence between steps, without tensors.

Penalties, bias and bans are kept as token ids and values: a row costs what it uses, not the vocabulary's size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from bireme.errors import RequestError
from bireme.logits.base import BaseLogitsProcessor
from bireme.logits.guided.guidance import Guidance
from bireme.messages import SamplingParams, temperature_of
from bireme.own_work import NO_MARK

Ids = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]


class TokenCounts:
    """Which tokens a sequence holds and how often it generated each, as growing columns."""

    __slots__ = ("_ids", "_outputs", "_size", "_slots", "_vocab_size")

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._slots: dict[int, int] = {}
        self._size = 0
        self._ids: Ids = np.zeros(64, dtype=np.int64)
        self._outputs: Values = np.zeros(64, dtype=np.float32)

    @property
    def ids(self) -> Ids:
        return self._ids[: self._size]

    @property
    def outputs(self) -> Values:
        """How often each of `ids` was generated; 0: it is only in the prompt."""
        return self._outputs[: self._size]

    def see(self, tokens: Iterable[int]) -> None:
        """Count prompt tokens, without placeholders of media."""
        for token in set(tokens):
            if 0 <= token < self._vocab_size:
                self._slot(token)

    def generate(self, token: int) -> None:
        slot = self._slot(token)  # first: it may replace the columns
        self._outputs[slot] += 1

    def _slot(self, token: int) -> int:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = self._size
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._outputs = np.concatenate([self._outputs, np.zeros_like(self._outputs)])
            self._ids[slot] = token
            self._size += 1
        return slot


class Row:
    """One sequence: its parameters in the sampler's form, and history where needed."""

    __slots__ = (
        *("_banned_always", "_banned_sequences", "_min_tokens", "_stop_ids", "bias_ids", "bias_values"),
        *("counts", "frequency", "guidance", "history", "is_always_edited", "is_edited", "is_plain", "is_simple"),
        *("mark", "min_p", "num_output"),
        *("num_top", "presence", "processors", "repetition", "seed", "temperature", "top_k", "top_p"),
    )

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        eos_ids: Sequence[int],
        vocab_size: int,
        processors: Sequence[BaseLogitsProcessor] = (),
        guidance: Guidance | None = None,
        mark: AbstractContextManager[None] = NO_MARK,
    ) -> None:
        """`guidance` has taken `output_ids` already. `mark`: held while `processors` work."""
        self.mark = mark
        self.num_top = params.logprobs  # None: no log probabilities; k: the k likeliest beside the chosen token
        self.num_output = 0
        self.processors = tuple(processors)
        self._take_filters(params, vocab_size)
        self._take_penalties(params, prompt_ids, vocab_size)
        self._take_bans(params, eos_ids)
        wants_history = self._banned_sequences or self.processors
        self.history: list[int] | None = list(prompt_ids) if wants_history else None
        self.is_always_edited = bool(self.counts or len(self.bias_ids) or len(self._banned_always) or wants_history)
        self.guidance: Guidance | None = None
        for token in output_ids:
            self.append(token)
        self.guidance = guidance
        self.is_always_edited |= guidance is not None and guidance.is_whole
        self._set_kind()

    def _take_filters(self, params: SamplingParams, vocab_size: int) -> None:
        self.temperature = temperature_of(params)
        self.top_k = min(params.top_k or 0, vocab_size)
        self.top_p = 1.0 if params.top_p is None else params.top_p
        self.min_p = params.min_p or 0.0
        if params.seed is None and self.temperature:
            raise RequestError("seed is unset; whoever lets a request in draws one, so that it can be resumed exactly")
        self.seed = params.seed or 0

    def _set_kind(self) -> None:
        is_guided = self.guidance is not None and not self.guidance.is_free
        self.is_edited = self.is_always_edited or is_guided or self.num_output < self._min_tokens
        self.is_plain = not (self.temperature or self.is_edited)
        # Its next token depends on logits, temperature, top-k, top-p, min-p, seed and position alone.
        self.is_simple = not (self.is_edited or self.num_top is not None)

    def _take_penalties(self, params: SamplingParams, prompt_ids: Sequence[int], vocab_size: int) -> None:
        self.repetition = 1.0 if params.repetition_penalty is None else params.repetition_penalty
        self.presence = params.presence_penalty or 0.0
        self.frequency = params.frequency_penalty or 0.0
        self.counts: TokenCounts | None = None
        if self.repetition != 1.0 or self.presence or self.frequency:
            self.counts = TokenCounts(vocab_size)
        if self.counts and self.repetition != 1.0:
            self.counts.see(prompt_ids)
        self.bias_ids: Ids = np.fromiter(params.logit_bias.keys(), np.int64)
        self.bias_values: Values = np.fromiter(params.logit_bias.values(), np.float32)

    def _take_bans(self, params: SamplingParams, eos_ids: Sequence[int]) -> None:
        single = [ids[0] for ids in params.bad_token_ids if len(ids) == 1]
        self._banned_always: Ids = np.array(single, dtype=np.int64)
        self._banned_sequences = tuple(ids for ids in params.bad_token_ids if len(ids) > 1)
        self._min_tokens = params.min_tokens or 0
        self._stop_ids: Ids = np.array([*eos_ids, *params.stop_token_ids], dtype=np.int64)

    def banned(self) -> Ids:
        parts = [self._banned_always]
        if self.num_output < self._min_tokens and not (self.guidance and self.guidance.must_stop):
            parts.append(self._stop_ids)
        history = self.history
        if history is not None:
            last = [ids[-1] for ids in self._banned_sequences if tuple(history[1 - len(ids) :]) == ids[:-1]]
            parts.append(np.array(last, dtype=np.int64))
        return np.concatenate(parts)

    def go_to(self, num_output: int) -> None:
        # Of a draft's row, which keeps no account of tokens: the next one is the one after so many.
        self.num_output = num_output
        self._set_kind()

    def append(self, token: int) -> None:
        """Raises RequestError when the guide does not allow it."""
        if self.guidance is not None:
            self.guidance.accept(token)
        self.num_output += 1
        if self.guidance is not None or self.num_output == self._min_tokens:
            self._set_kind()
        if self.counts is not None:
            self.counts.generate(token)
        if self.history is not None:
            self.history.append(token)
