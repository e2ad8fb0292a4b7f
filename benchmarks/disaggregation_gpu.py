"""What a second GPU for prefill is worth: one engine that does both, against prefill and decode on a GPU each.

Both are served at once, by a tritonserver of their own, and asked through `generate` in turns, on random weights of a
Llama-like shape; the client is this process. The first GPU has the engine that does both (`aggregated`) and prefill's,
the second decode's. A first round of each warms up and is not counted.

- TTFT: prompts of 8,192 tokens, one at a time; `prefill` and `transfer` as the engines tell them
- in flight: tokens/s of 256 requests of 512/128, 64 of them under way at any time
- at once: the same of 64 that are sent together: the last waits until all others are prefilled, and then has all its
  steps before it, so a second GPU can save little
- gaps: between responses of 16 running streams, before and while prompts of 8,192 tokens come one after the other

Those of the second way name their prefill worker, so all of them are transferred. Then the router decides, too, by what
the engines have measured (`measured`, the same server as the second way):

- of each length: TTFT and the second token of one prompt at a time
- arrivals: TTFT and time per output token where requests come at random (Poisson, lengths as chats have them)

Before that both answer the same eight prompts, and must say the same, token by token.

    python benchmarks/disaggregation_gpu.py                # 8B shape, two GPUs
    python benchmarks/disaggregation_gpu.py --gpus 1       # all engines on one GPU
    python benchmarks/disaggregation_gpu.py --quick        # also without a GPU, to see that it runs

The table comes first, then one line of JSON, then the aims.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

from benchmarks.load.meter import percentile
from benchmarks.options import numbers
from benchmarks.serving_gpu import NAME, write_model
from bireme.engines.stub.environment import find_python
from bireme.launch import start_server
from bireme.workers.grpc import GrpcChannel, infer_request, outputs_of

WAYS = ("aggregated", "disaggregated")
ALL_WAYS = {"aggregated": "aggregated", "disaggregated": "disaggregated", "measured": "disaggregated"}  # way: server
_STREAM_TOKENS = 4096  # that running streams ask for, more than they live to get: KV for all of them is there
AIM_TTFT, AIM_RATE, AIM_GAPS = 1.15, 1.3, 1.5
AIM_IDLE, AIM_IDLE_MS = 1.05, 2.0  # measured over aggregated, one at a time: this, or so much more
AIM_ARRIVALS = 1.03  # measured over the better of the others
NUM_ANSWERS = 8  # that are compared
NUM_TTFTS = 5  # of a round
Figures = dict[str, dict[str, list[float]]]  # what was measured, way, a value of each round


def main() -> None:
    options = parse()
    if options.write_model:
        write_model(options.write_model, options.shape)
        return
    with tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder, contextlib.ExitStack() as stack:
        model = Path(folder) / "model"
        command = [find_python(), __file__, "--write-model", str(model), "--shape", options.shape]
        subprocess.run(command, check=True)  # where transformers is
        recipes = {way: write_recipe(model, way, options) for way in WAYS}
        servers = {way: stack.enter_context(start_server(recipe, timeout_s=600)) for way, recipe in recipes.items()}
        found = asyncio.run(measure({way: server.grpc for way, server in servers.items()}, options))
    report(found, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="8b", help="of benchmarks/engine_gpu.py")
    parser.add_argument("--gpus", type=int, choices=(0, 1, 2), default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", default="CUDA_IPC", help="of the transfer")
    parser.add_argument("--requests", type=int, default=64, help="of 512/128")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of the long prompts")
    parser.add_argument("--seconds", type=float, default=4, help="of the streams, undisturbed and with long prompts")
    parser.add_argument("--quick", action="store_true", help="tiny shape, no GPU, one round of a few requests of 64/16")
    parser.add_argument("--lengths", type=numbers(int), default=[16, 128, 256, 512, 2048, 8192], help="16,128,256")
    parser.add_argument(
        "--rates", type=numbers(float), default=[8.0, 20.0, 30.0], help="of arrivals, requests a second"
    )
    parser.add_argument("--arrival-seconds", type=float, default=12, help="of each rate and way")
    parser.add_argument("--write-model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.shape, options.gpus, options.backend, options.rounds = "tiny", 0, "DEFAULT", 1
        options.requests, options.streams, options.prompt, options.seconds = 4, 2, 200, 0.5
        options.lengths, options.rates, options.arrival_seconds = [16, 200], [4.0], 1.0
    options.inputs, options.outputs = (64, 16) if options.quick else (512, 128)
    return options


def write_recipe(model: Path, way: str, options: argparse.Namespace) -> Path:
    folder = model.parent / way
    folder.mkdir()
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_batch_size": max(options.requests, options.streams + 4),
        "max_seq_len": options.prompt + _STREAM_TOKENS,
        "kv_cache_config": {"tokens_per_block": 32, "max_tokens": 8 * (options.prompt + _STREAM_TOKENS)},
    }
    workers = {"decode": 0}
    if way == "disaggregated":
        workers = {"prefill": 0, "decode": options.gpus - 1}
        settings["cache_transceiver_config"] = {"backend": options.backend}
    entries = {
        stage: {"engine": "torch", "engine_config": "engine.yaml"} | ({"devices": [gpu]} if options.gpus else {})
        for stage, gpu in workers.items()
    }
    (folder / "engine.yaml").write_text(json.dumps(settings))
    recipe = {"model": str(model), "served_model_name": NAME, "workers": entries}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder


async def measure(targets: dict[str, str], options: argparse.Namespace) -> Figures:
    channels = {way: GrpcChannel(target) for way, target in targets.items()}
    found: Figures = defaultdict(lambda: defaultdict(list))
    draw = np.random.default_rng(7)
    try:
        await compare(list(channels.values()), draw, options)
        for round_number, way in itertools.product(range(options.rounds + 1), WAYS):
            client = Client(channels[way], draw, options, way)
            figures = {
                **await client.ttft(),
                "at once, tokens/s": await client.rate(options.requests),
                "in flight, tokens/s": await client.rate(4 * options.requests),
                **await client.gaps(),
            }
            texts = (f"{name} {value:.2f}" for name, value in figures.items())
            print(f"round {round_number}, {way}: {'; '.join(texts)}", flush=True)
            for name, value in figures.items() if round_number else ():
                found[name][way].append(value)
        clients = {way: Client(channels[server], draw, options, way) for way, server in ALL_WAYS.items()}
        for turn, (way, client) in itertools.product(range(2), clients.items()):
            for name, value in (await client.lengths()).items() if turn else ():
                found[name][way].append(value)
        for rate, (way, client) in itertools.product(options.rates, clients.items()):
            for name, value in (await client.arrivals(rate)).items():
                found[name][way].append(value)
    finally:
        for channel in channels.values():
            await channel.close()
    return found


async def compare(channels: list[GrpcChannel], draw: np.random.Generator, options: argparse.Namespace) -> None:
    """Raises SystemExit where two servers answer differently."""
    for number in range(NUM_ANSWERS):
        prompt = draw.integers(10, 500, options.inputs * (1 + number)).astype(np.int32)
        answers = [await ask(channel, prompt, options.outputs) for channel in channels]
        if any(answer.ids != answers[0].ids for answer in answers):
            raise SystemExit(f"a prompt of {len(prompt)} tokens is answered differently: {answers}")


@dataclass(frozen=True, slots=True)
class Answer:
    ids: list[int]
    times: list[float]  # when each came, by perf_counter; those of one response at once
    usage: dict[str, Any]


async def ask(
    channel: GrpcChannel,
    prompt: npt.NDArray[np.int32],
    num_tokens: int,
    came: Callable[[float], object] = lambda _: None,
    is_transferred: bool = False,
) -> Answer:
    """`came` is told when each response comes. `is_transferred`: it names its prefill worker. Raises SystemExit."""
    routing = {"routing": np.array([b'{"prefill_worker": "prefill"}'], object)} if is_transferred else {}
    inputs = routing | {
        "input_ids": prompt,
        "max_tokens": np.array([num_tokens], np.int32),
        "ignore_eos": np.array([True]),
        "stream": np.array([True]),
    }
    answer = Answer([], [], {})
    call = channel.stream()
    try:
        await call.write(infer_request("generate", inputs))
        await call.done_writing()
        async for response in call:
            if response.error_message:
                raise SystemExit(f"a request failed: {response.error_message}")
            outputs = outputs_of(response.infer_response)
            if "usage" in outputs and outputs["usage"].size:
                answer.usage.update(json.loads(bytes(outputs["usage"].reshape(-1)[0])))
            if "output_ids" in outputs and (ids := outputs["output_ids"]).size:
                now = time.perf_counter()
                answer.ids.extend(ids.tolist())
                answer.times.extend([now] * ids.size)
                came(now)
    finally:
        call.cancel()
    if len(answer.ids) != num_tokens:
        raise SystemExit(f"a request ended with {len(answer.ids)} of {num_tokens} tokens")
    return answer


class Client:
    """Of one server."""

    def __init__(self, channel: GrpcChannel, draw: np.random.Generator, options: argparse.Namespace, way: str) -> None:
        self._channel, self._draw, self._options = channel, draw, options
        self._is_transferred = way == "disaggregated"

    async def ttft(self) -> dict[str, float]:
        """Return medians in ms of a few long prompts."""
        found = defaultdict(list)
        for _ in range(NUM_TTFTS):
            began = time.perf_counter()
            answer = await self._ask(self._options.prompt, 2)
            found["TTFT, ms"].append(1e3 * (answer.times[0] - began))
            for stage in ("prefill", "transfer"):
                found[f"{stage}, ms"].append(answer.usage[f"{stage}_ms"])
        return {name: statistics.median(values) for name, values in found.items()}

    async def rate(self, count: int) -> float:
        """Return tokens/s of so many requests, as many under way as the options say."""
        asked, most = self._options, asyncio.Semaphore(self._options.requests)

        async def one() -> None:
            async with most:
                await self._ask(asked.inputs, asked.outputs)

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(count)))
        return count * asked.outputs / (time.perf_counter() - began)

    async def gaps(self) -> dict[str, float]:
        """Return p99 and median in ms between two responses of a stream, undisturbed and while long prompts come."""
        asked, times = self._options, [list[float]() for _ in range(self._options.streams)]
        streams = [asyncio.create_task(self._ask(asked.inputs, _STREAM_TOKENS, at.append)) for at in times]
        try:
            await _until(lambda: all(len(at) > 20 for at in times), streams)
            bounds = [time.perf_counter()]
            await asyncio.sleep(asked.seconds)
            bounds.append(time.perf_counter())
            num_long = 0
            while time.perf_counter() < bounds[1] + asked.seconds:
                await self._ask(asked.prompt, 2)
                num_long += 1
            bounds.append(time.perf_counter())
            if ended := [task for task in streams if task.done()]:
                raise SystemExit(f"{len(ended)} streams ended before they were measured")
        finally:
            for task in streams:
                task.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        found = {"long prompts/s": num_long / (bounds[2] - bounds[1])}
        for name, (begin, end) in zip(("undisturbed", "disturbed"), itertools.pairwise(bounds), strict=True):
            gaps = sorted(
                1e3 * (late - soon) for at in times for soon, late in itertools.pairwise(at) if begin < late <= end
            )
            for what, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
                found[f"{name} gap {what}, ms"] = percentile(gaps, share) or 0.0
        return found

    async def lengths(self) -> dict[str, float]:
        """Return medians in ms of first and second tokens, one prompt at a time."""
        found = {}
        for length in self._options.lengths:
            began, times = [], []
            for _ in range(NUM_TTFTS):
                began.append(time.perf_counter())
                times.append((await self._ask(length, 3)).times)
            for at, what in enumerate(("first", "second")):
                taken = [1e3 * (of_one[at] - start) for start, of_one in zip(began, times, strict=True)]
                found[f"{length}: {what} token, ms"] = statistics.median(taken)
        return found

    async def arrivals(self, rate: float) -> dict[str, float]:
        """Return medians in ms of what requests see that come at this rate; the same for each way."""
        random, scale = np.random.default_rng(int(rate)), 0.05 if self._options.quick else 1.0
        first, later = [], []

        async def one() -> None:
            drawn = (random.lognormal(np.log(mean * scale) - 0.32, 0.8) for mean in (235, 200))
            inputs, outputs = (int(min(max(number, 4), 1500 * scale)) for number in drawn)
            began = time.perf_counter()
            times = (await self._ask(inputs, outputs)).times
            first.append(times[0] - began)
            later.append((times[-1] - times[0]) / (len(times) - 1))

        tasks, ends = [], time.perf_counter() + self._options.arrival_seconds
        while time.perf_counter() < ends:
            tasks.append(asyncio.create_task(one()))
            await asyncio.sleep(random.exponential(1 / rate))
        await asyncio.gather(*tasks)
        return {
            f"{rate:g}/s: TTFT p50, ms": 1e3 * statistics.median(first),
            f"{rate:g}/s: TPOT p50, ms": 1e3 * statistics.median(later),
        }

    async def _ask(self, num_inputs: int, num_tokens: int, came: Callable[[float], object] = lambda _: None) -> Answer:
        """Send a prompt that nobody has seen."""
        prompt = self._draw.integers(10, 500, num_inputs).astype(np.int32)
        return await ask(self._channel, prompt, num_tokens, came, self._is_transferred)


async def _until(is_true: Callable[[], bool], tasks: list[asyncio.Task[Any]]) -> None:
    while not is_true():
        for task in tasks:
            if task.done():
                task.result()  # raises what ended it
        await asyncio.sleep(0.01)


def report(found: Figures, options: argparse.Namespace) -> None:
    middle = {name: {way: statistics.median(values) for way, values in ways.items()} for name, ways in found.items()}
    print(f"{'':24}" + "".join(f"{way:>34}" for way in ALL_WAYS))
    for name, ways in found.items():
        texts = (f"{middle[name][way]:,.2f} ({min(of_way):,.2f} to {max(of_way):,.2f})" for way, of_way in ways.items())
        print(f"{name:24}" + "".join(f"{text:>34}" for text in texts))
    machine = {"cores": os.cpu_count(), "options": {key: str(value) for key, value in vars(options).items()}}
    print(json.dumps({"benchmark": "disaggregation_gpu", "figures": found} | machine))
    first, second = WAYS
    ttft = middle["TTFT, ms"][second] / middle["TTFT, ms"][first]
    print(f"aim: TTFT over aggregated's {ttft:.2f}, at most {AIM_TTFT:g} asked for: {_word(ttft <= AIM_TTFT)}")
    for what, asked in (("in flight", AIM_RATE), ("at once", None)):
        rate = middle[f"{what}, tokens/s"][second] / middle[f"{what}, tokens/s"][first]
        end = f", {asked:g} asked for: {_word(rate >= asked)}" if asked else ""
        print(f"aim: tokens/s {what} over aggregated's {rate:.2f}{end}")
    gaps = middle["disturbed gap p99, ms"][second] / middle["undisturbed gap p99, ms"][second]
    print(
        f"aim: gaps' p99 over undisturbed ones' {gaps:.2f}, at most {AIM_GAPS:g} asked for: {_word(gaps <= AIM_GAPS)}"
    )
    for name, ways in middle.items():
        if "measured" not in ways or "TTFT" in name:
            continue
        is_idle, others = "token" in name, [ways["aggregated"], ways["disaggregated"]]
        best = others[0] if is_idle else min(others)
        most = max(AIM_IDLE * best, best + AIM_IDLE_MS) if is_idle else AIM_ARRIVALS * best
        print(f"aim: {name}, measured {ways['measured']:.2f}, {most:.2f} asked for: {_word(ways['measured'] <= most)}")


def _word(is_met: bool) -> str:
    return "ok" if is_met else "BELOW"


if __name__ == "__main__":
    main()
