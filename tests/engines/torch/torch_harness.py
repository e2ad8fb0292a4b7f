"""Drives a TorchEngine as its process does: requests pass the gate, and what it emits is collected."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from bireme.config import CacheTransceiverConfig, EngineConfig, KvCacheConfig, Limits, SchedulerConfig
from bireme.disagg import DisaggregatedParams, seal
from bireme.engines.base import EngineContext, PlainTokens, StepOutput
from bireme.engines.child.validate import Gate
from bireme.engines.torch.engine import TorchEngine
from bireme.engines.torch.weights import setup
from bireme.engines.torch.weights.findings import Findings
from bireme.kv.transfer.base import KvTransfer
from bireme.messages import EngineRequest, Finish, SamplingParams, TokenLogprobs
from bireme.metrics import Registry
from tests.request_options import with_options

WAIT_S = 60.0
KEY = b"k" * 32


@dataclass
class Result:
    digest: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finishes: list[Finish] = field(default_factory=list)
    exported: DisaggregatedParams | None = None
    encoded: Any = None
    has_tokens: threading.Event = field(default_factory=threading.Event)
    is_over: threading.Event = field(default_factory=threading.Event)

    @property
    def finish(self) -> Finish:
        assert self.is_over.wait(WAIT_S), "the request does not end"
        return self.finishes[0]

    def take(self, delta: StepOutput) -> None:
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs or []
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        if delta.exported is not None:
            self.exported = msgspec.structs.replace(delta.exported, prompt_digest=self.digest)
        self.encoded = delta.encoded or self.encoded
        if delta.tokens:
            self.has_tokens.set()
        if delta.finish is not None:
            self.finishes.append(delta.finish)
            self.is_over.set()


def request(prompt: Sequence[int], max_tokens: int | None = 48, **fields: Any) -> EngineRequest:
    """Return a greedy request that goes on past the end of sequence; EngineRequest's fields and its options' pass."""
    sampling = {name: fields.pop(name) for name in list(fields) if name in SamplingParams.__struct_fields__}
    params = SamplingParams(**({"max_tokens": max_tokens, "ignore_eos": True} | sampling))
    return EngineRequest(prompt=np.asarray(prompt, "<i4").tobytes(), sampling=params, **with_options(fields))


_found: dict[str, Any] = {}  # by its subject


def _find_once(path: Path | None, *subject: Any) -> Findings:
    """Return what an engine of this process has found of the same, as the next life of a worker has it from a file."""
    findings = Findings(path, *subject)
    if path is None and not torch.cuda.is_available():
        known = _found.setdefault(findings._header.subject, (findings._header, findings._logits))
        findings._header, findings._logits = known
    return findings


setup.Findings = _find_once  # type: ignore[assignment, misc]


class Harness:
    """One started engine."""

    num_plain = 0  # tokens that came in columns

    def __init__(
        self,
        model_path: str,
        transfer: KvTransfer | None = None,
        worker: str = "decode",
        queue: dict[str, Any] | None = None,
        context: dict[str, Any] | None = None,
        limits: Limits | None = None,
        **settings: Any,
    ) -> None:
        own = set(KvCacheConfig.__struct_fields__) - set(EngineConfig.__struct_fields__)
        cache = {name: settings.pop(name) for name in list(settings) if name in own}
        cache.setdefault("tokens_per_block", 16)
        cache["dtype"] = settings.pop("kv_dtype", "auto")
        config = EngineConfig(
            **({"max_batch_size": 16} | settings),
            kv_cache_config=KvCacheConfig(**cache),
            scheduler_config=SchedulerConfig(**(queue or {})),
            cache_transceiver_config=CacheTransceiverConfig(backend="DEFAULT" if transfer else None),
        )
        self.metrics = Registry(worker)
        self.died: list[int] = []
        self.engine = TorchEngine(
            EngineContext(
                worker, worker, model_path, config, self.metrics, transfer, num_threads=1, life=1, **(context or {})
            ),
            die=self.died.append,
        )
        self.results: dict[tuple[int, int], Result] = {}
        self.capacity = self.engine.start(self._emit)
        self.gate = Gate("", self.capacity, limits or Limits(), KEY, transfer is not None, config.max_input_len)

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()

    @property
    def core(self) -> Any:
        assert self.engine._loaded is not None
        return self.engine._loaded.core

    @property
    def manager(self) -> Any:
        return self.core._parts.manager

    def submit(self, what: EngineRequest, params: DisaggregatedParams | None = None) -> Result:
        if params is not None:
            what = msgspec.structs.replace(what, disaggregated_params=seal(params, KEY))
        admitted = self.gate.admit(what)
        key = (0, len(self.results) + 1)
        result = self.results[key] = Result(admitted.digest)
        try:
            self.engine.submit(key, admitted)
        except Exception:
            del self.results[key]
            raise
        return result

    def abort(self, result: Result) -> None:
        self.engine.abort(next(key for key, value in self.results.items() if value is result))

    def run(self, requests: Sequence[EngineRequest], in_one_step: bool = False) -> list[list[int]]:
        """Submit all at once and return their tokens; every one must end once, without error. `in_one_step`: the engine
        takes them in together, however short its steps are.
        """
        are_there = threading.Event()
        if in_one_step:
            self.engine._post(lambda: are_there.wait(WAIT_S))
        results = [self.submit(one) for one in requests]
        are_there.set()
        for result in results:
            assert result.finish.error == ""
        assert all(len(result.finishes) == 1 for result in results)
        return [result.tokens for result in results]

    def settle(self) -> None:
        """Wait until the engine's thread has taken in all that was posted."""
        done = threading.Event()
        self.engine._post(done.set)
        assert done.wait(WAIT_S)

    def _emit(self, step: int, deltas: list[StepOutput], plain: PlainTokens | None = None) -> None:
        columns = zip(plain.keys, plain.tokens, strict=True) if plain else ()
        told = [StepOutput(key, [token]) for key, token in columns]
        self.num_plain += len(told)
        for delta in [*told, *deltas]:
            self.results[delta.key].take(delta)


def make_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(10, 500, length).tolist() for length in lengths]


MIXED = (3, 20, 45, 70, 150, 33, 8, 1, 64, 17, 90, 31, 32, 5, 128, 48)
