"""Triton's request -> a stage's inputs. Copies: the request's memory is gone after execute()."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from bireme.errors import RequestError
from bireme.types import Array, Inputs, RequestInfo

LARGE_BYTES = 1 << 20


def read_request(request: Any, all_outputs: frozenset[str]) -> Inputs:
    """Return tensors and RequestInfo of a pb_utils.InferenceRequest. Raises RequestError."""
    tensors = {tensor.name(): _copy(tensor) for tensor in request.inputs()}
    wanted = frozenset(request.requested_output_names())
    info = RequestInfo(
        request_id=request.request_id(),
        parameters=_parameters(request.parameters()),
        timeout_ms=-(-request.timeout() // 1000),  # Triton's microseconds, rounded up: 0 stays "none"
        outputs=frozenset() if wanted >= all_outputs else wanted,
    )
    return Inputs(tensors, info)


def _copy(tensor: Any) -> Array:
    try:
        array = tensor.as_numpy()
        if array.dtype == object or array.nbytes > LARGE_BYTES:
            return np.array(array)
        # numpy's own copy releases the GIL, and getting it back costs a busy stub more than the copy
        return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)
    except Exception as error:  # pybind raises several kinds, for instance on a device tensor
        raise RequestError(f"{tensor.name()}: the tensor can't be read: {error}") from error


def _parameters(text: str) -> dict[str, str | int | float | bool]:
    if not text or text == "{}":
        return {}
    try:
        parameters: dict[str, str | int | float | bool] = json.loads(text)
    except ValueError as error:
        raise RequestError(f"request parameters: not valid JSON: {error}") from error
    return parameters
