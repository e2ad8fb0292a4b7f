"""What a draw takes: the step's kernel and rows with log probabilities on a GPU, rows on a CPU.

    python benchmarks/draws.py

One line for each filter, in microseconds, the median: on a GPU of the kernel for 1 and 32 rows, its logits of float32
and of bfloat16, and of a sampler's step for the same; on a CPU of one row.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bireme.logits import filters
from bireme.logits.random import draw_key
from bireme.logits.rows import Row
from bireme.logits.sampler import Sampler
from bireme.messages import SamplingParams

FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 50},
    {"top_p": 0.9},
    {"top_k": 50, "top_p": 0.9},
    {"min_p": 0.05},
]
BESIDE = {"logprobs": 0}  # chosen by the sampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=151_936, help="tokens of the vocabulary")
    size = parser.parse_args().size
    torch.manual_seed(0)
    for name, logits in (("flat", flat(size)), ("like a model's", peaked(size))):
        for params in FILTERS:
            what = " ".join(f"{key}={value}" for key, value in params.items()) or "no filter"
            print(
                f"{name}, {what}: {' '.join(f'{case}={took:.0f}' for case, took in times(logits, params))}", flush=True
            )


def flat(size: int) -> torch.Tensor:
    return torch.randn(32, size) * 2.5


def peaked(size: int) -> torch.Tensor:
    """Return logits of which some forty tokens are likely."""
    logits = torch.randn(32, size) * 2.2
    for row in logits:
        row[torch.randint(size, (40,))] += 6 + 4 * torch.empty(40).exponential_()
    return logits


def times(logits: torch.Tensor, params: dict[str, Any]) -> list[tuple[str, float]]:
    rows = [Row(SamplingParams(temperature=1.0, seed=at, **params), [], [], [], logits.shape[1]) for at in range(32)]
    found = [("cpu", of_cpu(logits[0].numpy(), rows[0]))]
    if torch.cuda.is_available():
        for count in (1, 32):
            for dtype in (torch.float32, torch.bfloat16):
                some = logits[:count].to("cuda", dtype)
                found.append((f"kernel_{str(dtype)[6:]}_{count}", of_kernel(some, rows[:count])))
            found.append((f"sampler_{count}", of_sampler(logits[:count].cuda(), params)))
    return found


def of_cpu(logits: Any, row: Row) -> float:
    took = []
    for at in range(60):
        own = logits.copy()
        began = time.thread_time()
        filters.draw_row(own, row, draw_key(row.seed, at))
        took.append(1e6 * (time.thread_time() - began))
    return statistics.median(took)


def of_kernel(logits: torch.Tensor, rows: list[Row]) -> float:
    """Return the device's time, of a graph of twenty draws at as many positions."""
    from bireme.engines.torch.kernels import draw

    device, count = logits.device, len(rows)
    steps = [
        torch.tensor([[slot, at, 0] for slot in range(count)], dtype=torch.int32, device=device) for at in range(20)
    ]
    requests = torch.from_numpy(np.stack([draw.request_columns(row, 0) for row in rows])).to(device)
    last, tokens = torch.zeros(2, count, dtype=torch.int32, device=device)

    def run() -> None:
        for step in steps:
            draw.draw(logits, step, requests, last, tokens, logits.shape[1])

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median_us(graph.replay) / len(steps)


def of_sampler(logits: torch.Tensor, params: dict[str, Any]) -> float:
    from bireme.engines.torch.kernels.draw import draw_rows

    sampler: Sampler[int] = Sampler(logits.shape[1], "cuda", draw=draw_rows)
    for at in range(len(logits)):
        sampler.add(at, SamplingParams(temperature=1.0, seed=at, **params, **BESIDE), [])
    return median_us(functools.partial(sampler.sample, logits, range(len(logits))))


def median_us(action: Callable[[], Any]) -> float:
    took = []
    for _ in range(40):
        torch.cuda.synchronize()
        began = time.perf_counter()
        action()
        torch.cuda.synchronize()
        took.append(1e6 * (time.perf_counter() - began))
    return statistics.median(took[10:])


if __name__ == "__main__":
    main()
