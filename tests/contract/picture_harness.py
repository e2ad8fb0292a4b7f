"""TensorRT-LLM engines of one tiny model that sees: together, EP/D or E/P/D, each as its worker makes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bireme import disagg
from bireme.config import Limits
from bireme.engines.base import EngineContext
from bireme.engines.child.validate import Gate
from bireme.engines.trtllm.encoder import TrtllmEncoderEngine
from bireme.kv.transfer.fake import FakeNetwork
from bireme.messages import EncodeRequest
from bireme.multimodal.answers import seal_outcome
from bireme.multimodal.embedding_share import EmbeddingShare
from bireme.multimodal.placeholders import expand
from bireme.multimodal.wire import EncodeAnswer, MediaItem, decode_answer, encode_multimodal
from tests.contract.trtllm_harness import KEY, UNSET, Answer, Harness
from tests.engines.torch.picture_deployment import png
from tests.engines.torch.picture_models import PLACEHOLDER

ENCODER = {"agg": "decode", "ep-d": "prefill", "e-p-d": "multimodal_encoder"}
APART = {"cache_transceiver_config": {"backend": "DEFAULT", "max_tokens_in_buffer": 8192}}
YAML = {
    "max_seq_len": 512,
    "enable_chunked_prefill": True,
    "kv_cache_config": {"tokens_per_block": 8, "event_buffer_max_size": 1000},
}


class EncoderHarness(Harness):
    def _make(self, context: EngineContext) -> Any:
        return TrtllmEncoderEngine(context)


class Deployment:
    """`mode`: agg, ep-d or e-p-d."""

    def __init__(self, model: str, mode: str, **yaml: Any) -> None:
        self.mode, self.network = mode, FakeNetwork()
        self.shares: dict[str, EmbeddingShare] = {}
        self.engines: dict[str, Harness] = {}
        if mode == "e-p-d":
            plain = {"disable_overlap_scheduler": UNSET, "multimodal_config": yaml.get("multimodal_config", {})}
            self.engines["multimodal_encoder"] = EncoderHarness(
                "multimodal_encoder", Path(model), plain, **self._context("multimodal_encoder")
            )
        for stage in ("decode",) if mode == "agg" else ("prefill", "decode"):
            config = YAML | ({} if mode == "agg" else APART) | yaml
            self.engines[stage] = Harness(stage, Path(model), config, **self._context(stage))
        for stage, engine in self.engines.items():
            engine.gate = Gate(stage, engine.capacity, Limits(), KEY, mode != "agg")

    def _context(self, stage: str) -> dict[str, Any]:
        self.shares[stage] = EmbeddingShare(self.network.join(f"{stage}-mm", 7), f"{stage}-mm", 7)
        return {"share": self.shares[stage], "hosts_encoder": stage == ENCODER[self.mode], "num_threads": 1}

    def close(self) -> None:
        for engine in self.engines.values():
            engine.engine.stop()
        for share in self.shares.values():
            share.close()

    def encode(self, pictures: Sequence[Any]) -> EncodeAnswer:
        answer = self.engines[ENCODER[self.mode]].encode(EncodeRequest(sources=tuple(map(png, pictures))))
        assert not answer.wait().error, answer.finish
        return decode_answer(seal_outcome(answer.encoded, KEY))

    def prepare(self, ids: list[int], pictures: Sequence[Any]) -> tuple[list[int], bytes | None, bytes | None]:
        """Return the expanded prompt, and `multimodal` with and without handles."""
        if not pictures:
            return ids, None, None
        made = self.encode(pictures).pictures
        expanded, places = expand(np.array(ids, np.int32), PLACEHOLDER, [one.num_tokens for one in made])
        items = tuple(
            MediaItem(hash=one.hash, num_tokens=one.num_tokens, position=at, grid=one.grid, handle=one.handles[0])
            for one, at in zip(made, places, strict=True)
        )
        bare = tuple(msgspec.structs.replace(item, handle=None) for item in items)
        return expanded.tolist(), encode_multimodal(items), encode_multimodal(bare)

    def begin(self, ids: list[int], pictures: Sequence[Any] = (), **fields: Any) -> Answer:
        """Start a request on decode, through prefill where there is one."""
        prompt, handles, places = self.prepare(ids, pictures)
        if self.mode == "agg":
            return self.engines["decode"].ask(prompt, multimodal=handles, **fields)
        first = self.engines["prefill"].ask(prompt, request_type="context_only", multimodal=handles, **fields)
        assert not first.wait().error, first.finish
        params = disagg.unseal(disagg.seal(first.exported, KEY), KEY)
        return self.engines["decode"].ask(prompt, params, request_type="generation_only", multimodal=places, **fields)

    def run(self, ids: list[int], pictures: Sequence[Any] = (), **fields: Any) -> list[int]:
        answer = self.begin(ids, pictures, **fields)
        assert not answer.wait().error, answer.finish
        return answer.tokens
