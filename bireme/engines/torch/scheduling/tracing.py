"""What the engine tells of a traced request, with its end; chunks and preemptions are noted as they happen."""

from __future__ import annotations

from bireme.engines.torch.step import SchedulerOutput, Sequence
from bireme.messages import EngineSpan
from bireme.request_trace import EngineSpans, PromptWork


def note_chunks(plan: SchedulerOutput, work: PromptWork, step: int, began_at: float, now: float) -> None:
    """Note the parts of prompts that a step has computed."""
    work.note(now - began_at, sum(count for _, count in plan.chunks))
    for sequence, count in plan.chunks:
        if sequence.spans is not None:
            sequence.spans.add("prefill_chunk", began_at, now, tokens=count, step=step)
            sequence.spans.begin_generation(work)


def told(sequence: Sequence, spans: EngineSpans, work: PromptWork, now: float) -> list[EngineSpan]:
    """Return all spans of a request that ends now."""
    scheduled_at, first_at = sequence.scheduled_at, sequence.first_token_at
    has_chunks = any(span.name == "prefill_chunk" for span in spans.spans)
    spans.add("queue", sequence.arrived_at, scheduled_at or now)
    if (fetch := sequence.kv_fetch) is not None:
        spans.add("transfer", scheduled_at, sequence.imported_at or now, bytes=fetch.num_bytes, way=fetch.way)
    elif first_at and not has_chunks and sequence.params is None:  # one token was left to compute
        spans.add("prefill_chunk", scheduled_at, first_at, tokens=sequence.num_prompt - max(0, sequence.num_cached))
    if first_at and sequence.request.request_type != "context_only":
        num_tokens = sequence.num_output - sequence.request.num_resumed
        spans.add_generation(max(first_at, sequence.imported_at), now, num_tokens, work)
    return spans.spans
