"""Embeddings of pictures and texts, made in a stub's own engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from bireme.errors import BiremeError
from bireme.messages import EmbedRequest, Encode, EncodeRequest, Release
from bireme.multimodal.answers import EncodeSink
from bireme.multimodal.wire import EncodeAnswer, decode_answer
from bireme.stages.requests import EngineRun, RequestNames, failure_of
from bireme.types import Cancelled

if TYPE_CHECKING:
    from bireme.engines.stub.client import EngineClient


async def run_command(
    engine: EngineClient, names: RequestNames, command: Encode | Release, request_id: str, cancelled: Cancelled
) -> EncodeAnswer:
    """Do what a pipeline says; the answer to a release has no pictures."""
    if isinstance(command, Encode):
        return decode_answer(await run_encode(engine, names, command.request, request_id, cancelled))
    engine.release(command.handles)
    return EncodeAnswer(pictures=())


async def run_encode(
    engine: EngineClient,
    names: RequestNames,
    request: EncodeRequest | EmbedRequest,
    request_id: str,
    cancelled: Cancelled,
) -> bytes:
    """Return the engine's answer. Raises its error; a client that goes away stops the work."""
    names.reserve(request_id)
    try:
        engine_run = EngineRun(engine)
        engine_run.submit(request, EncodeSink(engine_run.done))
        names.bind(request_id, engine_run.number)
        finish = await engine_run.wait(cancelled)
    finally:
        names.forget(request_id)
    if finish.reason != "stop":
        raise failure_of(finish)
    if finish.encoded is None:
        raise BiremeError("the engine's answer has no embeddings; run the same build on both sides")
    if cancelled:
        engine_run.abort()  # nobody will fetch pictures' embeddings
    return finish.encoded


def answer_json(answer: EncodeAnswer) -> bytes:
    """Return the answer as the tensor `embedding_handles` has it: without the embeddings themselves."""
    return msgspec.json.encode({"v": answer.v, "pictures": answer.pictures})
