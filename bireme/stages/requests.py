"""The common part of decode and prefill: reading a request, running it, and finding it by its request id."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from bireme.canary_mark import is_canary
from bireme.config import Recipe
from bireme.errors import BiremeError, NotFoundError, RequestCancelledError, RequestError, from_message
from bireme.messages import (
    MALFORMED,
    Encode,
    EngineRequest,
    Finish,
    Release,
    Sink,
    StartRequest,
    Submit,
    decode_request,
)
from bireme.request import check_ids, check_prompt_tokens, timeout_ms
from bireme.request_trace import RequestTrace
from bireme.sampling import EncodeText, Sampling, parse_sampling, with_seed
from bireme.serving_options import read_options
from bireme.types import Cancelled, Tensors, info_of

if TYPE_CHECKING:
    from bireme.engines.stub.client import EngineClient

MAX_REQUEST_ID_BYTES = 256  # no key: ids stand in logs and are chosen by clients, a UUID has 36


@dataclass(frozen=True, slots=True)
class StageRequest:
    engine: EngineRequest
    request_id: str  # "": can't be aborted by name


def parse_stage_request(values: Mapping[str, Any], inputs: Tensors, recipe: Recipe, encode: EncodeText) -> StageRequest:
    """Raises RequestError. `encode` turns bad words into ids."""
    if "engine_request" in values:
        command = read_command(values["engine_request"])
        if not isinstance(command, Submit):
            raise RequestError(f"engine_request: {type(command).__name__}; this worker takes prompts")
        return StageRequest(command.request, request_id_of(values))
    sampling = parse_sampling(values, info_of(inputs).parameters, recipe)
    prompt, num_resumed = _prompt(values, recipe)
    request = EngineRequest(
        prompt=prompt,
        sampling=with_seed(_single(sampling).resolve(encode)),
        num_resumed=num_resumed,
        options=read_options(values, sampling.priority, values.get("lora_name", "")),
        timeout_ms=timeout_ms(inputs, recipe),
        multimodal=values.get("multimodal"),
    )
    if blob := values.get("disaggregated_params"):
        request = msgspec.structs.replace(request, request_type="generation_only", disaggregated_params=blob)
    return StageRequest(request, request_id_of(values))


def with_trace(request: StageRequest, trace: RequestTrace | None) -> StageRequest:
    """Return the request for an engine that is to tell what it does."""
    if trace is None:
        return request
    trace.is_canary = is_canary(request.engine.options.cache_salt)
    told = {"traceparent": trace.traceparent(trace.root), "tracestate": trace.tracestate}
    return replace(request, engine=msgspec.structs.replace(request.engine, **told))


def request_id_of(values: Mapping[str, Any]) -> str:
    name: str = values.get("request_id", "")
    if len(name.encode()) > MAX_REQUEST_ID_BYTES:
        raise RequestError(f"request_id: {len(name.encode())} bytes; the limit is {MAX_REQUEST_ID_BYTES}, shorten it")
    return name


class EngineRun:
    """One request in the stub's own engine. `done` and `abort` may be called from any thread."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Finish] = self._loop.create_future()
        self._is_aborted = False
        self.number = 0

    def submit(self, request: StartRequest, sink: Sink) -> None:
        """`sink` calls `done` with its finish."""
        self.number = self._engine.submit(request, sink)
        if self._is_aborted:  # by the sink, before the number was known
            self._engine.abort(self.number)

    def abort(self) -> None:
        self._is_aborted = True
        if self.number:
            self._engine.abort(self.number)

    def done(self, finish: Finish) -> None:
        self._loop.call_soon_threadsafe(self._settle, finish)

    async def wait(self, cancelled: Cancelled) -> Finish:
        """Return the finish; the engine is told when the client goes away or this task is cancelled."""
        cancelled.on_set(self.abort)
        try:
            return await self._ended
        except asyncio.CancelledError:
            self.abort()
            raise

    def _settle(self, finish: Finish) -> None:
        if not self._ended.done():
            self._ended.set_result(finish)


def failure_of(finish: Finish) -> BiremeError:
    """Return the error that a finish other than stop and length stands for."""
    if finish.error:
        return from_message(finish.error)
    return RequestCancelledError("the request was aborted")


class RequestNames:
    """Running requests (and, in prefill, remaining leases) by their request id; used on one loop."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def reserve(self, name: str) -> None:
        """Take a name before the engine has given a number. Raises RequestError when it is taken."""
        if name in self._numbers:
            raise RequestError(f"request_id: {name[:80]} is in use; choose ids that nobody else can guess")
        if name:
            self._numbers[name] = 0

    def bind(self, name: str, number: int) -> None:
        if name:
            self._numbers[name] = number

    def forget(self, name: str) -> None:
        self._numbers.pop(name, None)

    def find(self, name: str) -> int:
        """Raises RequestError without a name, NotFoundError for an unknown one."""
        if not name:
            raise RequestError("abort: without request_id; send the id of the request that is to stop")
        number = self._numbers.get(name)
        if number is None:
            raise NotFoundError(f"request_id: {name[:80]} is not under way; it may have ended")
        return number


def _single(sampling: Sampling) -> Sampling:
    if sampling.params.n != 1:
        raise RequestError(
            f"num_return_sequences: {sampling.params.n}; this model makes one sequence a request, use generate for more"
        )
    return sampling


def _prompt(values: Mapping[str, Any], recipe: Recipe) -> tuple[bytes, int]:
    """Return prompt and resumed ids together, and the number of resumed ones."""
    if "input_ids" not in values:
        raise RequestError("input_ids: missing; send the prompt's token ids (text goes to generate or completion)")
    prompt = check_ids("input_ids", values["input_ids"])
    check_prompt_tokens(len(prompt), recipe.limits)
    resumed = check_ids("resumed_output_ids", values.get("resumed_output_ids", np.zeros(0, np.int32)))
    return prompt.tobytes() + resumed.tobytes(), len(resumed)


def read_command(payload: Any) -> Submit | Encode | Release:
    """Return what a pipeline asks for, whole, in the tensor `engine_request`. Raises RequestError."""
    try:
        command: Submit | Encode | Release = decode_request(payload.tobytes())
        return command
    except MALFORMED as error:
        raise RequestError(
            f"engine_request: {str(error)[:120]}; it is for this deployment's pipelines, send input_ids instead"
        ) from error
