"""gRPC streams of one request each, for the models of adapter_stages.py."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from tests.triton import adapter_stages

_NUMPY = {"INT32": np.int32, "FP32": np.float32, "BYTES": np.object_}
_SPECS = {stage.spec.name: stage.spec for stage in adapter_stages.STAGES}


def infer_input(data_type: str, name: str, value: Any) -> grpcclient.InferInput:
    items = value if isinstance(value, list) else [value]
    items = [item.encode() if isinstance(item, str) else item for item in items]
    array = np.array(items, _NUMPY[data_type])
    tensor = grpcclient.InferInput(name, list(array.shape), data_type)
    tensor.set_data_from_numpy(array)
    return tensor


def inputs_of(model: str, values: dict[str, Any]) -> list[grpcclient.InferInput]:
    types = {tensor.name: tensor.data_type for tensor in _SPECS[model].inputs}
    return [infer_input(types[name], name, value) for name, value in values.items()]


class Call:
    """One request on its own stream; iterate over results. A request that never ends raises queue.Empty."""

    def __init__(self, address: str, model: str, values: dict[str, Any], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._client = grpcclient.InferenceServerClient(address)
        self._client.start_stream(callback=lambda result, error: self._results.put((result, error)))
        self._client.async_stream_infer(model, inputs_of(model, values), enable_empty_final_response=True)
        self.num_responses = 0
        self._is_over = False

    def __iter__(self) -> Iterator[grpcclient.InferResult]:
        while True:
            result, error = self._results.get(timeout=self._timeout_s)
            if error is not None:
                self._is_over = True
                raise error
            response = result.get_response()
            if response.outputs:
                self.num_responses += 1
                yield result
            if response.parameters["triton_final_response"].bool_param:
                self._is_over = True
                return

    def tokens(self) -> list[int]:
        return [token for result in self for token in result.as_numpy("tokens").tolist()]

    def drop(self) -> None:
        """Leave; what has ended is not cancelled: that can keep the server from ending."""
        self._client.stop_stream(cancel_requests=not self._is_over)
        self._client.close()

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()


class Client:
    def __init__(self, address: str) -> None:
        self.address = address

    def call(self, model: str, timeout_s: float = 20.0, **values: Any) -> Call:
        return Call(self.address, model, values, timeout_s)

    def tokens(self, model: str, **values: Any) -> list[int]:
        with self.call(model, **values) as call:
            return call.tokens()

    def infer(self, model: str, *, values: dict[str, Any], **options: Any) -> grpcclient.InferResult:
        with grpcclient.InferenceServerClient(self.address) as client:
            return client.infer(model, inputs_of(model, values), **options)
