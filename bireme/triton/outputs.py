"""What a stage sends -> Triton's response. The only place that builds InferenceResponse and TritonError."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from bireme.errors import BiremeError, to_message
from bireme.specs import ModelSpec
from bireme.types import Response, Tensors

CHECKS_TENSORS = os.environ.get("BIREME_CHECK_TENSORS") == "1"  # the tests' servers; Triton checks nothing itself

# Triton knows fewer codes: the text has ours, the number is the nearest one, which clients retry alike.
_TRITON_CODES = {
    "INVALID_ARGUMENT": "INVALID_ARG", "NOT_FOUND": "NOT_FOUND", "RESOURCE_EXHAUSTED": "UNAVAILABLE",
    "UNAVAILABLE": "UNAVAILABLE", "DEADLINE_EXCEEDED": "CANCELLED", "CANCELLED": "CANCELLED",
    "FAILED_PRECONDITION": "UNSUPPORTED",
}  # fmt: skip
_NUMPY_TYPES = {
    "BOOL": np.bool_, "BYTES": np.object_, "FP32": np.float32, "INT32": np.int32, "INT64": np.int64,
    "UINT8": np.uint8, "UINT32": np.uint32, "UINT64": np.uint64,
}  # fmt: skip


class TritonOutlet:
    """Answers one request through its response sender."""

    __slots__ = ("_sender", "_spec", "_wanted")

    def __init__(self, sender: Any, spec: ModelSpec, wanted: frozenset[str] = frozenset()) -> None:
        self._sender = sender
        self._spec = spec
        self._wanted = wanted  # empty: all

    def want(self, outputs: frozenset[str]) -> None:
        """Send these outputs alone; empty: all."""
        self._wanted = outputs

    def send(self, response: Response, is_final: bool) -> None:
        tensors = response.tensors()
        if CHECKS_TENSORS:
            check_tensors(tensors, self._spec)
        wanted = self._wanted
        built = make_response(
            [pb_utils.Tensor(name, array) for name, array in tensors.items() if not wanted or name in wanted],
            getattr(response, "parameters", None),
        )
        if is_final:
            self._sender.send(built, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        else:
            self._sender.send(built)

    def fail(self, error: BaseException) -> None:
        response = pb_utils.InferenceResponse(error=triton_error(error))
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def close(self) -> None:
        self._sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


def triton_error(error: BaseException) -> Any:
    """Return the TritonError of any exception; its message is `CODE: text`."""
    code = error.code if isinstance(error, BiremeError) else "INTERNAL"
    return pb_utils.TritonError(to_message(error), getattr(pb_utils.TritonError, _TRITON_CODES.get(code, "INTERNAL")))


def make_response(tensors: Iterable[Any], parameters: Mapping[str, Any] | None = None) -> Any:
    """Build a response; Triton before 25.02 has no `parameters`."""
    if parameters:
        try:
            return pb_utils.InferenceResponse(output_tensors=list(tensors), parameters=dict(parameters))
        except TypeError:
            pass
    return pb_utils.InferenceResponse(output_tensors=list(tensors))


def check_tensors(tensors: Tensors, spec: ModelSpec) -> None:
    """Raise BiremeError when a name, type or rank is not the spec's."""
    known = {tensor.name: tensor for tensor in spec.outputs}
    for name, array in tensors.items():
        tensor = known.get(name)
        if tensor is None:
            raise BiremeError(f"{spec.name} has no output {name}")
        if array.dtype != _NUMPY_TYPES[tensor.data_type]:
            raise BiremeError(f"{spec.name}.{name}: {array.dtype}; the spec says {tensor.data_type}")
        # tensorrtllm_backend's text_output lacks the batch dimension of its other tensors, and clients rely on it
        if not _fits(array.shape, tensor.dims) and not (spec.max_batch_size and _fits(array.shape, (-1, *tensor.dims))):
            raise BiremeError(f"{spec.name}.{name}: shape {array.shape}; the spec says {tensor.dims}")


def _fits(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    return len(shape) == len(dims) and all(dim in (-1, size) for size, dim in zip(shape, dims, strict=True))
