"""A deployment of tiny-video with its OpenAI frontend, and what tests ask of it."""

from __future__ import annotations

import io
import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from tests.server.openai_served import five_ports, gauge

PORTS = five_ports()
URL = f"http://127.0.0.1:{PORTS['openai']}"
PROMPT = "a red circle moving right"
_TYPES = {"num_frames": "INT32", "fps": "INT32", "num_inference_steps": "INT32", "seed": "UINT64", "abort": "BOOL"}
_NUMPY = {"INT32": np.int32, "UINT64": np.uint64, "BOOL": bool}


def request(method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
    """Return status and body; what is not bytes is sent as JSON."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    asked = urllib.request.Request(URL + path, data, {"content-type": "application/json", **headers}, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=120) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def call(method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    status, data = request(method, path, body, **headers)
    return status, json.loads(data)


def generate(**fields: Any) -> tuple[int, Any]:
    return call("POST", "/v1/videos/generations", {"prompt": PROMPT, **fields})


def decode(data: bytes) -> tuple[Any, float]:
    """Return the frames of a file, (T, H, W, 3), and its frames a second."""
    import av

    with av.open(io.BytesIO(data)) as container:
        rate = container.streams.video[0].average_rate
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]), float(rate)


def stream(model: str, **values: Any) -> Iterator[dict[str, Any]]:
    """Yield the responses of a model over gRPC: arrays, BYTES as bytes."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client = grpcclient.InferenceServerClient(f"127.0.0.1:{PORTS['grpc']}")
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    try:
        client.async_stream_infer(model, [_input(*item) for item in values.items()], enable_empty_final_response=True)
        while True:
            result, error = answers.get(timeout=120)
            if error is not None:
                raise error
            response = result.get_response()
            if response.outputs:
                yield {output.name: _plain(result.as_numpy(output.name)) for output in response.outputs}
            if response.parameters["triton_final_response"].bool_param:
                return
    finally:
        client.stop_stream()


def _input(name: str, value: Any) -> grpcclient.InferInput:
    kind = _TYPES.get(name, "BYTES")
    array = np.array([value.encode()], object) if kind == "BYTES" else np.array([value], _NUMPY[kind])
    tensor = grpcclient.InferInput(name, [1], kind)
    tensor.set_data_from_numpy(array)
    return tensor


def _plain(array: Any) -> Any:
    return array.reshape(-1)[0] if array.dtype.kind == "O" or array.size == 1 else array


class Background:
    """A call on a thread of its own."""

    def __init__(self, work: Any) -> None:
        self.result: Any = None
        self._thread = threading.Thread(target=lambda: setattr(self, "result", work()), daemon=True)
        self._thread.start()

    def wait(self) -> Any:
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self.result


def num_steps() -> float:
    return gauge("bireme_video_steps_total", PORTS["metrics"])


def settled_steps() -> float:
    """Return the steps when those done so far have been published (twice a second)."""
    time.sleep(1.2)
    return num_steps()
