"""Requests that arrive at random, through tritonserver and the OpenAI frontend, beside vLLM in process.

The load of arrivals_gpu.py (Poisson, lengths as chats have them) on random weights (bf16) of a known model's shape.
Then prompts alone, one after the other (`--alone`), and twice as many requests of 512 tokens in and 128 out as are let
in at once (`--in-flight`).
This process is the client: of the frontend by server-sent events over HTTP, of vLLM by its AsyncLLM, which has its
engine core in a process of its own, without HTTP. One after the other on the same machine, since both want the whole
GPU, and each in its own environment. Each call is one start, and adds its loads to the file:

    python benchmarks/arrivals_served.py measure frontend out.json     # three times
    python benchmarks/arrivals_served.py measure vllm out.json --repeats 3
    python benchmarks/arrivals_served.py report out.json --plot out.png
    python benchmarks/arrivals_served.py measure frontend out.json --shape tiny --quick   # also without a GPU

The report's table comes first, then the aims: the worst start of the frontend against vLLM's median load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from benchmarks.load.arrivals import Seen, summary
from benchmarks.options import numbers
from bireme.sizing.simulator.synthetic import poisson_chats

ENGINES = ("frontend", "vllm")
COMPARED = (8.0, 20.0, 30.0)  # requests/s
AIM_TPOT, AIM_GAPS = 1.0, 1.1  # of vLLM's
AIM_TTFT_MS = 5.0  # above vLLM's
AIM_ALONE = {8192: 0.98, 32000: 1.0}  # TTFT of a prompt alone, of vLLM's
AIM_IN_FLIGHT = 1.0  # tokens/s, of vLLM's
NAME = "bench"
_WAIT_S = 120.0
_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
_WARM_UP = (10.0, 4.0)  # requests/s, seconds
_MAX_SEQ_LEN = 33792
_ALONE = 4  # prompts of a length, the first of which is not measured
Ask = Callable[[list[int], int], Awaitable[Seen]]  # token ids of a prompt, how many to answer


def main() -> None:
    options = parse()
    if options.action == "report":
        report(json.loads(Path(options.file).read_text()), options.plot)
        return
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder:
        with (frontend if options.engine == "frontend" else vllm)(Path(folder), options) as run:
            run(lambda ask: measure(ask, options, started))


def measure_file(options: argparse.Namespace, found: dict[str, Any]) -> None:
    path = Path(options.file)
    starts = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([*starts, found]))


async def measure(ask: Ask, options: argparse.Namespace, started: float) -> None:
    scale = 0.05 if options.quick else 1.0
    ready_s = round(time.perf_counter() - started, 1)
    await load(ask, _WARM_UP[0], _WARM_UP[1], scale)
    loads = []
    for repeat in range(options.repeats):
        for rate in options.rates if not repeat else [one for one in options.rates if one in COMPARED]:
            loads.append(await load(ask, rate, options.seconds, scale))
            print(options.engine, line(loads[-1]), flush=True)
    found = {"engine": options.engine, "shape": options.shape, "ready_s": ready_s, "loads": loads}
    found["alone"] = [await alone(ask, length) for length in options.alone]
    if options.in_flight:
        found["in_flight"] = await in_flight(ask, options.in_flight, scale)
    for one in [*found["alone"], *filter(None, [found.get("in_flight")])]:
        print(options.engine, one, flush=True)
    measure_file(options, found)


async def load(ask: Ask, rate: float, seconds: float, scale: float) -> dict[str, Any]:
    random, tasks = np.random.default_rng(time.time_ns() % (1 << 32)), []
    began = time.perf_counter()
    for at_s, inputs, outputs in poisson_chats(np.random.default_rng(int(rate)), rate, seconds, scale):
        await asyncio.sleep(max(0.0, began + at_s - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(random.integers(10, 500, inputs).tolist(), outputs)))
    load_ended = time.perf_counter()
    asked = await asyncio.wait_for(asyncio.gather(*tasks), _WAIT_S)
    return summary(rate, asked, began, load_ended)


async def alone(ask: Ask, length: int) -> dict[str, Any]:
    random, ttfts = np.random.default_rng(time.time_ns() % (1 << 32)), []
    for _ in range(_ALONE):
        ttfts.append((await ask(random.integers(10, 500, length).tolist(), 4)).ttft)
    return {"prompt": length, "ttft_ms": [round(1e3 * ttft, 2) for ttft in ttfts[1:]]}


async def in_flight(ask: Ask, count: int, scale: float) -> dict[str, Any]:
    random, room = np.random.default_rng(time.time_ns() % (1 << 32)), asyncio.Semaphore(count)
    inputs, outputs = max(4, int(512 * scale)), max(4, int(128 * scale))

    async def one(prompt: list[int]) -> None:
        async with room:
            await ask(prompt, outputs)

    prompts = random.integers(10, 500, (2 * count, inputs)).tolist()
    began = time.perf_counter()
    await asyncio.wait_for(asyncio.gather(*map(one, prompts)), _WAIT_S)
    tokens_per_s = len(prompts) * outputs / (time.perf_counter() - began)
    return {"in_flight": count, "prompt": inputs, "output": outputs, "tokens_per_s": round(tokens_per_s)}


@contextmanager
def frontend(folder: Path, options: argparse.Namespace) -> Any:
    """Serve the shape, and yield what runs a client. Raises BiremeError where it can't be served."""
    from benchmarks.serving_gpu import write_model
    from bireme.launch import free_ports, start_server
    from bireme.launch.console import Console
    from bireme.launch.frontend import FrontendProcess, FrontendSettings

    if options.model:
        model = Path(options.model)
    else:
        write_model(model := folder / "model", options.shape)
    engine = {"load_format": "dummy", "dtype": "bfloat16", "max_batch_size": 256, "max_seq_len": _MAX_SEQ_LEN}
    engine |= {"kv_cache_config": {"tokens_per_block": 32} | ({"max_tokens": 16384} if options.quick else {})}
    recipe = {
        "model": str(model),
        "served_model_name": NAME,
        "workers": {"decode": {"engine": "torch", "engine_config": "engine.yaml"}},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    (folder / "engine.yaml").write_text(json.dumps(engine))
    with start_server(folder, timeout_s=300) as server:
        arguments = ("--log-level", "warning", "--processes", "2")
        settings = FrontendSettings(
            recipe=str(folder), grpc=server.grpc, port=free_ports().http, drain_timeout_s=5, arguments=arguments
        )
        with FrontendProcess(settings, Console("warning")) as process:
            yield lambda client: asyncio.run(client(lambda *asked: EventStream.ask(process.address, *asked)))


class EventStream(asyncio.Protocol):
    """One streamed answer on a connection of its own, looked at as little as can be."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.seen = Seen(time.perf_counter())
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def ask(cls, address: str, prompt: list[int], num_tokens: int) -> Seen:
        """Raises ValueError where the answer is not whole."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        data = json.dumps(body | {"temperature": 0, "stream_options": {"include_usage": True}}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data
        host, _, port = address.rpartition(":")
        stream = cls(request)
        await asyncio.get_running_loop().create_connection(lambda: stream, host, int(port))
        await stream.done
        found = _USAGE.findall(stream._tail)
        if not found or int(found[-1]) != num_tokens:
            raise ValueError(f"{num_tokens} tokens asked for: {stream._tail[-300:].decode(errors='replace')}")
        stream.seen.num_tokens = num_tokens
        del stream.seen.times[-2:]  # the finish reason's usage and [DONE]
        return stream.seen

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.seen.times += [time.perf_counter()] * data.count(b"data: ")
        self._tail = (self._tail + data)[-2048:]

    def connection_lost(self, error: Exception | None) -> None:
        self.done.set_result(None)


@contextmanager
def vllm(folder: Path, options: argparse.Namespace) -> Any:
    """Start vLLM on the shape, with its defaults but for limits that are this engine's; yield what runs a client."""
    if not options.model:
        from benchmarks.engine_gpu import write_config

        write_config(str(folder), options.shape)

    async def serve(client: Any) -> None:
        from vllm import SamplingParams
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM

        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=options.model or str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
                gpu_memory_utilization=0.8, max_model_len=_MAX_SEQ_LEN, max_num_seqs=256, disable_log_stats=True,
            )
        )  # fmt: skip

        async def ask(prompt: list[int], num_tokens: int) -> Seen:
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
            params.output_kind = RequestOutputKind.DELTA
            seen = Seen(time.perf_counter())
            number = f"{seen.began_at}-{id(seen)}"
            async for output in engine.generate({"prompt_token_ids": prompt}, params, number):
                seen.times += [time.perf_counter()] * len(output.outputs[0].token_ids)
            return seen

        await client(ask)
        engine.shutdown()

    yield lambda client: asyncio.run(serve(client))


def line(found: dict[str, Any]) -> str:
    parts = [
        what + " " + " / ".join(format(found[f"{what}_p{quantile}_ms"], ".1f") for quantile in (50, 90, 99))
        for what in ("ttft", "tpot", "gap")
    ]
    return (
        f"{found['rate']:>4g} req/s: {', '.join(parts)} (max {found['gap_max_ms']:.0f}) ms p50/p90/p99,"
        f" {found['tokens_per_s']} tokens/s, goodput {found['goodput']}/s"
    )


def report(starts: list[dict[str, Any]], plot: str) -> None:
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for start in starts:
        for one in start["loads"]:
            found.setdefault((start["engine"], one["rate"]), []).append(one)
    for (engine, _), loads in sorted(found.items(), key=lambda item: (item[0][1], item[0][0])):
        for one in loads:
            print(f"{engine:9}", line(one))
    if plot:
        draw_plot(found, plot)
    print(json.dumps({"benchmark": "arrivals_served", "starts": starts}))
    for rate in COMPARED:
        ours, theirs = found.get(("frontend", rate), []), found.get(("vllm", rate), [])
        if ours and theirs:
            compare(rate, ours, theirs)
    knees = {engine: max(median(loads, "goodput") for (of, _), loads in found.items() if of == engine)
             for engine in {engine for engine, _ in found}}  # fmt: skip
    if len(knees) == len(ENGINES):
        aim("goodput at the knee, of vLLM's", knees["frontend"] / knees["vllm"], 1.0, at_least=True)
    compare_alone(starts)
    ours, theirs = (
        [start["in_flight"]["tokens_per_s"] for start in starts if start["engine"] == engine and "in_flight" in start]
        for engine in ENGINES
    )
    if ours and theirs:
        found_share = min(ours) / statistics.median(theirs)
        aim("tokens/s of requests let in at once, of vLLM's", found_share, AIM_IN_FLIGHT, at_least=True)


def compare_alone(starts: list[dict[str, Any]]) -> None:
    for length, asked in AIM_ALONE.items():
        ours, theirs = (
            [statistics.median(one["ttft_ms"]) for start in starts if start["engine"] == engine
             for one in start.get("alone", ()) if one["prompt"] == length]
            for engine in ENGINES
        )  # fmt: skip
        if ours and theirs:
            aim(f"TTFT of {length} tokens alone, of vLLM's", max(ours) / statistics.median(theirs), asked)


def compare(rate: float, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    def share(name: str) -> float:
        return worst(ours, name) / median(theirs, name)

    aim(f"TPOT p50 at {rate:g} req/s, of vLLM's", share("tpot_p50_ms"), AIM_TPOT)
    above = worst(ours, "ttft_p50_ms") - median(theirs, "ttft_p50_ms")
    aim(f"TTFT p50 at {rate:g} req/s above vLLM's, ms", above, AIM_TTFT_MS)
    if rate == COMPARED[-1]:
        for quantile in (90, 99):
            aim(f"gaps' p{quantile} at {rate:g} req/s, of vLLM's", share(f"gap_p{quantile}_ms"), AIM_GAPS)


def worst(loads: list[dict[str, Any]], name: str) -> float:
    return float(max(one[name] for one in loads))


def median(loads: list[dict[str, Any]], name: str) -> float:
    return float(statistics.median(one[name] for one in loads))


def aim(what: str, found: float, asked: float, *, at_least: bool = False) -> None:
    is_ok = found >= asked if at_least else found <= asked
    print(f"aim: {what} {found:.2f}, {asked:g} asked for: {'ok' if is_ok else 'BELOW'}")


def draw_plot(found: dict[tuple[str, float], list[dict[str, Any]]], path: str) -> None:
    """Write a PNG of medians over the rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {"TTFT p50, ms": "ttft_p50_ms", "time per output token p50, ms": "tpot_p50_ms",
              "gaps p99, ms": "gap_p99_ms", "goodput, requests/s": "goodput"}  # fmt: skip
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.4))
    for axis, (title, name) in zip(axes, panels.items(), strict=True):
        for engine in ENGINES:
            points = sorted((rate, median(loads, name)) for (of, rate), loads in found.items() if of == engine)
            if points:
                label = "bireme, OpenAI frontend" if engine == "frontend" else "vLLM, in process"
                axis.plot(*zip(*points, strict=True), marker="o", label=label)
        axis.set(title=title, xlabel="requests/s", ylim=(0, None))
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    actions = parser.add_subparsers(dest="action", required=True)
    measuring = actions.add_parser("measure", help="one start of one engine")
    measuring.add_argument("engine", choices=ENGINES)
    measuring.add_argument("file", help="JSON to which its loads are added")
    measuring.add_argument("--shape", default="8b", help="of benchmarks/engine_gpu.py")
    measuring.add_argument("--model", default="", help="a folder with config.json, if the shape is not to be written")
    measuring.add_argument("--rates", type=numbers(float), default=list(COMPARED), help="requests/s: 8,20,30")
    measuring.add_argument("--seconds", type=float, default=15.0, help="of each load")
    measuring.add_argument("--repeats", type=int, default=1, help="of the rates that are compared")
    measuring.add_argument("--alone", type=numbers(int), default=list(AIM_ALONE), help="tokens of prompts: 8192,32000")
    measuring.add_argument("--in-flight", type=int, default=256, help="requests at once; 0: not measured")
    measuring.add_argument("--quick", action="store_true", help="short requests, no figures worth having")
    reporting = actions.add_parser("report", help="a table, a plot and the aims")
    reporting.add_argument("file")
    reporting.add_argument("--plot", default="", help="PNG to write")
    options = parser.parse_args()
    if options.action == "measure" and options.quick:
        options.rates, options.seconds, options.alone, options.in_flight = [4.0], 4.0, [64], 4
    return options


if __name__ == "__main__":
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    main()
