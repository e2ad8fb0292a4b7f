"""KServe over gRPC, as far as worker clients need it: raw tensors in, raw tensors out.

grpc is imported at the first use: a stub that never calls out stays light.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bireme.errors import BiremeError, find_error, parse_error
from bireme.messages import U32
from bireme.types import Array, Tensors
from bireme.workers.base import UnreachableError
from bireme.workers.grpc_tls import GrpcTls

DEFAULT_ADDRESS = "127.0.0.1:8001"
_SERVICE = "/inference.GRPCInferenceService/"
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),  # a restarted server is found at once
    ("grpc.min_reconnect_backoff_ms", 2000),  # an attempt may take that: machines stall, packets are sent again
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_WRITE_FAILED = "Internal error from Core"  # grpc.aio's own word for a stream that breaks under a write
_RAW_CONTENTS = b"\x3a"  # tag of ModelInferRequest.raw_input_contents: field 7, bytes
_DTYPES = {"INT32": np.int32, "FP32": np.float32, "UINT8": np.uint8, "UINT64": np.uint64, "BOOL": np.bool_}


def server_address() -> str:
    """Return BIREME_GRPC, else 127.0.0.1:8001."""
    return os.environ.get("BIREME_GRPC") or DEFAULT_ADDRESS


class GrpcChannel:
    """To one tritonserver; connects with the first call. Used on one loop."""

    def __init__(self, address: str | None = None, tls: GrpcTls | None = None) -> None:
        """`address`: None is server_address()."""
        self.address = address or server_address()
        self._tls = tls
        self.num_calls = 0  # unary ones under way: they would be cancelled with the channel
        self._channel: Any = None
        self._infer: Any = None

    async def infer(self, model: str, inputs: Tensors) -> Tensors:
        """Call a unary model. Raises errors.py's."""
        import grpc

        from bireme.workers import kserve

        if self._infer is None:
            self._infer = self._method("unary_unary", "ModelInfer", kserve.ModelInferResponse)
        self.num_calls += 1
        try:
            return outputs_of(await self._infer(infer_request(model, inputs)))
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error, self.address) from error
        finally:
            self.num_calls -= 1

    def stream(self) -> Any:
        """Open a ModelStreamInfer call; for its errors `rpc_error`."""
        from bireme.workers import kserve

        return self._method("stream_stream", "ModelStreamInfer", kserve.ModelStreamInferResponse)()

    async def is_loaded(self, model: str) -> bool:
        """Return the server's state of a model: true also with a dead stub. Raises BiremeError."""
        import grpc

        from bireme.workers import kserve

        ask = self._method("unary_unary", "ModelReady", kserve.ModelReadyResponse)
        self.num_calls += 1
        try:
            return bool((await ask(kserve.ModelReadyRequest(name=model).SerializeToString())).ready)
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error, self.address) from error
        finally:
            self.num_calls -= 1

    async def close(self) -> None:
        channel, self._channel, self._infer = self._channel, None, None
        if channel is not None:
            await channel.close()

    def _method(self, kind: str, name: str, answer: Any) -> Any:
        import grpc.aio

        if self._channel is None and self._tls is None:
            self._channel = grpc.aio.insecure_channel(self.address, _OPTIONS)
        elif self._channel is None and self._tls is not None:
            self._channel = self._tls.channel(self.address, _OPTIONS)
        return getattr(self._channel, kind)(_SERVICE + name, response_deserializer=answer.FromString)


async def leave(call: Any, limit_s: float) -> None:
    """Read a stream whose requests are over to its end, or cancel it.

    Triton 2.51 goes on counting a stream that is cancelled then, and its exit takes the whole --exit-timeout-secs.
    """
    import grpc

    async def read_on() -> None:
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass

    try:
        async with asyncio.timeout(limit_s):
            await read_on()
    except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
        call.cancel()


def infer_request(model: str, tensors: Mapping[str, bytes | Array]) -> bytes:
    """Return a ModelInferRequest as bytes: bytes become BYTES[1], arrays what they are.

    Tensors are appended by hand: protobuf would copy a long prompt several times.
    """
    from bireme.workers import kserve

    request = kserve.ModelInferRequest(model_name=model)
    contents: list[Any] = []
    for name, value in tensors.items():
        data_type, shape, raw = _encoded(value)
        request.inputs.add(name=name, datatype=data_type, shape=shape)
        contents += [_RAW_CONTENTS, _varint(sum(map(len, raw))), *raw]
    return b"".join([request.SerializeToString(), *contents])


def _encoded(value: bytes | Array) -> tuple[str, list[int], list[Any]]:
    """Return a tensor's type, shape, and bytes in parts."""
    if isinstance(value, bytes):
        return "BYTES", [1], [U32.pack(len(value)), value]
    if value.dtype.kind == "O":
        items = [bytes(item) for item in value.reshape(-1)]
        return "BYTES", list(value.shape), [part for item in items for part in (U32.pack(len(item)), item)]
    return _data_type(value), list(value.shape), [np.ascontiguousarray(value).reshape(-1).view(np.uint8)]


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def outputs_of(response: Any) -> dict[str, Array]:
    """Return a response's tensors; BYTES as object arrays of bytes."""
    return {
        output.name: _array(output.datatype, list(output.shape), raw)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def rpc_error(error: Any, address: str) -> BiremeError:
    """Map a grpc.aio.AioRpcError; our own codes in its text win."""
    import grpc

    details = error.details() or ""
    if (coded := find_error(details)) is not None:
        return coded
    if error.code() == grpc.StatusCode.UNAVAILABLE or details == _WRITE_FAILED:
        why = details.splitlines()[0] if details else "connection lost"
        remedy = "set BIREME_GRPC to the host:port of this deployment's server"
        if "handshake" in why and "tcp handshaker" not in why:  # gRPC calls connecting so, too
            remedy = "certificate, authority and server_name of grpc_tls in both recipes have to fit each other"
        return UnreachableError(f"no Triton gRPC endpoint at {address} ({why}); {remedy}")
    parsed = parse_error(details)
    return parsed if parsed.retryable else BiremeError(f"{error.code().name}: {details}")


def _data_type(array: Array) -> str:
    return next(name for name, dtype in _DTYPES.items() if array.dtype == dtype)


def _array(data_type: str, shape: list[int], raw: bytes) -> Array:
    if data_type == "BYTES":
        return np.array(list(_strings(raw)), np.object_).reshape(shape)
    return np.frombuffer(raw, _DTYPES[data_type]).reshape(shape)


def _strings(raw: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(raw):
        end = at + 4 + U32.unpack_from(raw, at)[0]
        yield raw[at + 4 : end]
        at = end
