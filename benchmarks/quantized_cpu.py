"""GGUF's blocks and 4-bit groups as files have them, on a CPU: products beside bfloat16's, serving beside llama.cpp.

Products: GB/s of weights that are read, and the time of bfloat16's packed product over the quantized one's, in turns.
Serving: both servers have the same file and threads and are asked in turns, over OpenAI's API, on a machine that does
nothing else: tokens/s of one stream and of eight, and milliseconds until the first token of a prompt that is new.

    python benchmarks/quantized_cpu.py                                          # products, a minute
    python benchmarks/quantized_cpu.py --model M.gguf --llama build/bin/llama-server
    python benchmarks/quantized_cpu.py --model M.gguf --urls http://127.0.0.1:9000 http://127.0.0.1:8080   # that run
    python benchmarks/quantized_cpu.py --quick                                  # to see that it runs
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
ENVIRONMENT = dict(os.environ)  # of the servers: llama.cpp's threads are half as fast where they wait passively
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as engines have it

import torch  # noqa: E402

from bireme.engines.torch import native  # noqa: E402
from bireme.engines.torch.forward import quantized_linear  # noqa: E402
from bireme.engines.torch.forward.quantized_linear import (  # noqa: E402
    FORMS,
    BlockRows,
    GroupRows,
    QuantizedLinear,
    StoredRows,
)
from bireme.launch.ports import free_port  # noqa: E402

START_S = 300.0
AIMS = {
    "one stream": 1.0,
    "eight streams": 1.4,
    "first token": 2.0,
}  # ours over theirs; of the first token's time inverse
WORDS = "alpha bravo carbon delta ember forest granite harbor island jungle kernel lagoon marble needle orchid".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file")
    parser.add_argument("--llama", help="llama.cpp's llama-server")
    parser.add_argument("--urls", nargs=2, metavar=("OURS", "THEIRS"), help="servers that run, in place of --llama")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.llama and not options.model:
        parser.error("--llama needs --model")
    if options.urls or options.llama:
        with contextlib.ExitStack() as stack:
            urls = options.urls or [stack.enter_context(start(options, is_ours)) for is_ours in (True, False)]
            compare(urls, options.rounds)
    else:
        products(options)


def products(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    library, _ = native.load()
    width, depth = (512, 512) if options.quick else (16384, 2048)
    weight = torch.randn(width, depth).bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    print(f"{width} x {depth}, {options.threads} threads, by {quantized_linear.instructions(library)}; load {load()}")
    for form, stored in made_up(width, depth):
        linear = QuantizedLinear([stored], None, library, torch.bfloat16, options.threads)
        for rows in (1, 8) if options.quick else (1, 2, 4, 8, 16, 64, 256):
            x = torch.randn(rows, depth).bfloat16()
            ours, theirs = in_turns(
                lambda x=x, own=linear: own(x),
                lambda x=x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""),
                3 if options.quick else 25,
            )
            print(
                f"{form} rows {rows:3}: {1e3 * ours:8.3f} ms, {linear.num_bytes / ours / 1e9:5.1f} GB/s;"
                f" bfloat16 {1e3 * theirs:8.3f} ms, {weight.nbytes / theirs / 1e9:5.1f} GB/s; x {theirs / ours:.2f}"
            )


def made_up(width: int, depth: int) -> Iterator[tuple[str, StoredRows]]:
    """Yield weights of each form that there are products with."""
    for form, what in FORMS.items():
        blocks = torch.randint(0, 256, (width, depth // 32 * what.block_bytes), dtype=torch.uint8)
        blocks.view(width, depth // 32, -1)[..., : 2 * what.num_scales] = 0x20  # scales of 0.008
        yield form, BlockRows(form, blocks)
    values = torch.randint(0, 16, (width, depth), dtype=torch.uint8)
    for group in (128, 32):
        scales = torch.full((width, depth // group), 0.008, dtype=torch.float16)
        yield f"INT4 of {group}", GroupRows(values, scales, torch.full_like(scales, 8))


def in_turns(ours: Callable[[], Any], theirs: Callable[[], Any], count: int) -> list[float]:
    """Return the least seconds of each."""
    taken: list[list[float]] = [[], []]
    for _ in range(count):
        for function, seconds in zip((ours, theirs), taken, strict=True):
            began = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - began)
    return [min(seconds) for seconds in taken]


@contextlib.contextmanager
def start(options: argparse.Namespace, is_ours: bool) -> Iterator[str]:
    port = free_port()
    if is_ours:
        command = [sys.executable, str(ROOT / "tools/serve.py"), "--model", options.model, "--openai-port", str(port)]
        for name in ("http", "grpc", "metrics", "health"):
            command += [f"--{name}-port", str(free_port())]
    else:
        command = [options.llama, "-m", options.model, "-t", str(options.threads), "-np", "8", "-c", "16384"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    try:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while not is_ready(url):
            if server.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{' '.join(command)} did not start")
            time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def is_ready(url: str) -> bool:
    try:
        stream(url, "Hello", 1)
    except (OSError, RuntimeError, http.client.HTTPException):
        return False
    return True


def compare(urls: list[str], rounds: int) -> None:
    found: dict[str, list[list[float]]] = {name: [[], []] for name in AIMS}
    for number in range(rounds):
        for place, url in enumerate(urls):
            seed = 100 * number + 10 * place
            first, seconds, tokens = stream(url, prompt(seed), 128)
            found["one stream"][place].append((tokens - 1) / (seconds - first))
            found["first token"][place].append(1 / stream(url, prompt(seed + 1), 1)[0])
            began = time.perf_counter()
            found["eight streams"][place].append(eight(url, seed) / (time.perf_counter() - began))
    print(f"load {load()}; {rounds} rounds in turns; medians (least to most)")
    for name, aim in AIMS.items():
        values = found[name]
        if name == "first token":
            values = [[1e3 / value for value in own] for own in values]
        texts = [f"{statistics.median(own):.1f} ({min(own):.1f} to {max(own):.1f})" for own in values]
        ratio = statistics.median(found[name][0]) / statistics.median(found[name][1])
        unit = "ms" if name == "first token" else "tokens/s"
        word = "ok" if ratio >= aim else "BELOW"
        print(f"aim: {name}, ours {texts[0]}, theirs {texts[1]} {unit}: {ratio:.2f}, {aim:g} asked for: {word}")


def eight(url: str, seed: int) -> int:
    """Return the tokens of eight streams at once."""
    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: counts.append(stream(url, prompt(seed + 2 + n), 128)[2])) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(counts) < len(threads):
        raise SystemExit(f"{url}: {len(threads) - len(counts)} of {len(threads)} streams failed")
    return sum(counts)


def prompt(seed: int) -> str:
    """Return about 150 tokens that no other seed has."""
    words = [WORDS[(seed * 7 + at * (seed % 5 + 3)) % len(WORDS)] for at in range(110)]
    return f"Tale {seed}: " + " ".join(words)


def stream(url: str, text: str, max_tokens: int) -> tuple[float, float, int]:
    """Return the seconds until the first token and the last, and how many there were. Raises RuntimeError."""
    place = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=120)
    try:
        model = json.loads(ask(connection, "GET", "/v1/models").read())["data"][0]["id"]
        body = {"model": model, "prompt": text, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        began, first, count = time.perf_counter(), 0.0, 0
        for line in ask(connection, "POST", "/v1/completions", body):
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if event.get("choices") and not first:
                first = time.perf_counter() - began
            count = (event.get("usage") or {}).get("completion_tokens", count)
        return first, time.perf_counter() - began, count
    finally:
        connection.close()


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
    headers = {"Content-Type": "application/json"}
    connection.request(method, path, json.dumps(body) if body is not None else None, headers)
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{path}: {response.status} {response.read()[:200]!r}")
    return response


def load() -> str:
    return " ".join(f"{value:.1f}" for value in os.getloadavg())


if __name__ == "__main__":
    main()
