"""Logits processors inside TensorRT-LLM: one object a request, with TensorRT-LLM's call and bireme's processors.

It travels to TensorRT-LLM's worker process by pickle, so it holds names and arguments only; the processors are made
there, at the first call. An error in a processor must not escape: it is logged once, and that request's logits stay as
the model made them from then on.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bireme.errors import RequestError
from bireme.logits.base import BaseLogitsProcessor, ProcessorContext
from bireme.logits.registry import create
from bireme.messages import ProcessorCall

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("bireme.engines.trtllm")


class LogitsAdapter:
    def __init__(
        self, calls: Sequence[ProcessorCall], context: ProcessorContext, placeholder: int | None = None
    ) -> None:
        """`placeholder`: what processors see where a prompt has pictures; None: it has none."""
        self._calls = tuple(calls)
        self._context = context
        self._placeholder = placeholder
        self._processors: list[BaseLogitsProcessor] | None = None
        self._has_failed = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_processors": None, "_has_failed": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __call__(
        self,
        req_id: int,
        logits: torch.Tensor,
        token_ids: list[list[int]],
        stream_ptr: int | None,
        client_id: int | None,
    ) -> None:
        """Change `logits` (1, 1, vocab) in place; token_ids: prompt and generated tokens of the one beam."""
        if self._has_failed:
            return
        try:
            _check_shape(logits)
            with _on_stream(stream_ptr, logits):
                self._apply(logits, token_ids[0])
        except Exception:  # it would end the engine, with every request
            self._has_failed = True
            names = ",".join(call.name for call in self._calls)
            logger.exception("logits_processor_failed request=%s processors=%s", client_id, names)

    def _apply(self, logits: torch.Tensor, token_ids: list[int]) -> None:
        import torch

        if self._processors is None:
            self._processors = create(self._calls, self._context)
        if self._placeholder is not None:  # 1.2 has tokens beyond the vocabulary there
            token_ids = [one if one < self._context.vocab_size else self._placeholder for one in token_ids]
        row = logits[0, 0, : self._context.vocab_size]
        work = row.to(torch.float32, copy=True)  # processors see float32, and a failed one leaves nothing behind
        for processor in self._processors:
            processor(token_ids, work)
        row.copy_(work)


def check_processors(calls: Sequence[ProcessorCall], context: ProcessorContext, obstacle: str) -> None:
    """Raises RequestError."""
    create(calls, context)
    if obstacle:
        names = ", ".join(call.name for call in calls)
        raise RequestError(
            f"logits_processors: {names}; TensorRT-LLM runs none together with {obstacle}; leave them out"
        )


def _check_shape(logits: torch.Tensor) -> None:
    if logits.dim() != 3 or logits.shape[0] != 1 or logits.shape[1] != 1:
        raise ValueError(f"logits of shape {tuple(logits.shape)}; only batch 1 and beam width 1 are supported")


def _on_stream(stream_ptr: int | None, logits: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """The engine's own CUDA stream: work on another would race with its sampling."""
    if stream_ptr is None or not logits.is_cuda:
        return contextlib.nullcontext()
    import torch

    context: contextlib.AbstractContextManager[Any] = torch.cuda.stream(
        torch.cuda.ExternalStream(stream_ptr, device=logits.device)
    )
    return context
