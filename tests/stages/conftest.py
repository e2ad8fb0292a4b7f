"""Stages over a fake engine, without Triton."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models

from bireme.config import Recipe
from bireme.conversion import convert
from bireme.engines.stub.fake_client import FakeEngineClient
from bireme.metrics import Registry
from bireme.stages.decode import Decode
from bireme.stages.embedding import Embedding
from bireme.stages.multimodal_encoder import MultimodalEncoder
from bireme.stages.prefill import Prefill
from bireme.text.tokenizer import TextTokenizer
from bireme.types import Cancelled, Inputs, RequestInfo, StageContext

NUMPY = {"INT32": np.int32, "FP32": np.float32, "BOOL": bool, "UINT64": np.uint64, "UINT8": np.uint8}


class StageCall:
    """One request to a stage, running."""

    def __init__(self, stage: Any, info: RequestInfo | None, values: dict[str, Any]) -> None:
        self.sent: list[Any] = []
        self.cancelled = Cancelled()
        tensors = {name: _tensor(stage, name, value) for name, value in values.items()}
        self.task = asyncio.ensure_future(stage.handle(Inputs(tensors, info), self.sent.append, self.cancelled))

    async def begun(self) -> StageCall:
        for _ in range(3):
            await asyncio.sleep(0)
        return self

    async def end(self) -> list[dict[str, Any]]:
        await asyncio.wait_for(self.task, 5)
        return self.responses

    @property
    def responses(self) -> list[dict[str, Any]]:
        return [{name: array.tolist() for name, array in response.tensors().items()} for response in self.sent]


def _tensor(stage: Any, name: str, value: Any) -> Any:
    spec = stage.spec.input(name)
    if isinstance(value, np.ndarray) or spec is None:
        return np.asarray(value)
    items = value if isinstance(value, list) else [value]
    if spec.data_type == "BYTES":
        return np.array([item.encode() if isinstance(item, str) else item for item in items], object)
    return np.array(items, NUMPY[spec.data_type])


class StageBench:
    def __init__(self, stage: Any, engine: FakeEngineClient, metrics: Registry) -> None:
        self.stage, self.engine, self.metrics = stage, engine, metrics

    def ask(self, info: RequestInfo | None = None, **values: Any) -> StageCall:
        return StageCall(self.stage, info, values)


@functools.cache
def letters() -> TextTokenizer:
    """One token a character: ids are code points, up to 1000. All tests have the same, which nothing changes."""
    inner = Inner(models.WordLevel({chr(code): code for code in range(1, 1000)}, unk_token="?"))
    inner.decoder = decoders.Fuse()
    return TextTokenizer(inner)


async def start(stage: Any, engine: FakeEngineClient, **tree: Any) -> StageBench:
    workers = {"prefill": {"engine": "mocker"}, "decode": {"engine": "mocker"}}
    recipe = convert({"model": "none", "workers": workers, "name": "test"} | tree, Recipe, "test")
    name = stage.spec.name
    metrics = Registry(name)
    await stage.start(StageContext(name, recipe, recipe.entry(name), metrics))
    return StageBench(stage, engine, metrics)


@pytest.fixture
def decode() -> Any:
    async def make(**tree: Any) -> StageBench:
        engine = FakeEngineClient()
        return await start(Decode(engine, letters()), engine, **tree)

    return make


@pytest.fixture
def prefill() -> Any:
    async def make(**tree: Any) -> StageBench:
        engine = FakeEngineClient()
        return await start(Prefill(engine, letters()), engine, **tree)

    return make


@pytest.fixture
def embedding() -> Any:
    async def make(**tree: Any) -> StageBench:
        engine, workers = FakeEngineClient(), {"embedding": {"engine": "torch"}}
        return await start(Embedding(engine, letters()), engine, **{"workers": workers} | tree)

    return make


@pytest.fixture
def encoder() -> Any:
    async def make(**tree: Any) -> StageBench:
        engine = FakeEngineClient()
        return await start(MultimodalEncoder(engine), engine, **tree)

    return make
