"""A video worker reached over gRPC: one stream a request, so that leaving the stream cancels it.

The same inside Triton: BLS must not stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from bireme.errors import BiremeError, EngineLostError, UnavailableError, parse_error
from bireme.types import Array, Tensors
from bireme.workers.grpc import GrpcChannel, infer_request, leave, outputs_of, rpc_error
from bireme.workers.grpc_tls import GrpcTls

_LEAVE_S = 1.0  # from a request's end to its stream's


class VideoWorkers:
    """All video workers of one tritonserver. Used on one loop."""

    def __init__(self, stall_timeout_s: float, address: str | None = None, tls: GrpcTls | None = None) -> None:
        self._channel = GrpcChannel(address, tls)
        self._stall_timeout_s = stall_timeout_s

    async def generate(self, worker: str, tensors: Mapping[str, bytes | Array]) -> AsyncIterator[Tensors]:
        """Yield the responses. Raises errors.py's; closing the iterator cancels."""
        call = self._channel.stream()
        is_over = False
        try:
            await self._guarded(call.write(infer_request(worker, tensors)), worker)
            await self._guarded(call.done_writing(), worker)
            while (response := await self._read(call, worker)) is not None:
                if response.error_message:
                    is_over = True
                    await leave(call, _LEAVE_S)
                    raise parse_error(response.error_message)
                if outputs := outputs_of(response.infer_response):
                    yield outputs
            is_over = True
        finally:
            if not is_over:
                call.cancel()

    async def is_ready(self, worker: str) -> bool:
        """Return whether the server has the worker; false also without a server."""
        try:
            return await self._channel.is_loaded(worker)
        except BiremeError:
            return False

    async def close(self) -> None:
        await self._channel.close()

    async def _read(self, call: Any, worker: str) -> Any:
        """Return one response; None at the end."""
        import grpc

        response = await self._guarded(call.read(), worker)
        return None if response is grpc.aio.EOF else response

    async def _guarded(self, work: Any, worker: str) -> Any:
        import grpc

        try:
            async with asyncio.timeout(self._stall_timeout_s):
                return await work
        except TimeoutError:
            raise EngineLostError(
                f"{worker}: no news for {self._stall_timeout_s:g} s (pipeline.stall_timeout_s); try again"
            ) from None
        except grpc.aio.AioRpcError as error:
            raise _as_video(rpc_error(error, self._channel.address), worker) from error
        except asyncio.InvalidStateError as error:  # written to a stream that the server has ended
            raise UnavailableError(f"{worker}: the server closed the stream; try again") from error


def _as_video(error: BiremeError, worker: str) -> BiremeError:
    """A broken connection ends the request, too."""
    return error if error.retryable or type(error) is not BiremeError else EngineLostError(f"{worker}: {error}")
