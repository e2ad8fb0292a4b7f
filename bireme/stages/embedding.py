"""embedding: texts, or their token ids, to embeddings.

Unary. `text_input` holds one text or more, which get the model's prompt (`prompt_name`, else its default) and its
special tokens; `input_ids` are taken as they are, of several texts one after the other with `input_lengths`. The answer
has a row a text. `abort` with a request id stops one, `ping` asks for the engine's `state`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from bireme.canary_mark import PARAMETER, is_canary
from bireme.engines.stub.client import EngineClient
from bireme.errors import RequestError
from bireme.messages import MALFORMED, EmbedRequest, decode_embed
from bireme.observability.entry import open_traces
from bireme.observability.traces import Traces, traced_call
from bireme.request import Ids, check_ids, read_tensors, timeout_ms
from bireme.specs import EMBEDDING, ModelSpec
from bireme.stages.encoding import run_encode
from bireme.stages.engine_stage import EngineStage
from bireme.stages.requests import request_id_of
from bireme.text.embedding_encoder import EmbeddingEncoder
from bireme.text.tokenizer import TextTokenizer, recipe_tokenizer
from bireme.types import Array, Cancelled, Send, StageContext, TensorResponse, Tensors, info_of


class Embedding(EngineStage[EngineClient]):
    spec: ClassVar[ModelSpec] = EMBEDDING

    def __init__(self, engine: EngineClient | None = None, tokenizer: TextTokenizer | None = None) -> None:
        super().__init__(EngineClient, engine)
        self._given_tokenizer = tokenizer  # by tests; else loaded at start
        self._encoder: EmbeddingEncoder | None = None
        self._traces: Traces | None = None

    async def start(self, context: StageContext) -> None:
        tokenizer = await asyncio.to_thread(lambda: self._given_tokenizer or recipe_tokenizer(context.recipe))
        self._encoder = EmbeddingEncoder(tokenizer, context.recipe, context.metrics)
        self._traces = open_traces(context.recipe, context.metrics)
        await super().start(context)

    async def stop(self) -> None:
        if self._encoder is not None:
            self._encoder.close()
        if self._traces is not None:
            await self._traces.close()
        await super().stop()

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None:
        values = read_tensors(inputs, self.spec)
        if values.get("ping"):
            self._answer_ping(request_id_of(values), send)
            return
        if values.get("abort"):
            self._engine.abort(self._names.find(request_id_of(values)))
            send(TensorResponse({}))
            return
        self._check_ready()
        traces = None if "engine_request" in values else self._traces  # of a frontend's request it has the tree
        with traced_call(traces, self.spec.name, inputs) as trace:
            request = await self._request(inputs, values)
            if trace is not None:
                trace.is_canary = is_canary(request.canary)
                trace.root.attributes |= {"texts": len(request.prompts), "tokens": _num_tokens(request)}
            send(TensorResponse(await self._embed(request, request_id_of(values), cancelled)))

    async def _request(self, inputs: Tensors, values: Mapping[str, Any]) -> EmbedRequest:
        if "engine_request" in values:
            try:
                return decode_embed(values["engine_request"].tobytes()).request
            except MALFORMED as error:
                raise RequestError(
                    f"engine_request: {str(error)[:120]}; it is for frontends, send text_input or input_ids instead"
                ) from error
        assert self._encoder is not None
        name = "text_input" if "text_input" in values else "input_ids"
        ids = await self._encoder.encode(
            _texts(values), values.get("prompt_name"), self._engine.capacity.max_seq_len, lambda at: f"{name}[{at}]"
        )
        return EmbedRequest(
            prompts=tuple(one.tobytes() for one in ids),
            dimensions=values.get("dimensions", 0),
            timeout_ms=timeout_ms(inputs, self._context.recipe),
            canary=str(info_of(inputs).parameters.get(PARAMETER, "")),
        )

    async def _embed(self, request: EmbedRequest, request_id: str, cancelled: Cancelled) -> dict[str, Array]:
        embeddings = await run_encode(self._engine, self._names, request, request_id, cancelled)
        return {
            "embedding": np.frombuffer(embeddings, "<f4").reshape(len(request.prompts), -1),
            "num_tokens": np.array([len(prompt) // 4 for prompt in request.prompts], np.int32),
        }


def _num_tokens(request: EmbedRequest) -> int:
    return sum(map(len, request.prompts)) // 4


def _texts(values: Mapping[str, Any]) -> list[str | Ids]:
    if ("text_input" in values) == ("input_ids" in values):
        given = "both" if "text_input" in values else "neither"
        raise RequestError(f"{given} of text_input and input_ids were sent; send exactly one of them")
    if "text_input" in values:
        if not values["text_input"]:
            raise RequestError("text_input: empty; send at least one text")
        return list(values["text_input"])
    ids = check_ids("input_ids", values["input_ids"])
    lengths = values.get("input_lengths", [len(ids)])
    if min(lengths, default=0) < 1 or sum(lengths) != len(ids):
        raise RequestError(
            f"input_lengths: {lengths[:8]}; one a text, at least 1, and together the {len(ids)} of input_ids"
        )
    return list(np.split(ids, np.cumsum(lengths)[:-1]))
