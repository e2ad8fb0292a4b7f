"""Where a request would run, as JSON: the answer to `routing.query_only`, and to the model `router`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bireme.kv.routing.placement import RoutingRequest
from bireme.kv.routing.router import WorkerRouter


def placement_json(router: WorkerRouter, request: RoutingRequest) -> dict[str, Any]:
    """Return the workers that the request would get now, and all that could serve it with their costs.

    Raises what `WorkerRouter.place` raises. Nothing is counted as sent.
    """
    placement, candidates = router.preview(request)
    return {
        "object": "bireme.placement",
        "prefill_worker": placement.prefill,
        "decode_worker": placement.decode,
        "prefill_dp_rank": placement.prefill_dp_rank,
        "decode_dp_rank": placement.decode_dp_rank,
        "reason": placement.reason,
        "prompt_tokens": len(request.prompt),
        "predicted_cached_tokens": placement.cached_tokens,
        "candidates": [asdict(candidate) for candidate in candidates],
    }
