"""multimodal_encoder: pictures to embeddings, which wait under leases for the engine that computes with them.

Unary. `images` are URLs, data: URLs or the bytes of a file; `embeddings` is a safetensors file that a client computed,
in place of one picture. The answer names, for each, hash, tokens and a signed handle good for one fetch. `abort` with a
request id stops an encode, `ping` asks for the engine's `state`. The engine, in its child process, fetches and decodes
the pictures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from bireme.engines.stub.client import EngineClient
from bireme.errors import RequestError
from bireme.messages import Encode, EncodeRequest, EncodeSource, Release, Submit
from bireme.multimodal.wire import EncodeAnswer
from bireme.request import read_tensors, timeout_ms
from bireme.specs import MULTIMODAL_ENCODER, ModelSpec
from bireme.stages.encoding import answer_json, run_command
from bireme.stages.engine_stage import EngineStage
from bireme.stages.requests import read_command, request_id_of
from bireme.types import Array, Cancelled, Send, TensorResponse, Tensors


class MultimodalEncoder(EngineStage[EngineClient]):
    spec: ClassVar[ModelSpec] = MULTIMODAL_ENCODER

    def __init__(self, engine: EngineClient | None = None) -> None:
        super().__init__(EngineClient, engine)

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None:
        values = read_tensors(inputs, self.spec)
        if values.get("ping"):
            self._answer_ping(request_id_of(values), send)
            return
        if values.get("abort"):
            self._abort(request_id_of(values), send)
            return
        command, request_id = self._command(inputs, values), request_id_of(values)
        self._check_ready()
        answer = await run_command(self._engine, self._names, command, request_id, cancelled)
        send(TensorResponse(_tensors(answer, bool(values.get("return_embeddings")))))

    def _command(self, inputs: Tensors, values: Mapping[str, Any]) -> Encode | Release:
        if "engine_request" not in values:
            inline = bool(values.get("return_embeddings"))
            limit_ms = timeout_ms(inputs, self._context.recipe)
            return Encode(0, EncodeRequest(sources=_sources(values), inline=inline, timeout_ms=limit_ms))
        command = read_command(values["engine_request"])
        if isinstance(command, Submit):
            raise RequestError("engine_request: Submit; this worker takes pictures, no prompts")
        return command

    def _abort(self, name: str, send: Send) -> None:
        number = self._names.find(name)
        if number:
            self._engine.abort(number)
        send(TensorResponse(_tensors(EncodeAnswer(pictures=()), False)))


def _sources(values: Mapping[str, Any]) -> tuple[EncodeSource, ...]:
    if ("images" in values) == ("embeddings" in values):
        given = "both" if "images" in values else "neither"
        raise RequestError(f"{given} of images and embeddings were sent; send exactly one of them")
    if "embeddings" in values:
        return (EncodeSource("embeddings", values["embeddings"]),)
    if not values["images"]:
        raise RequestError("images: empty; send BYTES, at least one")
    return tuple(EncodeSource("image", content) for content in values["images"])


def _tensors(answer: EncodeAnswer, has_embeddings: bool) -> dict[str, Array]:
    tensors: dict[str, Array] = {
        "embedding_handles": np.array([answer_json(answer)], np.object_),
        "shapes": np.array([[one.num_tokens, one.hidden_size] for one in answer.pictures], np.int32).reshape(-1, 2),
        "hashes": np.array([one.hash.encode() for one in answer.pictures], np.object_),
    }
    if has_embeddings:
        tensors["embeddings"] = np.array([answer.embeddings], np.object_)
    return tensors
