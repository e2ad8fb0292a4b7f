"""Encoder, prefill and decode engines of one tiny vision-language model, in one process, each as its worker makes
it: requests pass the gate, handles are signed, embeddings and KV move by the in-process transfer."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from bireme.config import EngineConfig, Limits
from bireme.engines.base import EngineContext
from bireme.engines.child.validate import Gate
from bireme.engines.torch.images.encoder_engine import EncoderEngine
from bireme.kv.transfer.base import KvTransfer
from bireme.kv.transfer.fake import FakeNetwork
from bireme.messages import EncodeRequest, EncodeSource, EngineRequest
from bireme.metrics import Registry
from bireme.multimodal.answers import seal_outcome
from bireme.multimodal.embedding_share import EmbeddingShare
from bireme.multimodal.placeholders import expand
from bireme.multimodal.wire import (
    EncodeAnswer,
    MediaItem,
    decode_answer,
    encode_multimodal,
)
from tests.engines.torch.torch_harness import KEY, Harness, Result, request

PLACEHOLDER = 5


def png(pixels: np.ndarray) -> EncodeSource:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return EncodeSource("image", file.getvalue())


class EncoderHarness(Harness):
    """An encoder engine behind the same face as the others."""

    def __init__(self, model_path: str, share: EmbeddingShare) -> None:
        self.metrics = Registry("multimodal_encoder")
        context = EngineContext(
            "multimodal_encoder", "multimodal_encoder", model_path, EngineConfig(), self.metrics, num_threads=1,
            life=1, share=share, hosts_encoder=True,
        )  # fmt: skip
        self.engine: Any = EncoderEngine(context)
        self.results = {}
        self.capacity = self.engine.start(self._emit)
        self.gate = Gate("multimodal_encoder", self.capacity, Limits(), KEY)


class Deployment:
    """`mode`: agg, ep-d or e-p-d."""

    def __init__(
        self,
        model_path: str,
        mode: str = "e-p-d",
        move_embeddings: Callable[[str], KvTransfer] | None = None,
        **settings: Any,
    ) -> None:
        """`move_embeddings`: worker -> its transfer, in place of the in-process one."""
        self.kv, self.mm = FakeNetwork(), FakeNetwork()
        self._move_embeddings = move_embeddings or self.mm.join
        self.shares: dict[str, EmbeddingShare] = {}
        self.engines: dict[str, Harness] = {}
        self.encoder_name = {"agg": "decode", "ep-d": "prefill", "e-p-d": "multimodal_encoder"}[mode]
        if mode == "e-p-d":
            self.engines["multimodal_encoder"] = EncoderHarness(model_path, self._share("multimodal_encoder"))
        for name in ("decode",) if mode == "agg" else ("prefill", "decode"):
            transfer = None if mode == "agg" else self.kv.join(name)
            context = {"share": self._share(name), "hosts_encoder": name == self.encoder_name}
            common = {"max_num_tokens": 24, "max_batch_size": 8} | settings
            self.engines[name] = Harness(model_path, transfer, name, context=context, **common)
        self.has_prefill = mode != "agg"

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self.engines.values():
            engine.engine.stop()
        for share in self.shares.values():
            share.close()
        for transfer in self.kv.members.values():
            transfer.close()

    def encode(self, pictures: Sequence[Any], copies: int = 1) -> EncodeAnswer:
        """Pictures are pixels, or an EncodeSource."""
        sources = tuple(one if isinstance(one, EncodeSource) else png(one) for one in pictures)
        ended = self.submit_encode(EncodeRequest(sources=sources, copies=copies))
        assert ended.finish.error == "", ended.finish
        return decode_answer(seal_outcome(ended.encoded, KEY))

    def submit_encode(self, asked: EncodeRequest) -> Result:
        harness = self.engines[self.encoder_name]
        harness.gate.check_encode(asked.timeout_ms)
        key = (0, len(harness.results) + 1)
        result = harness.results[key] = Result("")
        harness.engine.encode(key, asked)
        return result

    def prepare(self, ids: list[int], pictures: Sequence[Any]) -> tuple[list[int], bytes | None, bytes | None]:
        """Return the expanded prompt, and `multimodal` with and without handles."""
        if not pictures:
            return ids, None, None
        answer = self.encode(pictures)
        expanded, places = expand(np.array(ids, np.int32), PLACEHOLDER, [one.num_tokens for one in answer.pictures])
        items = [
            MediaItem(hash=one.hash, num_tokens=one.num_tokens, position=at, grid=one.grid, handle=one.handles[0])
            for one, at in zip(answer.pictures, places, strict=True)
        ]
        bare = [
            MediaItem(hash=item.hash, num_tokens=item.num_tokens, position=item.position, grid=item.grid)
            for item in items
        ]
        return expanded.tolist(), encode_multimodal(tuple(items)), encode_multimodal(tuple(bare))

    def begin(self, ids: list[int], pictures: Sequence[Any], max_tokens: int = 24, **fields: Any) -> Result:
        """Start a request on decode, through prefill where there is one."""
        prompt, handles, places = self.prepare(ids, pictures)
        if not self.has_prefill:
            return self._submit("decode", request(prompt, max_tokens, multimodal=handles, **fields))
        first = self._submit(
            "prefill", request(prompt, max_tokens, request_type="context_only", multimodal=handles, **fields)
        )
        assert first.finish.error == "", first.finish
        asked = request(prompt, max_tokens, request_type="generation_only", multimodal=places, **fields)
        return self._submit("decode", asked, first.exported)

    def run(self, ids: list[int], pictures: Sequence[Any], max_tokens: int = 24, **fields: Any) -> list[int]:
        result = self.begin(ids, pictures, max_tokens, **fields)
        assert result.finish.error == "", result.finish
        return result.tokens

    def num_leases(self) -> int:
        return sum(len(transfer.leases) for transfer in (*self.mm.members.values(), *self.kv.members.values()))

    def counter(self, name: str) -> float:
        counters = self.engines[self.encoder_name].metrics.take_delta().counters
        return sum(value for found, _, value in counters if found == name)

    def _submit(self, name: str, asked: EngineRequest, exported: Any = None) -> Result:
        return self.engines[name].submit(asked, exported)

    def _share(self, name: str) -> EmbeddingShare:
        self.shares[name] = EmbeddingShare(self._move_embeddings(f"{name}-mm"), f"{name}-mm", 1)
        return self.shares[name]
