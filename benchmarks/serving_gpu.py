"""What serving costs beside a real engine: tokens/s of one engine in process, through `generate`, through the frontend.

A round is 64 requests of 512 tokens in and 128 out, all sent at once: its tokens over the time until the last one is
there. In process the engine is stepped by the program itself; served, it stands behind tritonserver (gRPC, one stream a
request) and the OpenAI frontend (completions, streamed), whose clients share the machine's cores. Random weights of a
Llama-like shape; prompts differ in each round; a first round of each way warms up and is not counted.

    python benchmarks/serving_gpu.py                       # 8B shape, about two minutes on a GPU
    python benchmarks/serving_gpu.py --shape tiny --quick  # also without a GPU, to see that it runs

The table comes first, then one line of JSON, then the aims.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from bireme.engines.stub.environment import find_python
from bireme.launch import free_ports, start_server
from bireme.launch.console import Console
from bireme.launch.frontend import FrontendProcess, FrontendSettings

CHECKOUT = Path(__file__).resolve().parents[1]
AIM = 0.95  # of the engine in process
NAME = "bench"
WAYS = ("generate", "frontend")
_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
Prompt = npt.NDArray[np.int32]


def main() -> None:
    options = parse()
    if options.in_process:
        print(json.dumps(in_process(options)))
        return
    with tempfile.TemporaryDirectory(prefix="bireme-bench-", dir=options.folder) as folder:
        options.in_process = Path(folder) / "model"
        alone = json.loads(run_in_process(options).splitlines()[-1])
        rates = {"in process": alone["rates"], **served(Path(folder), options)}
    report(rates, alone["device"], options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="8b", help="of benchmarks/engine_gpu.py")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="4 requests of 64/16")
    parser.add_argument("--folder", help="for temporary files")
    parser.add_argument("--in-process", type=Path, help=argparse.SUPPRESS)  # make the model there, and run the engine
    options = parser.parse_args()
    if options.quick:
        options.requests = 4
    options.inputs, options.outputs = (64, 16) if options.quick else (512, 128)
    return options


def prompts(options: argparse.Namespace, seed: int) -> list[Prompt]:
    random = np.random.default_rng(seed)
    return [random.integers(10, 500, options.inputs).astype("<i4") for _ in range(options.requests)]


def engine_config(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_batch_size": max(options.requests, 4),
        "max_seq_len": 1024,
        "kv_cache_config": {"tokens_per_block": 32, "max_tokens": 1024 * options.requests},
    }


def run_in_process(options: argparse.Namespace) -> str:
    """Run this program where torch is."""
    command = [find_python(), __file__, "--in-process", options.in_process]
    command += ["--shape", options.shape, "--requests", options.requests, "--rounds", options.rounds]
    command += ["--quick"] if options.quick else []
    return subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True).stdout


def in_process(options: argparse.Namespace) -> dict[str, Any]:
    """Write the model's folder and return tokens/s of each round."""
    import torch

    from bireme.config import EngineConfig, Limits
    from bireme.conversion import convert
    from bireme.engines.base import EngineContext
    from bireme.engines.child.validate import Gate
    from bireme.engines.torch.loading import LoadedEngine
    from bireme.messages import EngineRequest, SamplingParams
    from bireme.metrics import Registry

    folder = options.in_process
    write_model(folder, options.shape)
    config = convert(engine_config(options), EngineConfig)
    loaded = LoadedEngine(EngineContext(NAME, "decode", str(folder), config, Registry(NAME)), lambda act: act())
    gate, core = Gate("decode", loaded.capacity, Limits(), b""), loaded.core
    sampling = SamplingParams(max_tokens=options.outputs, ignore_eos=True)
    rates = []
    for seed in range(options.rounds + 1):
        began, num_tokens = time.perf_counter(), 0
        for number, prompt in enumerate(prompts(options, seed)):
            admitted = gate.admit(EngineRequest(prompt=prompt.tobytes(), sampling=sampling))
            core.requests.add(loaded.admission.admit((seed, number), admitted))
        while not core.is_empty:
            core.step()
            outputs, plain = core.take_outputs()
            num_tokens += len(plain.tokens) + sum(len(output.tokens) for output in outputs)
        rates.append(num_tokens / (time.perf_counter() - began))
    return {"rates": rates[1:], "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"}


def write_model(folder: Path, shape: str) -> None:
    """Write a model's configuration and tokenizer, which an engine fills with random weights. Needs transformers."""
    from benchmarks.engine_gpu import write_config

    write_config(str(folder), shape)
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    """Give each id of the model's a text: that of the sample model's tokenizer, or a word with its number."""
    from make_sample_model import make

    source = make(CHECKOUT / "models" / "tiny-llama", "llama")
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    words: dict[str, int] = tokenizer["model"]["vocab"]
    first = max([*words.values(), *(token["id"] for token in tokenizer["added_tokens"])]) + 1
    words.update({f"Ġw{number}": number for number in range(first, size)})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text((source / "tokenizer_config.json").read_text())


def served(folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return tokens/s of each round, by way."""
    recipe = {
        "model": str(folder / "model"),
        "served_model_name": NAME,
        "workers": {"decode": {"engine": "torch", "engine_config": "engine.yaml"}},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    (folder / "engine.yaml").write_text(json.dumps(engine_config(options)))
    with start_server(folder, timeout_s=300) as server:
        port = free_ports().http
        settings = FrontendSettings(
            recipe=str(folder), grpc=server.grpc, port=port, drain_timeout_s=5, arguments=("--log-level", "warning")
        )
        with FrontendProcess(settings, Console("warning")) as frontend:
            ways = {"generate": (grpc_request, server.grpc), "frontend": (sse_request, frontend.address)}
            return {
                way: [
                    asyncio.run(rate(*ways[way], prompts(options, 100 * number + seed), options))
                    for seed in range(options.rounds + 1)
                ][1:]
                for number, way in enumerate(WAYS, 1)
            }


async def rate(
    request: Callable[[str, Prompt, int], Awaitable[int]],
    target: str,
    asked: Sequence[Prompt],
    options: argparse.Namespace,
) -> float:
    """Send all at once; return tokens/s until the last is there. Raises ValueError."""
    began = time.perf_counter()
    counts = await asyncio.gather(*(request(target, prompt, options.outputs) for prompt in asked))
    seconds = time.perf_counter() - began
    if set(counts) != {options.outputs}:
        raise ValueError(f"{options.outputs} tokens were asked for, {sorted(set(counts))} came")
    return sum(counts) / seconds


async def grpc_request(target: str, prompt: Prompt, num_tokens: int) -> int:
    """Return how many tokens came. Raises InferenceServerException."""
    import tritonclient.grpc.aio as grpc

    inputs = []
    for name, kind, value in (
        ("input_ids", "INT32", prompt),
        ("max_tokens", "INT32", np.array([num_tokens], np.int32)),
        ("ignore_eos", "BOOL", np.array([True])),
        ("stream", "BOOL", np.array([True])),
    ):
        inputs.append(grpc.InferInput(name, list(value.shape), kind))
        inputs[-1].set_data_from_numpy(value)

    async def ask() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "generate", "inputs": inputs}

    count = 0
    async with grpc.InferenceServerClient(target) as client:
        async for result, error in client.stream_infer(ask()):
            if error is not None:
                raise error
            count += len(result.as_numpy("output_ids"))
            reason = result.as_numpy("finish_reason")
            if reason is not None and reason.size and reason.reshape(-1)[0]:
                break
    return count


async def sse_request(target: str, prompt: Prompt, num_tokens: int) -> int:
    """Return the number of tokens that the answer's usage tells. Raises ValueError."""
    body = {"model": NAME, "prompt": prompt.tolist(), "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    data = json.dumps({**body, "stream_options": {"include_usage": True}}).encode()
    host, _, port = target.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {target}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    answer = await reader.read()
    writer.close()
    if not (found := _USAGE.findall(answer)):
        raise ValueError(f"frontend: {answer[:500].decode(errors='replace')}")
    return int(found[-1])


def report(rates: dict[str, list[float]], device: str, options: argparse.Namespace) -> None:
    print(
        f"{options.shape} shape, {device}: {options.requests} requests of {options.inputs}/{options.outputs}, tokens/s"
    )
    alone = statistics.median(rates["in process"])
    for way, found in rates.items():
        middle = statistics.median(found)
        print(f"{way:12} {middle:9,.0f} ({min(found):,.0f} to {max(found):,.0f}) {middle / alone:7.1%}")
    print(json.dumps({"benchmark": "serving_gpu", "device": device, "shape": options.shape, "tokens_per_s": rates}))
    for way in WAYS:
        share = statistics.median(rates[way]) / alone
        word = "ok" if share >= AIM else "BELOW"
        print(f"aim: {way} {share:.1%} of the engine in process, {AIM:.0%} asked for: {word}")


if __name__ == "__main__":
    main()
