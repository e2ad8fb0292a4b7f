"""What tests of engine processes share: a sink and a bus that remember, and requests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bireme.config import Recipe
from bireme.engines.stub.client import EngineClient
from bireme.messages import EngineRequest, Finish, SamplingParams, Step, TokenLogprobs, decode_step
from bireme.metrics import MetricDelta
from bireme.recipe_files import load_recipe
from tests.request_options import with_options

VOCAB_SIZE = 32000
PROMPT = list(range(1000, 1050))


class Collector:
    """A sink that keeps everything; `wait` returns the finish."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finishes: list[Finish] = []
        self._has_ended = threading.Event()

    def push(self, tokens: Any, logprobs: Any = None, prompt_logprobs: Any = None) -> None:
        self.tokens += tokens
        self.logprobs += logprobs or []
        self.prompt_logprobs += prompt_logprobs or []

    def finish(self, finish: Finish) -> None:
        self.finishes.append(finish)
        self._has_ended.set()

    def wait(self, timeout_s: float = 90.0) -> Finish:
        assert self._has_ended.wait(timeout_s), f"no finish in {timeout_s} s; {len(self.tokens)} tokens"
        return self.finishes[0]


class Bus:
    """A bus consumer that keeps its steps."""

    def __init__(self, client: EngineClient) -> None:
        self.steps: list[Step] = []
        self.client = client
        self.consumer = client.open_bus(lambda payload: self.steps.append(decode_step(payload)))

    def finish_of(self, number: int, timeout_s: float = 90.0) -> Finish:
        wait_for(lambda: any(number in step.finished for step in self.steps), timeout_s)
        return next(step.finished[number] for step in self.steps if number in step.finished)

    def tokens_of(self, number: int) -> list[int]:
        return [
            token for step in self.steps for request, tokens in step.deltas() if request == number for token in tokens
        ]


def wait_for(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


def recipe_in(
    folder: Path, engine: dict[str, Any] | None = None, top: dict[str, Any] | None = None, **mocker: Any
) -> Recipe:
    """Write a mocker's recipe into a folder and return it; keyword arguments go to `mocker`, others to their places."""
    config = {"mocker": {"vocab_size": VOCAB_SIZE, "step_ms": 2} | mocker} | (engine or {})
    workers = {"decode": {"engine": "mocker", "engine_config": config}}
    if (engine or {}).get("cache_transceiver_config"):
        workers["prefill"] = workers["decode"]
    supervisor = {"ping_interval_s": 0.05, "restart_backoff_s": 0.01}
    tree = {"model": "none", "workers": workers, "supervisor": supervisor} | (top or {})
    (folder / "recipe.yaml").write_text(json.dumps(tree))
    return load_recipe(folder, override="")


def make_request(prompt: list[int] | None = None, max_tokens: int | None = 10, **fields: Any) -> EngineRequest:
    sampling = fields.pop("sampling", None) or SamplingParams(max_tokens=max_tokens)
    data = np.array(PROMPT if prompt is None else prompt, np.int32).tobytes()
    return EngineRequest(prompt=data, sampling=sampling, **with_options(fields))


def check_canaries_are_apart(delta: MetricDelta, num_prompt_tokens: int) -> None:
    """Of two canaries and one request, each of two tokens, only the request is load."""
    counters = {(name, *labels[1:]): value for name, labels, value in delta.counters}
    assert counters["bireme_canaries_total", "length"] == 2 and counters["bireme_requests_total", "length"] == 1
    assert counters["bireme_generated_tokens_total",] == 2
    assert counters["bireme_prompt_tokens_total",] == num_prompt_tokens
    counts = {name: sum(counts) for name, _, counts, _ in delta.histograms if "step" not in name}
    assert set(counts.values()) == {1}
