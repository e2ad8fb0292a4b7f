"""What holding calls to their schemas costs an answer that may have some: ten tools, `chat.structural_tags` on and off.

- served: TTFT and the time of the whole answer, of the same chats to two servers in turns, one with tags and one
  without, all tools known to the engine; `new_tools` is the TTFT of the first chat with other tools, whose guide is
  compiled first
- compile: a guide of ten tools for a vocabulary as large as real models have, in a helper process that runs already
- sampler: one token of --rows rows of that vocabulary, without a guide, free, and within a call

    python benchmarks/structural_tags.py
    python benchmarks/structural_tags.py --requests 20 --vocab 50000

Tables come first, then one line of JSON, then the aims.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import queue
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

from benchmarks.contenders.endpoint import Endpoint
from benchmarks.contenders.ours import served
from bireme.config import GuidedDecodingConfig, Limits
from bireme.guides import Trigger, parse_guide
from bireme.logits.guided.compiler import GuideCompiler
from bireme.logits.guided.triggered import TriggeredGuidance
from bireme.logits.guided.vocabulary import TokenTable, make_table
from bireme.logits.sampler import Sampler
from bireme.messages import SamplingParams
from bireme.text.parsers import TOOLS

AIM_TTFT, AIM_ANSWER = 1.1, 1.05  # with tags over without
NUM_TOOLS, WARM_UP, EOS, MARK = 10, 5, 0, 1
QUESTION = "What is 27 + 35?"
SETTINGS = {"workers": {"decode": {"engine_config": {"max_seq_len": 2048, "max_num_tokens": 2048}}}}  # tools are long


def main() -> None:
    options = parse()
    names = ("without", "with tags")
    with contextlib.ExitStack() as stack:
        endpoints = [
            stack.enter_context(
                served("tiny-chat", SETTINGS | {"chat": {"structural_tags": on}}, options.port + 10 * on)
            )
            for on in (False, True)
        ]
        rows = measure(endpoints, options)
    for name, row in zip(names, rows, strict=True):
        print(f"served {name:10}" + "".join(f"  {figure} {value:.3f}" for figure, value in row.items()))
    table = vocabulary(options.vocab)
    compiled, seconds = compile_tools(table, options.guides)
    print(f"compile  {options.vocab} tokens, {NUM_TOOLS} tools: {seconds * 1e3:.0f} ms")
    steps = sampler_steps(table, compiled, options.rows, options.steps)
    for name, microseconds in steps.items():
        print(f"sampler  {options.rows} rows, {name}: {microseconds:.0f} us of CPU a row")
    machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    found = {"served": dict(zip(names, rows, strict=True)), "compile_s": seconds, "sampler_us": steps}
    print(json.dumps({"benchmark": "structural_tags", **found, **machine}))
    print(aim("TTFT p50 of known tools", rows[1]["ttft_p50_ms"] / rows[0]["ttft_p50_ms"], AIM_TTFT))
    print(aim("a whole answer's time", rows[1]["answer_p50_ms"] / rows[0]["answer_p50_ms"], AIM_ANSWER))


def aim(what: str, ratio: float, most: float) -> str:
    verdict = "ok" if ratio <= most else "BELOW"
    return f"aim: {what} over that without tags {ratio:.3f}, at most {most} asked for: {verdict}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="to each server")
    parser.add_argument("--guides", type=int, default=5, help="sets of tools that are compiled")
    parser.add_argument("--vocab", type=int, default=150_000)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--port", type=int, default=9400, help="the first of fourteen")
    return parser.parse_args()


def tools(kind: int) -> list[dict[str, Any]]:
    """Return functions as agents have them; no two kinds have the same guide."""
    text, number = {"type": "string"}, {"type": "integer", "minimum": 0}
    choice = {"enum": ["read", "write"]}
    lines = {"type": "array", "items": number}
    properties = {"path": text, "mode": choice, "lines": lines}
    parameters = {"type": "object", "properties": properties, "required": ["path"]}
    return [{"name": f"tool_{kind}_{at}", "parameters": parameters} for at in range(NUM_TOOLS)]


def measure(endpoints: list[Endpoint], options: argparse.Namespace) -> list[dict[str, float]]:
    """Return the figures of each server."""
    ttfts: list[list[float]] = [[] for _ in endpoints]
    wholes: list[list[float]] = [[] for _ in endpoints]
    new: list[list[float]] = [[] for _ in endpoints]
    for kind in range(1, 1 + options.guides):
        for at, endpoint in enumerate(endpoints):
            new[at].append(ask(endpoint, tools(kind))[0])
    for number in range(WARM_UP + options.requests):
        turn = list(enumerate(endpoints))
        for at, endpoint in turn if number % 2 else reversed(turn):
            first, whole = ask(endpoint, tools(1))
            ttfts[at].append(first)
            wholes[at].append(whole)
    return [
        {
            "ttft_p50_ms": statistics.median(ttfts[at][WARM_UP:]),
            "answer_p50_ms": statistics.median(wholes[at][WARM_UP:]),
            "new_tools_ttft_ms": statistics.median(new[at][1:] or new[at]),  # the first starts the helper process
        }
        for at in range(len(endpoints))
    ]


def ask(endpoint: Endpoint, functions: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the times of an answer's first and last piece, in ms."""
    body = {
        "model": endpoint.model, "stream": True, "max_tokens": 64, "reasoning_effort": "medium",
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [{"type": "function", "function": function} for function in functions],
    }  # fmt: skip
    connection = http.client.HTTPConnection(endpoint.address, timeout=60)
    began, times = time.monotonic(), list[float]()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        raise SystemExit(f"a request ended with status {reply.status}: {reply.read()[:300]!r}")
    for line in reply:
        if b'"delta":{' in line and b'"role"' not in line:
            times.append(time.monotonic())
    connection.close()
    if not times:
        raise SystemExit("an answer had no text")
    return 1e3 * (times[0] - began), 1e3 * (times[-1] - began)


def vocabulary(size: int) -> TokenTable:
    """Return all bytes, and pieces of words, JSON and code as tokenizers have them."""
    draw = np.random.default_rng(1)
    known = dict.fromkeys(bytes([at]) for at in range(256))
    known |= dict.fromkeys(b'{"|"}|": "|", "|": |": {"|"}}|\n|</tool_call>'.split(b"|"))
    letters = np.frombuffer(b"etaoinshrdlucmfwypvbgkqjxz_0123456789-/.", np.uint8)
    while len(known) < size - 2:
        for length in draw.integers(2, 10, 1000).tolist():
            word = draw.choice(letters, length).tobytes()
            known[b" " + word if draw.random() < 0.5 else word] = None
    tokens = [b"</s>", b"<tool_call>", *itertools.islice(known, size - 2)]
    return make_table([None] * size, dict(enumerate(tokens)), {EOS, MARK}, size)


def compile_tools(table: TokenTable, count: int) -> tuple[Any, float]:
    """Return a guide of ten tools, and the median time that one took."""
    compiler, took, answers = GuideCompiler(lambda: table, (EOS,), GuidedDecodingConfig()), [], queue.SimpleQueue[Any]()
    try:
        for kind in range(1 + count):
            guide = parse_guide(TOOLS["hermes"].guide(tools(kind), True), Limits())
            began = time.monotonic()
            compiler.compile(guide, answers.put)
            compiled = answers.get(timeout=120)
            if isinstance(compiled, Exception):
                raise compiled
            took.append(time.monotonic() - began)
    finally:
        compiler.close()
    return compiled, statistics.median(took[1:])  # the first starts the process


def sampler_steps(table: TokenTable, compiled: Any, num_rows: int, num_steps: int) -> dict[str, float]:
    """Return the CPU time of a row's token, in us: a greedy row, by one thread."""
    torch.set_num_threads(1)
    logits = torch.randn(num_rows, table.vocab_size)
    found = {}
    for name in ("no guide", "free", "in a call"):
        took = []
        for step in range(num_steps):
            if not step or name == "in a call":  # always at its first token
                sampler = rows_of(table, compiled, num_rows, name)
            began = time.thread_time()
            sampler.sample(logits, range(num_rows))
            took.append(time.thread_time() - began)
        found[name] = 1e6 * statistics.median(took) / num_rows
    return found


def rows_of(table: TokenTable, compiled: Any, num_rows: int, kind: str) -> Sampler[int]:
    sampler: Sampler[int] = Sampler(table.vocab_size)
    for row in range(num_rows):
        guidance = None if kind == "no guide" else TriggeredGuidance(compiled, table, (EOS,), Trigger(token=MARK))
        if guidance is not None and kind == "in a call":
            guidance.accept(MARK)
        sampler.add(row, SamplingParams(), [], (), (EOS,), guidance)
    return sampler


if __name__ == "__main__":
    main()
