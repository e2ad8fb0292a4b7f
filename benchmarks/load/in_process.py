"""Load on a mocker engine in this very process: what the engine does when nothing is between it and its client.

The engine's thread hands each step to the event loop in one call, as the engine process's IO thread would.
"""

from __future__ import annotations

import asyncio
import os

from benchmarks.load.meter import LoadError, Trace
from benchmarks.load.token_bus import TraceSink, make_request
from bireme.config import EngineConfig, KvCacheConfig, Limits, MockerConfig
from bireme.engines.base import EngineContext, PlainTokens, RequestKey, StepOutput
from bireme.engines.child.step_log import VARIABLE
from bireme.engines.child.validate import Gate
from bireme.engines.registry import create_engine
from bireme.errors import BiremeError
from bireme.messages import STUB
from bireme.metrics import Registry


class InProcess:
    """As recipes/mocker has it: room for 1024 requests at once."""

    def __init__(self, model_path: str, step_ms: float, step_log: str = "") -> None:
        config = EngineConfig(
            max_batch_size=1024,
            kv_cache_config=KvCacheConfig(max_tokens=4 << 20),
            mocker=MockerConfig(step_ms=step_ms),
        )
        if step_log:
            os.environ[VARIABLE] = step_log
        self._engine = create_engine(
            "mocker",
            EngineContext(
                worker="decode", stage="decode", model_path=model_path, config=config, metrics=Registry("decode")
            ),
        )
        self._sinks: dict[RequestKey, TraceSink] = {}
        self._keys: dict[int, RequestKey] = {}
        self._count = 0

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        capacity = self._engine.start(
            lambda step, deltas, plain=None: loop.call_soon_threadsafe(self._take, deltas, plain)
        )
        self._gate = Gate("decode", capacity, Limits(), b"")

    async def request(self, slot: int, trace: Trace) -> None:
        self._count += 1
        key = self._keys[slot] = (STUB, self._count)
        sink = self._sinks[key] = TraceSink(trace)
        try:
            self._engine.submit(key, self._gate.admit(make_request(trace)))
            await sink.ended
        except BiremeError as error:
            raise LoadError(str(error)) from error
        except asyncio.CancelledError:
            self._engine.abort(key)
            raise
        finally:
            self._sinks.pop(key, None)

    def drop(self, slot: int) -> None:
        self._engine.abort(self._keys[slot])

    async def close(self) -> None:
        self._engine.stop()

    def _take(self, deltas: list[StepOutput], plain: PlainTokens | None) -> None:
        for key, token in zip(plain.keys, plain.tokens, strict=True) if plain else ():
            if (sink := self._sinks.get(key)) is not None:
                sink.push((token,))
        for delta in deltas:
            sink = self._sinks.get(delta.key)
            if sink is None:
                continue
            if delta.tokens:
                sink.push(delta.tokens)
            if delta.finish is not None:
                sink.finish(delta.finish)
