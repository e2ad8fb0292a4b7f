"""A text pipeline over fake workers, and what a client of it sees."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models

from bireme.config import Recipe, WorkerEntry
from bireme.conversion import convert
from bireme.metrics import Registry
from bireme.pipelines.completion import Completion
from bireme.pipelines.generate import Generate
from bireme.pipelines.text import TextPipeline
from bireme.text.tokenizer import TextTokenizer
from bireme.types import Cancelled, Inputs, RequestInfo, Response, StageContext
from bireme.workers.fake import FakeWorkers

KINDS = {"BYTES": object, "INT32": np.int32, "FP32": np.float32, "BOOL": bool, "UINT64": np.uint64, "UINT8": np.uint8}


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until it is so; fail when that takes a minute."""

    async def reached() -> None:
        while not condition():
            await asyncio.sleep(0)

    await asyncio.wait_for(reached(), 60)


@functools.cache
def letters() -> TextTokenizer:
    """One token a character: ids are code points, up to 1000. All tests have the same, which nothing changes."""
    inner = Inner(models.WordLevel({chr(code): code for code in range(1, 1000)}, unk_token="?"))
    inner.decoder = decoders.Fuse()
    return TextTokenizer(inner)


class Call:
    """One request to a pipeline, running."""

    def __init__(self, pipeline: TextPipeline, info: RequestInfo | None, values: dict[str, Any]) -> None:
        self.responses: list[dict[str, Any]] = []
        self.cancelled = Cancelled()
        tensors = {name: tensor_of(pipeline, name, value) for name, value in values.items()}
        self.task = asyncio.ensure_future(pipeline.handle(Inputs(tensors, info), self._send, self.cancelled))

    def _send(self, response: Response) -> None:
        self.responses.append(dict(response.tensors()))

    async def end(self) -> None:
        await asyncio.wait_for(self.task, 5)

    @property
    def tokens(self) -> list[int]:
        return [token for response in self.responses for token in response["output_ids"].tolist()]

    @property
    def text(self) -> str:
        return b"".join(response["text_output"][0] for response in self.responses).decode()

    def last(self, name: str) -> Any:
        return self.responses[-1][name].tolist()


def tensor_of(pipeline: TextPipeline, name: str, value: Any) -> Any:
    spec = pipeline.spec.input(name)
    items = value if isinstance(value, list | np.ndarray) else [value]
    if spec is not None and spec.data_type == "BYTES":
        texts = np.array(items, object)
        return np.array([item.encode() if isinstance(item, str) else item for item in texts.flat], object).reshape(
            texts.shape
        )
    return np.array(items, KINDS[spec.data_type] if spec else None)


class Bench:
    """A started pipeline."""

    def __init__(self, pipeline: TextPipeline, workers: FakeWorkers, metrics: Registry) -> None:
        self.pipeline, self.workers, self.metrics = pipeline, workers, metrics

    def ask(self, info: RequestInfo | None = None, **values: Any) -> Call:
        return Call(self.pipeline, info, {"text_input": "hi", "max_tokens": 4, **values})

    def counters(self) -> dict[tuple[str, ...], float]:
        return {(name, *labels[1:]): value for name, labels, value in self.metrics.take_delta().counters}

    def observed(self) -> dict[str, int]:
        """Return how often each histogram was told something."""
        return {name: sum(counts) for name, _, counts, _ in self.metrics.take_delta().histograms}


def recipe(prefill: int = 0, decode: int = 1, **tree: Any) -> Recipe:
    workers = {"decode": {"engine": "mocker", "replicas": decode}}
    if prefill:
        workers["prefill"] = {"engine": "mocker", "replicas": prefill}
    # Prompts of tests are short, and go through prefill all the same; the first decode worker is the first to be used.
    tree.setdefault("router", {"mode": "round_robin", "transfer_ms": 0})
    return convert({"model": "none", "workers": workers, "name": "test"} | tree, Recipe, "test")


Make = Callable[..., Any]


@pytest.fixture
def bench() -> Make:
    async def make(kind: type[TextPipeline] = Generate, **settings: Any) -> Bench:
        workers, metrics = FakeWorkers(), Registry("generate")
        pipeline = kind(workers, letters())
        chosen = recipe(**settings)
        entry: WorkerEntry | None = None
        await pipeline.start(StageContext("generate", chosen, entry, metrics))
        return Bench(pipeline, workers, metrics)

    return make


@pytest.fixture
def completion(bench: Make) -> Make:
    return lambda **settings: bench(Completion, **settings)
