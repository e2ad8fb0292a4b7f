"""What an expression of Prometheus reads."""

from __future__ import annotations

import re

from bireme.metrics import TABLE


def metrics_of(expression: str) -> set[str]:
    """Return the metrics that an expression reads; a histogram's three series count as the histogram."""
    names = set(re.findall(r"\b(?:bireme|trtllm|nv|dynamo)_\w+", expression))
    return {name if name in TABLE else re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
