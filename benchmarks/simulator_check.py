"""The simulator beside what it simulates: mocker deployments under the same requests, and a GPU's measured arrivals.

Nine cells: two aggregated workers, one prefill with one and with three decode workers, each below its knee, at it and
beyond. Requests come at random (Poisson, lognormal lengths) and the same ones are sent to `generate` of a tritonserver
with mocker workers and to the simulator, in virtual time. Steps take tens of milliseconds, so that a busy host adds
little. What the way through the servers adds (`hop`) is fitted to the lightest cells of the first two layouts alone.

    python benchmarks/simulator_check.py
    python benchmarks/simulator_check.py --layouts 1:3 --loads knee --seconds 60
    python benchmarks/simulator_check.py --layouts none            # only the GPU's

In brackets: the simulator's figure over the measured one. The table comes first, then the aims; the last line of stdout
is one JSON document. Exit code 1 when a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

import numpy as np
import yaml

from benchmarks.options import chosen
from benchmarks.routing import ask, prompt_of
from bireme.config import MockerConfig, RouterConfig
from bireme.launch import Server, free_ports, start_server
from bireme.sizing.simulator.cluster import ClusterSettings, simulate
from bireme.sizing.simulator.outcome import Outcome
from bireme.sizing.simulator.synthetic import poisson_chats
from bireme.sizing.simulator.trace import SimulatedRequest, spread
from bireme.sizing.simulator.worker import SimulatedEngine
from bireme.sizing.step_times import StepTimes, TransferTimes
from bireme.workers.grpc import GrpcChannel

LAYOUTS = {"agg": (0, 2), "1:1": (1, 1), "1:3": (1, 3)}  # prefill, decode
LOADS = {"light": 1.0, "knee": 3.0, "overload": 7.0}  # requests a second
OVERLOAD_AGGREGATED = 12.0
FITTED = (("agg", "light"), ("1:1", "light"))  # all others are not looked at before they are compared
MODEL = MockerConfig(step_ms=40.0, step_ms_per_request=1.0, prefill_ms_per_token=4.0)
ROUTER = {"mode": "kv", "prefill_ms_per_token": 1.0, "transfer_ms": 20.0, "transfer_ms_per_token": 0.0}
TOKENS_PER_BLOCK, NUM_BLOCKS, SCALE = 32, 32_768, 0.2
FETCH = TransferTimes(start_ms=5.0)
TIMES = StepTimes.of_mocker(MODEL, FETCH)
AIMS = {"tokens_per_s": 0.05, "ttft_p50_ms": 0.10, "itl_p50_ms": 0.05}
AIMS_GPU = {"tokens_per_s": 0.10, "ttft_p50_ms": 0.15, "itl_p50_ms": 0.10}
GPU_ARRIVALS = {  # docs/measurements.md: 8B's shape on an H100, 10 s of benchmarks/arrivals_gpu.py
    8.0: {"tokens_per_s": 1803, "ttft_p50_ms": 13.8, "itl_p50_ms": 6.5},
    30.0: {"tokens_per_s": 4733, "ttft_p50_ms": 17.6, "itl_p50_ms": 8.1},
}
FigureRow = dict[str, float]


@dataclasses.dataclass(slots=True)
class Cell:
    layout: str
    load: str
    requests: list[SimulatedRequest]
    measured: FigureRow
    simulated: FigureRow = dataclasses.field(default_factory=dict)

    @property
    def is_fitted(self) -> bool:
        return (self.layout, self.load) in FITTED


def main() -> None:
    options = parse()
    cells: list[Cell] = []
    for layout in [] if options.layouts == ["none"] else options.layouts:
        cells += measured_cells(layout, options)
    hop_s = options.hop_ms / 1e3 if options.hop_ms is not None else fitted_hop_s(cells)
    for cell in cells:
        cell.simulated = summary(simulated(cell.layout, cell.requests, hop_s))
    gpu = {rate: gpu_row(rate) for rate in GPU_ARRIVALS}
    report(cells, hop_s, gpu, options)


def measured_cells(layout: str, options: argparse.Namespace) -> list[Cell]:
    with contextlib.ExitStack() as stack:
        server = start(layout, stack)
        cells = []
        for load in options.loads:
            requests = requests_of(rate_of(layout, load), options.seconds, options.seed)
            cells.append(Cell(layout, load, requests, asyncio.run(measure(server, requests))))
            print(f"measured {layout} {load}: {cells[-1].measured}", file=sys.stderr, flush=True)
        return cells


def rate_of(layout: str, load: str) -> float:
    return OVERLOAD_AGGREGATED if (layout, load) == ("agg", "overload") else LOADS[load]


def start(layout: str, stack: contextlib.ExitStack) -> Server:
    num_prefill, num_decode = LAYOUTS[layout]
    engine = {
        "max_batch_size": 256,
        "kv_cache_config": {"max_tokens": NUM_BLOCKS * TOKENS_PER_BLOCK, "tokens_per_block": TOKENS_PER_BLOCK},
        "mocker": {name: getattr(MODEL, name) for name in ("step_ms", "step_ms_per_request", "prefill_ms_per_token")},
    }
    if num_prefill:
        engine["cache_transceiver_config"] = {"backend": "DEFAULT"}
    stages = {"prefill": num_prefill, "decode": num_decode}
    workers = {
        stage: {"engine": "mocker", "replicas": count, "engine_config": engine}
        for stage, count in stages.items()
        if count
    }
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    recipe = {"model": "models/tiny-llama", "router": ROUTER, "workers": workers}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return stack.enter_context(start_server(folder, ports=free_ports()))


def requests_of(rate: float, seconds: float, seed: int) -> list[SimulatedRequest]:
    random, found = np.random.default_rng(seed), []
    for number, (at, num_prompt, num_output) in enumerate(poisson_chats(random, rate, seconds, SCALE)):
        blocks = np.arange(num_prompt // TOKENS_PER_BLOCK, dtype=np.uint64) + np.uint64(number << 20)
        found.append(SimulatedRequest(at, num_prompt, max(num_output, 2), spread(blocks)))
    return found


async def measure(server: Server, requests: Sequence[SimulatedRequest]) -> FigureRow:
    """Send each at its time, whatever has become of those before."""
    channel, draw = GrpcChannel(server.grpc), np.random.default_rng()
    loop = asyncio.get_running_loop()
    ended: list[float] = []

    async def send(request: SimulatedRequest, began: float) -> tuple[float, float]:
        prompt = prompt_of(request.num_prompt, draw)
        await asyncio.sleep(began + request.arrival_s - loop.time())
        answer = await ask(channel, prompt, request.num_output)
        ended.append(loop.time() - began)
        return answer.ttft_s, (answer.total_s - answer.ttft_s) / (request.num_output - 1)

    try:
        for _ in range(8):  # what only the first requests wait for
            await ask(channel, prompt_of(50, draw), 2)
        began = loop.time() + 0.5
        pairs = await asyncio.gather(*(send(request, began) for request in requests))
    finally:
        await channel.close()
    seconds = max(ended) - requests[0].arrival_s
    return {
        "tokens_per_s": sum(one.num_output for one in requests) / seconds,
        "ttft_p50_ms": 1e3 * statistics.median(pair[0] for pair in pairs),
        "itl_p50_ms": 1e3 * statistics.median(pair[1] for pair in pairs),
    }


def simulated(layout: str, requests: Sequence[SimulatedRequest], hop_s: float) -> Outcome:
    num_prefill, num_decode = LAYOUTS[layout]
    engine = SimulatedEngine(TIMES, NUM_BLOCKS, TOKENS_PER_BLOCK)
    router = RouterConfig(**ROUTER)
    settings = ClusterSettings(num_prefill, num_decode, engine, engine, router=router, hop_s=hop_s)
    return simulate(requests, "kv", settings)


def summary(outcome: Outcome) -> FigureRow:
    found = outcome.summary()
    return {name: float(found[name]) for name in AIMS}


def fitted_hop_s(cells: Sequence[Cell]) -> float:
    """Return what a hop must take for the lightest cells' TTFT to be right in the mean."""
    found = []
    for cell in cells:
        if cell.is_fitted:
            without, with_it = (
                summary(simulated(cell.layout, cell.requests, hop))["ttft_p50_ms"] for hop in (0.0, 0.01)
            )
            found.append((cell.measured["ttft_p50_ms"] - without) / max(with_it - without, 1.0) * 0.01)
    return max(statistics.fmean(found), 0.0) if found else 0.0


def gpu_row(rate: float) -> FigureRow:
    """Return the same figures as benchmarks/arrivals_gpu.py tells, of the same draws."""
    requests = [
        SimulatedRequest(at, num_prompt, num_output, np.zeros(0, np.uint64))
        for at, num_prompt, num_output in poisson_chats(np.random.default_rng(int(rate)), rate, 10.0)
    ]
    engine = SimulatedEngine(StepTimes.read("h100-8b-bf16"), 12_820, 32, max_num_tokens=2048)
    outcome = simulate(requests, "round_robin", ClusterSettings(num_decode=1, decode=engine))
    answers = list(zip(outcome.requests, outcome.ttft_s, outcome.itl_s, strict=True))
    times = np.concatenate([one.arrival_s + ttft + itl * np.arange(one.num_output) for one, ttft, itl in answers])
    load_ended = requests[-1].arrival_s
    kept = [(one, ttft, itl) for one, ttft, itl in answers if one.arrival_s > 1.0]
    return {
        "tokens_per_s": float(((times > 1.0) & (times < load_ended)).sum()) / (load_ended - 1.0),
        "ttft_p50_ms": 1e3 * statistics.median(ttft for _, ttft, _ in kept),
        "itl_p50_ms": 1e3 * statistics.median(itl for one, _, itl in kept if one.num_output > 8),
    }


def report(cells: Sequence[Cell], hop_s: float, gpu: dict[float, FigureRow], options: argparse.Namespace) -> None:
    rows = [(f"{cell.layout} {cell.load}", cell.measured, cell.simulated) for cell in cells]
    rows += [(f"H100 {rate:g}/s", GPU_ARRIVALS[rate], row) for rate, row in gpu.items()]
    print(f"{'cell':16}" + "".join(f"{name:>32}" for name in AIMS))
    for name, measured, found in rows:
        print(f"{name:16}" + "".join(f"{figures(measured[one], found[one]):>32}" for one in AIMS))
    print(f"a hop takes {1e3 * hop_s:.1f} ms")
    for text in aims(cells, gpu):
        print(text)
    document = {
        "benchmark": "simulator_check",
        "hop_ms": 1e3 * hop_s,
        "cells": [{"layout": one.layout, "load": one.load, "measured": one.measured, "simulated": one.simulated}
                  for one in cells],
        "gpu": gpu,
        "seconds": options.seconds,
        "machine": {"cores": os.cpu_count(), "load": os.getloadavg()[0]},
    }  # fmt: skip
    print(json.dumps(document))


def figures(measured: float, found: float) -> str:
    return f"{measured:.4g} / {found:.4g} ({found / measured:.3f})"


def aims(cells: Sequence[Cell], gpu: dict[float, FigureRow]) -> Iterator[str]:
    for name, limit in AIMS.items():
        for kind, some in (("fitted", True), ("not fitted", False)):
            ratios = [abs(one.simulated[name] / one.measured[name] - 1) for one in cells if one.is_fitted is some]
            if ratios:
                yield aim(f"{name}, furthest of {len(ratios)} cells {kind}", max(ratios), limit)
    for name, limit in AIMS_GPU.items():
        ratios = [abs(row[name] / GPU_ARRIVALS[rate][name] - 1) for rate, row in gpu.items()]
        yield aim(f"{name} of a GPU's arrivals, furthest of {len(ratios)} rates", max(ratios), limit)


def aim(what: str, figure: float, limit: float) -> str:
    return f"aim: {what} {figure:.3f} off, at most {limit:g}: {'ok' if figure <= limit else 'MISSED'}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=chosen([*LAYOUTS, "none"]), default=list(LAYOUTS))
    parser.add_argument("--loads", type=chosen(list(LOADS)), default=list(LOADS))
    parser.add_argument("--seconds", type=float, default=30.0, help="in which requests come, of each cell")
    parser.add_argument("--hop-ms", type=float, help="of a way through the servers; fitted where it is left out")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
