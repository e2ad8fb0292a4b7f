"""What must hold of every finished trace, and how tests look at one."""

from __future__ import annotations

from bireme.request_trace import RequestTrace

NAMES = frozenset(
    {
        *("tokenize", "pictures", "attempt", "route", "prefill", "decode", "embed", "video", "deliver"),
        *("queue", "prefill_chunk", "transfer", "preempted", "generate"),
    }
)


def check_tree(trace: RequestTrace) -> None:
    """Fail unless all spans have ended and hang, directly or not, below the root, within their parents' times."""
    spans = {span.span_id: span for span in trace.spans}
    assert len(spans) == len(trace.spans), "ids are unique"
    assert trace.spans[0] is trace.root
    for span in trace.spans[1:]:
        parent = spans.get(span.parent_id)
        assert parent is not None, f"{span.name} hangs nowhere"
        assert span.name in NAMES, span.name
        assert parent.start_us <= span.start_us <= span.end_us <= parent.end_us, (span, parent)
        at = span
        while at is not trace.root:
            at = spans[at.parent_id]


def shown(trace: RequestTrace) -> list[str]:
    """Return the names of the tree's spans, depth first, each indented below its parent."""

    def below(parent_id: int, depth: int) -> list[str]:
        children = [span for span in trace.spans if span.parent_id == parent_id and span is not trace.root]
        children.sort(key=lambda span: span.start_us)
        return [line for span in children for line in (f"{'  ' * depth}{span.name}", *below(span.span_id, depth + 1))]

    return [trace.root.name, *below(trace.root.span_id, 1)]
