"""Decode attention of the fused decoder beside FlashInfer's, where that is installed: one layer of a step on a GPU.

Both read the same pools of random keys and values in blocks of 32 tokens, layer after layer so that the cache is cold,
in one CUDA graph each. Ours also turns heads to their positions and writes the step's new rows, which FlashInfer leaves
to other kernels. `floor`: the bytes of keys and values over the rate at which the GPU reads in the same run. `fp8`:
ours over pools of 8-bit floats (E4M3), whose floor is half of that, and how far it is off ours over the same values.

    python benchmarks/attention_gpu.py            # 8B shape, contexts of 1,000 tokens, two minutes with FlashInfer
    python benchmarks/attention_gpu.py --quick    # also without a GPU, in Triton's interpreter, to see that it runs

The table comes first, then one line of JSON, then the aims.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from benchmarks.engine_gpu import stream_rate
from bireme.engines.torch.geometry import Rotary
from bireme.engines.torch.kernels import decode_attention as ours

SIZE = 32  # tokens a block
REPEATS = 10
AIM = 1.0  # FlashInfer's time over ours
FP8_AIM = {128: 0.6}  # over ours, of rows


def main() -> None:
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rate = stream_rate(device, options.quick)
    has_other = device.type == "cuda" and importlib.util.find_spec("flashinfer") is not None
    print(f"{options.heads}/{options.kv_heads} heads of {options.size}, {options.context} tokens; us a layer")
    print(f"{'rows':>5} {'bireme':>10} {'flashinfer':>10} {'floor':>10} {'differ':>10} {'fp8':>10} {'differ':>10}")
    rows = [measure(count, options, device, rate, has_other) for count in options.batch]
    print(
        json.dumps({"benchmark": "attention_gpu", "torch": torch.__version__, "options": vars(options), "rows": rows})
    )
    for row in rows if device.type == "cuda" else ():
        if (most := FP8_AIM.get(row["rows"])) is not None:
            share = row["fp8_us"] / row["us"]
            word = "ok" if share <= most else "ABOVE"
            print(f"aim: 8-bit floats at batch {row['rows']} {share:.2f} of ours, {most:.2f} asked for: {word}")
    for row in rows if has_other else ():
        gain = row["flashinfer_us"] / row["us"]
        word = "ok" if gain >= AIM else "BELOW"
        print(f"aim: FlashInfer's time over ours at batch {row['rows']} {gain:.2f}, {AIM:.2f} asked for: {word}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=128, help="of a head")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=1000, help="tokens a sequence")
    parser.add_argument("--spread", action="store_true", help="rows' from half of that to one and a half")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="one layer, one short row")
    options = parser.parse_args()
    if options.quick:
        options.batch, options.context, options.layers, options.size = [1], 40, 1, 32
    return options


def measure(count: int, options: argparse.Namespace, device: torch.device, rate: float, has_other: bool) -> Any:
    """Time both, and print a row of the table."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # whose products the interpreter has right
    step = Step(count, options, device, dtype)
    row = {"rows": count, "us": time_us(step.ours, options.layers, device)}
    row["floor_us"] = 1e6 * step.num_tokens * options.kv_heads * options.size * 2 * dtype.itemsize / rate
    if has_other:
        other = step.flashinfer()
        row["flashinfer_us"] = time_us(other, options.layers, device)
        found, expected = step.ours(0).float(), other(0).flatten(1).float()
        row["differ"] = float((found - expected).norm() / expected.norm())
    kept = step.in_fp8()
    row["fp8_us"] = time_us(kept.ours, options.layers, device)
    found, expected = kept.ours(0).float(), kept.in_dtype(dtype).ours(0).float()
    row["fp8_differ"] = float((found - expected).norm() / expected.norm())
    shown = (row.get(name) for name in ("us", "flashinfer_us", "floor_us"))
    figures = " ".join(f"{'-' if figure is None else format(figure, '.1f'):>10}" for figure in shown)
    eights = f"{row['fp8_us']:10.1f} {row['fp8_differ']:10.1e}"
    print(f"{count:5} {figures} {format(row['differ'], '.1e') if has_other else '-':>10} {eights}", flush=True)
    return {name: round(figure, 5) for name, figure in row.items()}


class Step:
    """Rows of one decode step, and pools of several layers."""

    def __init__(self, count: int, options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> None:
        self._options, heads, kv_heads, size = options, options.heads, options.kv_heads, options.size
        lengths = options.context * (np.linspace(0.5, 1.5, count) if options.spread else np.ones(count))
        blocks = -(-int(lengths.max()) // SIZE)
        shape = ((count * blocks + 1) * SIZE, kv_heads * size)
        self._pools = [
            tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(2)) for _ in range(options.layers)
        ]
        order = torch.randperm(count * blocks, device=device).int() + 1  # block 0 is nobody's
        self._table = order.view(count, blocks)
        self._qkv = torch.randn(count, (heads + 2 * kv_heads) * size, device=device, dtype=dtype)
        turns = torch.cat([torch.ones(size // 2), torch.zeros(size // 2)]).to(device)  # none: FlashInfer sees the same
        self._rotary = Rotary(turns.repeat(blocks * SIZE, 1), 1e-6)
        self._lengths = torch.from_numpy(lengths.astype(np.int32)).to(device)
        slots, positions = np.arange(count, dtype=np.int32), lengths.astype(np.int32) - 1
        most, tile = ours.most_parts(kv_heads), ours.tile_of(dtype, size)
        cut = ours.cut_into_parts(slots, positions, ours.num_parts(count, kv_heads), most, 0, tile)
        self._parts = torch.from_numpy(cut).to(device)
        self._scratch = ours.Scratch.make(count, heads, kv_heads, size, device)

    @property
    def num_tokens(self) -> int:
        return int(self._lengths.sum())

    def in_fp8(self) -> Step:
        """Return the same step over pools of 8-bit floats."""
        return self.in_dtype(torch.float8_e4m3fn)

    def in_dtype(self, dtype: torch.dtype) -> Step:
        made = copy(self)
        made._pools = [tuple(pool.to(dtype) for pool in pools) for pools in self._pools]
        return made

    def ours(self, layer: int) -> Tensor:
        options, (keys, values) = self._options, self._pools[layer]
        return ours.decode_attention(
            self._qkv,
            self._rotary,
            self._parts,
            self._table,
            keys,
            values,
            self._scratch,
            SIZE,
            options.heads,
            options.size**-0.5,
        )

    def flashinfer(self) -> Callable[[int], Tensor]:
        """Return its attention (R, H, K) of a layer; planned once, as a step does for all its layers."""
        import flashinfer

        options, table = self._options, self._table
        count, used = len(table), -(-self._lengths // SIZE)
        query = self._qkv[:, : options.heads * options.size].reshape(count, options.heads, options.size)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(256 << 20, dtype=torch.uint8, device=table.device), "NHD", use_tensor_cores=True
        )
        wrapper.plan(
            torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0)),
            table[torch.arange(table.shape[1], device=table.device) < used[:, None]],
            (self._lengths - 1) % SIZE + 1,
            options.heads,
            options.kv_heads,
            options.size,
            SIZE,
            q_data_type=query.dtype,
            kv_data_type=query.dtype,
        )
        paged = [tuple(pool.view(-1, SIZE, options.kv_heads, options.size) for pool in pools) for pools in self._pools]
        return lambda layer: wrapper.run(query, paged[layer])


def time_us(call: Callable[[int], Any], layers: int, device: torch.device) -> float:
    """Return the microseconds of one layer, the best of several replays of a graph of all; on a CPU of one call."""
    for layer in range(layers):
        call(layer)
    if device.type == "cpu":
        began = time.perf_counter()
        call(0)
        return 1e6 * (time.perf_counter() - began)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            call(layer)
    times = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * float(begin.elapsed_time(end)) / layers)
    return min(times)


if __name__ == "__main__":
    main()
