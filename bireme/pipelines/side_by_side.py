"""The sequences of one request, run together and measured: all succeed, or the request fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from bireme.gathering import all_results
from bireme.metrics import Registry
from bireme.pipelines.sequence import SequenceRequest, SequenceRunner
from bireme.pipelines.services import Services
from bireme.text.output import TokenDelta
from bireme.text.tokenizer import TextTokenizer

Output = Callable[[TokenDelta], None]


async def run_sequences(
    services: Services,
    tokenizer: TextTokenizer,
    sequence_requests: list[SequenceRequest],
    outputs: Iterable[Output],
    arrived_at: float,
) -> list[SequenceRunner]:
    """Return the sequences when all have succeeded. Raises the first one's error otherwise."""
    sequences = [
        SequenceRunner(
            services,
            request,
            tokenizer.detokenizer(request.sampling.skip_special_tokens),
            output,
            index if len(sequence_requests) > 1 else None,
        )
        for index, (request, output) in enumerate(zip(sequence_requests, outputs, strict=True))
    ]
    if services.observer is not None:
        services.observer.began(sequences)
    try:
        await _all(sequences)
    finally:
        for sequence in sequences:
            _measure(sequence, arrived_at)
        if services.observer is not None:
            services.observer.ended(sequences)
    return sequences


def count_request(metrics: Registry, outcome: str, arrived_at: float, is_canary: bool = False) -> None:
    metrics.count_end(outcome, time.monotonic() - arrived_at, is_canary)


async def _all(sequences: list[SequenceRunner]) -> None:
    """Run them side by side; when one fails, the others are cancelled."""
    if len(sequences) == 1:
        await sequences[0].run()
        return
    await all_results(sequence.run() for sequence in sequences)


def _measure(sequence: SequenceRunner, arrived_at: float) -> None:
    if not sequence.first_token_at:
        return
    sequence.metrics.observe("bireme_time_to_first_token_seconds", sequence.first_token_at - arrived_at)
    if (num_gaps := len(sequence.tokens) - 1) > 0:
        seconds = (sequence.ended_at - sequence.first_token_at) / num_gaps
        sequence.metrics.observe("bireme_time_per_output_token_seconds", seconds)
