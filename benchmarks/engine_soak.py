"""The torch engine under requests of random lengths, many of which are aborted: its memory must not grow.

Steps the engine in this process, without a server, on random weights of one of engine_gpu.py's shapes. A fifth of the
requests is aborted, as it waits, in the middle of its prompt or between tokens; a third begins as others do; in every
other tenth of the run some draw their tokens, have penalties or ask for log probabilities. Memory is looked at when
nothing is under way: after each tenth, and compared with what it was after the first two.

    python benchmarks/engine_soak.py                       # 10,000 requests, 1B shape
    python benchmarks/engine_soak.py --shape tiny --quick --requests 2000  # also without a GPU, to see that it runs

The table comes first, then one line of JSON, then the aims; the exit status is 1 where one is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

from benchmarks.engine_gpu import SHAPES, write_config
from bireme.config import EngineConfig, KvCacheConfig, Limits
from bireme.engines.base import EngineContext
from bireme.engines.child.validate import Gate
from bireme.engines.torch.loading import LoadedEngine
from bireme.messages import EngineRequest, SamplingParams
from bireme.metrics import Registry

PARTS, WARM_PARTS = 10, 2
# On a CPU oneDNN keeps what it made for the last 1,024 shapes.
MOST_GROWTH_MIB = {"allocated": 1.0, "reserved": 64.0, "host": 32.0 if torch.cuda.is_available() else 128.0}
EXTRAS: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.2},
    {"logprobs": 2},
    {"frequency_penalty": 0.5},
]


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="bireme-soak-") as folder:
        write_config(folder, options.shape)
        soak = Soak(folder, options)
    began = time.monotonic()
    levels = []
    for part in range(PARTS):
        soak.run(options.requests // PARTS, has_extras=part % 2 == 0)
        levels.append(soak.level())
        print(f"after {soak.num_submitted:6} requests: {levels[-1]}", flush=True)
    growth = {
        name: round(getattr(levels[-1], name) - getattr(levels[WARM_PARTS - 1], name), 2) for name in MOST_GROWTH_MIB
    }
    figures = {"seconds": round(time.monotonic() - began, 1), "finishes": soak.finishes, "growth_mib": growth}
    print(json.dumps({"benchmark": "engine_soak", "options": vars(options), **figures, "left": soak.left()}))
    aims = {
        f"{name} memory grew by {growth[name]} MiB, {most:g} allowed": growth[name] <= most
        for name, most in MOST_GROWTH_MIB.items()
    }
    aims[f"{soak.left()} requests and blocks left"] = soak.left() == 0
    aims[f"requests ended: {soak.finishes}"] = sum(soak.finishes.values()) == soak.num_submitted
    aims["no request failed"] = not soak.finishes.get("error")
    for text, is_met in aims.items():
        print(f"aim: {text}: {'ok' if is_met else 'BELOW'}")
    return 0 if all(aims.values()) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--quick", action="store_true", help="requests of a few tokens")
    return parser.parse_args()


@dataclass(frozen=True, slots=True)
class Level:
    """MiB."""

    allocated: float  # of the GPU, by torch
    reserved: float
    host: float  # resident pages of this process

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:.1f} MiB" for name, value in asdict(self).items())


class Soak:
    """One engine, stepped by this program."""

    def __init__(self, folder: str, options: argparse.Namespace) -> None:
        self._most_tokens = (40, 8) if options.quick else (1500, 100)  # of prompts and of answers
        config = EngineConfig(
            max_batch_size=8 if options.quick else 64,
            max_seq_len=sum(self._most_tokens),
            kv_cache_config=KvCacheConfig(tokens_per_block=32, max_tokens=1024 if options.quick else 60_000),
            load_format="dummy",
        )
        context = EngineContext("soak", "decode", folder, config, Registry("soak"))
        self._loaded = LoadedEngine(context, lambda act: act())
        while self._loaded.core.prepare():  # all graphs, or they would be made as steps need them
            pass
        self._core, self._most_at_once = self._loaded.core, config.max_batch_size * 3 // 2
        self._gate = Gate("decode", self._loaded.capacity, Limits(), b"")
        self._random = np.random.default_rng(4)
        self._beginnings = [self._random.integers(10, 500, self._most_tokens[0] // 2) for _ in range(20)]
        self._aborts: dict[int, list[tuple[int, int]]] = {}  # step -> requests
        self._num_steps = self.num_submitted = 0
        self.finishes: dict[str, int] = {}

    def run(self, count: int, has_extras: bool) -> None:
        """Submit so many requests and step until all have ended."""
        until = self.num_submitted + count
        while self.num_submitted < until or self._core.requests.running:
            while self.num_submitted < until and len(self._core.requests.running) < self._most_at_once:
                self._submit(has_extras)
            self._core.step()
            self._num_steps += 1
            for key in self._aborts.pop(self._num_steps, ()):
                self._core.requests.abort(key)
            for output in self._core.take_outputs()[0]:
                if output.finish is not None:
                    self.finishes[output.finish.reason] = self.finishes.get(output.finish.reason, 0) + 1

    def left(self) -> int:
        manager = self._core._parts.manager
        return len(self._core.requests.running) + int(manager.num_referenced)

    def level(self) -> Level:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        on_gpu = (0, 0)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            on_gpu = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        return Level(*(size / 2**20 for size in (*on_gpu, pages * os.sysconf("SC_PAGE_SIZE"))))

    def _submit(self, has_extras: bool) -> None:
        random = self._random
        num_tokens, max_tokens = (int(np.exp(random.uniform(0, np.log(most)))) for most in self._most_tokens)
        prompt = random.integers(10, 500, num_tokens)
        if random.random() < 1 / 3:
            beginning = self._beginnings[random.integers(len(self._beginnings))]
            prompt[: len(beginning)] = beginning[:num_tokens]
        extras = EXTRAS[random.integers(len(EXTRAS))] if has_extras and random.random() < 0.2 else {}
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **extras)
        admitted = self._gate.admit(EngineRequest(prompt=prompt.astype("<i4").tobytes(), sampling=sampling))
        self.num_submitted += 1
        key = (0, self.num_submitted)
        self._core.requests.add(self._loaded.admission.admit(key, admitted))
        if random.random() < 0.2:
            self._aborts.setdefault(self._num_steps + 1 + int(random.integers(30)), []).append(key)


if __name__ == "__main__":
    sys.exit(main())
