"""One engine step as frames: the news of each consumer's requests in columns."""

from __future__ import annotations

import msgspec

from bireme import disagg
from bireme.engines.base import Delta
from bireme.engines.ledger import Ledger, Record
from bireme.messages import Finish, Step, encode, frame
from bireme.multimodal.answers import seal_outcome


class StepEncoder:
    """Turns an engine's deltas into one frame per consumer and keeps the ledger."""

    def __init__(self, life: int, ledger: Ledger, key: bytes) -> None:
        self._life = life
        self._ledger = ledger
        self._key = key  # signs what context_only requests export

    def frames(self, number: int, deltas: list[Delta]) -> list[bytes]:
        """Return what goes out; news of muted or unknown requests goes nowhere."""
        steps: dict[int, Step] = {}
        for delta in deltas:
            record = self._ledger.get(delta.key)
            if record is None:
                continue
            if not record.is_muted:
                consumer = delta.key[0]
                step = steps.get(consumer)
                if step is None:
                    step = steps[consumer] = Step(self._life, number)
                self._add(step, delta, record)
            if delta.finish is not None:
                self._ledger.leave(delta.key)
        return [frame(consumer, encode(step)) for consumer, step in steps.items()]

    def refusal(self, consumer: int, number: int, finish: Finish) -> bytes:
        """Return the frame that ends a request which the engine never took."""
        return frame(consumer, encode(Step(self._life, 0, finished={number: finish})))

    def _add(self, step: Step, delta: Delta, record: Record) -> None:
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

    def _sign(self, delta: Delta, finish: Finish, record: Record) -> Finish:
        if delta.exported is not None:
            exported = delta.exported
            if not exported.prompt_digest:
                exported = msgspec.structs.replace(exported, prompt_digest=record.digest)
            finish.disaggregated_params = disagg.seal(exported, self._key)
        if delta.encoded is not None:
            finish.encoded = seal_outcome(delta.encoded, self._key)
        return finish
