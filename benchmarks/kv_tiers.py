"""KV tiers of the torch engine: a prefix that comes back from host memory or disk, against computing it again.

Random weights of a Llama-like shape, one engine in this process, one request at a time. Each round has a prompt of its
own: computed (`compute`), evicted by others, asked for again (`host`, `disk`); times are to the first token, the best
of the rounds. `down` and `up` are the rates at which blocks are copied between the pools and host memory, beside plain
copies of as many bytes (page-locked on a GPU).

    python benchmarks/kv_tiers.py                               # 8B shape, prompts of 8,192 tokens
    python benchmarks/kv_tiers.py --tiers host                  # without the disk
    python benchmarks/kv_tiers.py --shape 1b --prompt 1024      # a CPU's share of it
    python benchmarks/kv_tiers.py --shape tiny --quick

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
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

from benchmarks.engine_gpu import SHAPES, seconds_of, write_config
from bireme.config import EngineConfig, KvCacheConfig, Limits
from bireme.engines.base import EngineContext, PlainTokens, StepOutput
from bireme.engines.child.validate import Gate
from bireme.engines.torch.engine import TorchEngine
from bireme.engines.torch.pools.block_mover import BlockMover
from bireme.kv.blocks.block_tiers import BlockCopy, CopyResult
from bireme.kv.blocks.events import DEVICE, HOST
from bireme.messages import EngineRequest, SamplingParams
from bireme.metrics import Registry

SIZE = 32  # tokens a block
AIM_GAIN = 5.0  # computing it over its return from host memory
AIM_RATE = 0.8  # of a plain copy


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="bireme-bench-", dir=options.folder) as folder:
        shape, figures = write_config(folder, options.shape), dict[str, Any]()
        for tier in options.tiers:
            bench = Bench(folder, shape, tier, options)
            rounds = [bench.round() for _ in range(options.rounds)]
            figures |= {name: round(1e3 * min(one[name] for one in rounds), 2) for name in rounds[0]}
            if tier == "host":
                figures |= bench.copy_rates()
            bench.engine.stop()
    for name, figure in figures.items():
        print(f"{name:16} {figure:12,.2f} {'ms' if name in ('compute', 'host', 'disk') else 'GB/s'}")
    print(json.dumps({"benchmark": "kv_tiers", "machine": machine(), "options": vars(options), "figures": figures}))
    for tier in options.tiers:
        gain = figures["compute"] / figures[tier]
        asked = f", {AIM_GAIN:g} asked for: {'ok' if gain >= AIM_GAIN else 'BELOW'}" if tier == "host" else ""
        print(
            f"aim: a prefix of {options.prompt} tokens comes back from {tier} {gain:.1f} x sooner than computed{asked}"
        )
    for way in ("down", "up") if "host" in options.tiers else ():
        share = figures[way] / figures[f"plain_{way}"]
        word = "ok" if share >= AIM_RATE else "BELOW"
        print(f"aim: copies {way} at {share:.0%} of a plain copy, {AIM_RATE:.0%} asked for: {word}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiers", choices=("host", "disk"), nargs="+", default=["host", "disk"])
    parser.add_argument("--folder", help="where the disk tier's file lies; default: the system's for temporary files")
    parser.add_argument("--quick", action="store_true", help="one round of 256 tokens")
    options = parser.parse_args()
    if options.quick:
        options.prompt, options.rounds = 256, 1
    return options


class Bench:
    """An engine whose device holds a prompt and a half; what is measured holds ten."""

    def __init__(self, folder: str, shape: Any, tier: str, options: argparse.Namespace) -> None:
        self._tier, self._options = tier, options
        self._random = np.random.default_rng(7)
        num_blocks = -(-options.prompt // SIZE) + 1
        head_size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        self._block_bytes = 2 * 2 * SIZE * shape.num_hidden_layers * shape.num_key_value_heads * head_size
        in_host = 10 * num_blocks if tier == "host" else 3 * num_blocks
        cache = KvCacheConfig(
            tokens_per_block=SIZE,
            max_tokens=SIZE * (num_blocks + num_blocks // 2),
            host_cache_size=in_host * self._block_bytes,
            disk_cache_size=10 * num_blocks * self._block_bytes if tier == "disk" else None,
            disk_cache_path=folder if tier == "disk" else None,
        )
        config = EngineConfig(
            max_batch_size=1, max_num_tokens=2048, max_seq_len=options.prompt + 64, load_format="dummy",
            kv_cache_config=cache,
        )  # fmt: skip
        self.engine = TorchEngine(
            EngineContext("decode", "decode", folder, config, Registry(), None, num_threads=options.threads, life=1)
        )
        self._first_at, self._has_ended = 0.0, threading.Event()
        self._num_requests = 0
        capacity = self.engine.start(self._emit)
        self._gate = Gate("", capacity, Limits(), b"k" * 32, False, None)
        self._make_graphs()

    def _make_graphs(self) -> None:
        """All of them: CUDA lets nobody wait for the GPU while the engine, having nothing to do, records one."""
        assert self.engine._loaded is not None
        core, are_made = self.engine._loaded.core, threading.Event()

        def make() -> None:
            while core.prepare():
                pass
            are_made.set()

        self.engine._post(make)
        assert are_made.wait(600), "graphs are not made"

    def round(self) -> dict[str, float]:
        """Return seconds to the first token: computed, and from the tier."""
        prompt, *others = (self._random.integers(10, 500, self._options.prompt) for _ in range(6))
        computed = self._ask(prompt)
        for other in others:
            self._ask(other)
        before = self._tiers.counts.onboarded.total()
        again = self._ask(prompt)
        come_back = self._tiers.counts.onboarded.total() - before
        assert come_back >= (self._options.prompt - 1) // SIZE, f"{come_back} blocks have come back"
        return {"compute": computed, self._tier: again}

    def copy_rates(self) -> dict[str, float]:
        """Return GB/s between the pools and host memory, and of plain copies of as many bytes."""
        assert self.engine._loaded is not None and self.engine._loaded.mover is not None
        mover, count = self.engine._loaded.mover, self._options.prompt // SIZE
        down = [BlockCopy(0, b"", DEVICE, at, 0, HOST, at) for at in range(1, count + 1)]
        up = [BlockCopy(0, b"", HOST, at, 0, DEVICE, at) for at in range(1, count + 1)]
        num_bytes = count * self._block_bytes
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        here = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        there = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        seconds = {
            "down": min(_copied(mover, down, mover.offload) for _ in range(5)),
            "up": min(_copied(mover, up, mover.onboard) for _ in range(5)),
            "plain_down": min(seconds_of(lambda: there.copy_(here), device) for _ in range(5)),
            "plain_up": min(seconds_of(lambda: here.copy_(there), device) for _ in range(5)),
        }
        return {name: round(num_bytes / 1e9 / one, 2) for name, one in seconds.items()}

    @property
    def _tiers(self) -> Any:
        assert self.engine._loaded is not None
        return self.engine._loaded.core._parts.manager.tiers

    def _ask(self, prompt: Any) -> float:
        """Return seconds to the first token; all copies have ended then, as they would between two requests."""
        self._first_at = 0.0
        self._has_ended.clear()
        self._num_requests += 1
        request = EngineRequest(
            prompt=prompt.astype("<i4").tobytes(), sampling=SamplingParams(max_tokens=2, ignore_eos=True)
        )
        began = time.perf_counter()
        self.engine.submit((0, self._num_requests), self._gate.admit(request))
        assert self._has_ended.wait(600), "the request does not end"
        while any(moving for pools in self._tiers._moving for moving in pools):
            time.sleep(0.001)
        return self._first_at - began

    def _emit(self, step: int, deltas: list[StepOutput], plain: PlainTokens | None = None) -> None:
        self._first_at = self._first_at or time.perf_counter()
        if any(delta.finish is not None for delta in deltas):
            self._has_ended.set()


def _copied(mover: BlockMover, copies: list[BlockCopy], order: Any) -> float:
    ended = threading.Event()

    def done(_: list[BlockCopy], results: list[CopyResult]) -> None:
        assert set(results) == {CopyResult.DONE}
        ended.set()

    began = time.perf_counter()
    order(copies, done)
    assert ended.wait(600), "copies do not end"
    return time.perf_counter() - began


def machine() -> str:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return f"{name}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
