"""Unary calls from one model to another of the same server (BLS).

A blocked exec() holds one of the backend's pool threads of this model (thread-pool-size, default 32), and so does every
send: at 32 waiting calls all streams of the model stand still. Hence a bounded number of threads (BIREME_BLS_THREADS,
which serve.py raises together with thread-pool-size). Decoupled models can't be called: reading their BLS streams while
sending corrupts the stub's heap within seconds.

Triton never ends a call whose model's stub has died: our thread and the backend's are lost. Ours are replaced as far as
sends can spare the backend's (BIREME_BLS_SPARE_THREADS). Then only a new stub helps: `is_short` asks serve.py for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from bireme.config import stage_of
from bireme.errors import ConfigError, UnavailableError, parse_error
from bireme.specs import MODELS
from bireme.triton.daemon_threads import DaemonThreads
from bireme.types import Tensors

DEFAULT_THREADS = 24
VARIABLE, SPARES_VARIABLE = "BIREME_BLS_THREADS", "BIREME_BLS_SPARE_THREADS"
_MOST_THREADS = 1024
logger = logging.getLogger("bireme.triton")


class BlsClient:
    """`StageContext.call_async`."""

    def __init__(self) -> None:
        num_threads, num_spares = threads_from_environment(), spares_from_environment()
        self._pool = DaemonThreads(num_threads, "bls", num_spares)
        self.num_lost = 0

    @property
    def is_short(self) -> bool:
        """Whether lost threads can't all be replaced."""
        return self.num_lost > self._pool.num_spares

    @property
    def is_exhausted(self) -> bool:
        """Whether no call can be made any more."""
        return self._num_left == 0

    async def call_async(self, model: str, inputs: Tensors) -> Tensors:
        """Call a unary model of this server; waits for a free thread. Raises the errors of errors.py."""
        if self.is_exhausted:
            raise self._refusal()
        call = self._pool.submit(_call, model, inputs)
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            self._pool.leave(call)
            raise

    def look(self) -> bool:
        """Count and replace lost threads; return whether the number has changed. For one thread, now and then."""
        num_lost = self._pool.count_lost()
        before, self.num_lost = self.num_lost, num_lost
        if num_lost > before:
            logger.error("bls_threads_lost lost=%d left=%d reason=%s", num_lost, self._num_left, self._explain())
        if self.is_exhausted:
            self._pool.refuse_waiting(self._refusal())
        return num_lost != before

    def close(self) -> None:
        self._pool.shutdown()

    @property
    def _num_left(self) -> int:
        return self._pool.max_threads - max(0, self.num_lost - self._pool.num_spares)

    def _refusal(self) -> UnavailableError:
        return UnavailableError(f"no thread is left to call other models: {self._explain()}")

    def _explain(self) -> str:
        return (
            f"{self.num_lost} calls to models whose stub has died never ended, and hold a thread each; unload and load"
            " this model, as serve.py does"
        )


def threads_from_environment() -> int:
    return _number(VARIABLE, DEFAULT_THREADS, 1)


def spares_from_environment() -> int:
    return _number(SPARES_VARIABLE, 0, 0)


def _number(variable: str, default: int, least: int) -> int:
    text = os.environ.get(variable, "")
    if not text:
        return default
    if not text.isdecimal() or not least <= int(text) <= _MOST_THREADS:
        raise ConfigError(f"{variable}: {text!r}; a number from {least} to {_MOST_THREADS} is expected")
    return int(text)


def _call(model: str, inputs: Tensors) -> Tensors:
    request = pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=_outputs_of(model),
        inputs=[pb_utils.Tensor(name, array) for name, array in inputs.items()],
    )
    response = _execute(request, model)
    if response.has_error():
        raise parse_error(response.error().message())
    return {tensor.name(): np.array(tensor.as_numpy()) for tensor in response.output_tensors()}


def _execute(request: Any, model: str) -> Any:
    try:
        return request.exec()
    except pb_utils.TritonModelException as error:  # no such model, or it is decoupled
        raise parse_error(f"{model}: {error}") from error


def _outputs_of(model: str) -> list[str]:
    spec = MODELS.get(stage_of(model))
    return [tensor.name for tensor in spec.outputs] if spec else []
