"""The engine of an embedding worker: texts of many requests in one pass, sorted by length.

A pass begins with the longest waiting text of one request, requests taking turns, and is filled with the texts of all
requests that are shorter, down to half of its length. So a text is padded to twice its length at most, and a request
with thousands of texts holds up nobody. Passes keep to `max_num_tokens` (padding included) and `max_batch_size`.
"""

from __future__ import annotations

import bisect
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from bireme.engines.base import (
    AdmittedRequest,
    AdmittedTexts,
    Emit,
    EngineContext,
    EngineProgress,
    RequestKey,
    StepOutput,
)
from bireme.engines.child.lost_device import leave_if_lost
from bireme.engines.child.validate import check_open
from bireme.engines.torch.embedding.text_embedding_model import TextEmbeddingModel
from bireme.engines.torch.weights.lean_imports import import_transformers
from bireme.errors import (
    BiremeError,
    DeadlineExceededError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
    to_message,
)
from bireme.kv.blocks.events import KvEvent
from bireme.messages import Capacity, Finish, FinishReason, Usage

logger = logging.getLogger("bireme.engines.torch")
import_transformers()
_STOP_S = 10.0
_REASONS: dict[str, FinishReason] = {"CANCELLED": "cancelled", "DEADLINE_EXCEEDED": "timeout"}


class _EmbedJob:
    """A request, from submit to finish."""

    def __init__(self, key: RequestKey, admitted: AdmittedTexts) -> None:
        self.key, self.admitted = key, admitted
        self.arrived_at = time.monotonic()
        self.began_at = 0.0
        order = sorted(range(len(admitted.texts)), key=lambda at: len(admitted.texts[at]))
        self.waiting = order  # places of texts that no pass has taken, the shortest first
        self.lengths = [len(admitted.texts[at]) for at in order]  # of these
        self.rows: npt.NDArray[np.float32] | None = None  # (texts, size), from the first pass on
        self.failure: BiremeError | None = None

    def take(self, longest: int, shortest: int) -> int | None:
        """Take the place of the longest waiting text within these lengths; None: there is none."""
        at = bisect.bisect_right(self.lengths, longest) - 1
        if at < 0 or self.lengths[at] < shortest:
            return None
        del self.lengths[at]
        return self.waiting.pop(at)


class TorchEmbeddingEngine:
    """EmbeddingEngine on CPU or one GPU."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._config = context.config.scheduler_config
        self._jobs: deque[_EmbedJob] = deque()  # in their turn
        self._changed = threading.Condition()  # guards the jobs and what follows
        self._is_draining = self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="embedding", daemon=True)
        self._num_steps, self._step_began_at = 0, 0.0

    def start(self, emit: Emit) -> Capacity:
        began = time.monotonic()
        context = self._context
        self._emit = emit
        torch.set_num_threads(context.num_threads)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = model = TextEmbeddingModel(context.model_path, context.config, device)
        model.embed([np.zeros(1, np.int32)])
        self._thread.start()
        load_s = time.monotonic() - began
        context.metrics.set("bireme_engine_load_seconds", load_s)
        logger.info(
            "embedding_loaded model=%s parameters=%d size=%d pooling=%s max_seq_len=%d load_s=%.1f",
            model.name, model.num_parameters, model.size, model.rules.pooling, model.max_seq_len, load_s,
        )  # fmt: skip
        return Capacity(
            max_seq_len=model.max_seq_len,
            max_batch_size=model.max_batch_size,
            max_num_tokens=model.max_num_tokens,
            max_queue_size=self._config.max_queue_size,
            tokens_per_block=0,
            num_blocks=0,
            vocab_size=model.vocab_size,
            load_s=load_s,
            dtype=str(model.dtype).removeprefix("torch."),
            embedding_size=model.size,
        )

    def submit(self, key: RequestKey, admitted: AdmittedRequest) -> None:
        raise AssertionError("the gate lets no prompts through to an engine that makes embeddings")

    def embed(self, key: RequestKey, admitted: AdmittedTexts) -> None:
        with self._changed:
            check_open(self._context.worker, self._is_draining, len(self._jobs), self._config.max_queue_size)
            self._jobs.append(_EmbedJob(key, admitted))
            self._changed.notify()

    def abort(self, key: RequestKey) -> None:
        with self._changed:
            for job in self._jobs:
                if job.key == key:
                    job.failure = RequestCancelledError("the request was aborted")
            self._changed.notify()

    def drain(self) -> None:
        self._is_draining = True

    def progress(self) -> EngineProgress:
        with self._changed:
            running = sum(bool(job.began_at) for job in self._jobs)
            return EngineProgress(
                self._num_steps, self._step_began_at, len(self._jobs) - running, running,
                num_waiting_tokens=sum(sum(job.lengths) for job in self._jobs),
            )  # fmt: skip

    def kv_events(self) -> list[KvEvent]:
        return []

    def stop(self) -> None:
        with self._changed:
            self._is_stopping = self._is_draining = True
            for job in self._jobs:
                job.failure = job.failure or UnavailableError("the engine has stopped; try again")
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    # The thread

    def _run(self) -> None:
        torch.set_num_threads(self._context.num_threads)
        while True:
            with self._changed:
                while not self._jobs and not self._is_stopping:
                    self._changed.wait()
                if not self._jobs:
                    return
                ended = self._leave()
                batch = self._next_batch()
            for job in ended:
                self._finish(job)
            if batch:
                self._step(batch)

    def _leave(self) -> list[_EmbedJob]:
        """Take out the jobs that are complete, or that can't be completed."""
        now = time.monotonic()
        for job in self._jobs:
            job.failure = job.failure or self._lateness(job, now)
        ended = [job for job in self._jobs if job.failure is not None or (job.began_at and not job.waiting)]
        self._jobs = deque(job for job in self._jobs if job not in ended)
        return ended

    def _lateness(self, job: _EmbedJob, now: float) -> BiremeError | None:
        waited_s, limit_ms = now - job.arrived_at, job.admitted.timeout_ms
        is_done = job.began_at and not job.waiting
        if limit_ms and waited_s * 1e3 > limit_ms and not is_done:
            return DeadlineExceededError(f"timeout_ms: {limit_ms} ms have passed")
        limit_s = self._config.max_queue_time_s
        if limit_s and not job.began_at and waited_s > limit_s:
            return DeadlineExceededError(f"queue: waited longer than scheduler_config.max_queue_time_s {limit_s:g} s")
        return None

    def _next_batch(self) -> list[tuple[_EmbedJob, int]]:
        """Return the texts of the next pass, the longest first, and pass the turn on."""
        if not self._jobs:
            return []
        longest = self._jobs[0].lengths[-1]
        room = min(self._model.max_batch_size, self._model.max_num_tokens // longest)
        batch: list[tuple[_EmbedJob, int]] = []
        for job in self._jobs:
            while len(batch) < room and (at := job.take(longest, (longest + 1) // 2)) is not None:
                batch.append((job, at))
        self._jobs.rotate(-1)
        return batch

    def _step(self, batch: list[tuple[_EmbedJob, int]]) -> None:
        self._step_began_at = began = time.monotonic()
        for job in {id(job): job for job, _ in batch}.values():
            if not job.began_at:
                job.began_at = began
                if not job.admitted.is_canary:
                    self._context.metrics.observe("bireme_queue_seconds", began - job.arrived_at)
        try:
            rows = self._model.embed([job.admitted.texts[at] for job, at in batch])
        except Exception as error:
            self._fail((job for job, _ in batch), error)
        else:
            for (job, at), row in zip(batch, rows, strict=True):
                if job.rows is None:
                    job.rows = np.empty((len(job.admitted.texts), self._model.size), np.float32)
                job.rows[at] = row
        finally:
            self._step_began_at = 0.0
            self._num_steps += 1
            self._context.metrics.observe("bireme_engine_step_seconds", time.monotonic() - began)

    def _fail(self, jobs: Iterable[_EmbedJob], error: Exception) -> None:
        """End the requests of a pass that failed; the others go on."""
        failure: BiremeError = BiremeError(f"the texts could not be embedded: {type(error).__name__}")
        if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
            failure = ResourceExhaustedError("no memory to embed it now; try again, or lower max_num_tokens")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        logger.error("embedding_failed error=%s", error, exc_info=error)
        leave_if_lost(self._context.worker)
        with self._changed:
            for job in jobs:
                job.failure = job.failure or failure

    def _finish(self, job: _EmbedJob) -> None:
        now, metrics = time.monotonic(), self._context.metrics
        began_at = job.began_at or now
        usage = Usage(
            prompt_tokens=job.admitted.num_tokens,
            queue_ms=(began_at - job.arrived_at) * 1e3,
            prefill_ms=(now - began_at) * 1e3,
            prefill_worker=self._context.worker,
        )
        output = StepOutput(job.key)
        if job.failure is not None:
            output.finish = Finish(_REASONS.get(job.failure.code, "error"), usage, to_message(job.failure))
        else:
            assert job.rows is not None
            output.embedded = self._model.finish(job.rows, job.admitted.dimensions).tobytes()
            output.finish = Finish("stop", usage)
        if not job.admitted.is_canary:
            metrics.add("bireme_prompt_tokens_total", 0 if job.failure else usage.prompt_tokens)
        metrics.count_end(job.failure.code if job.failure else "stop", now - job.arrived_at, job.admitted.is_canary)
        self._emit(self._num_steps, [output])
