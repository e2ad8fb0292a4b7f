"""A TensorRT-LLM engine without its process: what it emits is gathered by request."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bireme import llm_args
from bireme.config import EngineConfig, Limits
from bireme.conversion import convert, keys_of
from bireme.disagg import DisaggregatedParams, seal
from bireme.engines.base import EngineContext, PlainTokens, StepOutput
from bireme.engines.child.validate import Gate
from bireme.engines.trtllm import lifecycle
from bireme.engines.trtllm.engine import TrtllmEngine
from bireme.messages import EncodeRequest, EngineRequest, Finish, SamplingParams, TokenLogprobs
from bireme.metrics import Registry
from tests.request_options import with_options

PROMPT = list(range(400, 480))
KEY = b"k" * 32
UNSET = object()  # instead of a value of the harness' own


def engine_config(yaml: dict[str, Any]) -> EngineConfig:
    """Return what load_recipe makes of an engine YAML of engine trtllm."""
    return convert(llm_args.split(yaml, keys_of(EngineConfig)), EngineConfig, "test")


class Answer:
    """One request's news."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.digest = ""
        self.tokens: list[int] = []
        self.deltas: list[StepOutput] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.encoded: Any = None
        self.finish: Finish | None = None
        self.exported: DisaggregatedParams | None = None
        self.has_tokens = threading.Event()
        self._has_ended = threading.Event()

    def take(self, delta: StepOutput) -> None:
        self.deltas.append(delta)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs or []
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        if delta.tokens:
            self.has_tokens.set()
        self.encoded = delta.encoded or self.encoded
        if delta.finish is not None:
            assert self.finish is None, "a request ends once"
            self.finish = delta.finish
            if delta.exported is not None:
                self.exported = msgspec.structs.replace(delta.exported, prompt_digest=self.digest)
            self._has_ended.set()

    def wait(self, timeout_s: float = 60.0) -> Finish:
        assert self._has_ended.wait(timeout_s), f"no end in {timeout_s} s after {len(self.tokens)} tokens"
        assert self.finish is not None
        return self.finish


class Harness:
    def __init__(self, stage: str, model: Path, yaml: dict[str, Any], **context: Any) -> None:
        """`context`: fields of EngineContext."""
        self.metrics = Registry(stage)
        self.exits: list[int] = []
        self.has_exited = threading.Event()
        self.steps: list[list[StepOutput]] = []
        self.num_plain = 0  # tokens that came in columns
        self._answers: dict[int, Answer] = {}
        self._count = 0
        given = {"dtype": "float32", "max_batch_size": 8, "disable_overlap_scheduler": True} | yaml
        given = {name: value for name, value in given.items() if value is not UNSET}
        self.config = engine_config(given)
        common = {"worker": stage, "stage": stage, "model_path": str(model), "config": self.config, "life": 7}
        self.context = EngineContext(**common | {"metrics": self.metrics} | context)
        self.engine = self._make(self.context)
        self.capacity = self.engine.start(self._emit)
        has_transfer = self.config.cache_transceiver_config.backend is not None
        self.gate = Gate("", self.capacity, Limits(), KEY, has_transfer, self.config.max_input_len)

    @property
    def llm(self) -> Any:
        assert self.engine._loaded is not None
        return self.engine._loaded.llm

    def _make(self, context: EngineContext) -> Any:
        return TrtllmEngine(context, die=self._die)

    def ask(self, prompt: list[int] | None = None, params: DisaggregatedParams | None = None, **fields: Any) -> Answer:
        """Submit; keyword arguments are EngineRequest's, ServingOptions', or SamplingParams'."""
        fields = with_options(fields)
        request_fields = {name: fields.pop(name) for name in list(fields) if name in EngineRequest.__struct_fields__}
        sampling = SamplingParams(**({"max_tokens": 12} | fields))
        data = np.array(PROMPT if prompt is None else prompt, np.int32).tobytes()
        self._count += 1
        answer = self._answers[self._count] = Answer(self._count)
        request = EngineRequest(prompt=data, sampling=sampling, **request_fields)
        if params is not None:
            request = msgspec.structs.replace(request, disaggregated_params=seal(params, KEY))
        admitted = self.gate.admit(request)
        answer.digest = admitted.digest
        self.engine.submit((0, self._count), admitted)
        return answer

    def encode(self, request: EncodeRequest) -> Answer:
        self.gate.check_encode(request.timeout_ms)
        self._count += 1
        answer = self._answers[self._count] = Answer(self._count)
        self.engine.encode((0, self._count), request)
        return answer

    def tokens(self, *args: Any, **kwargs: Any) -> list[int]:
        answer = self.ask(*args, **kwargs)
        finish = answer.wait()
        assert not finish.error, finish.error
        return answer.tokens

    def abort(self, answer: Answer) -> None:
        self.engine.abort((0, answer.number))

    def counter(self, name: str) -> float:
        """Return a counter's or gauge's present value, over all labels; does not take it away."""
        delta = self.metrics.take_delta()
        self.metrics.merge(delta)
        return sum(value for found, _, value in (*delta.counters, *delta.gauges) if found == name)

    def _emit(self, step: int, deltas: list[StepOutput], plain: PlainTokens | None = None) -> None:
        columns = zip(plain.keys, plain.tokens, strict=True) if plain else ()
        told = [StepOutput(key, [token]) for key, token in columns]
        self.num_plain += len(told)
        self.steps.append([*told, *deltas])
        for delta in self.steps[-1]:
            self._answers[delta.key[1]].take(delta)

    def close(self) -> None:
        """Stop the engine. Of one whose process would have ended, threads and LLM are still there, and read and wait as
        long as the process of the tests lives.
        """
        self.engine.stop()
        if self.exits and self.engine._loaded is not None:
            self.engine._loaded.iterations.stop()
            lifecycle.shut_down(self.engine._loaded.llms)
            self.engine._loop.call_soon_threadsafe(self.engine._end_loop)

    def _die(self, code: int) -> None:
        self.exits.append(code)
        self.has_exited.set()
