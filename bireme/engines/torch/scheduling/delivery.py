"""What becomes of a sampled token: it is delivered, and may end its request."""

from __future__ import annotations

from collections.abc import Callable

from bireme.engines.base import PlainTokens, StepOutput
from bireme.engines.torch.scheduling.parts import Parts
from bireme.engines.torch.scheduling.requests import OpenRequests
from bireme.engines.torch.scheduling.scheduler import Scheduler
from bireme.engines.torch.step import Sequence, SequenceStatus
from bireme.logits.sampler import Sampled
from bireme.messages import TokenLogprobs


class TokenDelivery:
    def __init__(self, parts: Parts, scheduler: Scheduler, requests: OpenRequests) -> None:
        self._parts, self._scheduler, self._requests = parts, scheduler, requests
        self._leaving: list[tuple[Sequence, StepOutput]] = []
        self._plain = PlainTokens([], [])  # of the last step; what happens between steps is emitted before it

    def take(self) -> tuple[list[StepOutput], PlainTokens]:
        """Return what has happened since the last call, and forget it."""
        outputs, self._requests.outputs, plain = self._requests.outputs, [], self._plain
        self._plain = PlainTokens([], [])
        return outputs, plain

    def begin(self, sequence: Sequence, first: tuple[int, ...] = ()) -> None:
        """Have the sampler know it. `first`: tokens that another engine has sampled and are still to be accepted."""
        split = sequence.num_prompt
        eos_ids = self._parts.admission.eos_ids(sequence.sampling)
        prompt_ids, output_ids = sequence.tokens[:split], [*sequence.tokens[split:], *first]
        self._parts.sampler.add(sequence.key, sequence.sampling, prompt_ids, output_ids, eos_ids, sequence.guidance)
        sequence.is_sampling = True

    def accept_all(self, sequences: list[Sequence], sampled: Sampled, now: float) -> None:
        for row, sequence in enumerate(sequences):
            if sequence.state is not SequenceStatus.RUNNING:
                continue  # aborted meanwhile
            if (error := sampled.errors.get(row)) is not None:
                self._requests.fail(sequence, error)
            elif not self._accept_plain(sequence, sampled.tokens[row], now):
                self._parts.accounts.num_canary_tokens += sequence.is_canary
                self.accept(sequence, sampled.tokens[row], sampled.logprobs[row], now)

    def accept_burst(
        self, sequence: Sequence, tokens: list[int], now: float, computed: int, advance: Callable[[Sequence, int], None]
    ) -> None:
        """Take tokens without log probabilities, of which the last one alone may end the request. With them so many of
        the sequence's tokens have been computed, which `advance` is told before a request ends.
        """
        last, num_output = tokens[-1], len(sequence.tokens) - sequence.num_prompt + len(tokens)
        if sequence.first_token_at and last not in sequence.stop_ids and num_output < sequence.max_tokens:
            self._take_plain(sequence, tokens, now)
            if computed:
                advance(sequence, computed)
            return
        if len(tokens) > 1:
            self._take_plain(sequence, tokens[:-1], now)
        if computed:
            advance(sequence, computed)
        self._parts.accounts.num_canary_tokens += sequence.is_canary
        self.accept(sequence, last, None, now)

    def _accept_plain(self, sequence: Sequence, token: int, now: float) -> bool:
        """Take a sampled token if there is nothing to say of it: neither the first nor the last, no logprobs."""
        is_last = token in sequence.stop_ids or sequence.num_output + 1 >= sequence.max_tokens
        if is_last or not sequence.first_token_at or sequence.sampling.logprobs is not None:
            return False
        self._take_plain(sequence, [token], now)
        return True

    def _take_plain(self, sequence: Sequence, tokens: list[int], now: float) -> None:
        count = len(tokens)
        self._parts.accounts.delivered(sequence, now, count)
        sequence.tokens += tokens
        sequence.last_token_at = now
        self._plain.keys += [sequence.key] * count
        self._plain.tokens += tokens

    def accept(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, now: float) -> None:
        """Take a sampled token: deliver it, or end the request with it."""
        delta = StepOutput(sequence.key)
        if not sequence.first_token_at:
            self._end_prefill(sequence, delta, now)
        is_stop = token in sequence.stop_ids
        if not is_stop:
            if not sequence.is_canary:
                self._parts.accounts.delivered(sequence, now)
            sequence.tokens.append(token)
            delta.tokens.append(token)
            if logprobs is not None:
                delta.logprobs = [logprobs]
        sequence.last_token_at = now
        exporter = self._parts.exporter if sequence.request.request_type == "context_only" else None
        if exporter is not None:
            usage = self._parts.accounts.usage(sequence, now)
            delta.exported = exporter.params(sequence, self._parts.worker, self._parts.life, token, logprobs, usage)
        if is_stop:
            self._requests.finish(sequence, "stop", delta, stop_token_id=token)
        elif sequence.num_output >= sequence.max_tokens:
            self._requests.finish(sequence, "length", delta)
        elif exporter is not None:
            self._leaving.append((sequence, delta))
        else:
            self._requests.outputs.append(delta)

    def hand_over(self) -> None:
        """Let go of the step's context_only requests: what else sees a step has seen their prompts."""
        leaving, self._leaving = self._leaving, []
        for sequence, delta in leaving:
            if sequence.state is SequenceStatus.RUNNING:
                self._requests.hand_over(sequence, delta)

    def _end_prefill(self, sequence: Sequence, delta: StepOutput, now: float) -> None:
        """Its first token is there: let go of what only the prompt needed."""
        self._parts.accounts.first_token(sequence, now)
        self._scheduler.prefilled(sequence)
        if self._parts.pictures is not None and not self._parts.limits.may_preempt:
            self._parts.pictures.release(sequence)
        if sequence.wants_prompt_logprobs:
            delta.prompt_logprobs = sequence.prompt_logprobs
            sequence.wants_prompt_logprobs = False  # delivered: a preemption must not compute them again
