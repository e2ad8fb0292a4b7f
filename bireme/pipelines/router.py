"""router: where a prompt would be computed now, for gateways that send requests to workers themselves.

The same decision as this deployment's own pipelines make. Nothing is counted as sent: what a gateway sends shows in its
workers' load, a few milliseconds later.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from bireme.pipelines.chat_answer import encode_json
from bireme.pipelines.placement_answer import placement_json
from bireme.pipelines.text import TextPipeline, cancel_with
from bireme.request import parse_generate
from bireme.specs import ROUTER, ModelSpec
from bireme.types import Array, Cancelled, Send, TensorResponse, Tensors


class Router(TextPipeline):
    spec: ClassVar[ModelSpec] = ROUTER

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None:
        with self._services.admitted():
            request = parse_generate(inputs, self.spec, self._services.recipe)
            cancel_with(cancelled)
            sequence = self._sequence_requests(request, await self._tokenize(request), time.monotonic())[0]
            send(TensorResponse(_tensors(placement_json(self._services.router, sequence.routing_request()))))


def _tensors(answer: dict[str, Any]) -> Tensors:
    candidates = answer["candidates"]
    ranks = [-1 if answer[name] is None else answer[name] for name in ("prefill_dp_rank", "decode_dp_rank")]
    return {
        "prefill_worker": _texts([answer["prefill_worker"] or ""]),
        "decode_worker": _texts([answer["decode_worker"]]),
        "prefill_dp_rank": np.array(ranks[:1], np.int32),
        "decode_dp_rank": np.array(ranks[1:], np.int32),
        "overlap_tokens": np.array([answer["predicted_cached_tokens"] or 0], np.int32),
        "workers": _texts([one["worker"] for one in candidates]),
        "overlaps": np.array([one["cached_tokens"] for one in candidates], np.int32),
        "costs": np.array([one["cost"] for one in candidates], np.float32),
        "placement": _texts([encode_json(answer).decode()]),
    }


def _texts(values: Sequence[str]) -> Array:
    return np.array([value.encode() for value in values], np.object_)
