"""Engine steps as frames: the output of each consumer's requests in columns.

Steps that are added before the next `take` share a frame, so a fast engine costs the transport no more than a slow one.
A request is then in its columns several times, in order. Log probabilities belong to requests, not to rows, so a step
that has any travels alone, and one in which a request has two tokens (the one that prefill made and the next) in two
frames.
"""

from __future__ import annotations

import msgspec

from bireme import disagg
from bireme.engines.base import PlainTokens, StepOutput
from bireme.engines.child.ledger import Ledger, Record
from bireme.messages import Finish, Step, encode, frame
from bireme.multimodal.answers import seal_outcome


class StepEncoder:
    def __init__(self, life: int, ledger: Ledger, key: bytes, worker: str = "") -> None:
        """`worker`: the id by which engines of other servers find this one; "": its name will do."""
        self._life, self._worker = life, worker
        self._ledger = ledger
        self._key = key  # signs what context_only requests export
        self._open: dict[int, Step] = {}  # by consumer; the next step is added to the same ones
        self._frames: list[bytes] = []

    def add(self, number: int, deltas: list[StepOutput], plain: PlainTokens | None = None) -> None:
        """Output of discarded or unknown requests is dropped."""
        is_rich = any(delta.logprobs is not None or delta.prompt_logprobs is not None for delta in deltas)
        if is_rich:
            self._seal()
        if plain is not None:
            self._add_plain(number, plain)
        for delta in deltas:
            self._add(number, delta)
        if is_rich:
            self._seal()

    def take(self) -> list[bytes]:
        self._seal()
        frames, self._frames = self._frames, []
        return frames

    def refusal(self, consumer: int, number: int, finish: Finish) -> bytes:
        """Of a request that the engine never took."""
        return frame(consumer, encode(Step(self._life, 0, finished={number: finish})))

    def _seal(self) -> None:
        steps, self._open = self._open, {}
        for consumer, step in steps.items():
            self._frames.append(frame(consumer, encode(step)))

    def _step(self, consumer: int, number: int) -> Step:
        step = self._open.get(consumer)
        if step is None:
            step = self._open[consumer] = Step(self._life, number)
        return step

    def _add_plain(self, number: int, plain: PlainTokens) -> None:
        find, steps = self._ledger.get, self._open
        for key, token in zip(plain.keys, plain.tokens, strict=True):
            record = find(key)
            if record is None or record.is_discarded:
                continue
            consumer, request = key
            step = steps.get(consumer) or self._step(consumer, number)
            step.requests.append(request)
            step.tokens.append(token)
            if step.counts is not None:
                step.counts.append(1)

    def _add(self, number: int, delta: StepOutput) -> None:
        record = self._ledger.get(delta.key)
        if record is None:
            return
        if not record.is_discarded:
            step = self._open.get(delta.key[0])
            if delta.logprobs is not None and step is not None and delta.key[1] in (step.logprobs or ()):
                self._seal()
            self._add_delta(self._step(delta.key[0], number), delta, record)
        if delta.finish is not None:
            self._ledger.leave(delta.key)

    def _add_delta(self, step: Step, delta: StepOutput, record: Record) -> None:
        number, tokens = delta.key[1], delta.tokens
        if tokens or delta.prompt_logprobs is not None:
            if step.counts is not None:
                step.counts.append(len(tokens))
            elif len(tokens) != 1:
                step.counts = [1] * len(step.requests) + [len(tokens)]
            step.requests.append(number)
            step.tokens += tokens
        if delta.logprobs is not None:
            step.logprobs = step.logprobs or {}
            step.logprobs[number] = delta.logprobs
        if delta.prompt_logprobs is not None:
            step.prompt_logprobs = step.prompt_logprobs or {}
            step.prompt_logprobs[number] = delta.prompt_logprobs
        if delta.finish is not None:
            step.finished[number] = self._sign(delta, delta.finish, record)

    def _sign(self, delta: StepOutput, finish: Finish, record: Record) -> Finish:
        if delta.exported is not None:
            worker = self._worker or delta.exported.worker
            exported = msgspec.structs.replace(delta.exported, prompt_digest=record.digest, worker=worker)
            finish.disaggregated_params = disagg.seal(exported, self._key)
        if delta.encoded is not None:
            finish.encoded = seal_outcome(delta.encoded, self._key)
        if delta.embedded is not None:
            finish.encoded = delta.embedded
        return finish
