"""What KV-aware routing is worth: the same conversations placed by what workers hold, and in turns.

Several decode workers on one tritonserver or two (which then find each other through a shared folder). Prompts of whole
conversations begin with a long prefix that some of them share; each turn adds a question and the answer to the last
one. All is sent to `generate` of the first server. Both modes run on the same servers, in turns, with prefixes of their
own, so that neither finds what the other has left. Then many requests with one new prefix come at once.

- TTFT as the client sees it
- computed: prompt tokens that no cache had, of all prompt tokens
- error: differences of the cached tokens predicted and found, summed over requests, over all prompt tokens
- spread: standard deviation over mean of the requests that each worker got

    python benchmarks/routing.py
    python benchmarks/routing.py --engine torch --prefix-tokens 512 --question-tokens 32 --herd 20

The table comes first, then the aims; the last line of stdout is one JSON document. Exit code 1 when a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

from benchmarks.load.meter import percentile
from benchmarks.options import chosen
from bireme.config import stage_of
from bireme.launch import Server, free_ports, start_server
from bireme.types import Tensors
from bireme.workers.grpc import GrpcChannel, infer_request, outputs_of

MODELS = {"mocker": "models/tiny-llama", "torch": "models/tiny-chat"}
MODES = ("kv", "round_robin")
AIM_TTFT, AIM_COMPUTED, AIM_ERROR = 0.15, 0.4, 0.02  # of the first two: over round robin's
AIM_HERD = 2  # times that a prefix is computed
MAX_ID = 400  # of prompts: words that every sample model knows


@dataclass(frozen=True, slots=True)
class Answered:
    """One request's figures."""

    ttft_s: float
    total_s: float  # until its last token
    prompt_tokens: int
    cached_tokens: int
    predicted_tokens: int | None
    worker: str
    output_ids: list[int]


@dataclass(slots=True)
class Figures:
    """Of all requests of one mode."""

    answers: list[Answered] = field(default_factory=list)

    @property
    def ttfts_ms(self) -> list[float]:
        return sorted(answer.ttft_s * 1000 for answer in self.answers)

    @property
    def computed_tokens(self) -> int:
        return sum(answer.prompt_tokens - answer.cached_tokens for answer in self.answers)

    def summary(self, mode: str, num_workers: int) -> dict[str, Any]:
        tokens = sum(answer.prompt_tokens for answer in self.answers)
        predicted = [one for one in self.answers if one.predicted_tokens is not None]
        errors = [abs(one.cached_tokens - (one.predicted_tokens or 0)) for one in predicted]
        counts = Counter(answer.worker for answer in self.answers)
        loads = [*counts.values(), *[0] * (num_workers - len(counts))]
        return {
            "mode": mode,
            "requests": len(self.answers),
            "ttft_p50_ms": percentile(self.ttfts_ms, 0.5),
            "ttft_p99_ms": percentile(self.ttfts_ms, 0.99),
            "prompt_tokens": tokens,
            "computed_tokens": self.computed_tokens,
            "computed": self.computed_tokens / tokens,
            "error": sum(errors) / sum(one.prompt_tokens for one in predicted) if predicted else None,
            "spread": statistics.pstdev(loads) / statistics.mean(loads),
        }


def main() -> None:
    options = parse()
    with contextlib.ExitStack() as stack:
        servers = start(options, stack)
        found = asyncio.run(measure(servers, options))
    for row in found["rows"]:
        error = "     -" if row["error"] is None else f"{100 * row['error']:5.2f}%"
        print(
            f"{row['mode']:12s} {row['requests']:5d} requests  TTFT {row['ttft_p50_ms']:7.1f} ms p50,"
            f" {row['ttft_p99_ms']:7.1f} p99  computed {100 * row['computed']:5.1f}%  error {error}"
            f"  spread {row['spread']:.2f}"
        )
    herd = found["herd"]
    print(f"{herd['requests']} requests with one new prefix at once: computed {herd['times_computed']:.2f} times")
    for text in aims(found):
        print(text)
    machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    print(json.dumps({"benchmark": "routing", "engine": options.engine, "servers": options.servers} | found | machine))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=MODELS, default="mocker")
    parser.add_argument("--modes", type=chosen(MODES), default=list(MODES))
    parser.add_argument("--servers", type=int, choices=(1, 2), default=2)
    parser.add_argument("--workers", type=int, default=2, help="of each server")
    parser.add_argument("--prefixes", type=int, default=8, help="of each round and mode")
    parser.add_argument("--conversations", type=int, default=2, help="with each prefix")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prefix-tokens", type=int, default=4096)
    parser.add_argument("--question-tokens", type=int, default=64)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--streams", type=int, default=6, help="conversations at a time")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--herd", type=int, default=80)
    parser.add_argument("--step-ms", type=float, default=5.0, help="of the mocker")
    parser.add_argument("--prefill-ms-per-token", type=float, default=0.5, help="of the mocker")
    return parser.parse_args()


def start(options: argparse.Namespace, stack: contextlib.ExitStack) -> list[Server]:
    """Start the servers, which end with `stack`; each knows the others' workers when this returns."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(options, folder)))
    key = secrets.token_hex(32)
    servers: list[Server] = []
    for _ in range(options.servers):
        ports = free_ports()
        env = {"BIREME_KEY": key, "BIREME_ADVERTISE": f"127.0.0.1:{ports.grpc}"}
        servers.append(stack.enter_context(start_server(folder, ports=ports, env=env)))
    return servers


def recipe(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    engine: dict[str, Any] = {"max_batch_size": 256, "kv_cache_config": {"max_tokens": 1 << 20}}
    if options.engine == "mocker":
        pace = {"step_ms": options.step_ms, "prefill_ms_per_token": options.prefill_ms_per_token}
        engine["mocker"] = pace
    else:
        longest = options.prefix_tokens + options.turns * (options.question_tokens + options.answer_tokens) + 64
        engine |= {"max_batch_size": 64, "max_num_tokens": 1024, "max_seq_len": longest, "dtype": "float32"}
        engine["kv_cache_config"] = {"max_tokens": 16 * longest}
    tree: dict[str, Any] = {
        "model": MODELS[options.engine],
        "workers": {"decode": {"engine": options.engine, "replicas": options.workers, "engine_config": engine}},
        "router": {"mode": "kv"},
    }
    if options.servers > 1:
        shared = folder / "shared"
        shared.mkdir(mode=0o700)
        tree["discovery"] = {"backend": "directory", "folder": str(shared)}
    return tree


async def measure(servers: list[Server], options: argparse.Namespace) -> dict[str, Any]:
    channel = GrpcChannel(servers[0].grpc)
    num_workers = options.servers * options.workers
    draw = np.random.default_rng(7)
    try:
        await every_worker_is_known(channel, num_workers, draw)
        figures = {mode: Figures() for mode in options.modes}
        for _ in range(options.rounds):
            for mode in options.modes:
                figures[mode].answers += await converse(channel, mode, options, draw)
        rows = [figures[mode].summary(mode, num_workers) for mode in options.modes]
        return {"rows": rows, "herd": await herd(channel, options, draw)}
    finally:
        await channel.close()


async def every_worker_is_known(channel: GrpcChannel, num_workers: int, draw: np.random.Generator) -> None:
    """Ask in turns until all workers have answered."""
    seen: set[str] = set()
    until = time.monotonic() + 60
    while len(seen) < num_workers:
        if time.monotonic() > until:
            raise SystemExit(f"only {sorted(seen)} of {num_workers} workers have answered in 60 s")
        seen.add((await ask(channel, prompt_of(64, draw), 1, "round_robin")).worker)
        assert all(stage_of(worker) == "decode" for worker in seen)


async def converse(
    channel: GrpcChannel, mode: str, options: argparse.Namespace, draw: np.random.Generator
) -> list[Answered]:
    """Hold all conversations of a round, `streams` at a time."""
    prefixes = [prompt_of(options.prefix_tokens, draw) for _ in range(options.prefixes)]
    begun = [prefix for _ in range(options.conversations) for prefix in prefixes]
    questions = [[prompt_of(options.question_tokens, draw) for _ in range(options.turns)] for _ in begun]
    gate, answers = asyncio.Semaphore(options.streams), list[Answered]()

    async def hold(prompt: list[int], asked: list[list[int]]) -> None:
        async with gate:
            for question in asked:
                prompt = [*prompt, *question]
                answer = await ask(channel, prompt, options.answer_tokens, mode)
                answers.append(answer)
                prompt = [*prompt, *answer.output_ids]

    await asyncio.gather(*(hold(*pair) for pair in zip(begun, questions, strict=True)))
    return answers


async def herd(channel: GrpcChannel, options: argparse.Namespace, draw: np.random.Generator) -> dict[str, Any]:
    prefix = prompt_of(options.prefix_tokens, draw)
    prompts = [prefix + prompt_of(8, draw) for _ in range(options.herd)]
    answers = await asyncio.gather(*(ask(channel, prompt, 2, "kv") for prompt in prompts))
    computed = Figures(list(answers)).computed_tokens
    return {
        "requests": len(answers),
        "workers": len({answer.worker for answer in answers}),
        "computed_tokens": computed,
        "times_computed": sum(answer.cached_tokens < options.prefix_tokens // 2 for answer in answers),
    }


async def ask(channel: GrpcChannel, prompt: list[int], num_tokens: int, mode: str | None = None) -> Answered:
    """`mode`: of the router; None: the recipe's."""
    inputs: dict[str, Any] = {
        "input_ids": np.array(prompt, np.int32),
        "max_tokens": np.array([num_tokens], np.int32),
        "ignore_eos": np.array([True]),
        "stream": np.array([True]),
    }
    if mode is not None:
        inputs["routing"] = json.dumps({"mode": mode}).encode()
    began, first, last, ids, usage = time.monotonic(), 0.0, 0.0, list[int](), dict[str, Any]()
    call = channel.stream()
    await call.write(infer_request("generate", inputs))
    await call.done_writing()
    async for response in call:
        if response.error_message:
            raise SystemExit(f"a request failed: {response.error_message}")
        outputs: Tensors = outputs_of(response.infer_response)
        if "output_ids" in outputs and outputs["output_ids"].size:
            last = time.monotonic()
            first = first or last
            ids += outputs["output_ids"].tolist()
        if "usage" in outputs and outputs["usage"].size and (text := bytes(outputs["usage"].reshape(-1)[0])):
            usage = json.loads(text)
    if not usage or len(ids) != num_tokens:
        raise SystemExit(f"a request ended with {len(ids)} of {num_tokens} tokens")
    return Answered(
        first - began, last - began, usage["prompt_tokens"], usage["cached_tokens"],
        usage["predicted_cached_tokens"], usage["decode_worker"], ids,
    )  # fmt: skip


def prompt_of(num_tokens: int, draw: np.random.Generator) -> list[int]:
    ids: list[int] = draw.integers(5, MAX_ID, num_tokens).tolist()
    return ids


def aims(found: dict[str, Any]) -> Iterable[str]:
    rows = {row["mode"]: row for row in found["rows"]}
    if set(MODES) <= rows.keys():
        ours, turns = rows["kv"], rows["round_robin"]
        yield aim("TTFT p50 over round robin's", ours["ttft_p50_ms"] / turns["ttft_p50_ms"], AIM_TTFT)
        yield aim(
            "computed tokens over round robin's", ours["computed_tokens"] / turns["computed_tokens"], AIM_COMPUTED
        )
    if "kv" in rows:
        yield aim("error of the predicted cached tokens", rows["kv"]["error"], AIM_ERROR)
    yield aim("times that a burst computes its prefix", found["herd"]["times_computed"], AIM_HERD)


def aim(what: str, figure: float, limit: float) -> str:
    return f"aim: {what} {figure:.3f}, at most {limit:g}: {'ok' if figure <= limit else 'MISSED'}"


if __name__ == "__main__":
    main()
