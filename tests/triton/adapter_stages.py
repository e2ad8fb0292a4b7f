"""Tiny stages that try the adapter: one class a Triton model, loaded into a real tritonserver by conftest.py."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
import threading
import time

import numpy as np

from bireme.errors import EngineLostError, NotFoundError, RequestCancelledError, RequestError, ResourceExhaustedError
from bireme.specs import ModelSpec, TensorSpec
from bireme.types import Cancelled, Response, Send, StageContext, TensorResponse, Tensors, info_of

BYTES, INT32, FP32 = "BYTES", "INT32", "FP32"


def optional(name: str, data_type: str, dims: tuple[int, ...] = (1,)) -> TensorSpec:
    return TensorSpec(name, data_type, dims, optional=True)


def unary(name: str, *inputs: TensorSpec, outputs: tuple[TensorSpec, ...]) -> ModelSpec:
    return ModelSpec(name, inputs, outputs)


def streaming(name: str, *inputs: TensorSpec, outputs: tuple[TensorSpec, ...]) -> ModelSpec:
    return ModelSpec(name, inputs, outputs, decoupled=True)


TOKENS = TensorSpec("tokens", INT32, (-1,))
TEXT = TensorSpec("text", BYTES, (1,))


def number(inputs: Tensors, name: str, default: int) -> int:
    return int(inputs[name].reshape(-1)[0]) if name in inputs else default


@dataclasses.dataclass
class TokenResponse:
    """Deltas that concatenate, as decode's do."""

    tokens: list[int]
    is_last: bool = False

    def merge(self, later: Response) -> Response | None:
        return TokenResponse(self.tokens + later.tokens) if isinstance(later, TokenResponse) else None

    def tensors(self) -> Tensors:
        return {"tokens": np.array(self.tokens, np.int32)}


class TestStage:
    """Start, stop and readiness that do nothing."""

    context: StageContext

    async def start(self, context: StageContext) -> None:
        self.context = context

    async def stop(self) -> None:
        return None

    def is_ready(self) -> bool:
        return True


class Echo(TestStage):
    spec = unary(
        "echo",
        optional("text_in", BYTES, (-1,)),
        optional("tokens_in", INT32, (-1,)),
        optional("delay_ms", INT32),
        outputs=(
            TensorSpec("text_out", BYTES, (-1,)),
            TensorSpec("tokens_out", INT32, (-1,)),
            TensorSpec("about", BYTES, (1,)),
        ),
    )

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None:
        info = info_of(inputs)
        await asyncio.sleep(number(inputs, "delay_ms", 0) / 1e3)
        about = f"{info.request_id}|{info.timeout_ms}|{sorted(info.parameters.items())}|{sorted(info.outputs)}"
        outputs: dict[str, np.ndarray] = {"about": np.array([about.encode()], object)}
        if "text_in" in inputs:
            outputs["text_out"] = inputs["text_in"]
        if "tokens_in" in inputs:
            outputs["tokens_out"] = inputs["tokens_in"]
        send(TensorResponse(outputs))


class Silent(TestStage):
    """A unary stage that forgets to answer."""

    spec = unary("silent", optional("any", INT32), outputs=(TOKENS,))

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None:
        return None


class Ticker:
    """Steps all its sequences at a fixed pace on one thread, like an engine."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.sequences: dict[int, tuple[Send, int, int, asyncio.Future[None]]] = {}
        self.lock = threading.Lock()
        self.steps: list[float] = []
        self.stopped = False
        self.count = 0
        self.wakes = threading.Event()
        threading.Thread(target=self.run, daemon=True).start()

    def add(self, send: Send, num_tokens: int) -> tuple[int, asyncio.Future[None]]:
        done = asyncio.get_running_loop().create_future()
        with self.lock:
            self.count += 1
            self.sequences[self.count] = (send, 0, num_tokens, done)
            self.wakes.set()
            return self.count, done

    def remove(self, key: int) -> None:
        with self.lock:
            sequence = self.sequences.pop(key, None)
        if sequence:
            resolve(sequence[3])

    def run(self) -> None:
        while not self.stopped:
            if not self.sequences:
                self.wakes.clear()
                if not self.sequences:
                    self.wakes.wait(0.5)
                continue
            began = time.perf_counter()
            time.sleep(self.step_s)
            self.step()
            self.steps.append(time.perf_counter() - began)

    def step(self) -> None:
        with self.lock:
            for key, (send, at, count, done) in list(self.sequences.items()):
                is_last = at + 1 == count
                send(TokenResponse([at], is_last))
                if is_last:
                    del self.sequences[key]
                    resolve(done)
                else:
                    self.sequences[key] = (send, at + 1, count, done)


def resolve(future: asyncio.Future[None]) -> None:
    future.get_loop().call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))


class Tokens(TestStage):
    """`count` tokens, one a step of STEP_MS milliseconds, from a thread of its own; abort on cancel.

    `when_asked`: one for each request with `ask`.
    """

    spec = streaming(
        "tokens",
        optional("count", INT32),
        optional("report", INT32),
        optional("when_asked", INT32),
        optional("ask", INT32),
        outputs=(TOKENS, TensorSpec("running", INT32, (1,))),
    )

    async def start(self, context: StageContext) -> None:
        self.ticker = Ticker(float(os.environ.get("STEP_MS", "10")) / 1e3)
        self.asked: asyncio.Queue[None] = asyncio.Queue()

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None:
        if "report" in inputs:
            send(TensorResponse({"running": np.array([len(self.ticker.sequences)], np.int32)}))
            return
        if "ask" in inputs:
            self.asked.put_nowait(None)
            return
        if "when_asked" in inputs:
            for at in range(number(inputs, "count", 10)):
                await self.asked.get()
                send(TokenResponse([at]))
            return
        key, done = self.ticker.add(send, number(inputs, "count", 10))
        cancelled.on_set(lambda: self.ticker.remove(key))
        await done
        if cancelled:
            raise RequestCancelledError("the client is gone")

    async def stop(self) -> None:
        self.ticker.stopped = True
        steps = sorted(self.ticker.steps)
        if steps:
            p50, p99 = (steps[int(len(steps) * share)] * 1e3 for share in (0.5, 0.99))
            print(f"ticker steps={len(steps)} p50_ms={p50:.2f} p99_ms={p99:.2f}", flush=True)


class Bursts(TestStage):
    """`count` tokens as fast as the loop goes."""

    spec = streaming("bursts", optional("count", INT32), outputs=(TOKENS,))

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None:
        for at in range(number(inputs, "count", 100)):
            send(TokenResponse([at]))
            if at % 16 == 0:
                await asyncio.sleep(0)


class Flood(TestStage):
    """Megabytes that don't merge, faster than they can be sent."""

    spec = streaming("flood", optional("count", INT32), optional("pause_ms", INT32), outputs=(TOKENS,))

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None:
        block = TensorResponse({"tokens": np.zeros(1 << 18, np.int32)})
        for _ in range(number(inputs, "count", 64)):
            if cancelled:
                return
            send(block)
            if pause := number(inputs, "pause_ms", 0):
                await asyncio.sleep(pause / 1e3)


class Failing(TestStage):
    """Every way to go wrong, by name; `after` responses go out before."""

    spec = streaming("failing", optional("how", BYTES), optional("after", INT32), outputs=(TOKENS,))

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None:
        for at in range(number(inputs, "after", 0)):
            send(TokenResponse([at]))
        how = bytes(inputs["how"][0]).decode()
        if how in FAILURES:
            raise FAILURES[how]
        if how == "wrong_name":
            send(TensorResponse({"tokenz": np.zeros(1, np.int32)}))
        if how == "wrong_type":
            send(TensorResponse({"tokens": np.zeros(1, np.float32)}))
        if how == "bad_object":
            send(TensorResponse({"tokens": "not an array"}))  # type: ignore[dict-item]
        if how == "tensors_raises":
            send(Broken())
        if how == "late":
            send(TokenResponse([7], is_last=True))
            raise RequestError("too late")
        if how == "loop_exit":
            asyncio.get_running_loop().call_soon(sys.exit, 3)
            await asyncio.sleep(0.05)
            send(TokenResponse([1]))
        if how == "cancel_self":
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            await asyncio.sleep(1)


FAILURES: dict[str, BaseException] = {
    "request": RequestError("max_tokens: -1; at least 1"),
    "lost": EngineLostError("the engine died"),
    "full": ResourceExhaustedError("queue: 1024 requests wait; the limit is 1024"),
    "missing": NotFoundError("no lease 7"),
    "value": ValueError("odd"),
    "exit": SystemExit(3),
    "interrupt": KeyboardInterrupt(),
    "memory": MemoryError(),
}


class Broken:
    def merge(self, later: Response) -> Response | None:
        return None

    def tensors(self) -> Tensors:
        raise RuntimeError("no tensors today")


class UnaryFailing(Failing):
    spec = unary("unary_failing", optional("how", BYTES), optional("after", INT32), outputs=(TOKENS,))


class Stubborn(TestStage):
    """Looks away when it is cancelled."""

    spec = streaming("stubborn", optional("any", INT32), outputs=(TOKENS,))

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None:
        send(TokenResponse([0]))
        await asyncio.sleep(60)


class Caller(TestStage):
    """Calls `model` by BLS `times` times side by side and says what came back."""

    spec = streaming(
        "caller", optional("target", BYTES), optional("times", INT32), optional("how", BYTES), outputs=(TEXT,)
    )

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None:
        assert self.context.call_async is not None
        model = bytes(inputs["target"][0]).decode()
        ask: dict[str, np.ndarray] = {"how": inputs["how"]} if "how" in inputs else {}
        if not ask:
            ask = {"text_in": np.array([b"ahoy", b""], object), "delay_ms": np.array([20], np.int32)}
        calls = [self.context.call_async(model, ask) for _ in range(number(inputs, "times", 1))]
        for answer in await asyncio.gather(*calls):
            text = b",".join(answer["text_out"].tolist()) if "text_out" in answer else b""
            send(TensorResponse({"text": np.array([text], object)}))


class Measured(TestStage):
    """Hammers the registry from many threads."""

    spec = unary("measured", optional("threads", INT32), optional("times", INT32), outputs=(TOKENS,))

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None:
        metrics, times = self.context.metrics, number(inputs, "times", 1000)

        def hammer(thread: int) -> None:
            for at in range(times):
                metrics.add("bireme_generated_tokens_total", 2)
                metrics.add("bireme_requests_total", 1, f"outcome{thread % 4}")
                metrics.set("bireme_requests_running", at)
                metrics.observe("bireme_queue_seconds", 0.002)

        threads = [threading.Thread(target=hammer, args=(i,)) for i in range(number(inputs, "threads", 16))]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        send(TokenResponse([times]))


class Unstartable(TestStage):
    """Not loaded at the start: its error text is looked at."""

    spec = unary("unstartable", optional("any", INT32), outputs=(TOKENS,))

    async def start(self, context: StageContext) -> None:
        from bireme.errors import ConfigError

        raise ConfigError("max_seq_len: 9; at least 16 is needed")


class SlowStop(TestStage):
    """Its stop never ends, and it has a request under way that never ends either."""

    spec = streaming("slow_stop", optional("any", INT32), outputs=(TOKENS,))

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None:
        send(TokenResponse([1]))

    async def stop(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


STAGES = [
    Echo, Silent, Tokens, Bursts, Flood, Failing, UnaryFailing, Stubborn, Caller, Measured, Unstartable, SlowStop,
]  # fmt: skip
