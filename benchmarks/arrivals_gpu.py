"""Requests that arrive at random, in the torch engine on a GPU: steps with prompts as one launch against kernels.

An engine with its thread in this process, on random weights (bf16) of a known model's shape, without a server. Two
loads, each in turns with MixedSteps, without (`kernels`: every step that has a prompt is launched kernel by kernel, and
none is started while its tokens are not known), with the next step started as soon as it can be (`at_once`), and with
a bound on streams' gaps (`bounded`: scheduler_config.max_stream_gap_ms is `--gap`):

* `join`: streams run, and one prompt of so many tokens comes at a random moment of a step. Told are the prompt's first
  token, and the longest gap that a stream has from just before it came until its first token.
* `arrivals`: Poisson, lengths as chats have them (lognormal, mean 235 in and 200 out). Told are TTFT, time per output
  token (TPOT: of a request's tokens after the first), gaps between tokens of a stream, tokens/s. With `--long-share`
  some prompts have `--long` tokens.

    python benchmarks/arrivals_gpu.py                      # 8B shape, 8, 20 and 30 requests/s
    python benchmarks/arrivals_gpu.py --ways bounded mixed --gap 20 --long-share 0.1 --long 4000 --rates 30
    python benchmarks/arrivals_gpu.py --shape tiny --quick  # also without a GPU, to see that it runs

The table comes first, then one line of JSON, then the aims.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

from benchmarks.engine_gpu import SHAPES, write_config
from benchmarks.load.arrivals import Seen, summary
from benchmarks.options import numbers
from bireme.config import EngineConfig, KvCacheConfig, Limits, SchedulerConfig
from bireme.engines.base import EngineContext, PlainTokens, RequestKey, StepOutput
from bireme.engines.child.validate import Gate
from bireme.engines.torch.engine import TorchEngine
from bireme.engines.torch.scheduling.pace import StepPace
from bireme.engines.torch.scheduling.step_costs import StepWork
from bireme.messages import EngineRequest, SamplingParams
from bireme.metrics import Registry
from bireme.settings import SpeculativeConfig
from bireme.sizing.simulator.synthetic import poisson_chats

AIM_JOIN_128 = 19.5  # ms to the first token of 128 tokens that join 64 streams of the 8B shape
AIM_TPOT = {8.0: 6.89, 20.0: 7.82, 30.0: 8.98}  # ms: what vLLM 0.26 needed in process on an H100
AIM_OVER_GAP = 1.1  # the 99th percentile of streams' gaps, of the bound asked for
WAYS = ("mixed", "at_once", "kernels", "bounded")
_WAIT_S = 120.0


@dataclass(slots=True)
class Asked(Seen):
    is_over: threading.Event = field(default_factory=threading.Event)
    error: str = ""


class NoPace(StepPace):
    def starts_next_at(self, work: StepWork, began_at: float) -> float:
        return 0.0


class Running:
    """The engine, and what it has told of each request."""

    def __init__(
        self,
        folder: str,
        options: argparse.Namespace,
        is_prepared: bool = True,
        num_threads: int = 1,
        windows: list[int] | None = None,
        drafts: SpeculativeConfig | None = None,
    ) -> None:
        """`is_prepared`: with all graphs, which an engine makes when it has nothing to do.

        `windows`: kv_cache_config.max_attention_window.
        """
        config = EngineConfig(
            max_batch_size=8 if options.quick else 256,
            max_seq_len=1024 if options.quick else 20000,
            kv_cache_config=KvCacheConfig(
                tokens_per_block=32, max_tokens=8192 if options.quick else None, max_attention_window=windows
            ),
            scheduler_config=SchedulerConfig(max_stream_gap_ms=options.gap),
            load_format="dummy",
            speculative_config=drafts,
        )
        self.asked: dict[RequestKey, Asked] = {}
        self.metrics, began = Registry("bench"), time.perf_counter()
        self._engine = TorchEngine(
            EngineContext("bench", "decode", folder, config, self.metrics, None, num_threads=num_threads, life=1),
            die=lambda code: None,
        )
        self.capacity = self._engine.start(self._emit)
        self.ready_at = time.perf_counter()
        self.ready_s = self.ready_at - began
        self._gate = Gate("decode", self.capacity, Limits(), b"")
        self._random = np.random.default_rng(2)
        loaded = self._engine._loaded
        assert loaded is not None
        self._core, self._forward = loaded.core, loaded.core._parts.forward
        self._mixed, self._gap = self._forward.mixed, self._core.scheduler._gap
        if is_prepared:
            self._post(lambda: self._prepare(loaded.core))

    def use(self, way: str) -> None:
        def change() -> None:
            self._forward.mixed = None if way == "kernels" else self._mixed
            costs = self._core._parts.costs
            self._core._pace = NoPace(costs) if way == "at_once" else StepPace(costs)
            self._core.scheduler._gap = self._gap if way == "bounded" else None

        self._post(change)

    def submit(self, num_tokens: int, max_tokens: int, **sampled: Any) -> Asked:
        prompt = self._random.integers(10, 500, num_tokens).astype("<i4").tobytes()
        sampling = SamplingParams(max_tokens=max_tokens, **({"ignore_eos": True} | sampled))
        admitted = self._gate.admit(EngineRequest(prompt=prompt, sampling=sampling))
        key = (0, len(self.asked) + 1)
        self.asked[key] = asked = Asked(time.perf_counter())
        self._engine.submit(key, admitted)
        return asked

    def abort_all(self) -> None:
        for key, asked in list(self.asked.items()):
            if not asked.is_over.is_set():
                self._engine.abort(key)
        for asked in self.asked.values():
            asked.is_over.wait(_WAIT_S)

    def stop(self) -> None:
        self._engine.stop()

    @staticmethod
    def _prepare(core: Any) -> None:
        while core.prepare():  # graphs that an engine makes before its first request, if it has the time
            pass

    def _post(self, action: Any) -> None:
        done = threading.Event()
        self._engine._post(lambda: (action(), done.set()))  # type: ignore[func-returns-value,arg-type,return-value]
        assert done.wait(_WAIT_S)

    def _emit(self, step: int, deltas: list[StepOutput], plain: PlainTokens | None = None) -> None:
        now = time.perf_counter()
        for key in plain.keys if plain else ():
            self.asked[key].times.append(now)
        for delta in deltas:
            asked = self.asked[delta.key]
            asked.times += [now] * len(delta.tokens)
            if delta.finish is not None:
                asked.error = delta.finish.error
                asked.is_over.set()


def join(engine: Running, num_streams: int, context: int, lengths: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Return, by prompt length, ms of first tokens and of the streams' longest gaps meanwhile."""
    random, rows = np.random.default_rng(5), []
    streams = [engine.submit(context, context + 4000 if context > 100 else 400) for _ in range(num_streams)]
    wait_until(lambda: all(len(one.times) > 3 for one in streams))
    for length in lengths:
        firsts, gaps = [], []
        for _ in range(rounds):
            time.sleep(0.05 + random.random() * 0.02)
            asked = engine.submit(length, 2)
            assert asked.is_over.wait(_WAIT_S)
            firsts.append(asked.ttft)
            end = asked.times[0] + 1e-4
            gaps.append(
                max(
                    after - before
                    for one in streams[:8]
                    for before, after in zip(one.times, one.times[1:], strict=False)
                    if asked.began_at - 0.02 < after <= end
                )
            )
        row = {"tokens": length, "ttft_ms": ms(np.mean(firsts)), "ttft_max_ms": ms(max(firsts))}
        rows.append(row | {"gap_ms": ms(np.mean(gaps)), "gap_max_ms": ms(max(gaps))})
    engine.abort_all()
    return rows


def arrivals(engine: Running, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    """Return what requests at this rate see; those of the first and last second are load, not measured."""
    seconds, scale, others = options.seconds, 0.05 if options.quick else 1.0, np.random.default_rng(1)
    moments = [
        (at, options.long if others.random() < options.long_share else inputs, outputs)
        for at, inputs, outputs in poisson_chats(np.random.default_rng(int(rate)), rate, seconds, scale)
    ]
    asked, began = [], time.perf_counter()
    for at, inputs, outputs in moments:
        time.sleep(max(0.0, began + at - time.perf_counter()))
        asked.append(engine.submit(inputs, outputs))
    load_ended = time.perf_counter()
    for one in asked:
        assert one.is_over.wait(_WAIT_S) and not one.error, one.error
    return summary(rate, asked, began, load_ended)


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder:
        write_config(folder, options.shape)
        engine = Running(folder, options)
        joins: dict[str, Any] = {}
        loads: dict[str, list[dict[str, Any]]] = {way: [] for way in options.ways}
        for way in options.ways:
            engine.use(way)
            joins[way] = join(engine, options.streams, options.context, options.lengths, options.rounds)
        for rate in options.rates:
            for way in options.ways:
                engine.use(way)
                loads[way].append(arrivals(engine, rate, options))
        engine.stop()
    report(joins, loads, options)


def report(joins: dict[str, Any], loads: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    print(f"{options.shape} shape, bf16, {name}, torch {torch.__version__}")
    for way, rows in joins.items():
        for row in rows:
            print(
                f"join {way:8} {row['tokens']:>5} tokens beside {options.streams}: first token {row['ttft_ms']:6.1f} ms"
                f" (worst {row['ttft_max_ms']:.1f}), streams' gap {row['gap_ms']:6.1f} (worst {row['gap_max_ms']:.1f})"
            )
    for way, cells in loads.items():
        for cell in cells:
            parts = [f"{what} {quantiles(cell, what)}" for what in ("ttft", "tpot", "gap")]
            print(
                f"{cell['rate']:>4g} req/s {way:8} {', '.join(parts)} (max {cell['gap_max_ms']:.0f}) ms p50/p90/p99,"
                f" {cell['tokens_per_s']} tokens/s"
            )
    print(
        json.dumps(
            {"benchmark": "arrivals_gpu", "device": name, "options": vars(options), "joins": joins, "loads": loads}
        )
    )
    if torch.cuda.is_available() and options.shape == "8b" and "mixed" in joins:
        for row in joins["mixed"]:
            if row["tokens"] == 128 and options.streams == 64:
                aim("first token of 128 tokens that join 64 streams, ms", row["ttft_ms"], AIM_JOIN_128)
        for cell in loads["mixed"]:
            if cell["rate"] in AIM_TPOT and not options.long_share:
                aim(f"TPOT p50 at {cell['rate']:g} requests/s, ms", cell["tpot_p50_ms"], AIM_TPOT[cell["rate"]])
    for cell in loads.get("bounded", ()) if torch.cuda.is_available() else ():
        aim(f"gap p99 at {cell['rate']:g} requests/s, ms", cell["gap_p99_ms"], AIM_OVER_GAP * options.gap)


def quantiles(cell: dict[str, Any], what: str) -> str:
    return " / ".join(f"{cell[f'{what}_p{quantile}_ms']:.1f}" for quantile in (50, 90, 99))


def aim(what: str, found: float, asked: float) -> None:
    print(f"aim: {what} {found:.2f}, {asked:g} asked for: {'ok' if found <= asked else 'BELOW'}")


def ms(seconds: Any) -> float:
    return round(1e3 * float(seconds), 2)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.01)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--rates", type=numbers(float), default=[8.0, 20.0, 30.0], help="requests a second: 8,20,30")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each rate and way")
    parser.add_argument("--streams", type=int, default=64, help="that prompts join")
    parser.add_argument("--context", type=int, default=300, help="tokens of each stream's prompt")
    parser.add_argument("--lengths", type=numbers(int), default=[16, 64, 128, 256, 512, 1024])
    parser.add_argument("--rounds", type=int, default=12, help="prompts of each length")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=None, help="bounded: with --gap alone")
    parser.add_argument("--gap", type=float, default=0.0, help="ms that a bound on streams' gaps asks for; 0: none")
    parser.add_argument("--long-share", type=float, default=0.0, help="of arrivals' prompts that are long")
    parser.add_argument("--long", type=int, default=4000, help="tokens of these")
    parser.add_argument("--quick", action="store_true", help="few streams and short ones, no figures worth having")
    options = parser.parse_args()
    if options.quick:
        options.streams, options.context, options.lengths, options.rounds = 2, 20, [8], 2
        options.rates, options.seconds, options.long = [4.0], 3.0, min(options.long, 400)
    if options.ways is None:
        options.ways = [way for way in WAYS if way != "bounded" or options.gap]
    if "bounded" in options.ways and not options.gap:
        parser.error("--ways bounded needs --gap, in milliseconds, e.g. --gap 20")
    return options


if __name__ == "__main__":
    main()
