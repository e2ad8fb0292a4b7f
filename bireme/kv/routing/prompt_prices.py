"""What a prompt costs where decode computes it, and where prefill does: milliseconds that all requests together wait.

By what the workers' engines have measured and tell with their load. Each side counts until the prompt's first token can
be followed by a second. A half step of waiting, and decode's step for the second token, are the same on both.

    decode computes it:   prompts that wait there + this one + what the running requests there wait for this one
    prefill computes it:  the hop + prompts that wait there + this one + the transfer of its KV
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

import msgspec

from bireme.kv.wire.event_wire import PRICED_TOKENS, WorkerPrices

_DOUBT = 1.1  # by which a transfer must pay: two engines that are alike measure a little apart


@dataclass(frozen=True, slots=True)
class PromptSide:
    """A worker that may compute a prompt."""

    prices: WorkerPrices
    num_new: float  # tokens that it does not hold
    waiting_tokens: float  # of prompts that come before
    step_tokens: int  # the most of a step

    @property
    def queue_ms(self) -> float:
        return self._alone_ms(self.waiting_tokens)

    @property
    def prompt_ms(self) -> float:
        return self._alone_ms(self.num_new)

    @property
    def delay_ms(self) -> float:
        """What each request that runs there waits longer for its next tokens."""
        return added_ms(self.prices, self.num_new)

    def _alone_ms(self, num_tokens: float) -> float:
        return added_ms(self.prices, num_tokens) + math.ceil(num_tokens / self.step_tokens) * self.prices.step_ms


@dataclass(frozen=True, slots=True)
class Transfer:
    hop_ms: float  # over prefill, whatever is moved
    start_ms: float
    ms_per_token: float

    def ms(self, num_tokens: float) -> float:
        return self.hop_ms + self.start_ms + self.ms_per_token * num_tokens


def is_decode_cheaper(decode: PromptSide, num_running: float, prefill: PromptSide, transfer: Transfer) -> bool:
    """`num_running`: requests at decode, each of which waits for what decode computes of the prompt."""
    here = decode.queue_ms + decode.prompt_ms + num_running * decode.delay_ms
    there = prefill.queue_ms + prefill.prompt_ms + transfer.ms(decode.num_new)
    return here <= there * _DOUBT


def believed(decode: WorkerPrices, prefill: WorkerPrices, step_tokens: int) -> WorkerPrices:
    """Return decode's prices, with prefill's for prompts of which it only guesses that they take longer there."""
    prompt_ms = [
        own if min(tokens, step_tokens) <= 2 * decode.measured_tokens else min(own, others)
        for tokens, own, others in zip(PRICED_TOKENS, decode.prompt_ms, prefill.prompt_ms, strict=True)
    ]
    return msgspec.structs.replace(decode, prompt_ms=tuple(prompt_ms))


def added_ms(prices: WorkerPrices, num_tokens: float) -> float:
    """Return by how much a prompt of so many tokens prolongs steps: straight between the lengths that are told."""
    if num_tokens <= 0:
        return 0.0
    known = prices.prompt_ms
    if num_tokens <= PRICED_TOKENS[0]:
        return known[0]
    at = min(bisect.bisect_left(PRICED_TOKENS, num_tokens), len(PRICED_TOKENS) - 1)  # the last line goes on
    short, long = PRICED_TOKENS[at - 1 : at + 1]
    return known[at - 1] + (known[at] - known[at - 1]) * (num_tokens - short) / (long - short)
