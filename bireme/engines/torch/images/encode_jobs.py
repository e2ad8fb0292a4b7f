"""Encode requests of an engine with the vision tower, from submit to finish."""

from __future__ import annotations

import time
from functools import partial

from bireme.canary_mark import is_canary
from bireme.engines.base import Emit, EngineContext, RequestKey, StepOutput
from bireme.engines.child.lost_device import leave_if_lost
from bireme.engines.torch.images.picture_encoder import PictureEncoder
from bireme.errors import BiremeError, to_message
from bireme.messages import EncodeRequest, Finish, FinishReason, Usage
from bireme.multimodal.encoding import EncodeOutcome, EncoderService
from bireme.own_work import Work


class EncodeJobs:
    """Encode requests of an engine, from submit to finish; held by any engine with the vision tower."""

    def __init__(self, context: EngineContext, encoder: PictureEncoder, emit: Emit) -> None:
        assert context.share is not None
        self._emit, self._worker, self._metrics = emit, context.worker, context.metrics
        encoder.warm_up()
        self.service = EncoderService(
            encoder,
            context.share,
            context.config.multimodal_config,
            context.media,
            context.metrics,
            context.config.scheduler_config.max_queue_size,
            context.num_threads,
            context.max_n,
            on_failure=lambda: leave_if_lost(context.worker),
            mark=partial(context.own_work.mark, work=Work.PICTURES),
        )
        self.service.start()

    def submit(self, key: RequestKey, request: EncodeRequest) -> None:
        began, is_probe = time.monotonic(), is_canary(request.canary)
        self.service.submit(key, request, lambda outcome: self._done(key, began, outcome, is_probe))

    def _done(self, key: RequestKey, began: float, outcome: EncodeOutcome | BiremeError, is_probe: bool) -> None:
        delta, seconds = StepOutput(key), time.monotonic() - began
        usage = Usage(prefill_ms=seconds * 1e3, prefill_worker=self._worker)
        if isinstance(outcome, BiremeError):
            reason = _REASONS.get(outcome.code, "error")
            delta.finish = Finish(reason, usage, to_message(outcome))
        else:
            delta.encoded, delta.finish = outcome, Finish("stop", usage)
        label = outcome.code if isinstance(outcome, BiremeError) else "stop"
        self._metrics.count_end(label, seconds, is_probe)
        self._emit(self.service.num_steps, [delta])


_REASONS: dict[str, FinishReason] = {"CANCELLED": "cancelled", "DEADLINE_EXCEEDED": "timeout"}
