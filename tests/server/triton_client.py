"""A small synchronous client for tests: plain Python values in, plain Python values out."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from bireme import specs

_NUMPY = {"INT32": np.int32, "FP32": np.float32, "BOOL": bool, "UINT64": np.uint64, "UINT8": np.uint8}


def inputs_of(model: str, values: dict[str, Any]) -> list[grpcclient.InferInput]:
    spec = specs.MODELS[model.partition("_")[0] if model not in specs.MODELS else model]
    return [_input(spec.input(name).data_type, name, value) for name, value in values.items()]


def _input(data_type: str, name: str, value: Any) -> grpcclient.InferInput:
    items = value if isinstance(value, list | tuple | np.ndarray) else [value]
    if data_type == "BYTES":
        array = np.array([item.encode() if isinstance(item, str) else item for item in items], object)
    else:
        array = np.array(items, _NUMPY[data_type])
    tensor = grpcclient.InferInput(name, list(array.shape), data_type)
    tensor.set_data_from_numpy(array)
    return tensor


def outputs_of(result: grpcclient.InferResult) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    for output in result.get_response().outputs:
        array = result.as_numpy(output.name)
        if output.datatype == "BYTES":
            values = [item.decode("utf-8") for item in array.reshape(-1)]
            answer[output.name] = values[0] if len(values) == 1 else values
        else:
            answer[output.name] = array.reshape(-1).tolist()
    return answer


class Stream:
    """One request on a gRPC stream of its own, so that it can be cancelled alone."""

    def __init__(self, address: str, model: str, values: dict[str, Any], timeout: float = 60.0) -> None:
        self.timeout = timeout
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._client = grpcclient.InferenceServerClient(address)
        self._client.start_stream(callback=lambda result, error: self._queue.put((result, error)))
        self._client.async_stream_infer(model, inputs_of(model, values), enable_empty_final_response=True)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield responses until the final one; raises InferenceServerException. A hang is queue.Empty."""
        is_over = False
        try:
            while not is_over:
                result, error = self._queue.get(timeout=self.timeout)
                is_over = error is not None
                if error is not None:
                    raise error
                is_over = result.get_response().parameters["triton_final_response"].bool_param
                if answer := outputs_of(result):
                    yield answer
        finally:
            self.close(cancel=not is_over)

    def cancel(self) -> None:
        self._client.stop_stream(cancel_requests=True)

    def close(self, cancel: bool = True) -> None:
        """Leave; a request that has ended needs no cancel."""
        self._client.stop_stream(cancel_requests=cancel)
        try:
            self._client.close()
        except RuntimeError:  # grpc goes through the channel's calls while its own thread takes away one that ends
            self._client.close()


class Client:
    def __init__(self, address: str) -> None:
        self.address = address

    def stream(self, model: str, timeout: float = 60.0, **values: Any) -> Stream:
        return Stream(self.address, model, values, timeout)

    def generate(self, model: str = "generate", **values: Any) -> dict[str, Any]:
        """Stream to the end and join the deltas of all responses."""
        joined: dict[str, Any] = {"output_ids": [], "text_output": "", "responses": 0}
        for answer in self.stream(model, **values):
            joined["responses"] += 1
            joined["output_ids"] += answer.pop("output_ids", [])
            joined["text_output"] += answer.pop("text_output", "")
            joined |= answer
        return joined

    def infer(self, model: str, **values: Any) -> dict[str, Any]:
        with grpcclient.InferenceServerClient(self.address) as client:
            return outputs_of(client.infer(model, inputs_of(model, values)))
