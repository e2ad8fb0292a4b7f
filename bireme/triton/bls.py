"""Unary calls from one model to another of the same server (BLS).

A blocked exec() holds one of the backend's pool threads of this model (thread-pool-size, default 32), and so does every
send: at 32 waiting calls all streams of the model stand still. Hence a bounded number of threads (BIREME_BLS_THREADS,
which serve.py raises together with thread-pool-size). Decoupled models can't be called: reading their BLS streams while
sending corrupts the stub's heap within seconds.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from bireme.config import stage_of
from bireme.errors import ConfigError, parse_error
from bireme.specs import MODELS
from bireme.triton.daemon_threads import DaemonThreads
from bireme.types import Tensors

DEFAULT_THREADS = 24
VARIABLE = "BIREME_BLS_THREADS"


class BlsClient:
    """`StageContext.call` and `call_async`."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads or threads_from_environment()
        self._slots = threading.BoundedSemaphore(self._num_threads)
        self._pool = DaemonThreads(self._num_threads, "bls")

    def call(self, model: str, inputs: Tensors) -> Tensors:
        """Call a unary model of this server on the calling thread. Raises the errors of errors.py."""
        request = pb_utils.InferenceRequest(
            model_name=model,
            requested_output_names=_outputs_of(model),
            inputs=[pb_utils.Tensor(name, array) for name, array in inputs.items()],
        )
        with self._slots:
            response = _execute(request, model)
        if response.has_error():
            raise parse_error(response.error().message())
        return {tensor.name(): np.array(tensor.as_numpy()) for tensor in response.output_tensors()}

    async def call_async(self, model: str, inputs: Tensors) -> Tensors:
        """The same from a coroutine; waits for a free thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self.call, model, inputs)

    def close(self) -> None:
        """Refuse new calls; those under way end when their model answers."""
        self._pool.shutdown()


def threads_from_environment() -> int:
    text = os.environ.get(VARIABLE, "")
    if not text:
        return DEFAULT_THREADS
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise ConfigError(f"{VARIABLE}: {text!r}; a number from 1 to 1024 is expected")
    return int(text)


def _execute(request: Any, model: str) -> Any:
    try:
        return request.exec()
    except pb_utils.TritonModelException as error:  # no such model, or it is decoupled
        raise parse_error(f"{model}: {error}") from error


def _outputs_of(model: str) -> list[str]:
    spec = MODELS.get(stage_of(model))
    return [tensor.name for tensor in spec.outputs] if spec else []
