"""Weights in 8 and 4 bits on a GPU beside bfloat16: steps of the 8B shape, and the products they are made of.

Engines on random weights in this process, without a server. Each form is measured beside bfloat16 in turns: decode
steps of 1, 8, 32 and 128 rows at contexts of 1,000 tokens, and a prompt of 8,192. Then KV in 8 bits, with weights of
bfloat16 and of 8 bits a channel. `replay` is the step's CUDA graph alone.
What a start compares, decoder and dequantized reference, is told with it. Then products alone: the four matrices of a
layer in a CUDA graph of several layers, times 32 layers, by form, rows and kernel, as long as there is time.

    python3 benchmarks/quantized_gpu.py OUT.json   # 240 seconds
    python3 benchmarks/quantized_gpu.py OUT.json --form int4_groups --seconds 70
    python3 benchmarks/quantized_gpu.py --quick    # also without a GPU, products alone, to see that it runs

A case that fails is told with the end of its traceback, and the next one follows. The aims come last.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from benchmarks.engine_gpu import SHAPES, Bench, write_config
from benchmarks.int4_products import graph_seconds, int4_weight, plain_product
from bireme.config import CudaGraphConfig, EngineConfig, KvCacheConfig, Limits, QuantConfig
from bireme.engines.base import EngineContext
from bireme.engines.child.validate import Gate
from bireme.engines.torch.kernels import one_row_fp8, one_row_linear, rounded_linear, row_wise
from bireme.engines.torch.kernels.int4_linear import MOST_ROWS as MOST_INT4_ROWS
from bireme.engines.torch.kernels.int4_linear import few_rows_int4
from bireme.engines.torch.storage import BLOCK, Fp8Weight, WeightForm, restored, rounded
from bireme.metrics import Registry

ALGOS = {
    WeightForm.FP8_CHANNEL: "FP8_PER_CHANNEL_PER_TOKEN",
    WeightForm.FP8_BLOCKS: "FP8_BLOCK_SCALES",
    WeightForm.INT4_GROUPS: "W4A16_AWQ",
}
ROWS = (1, 8, 32, 128)
CONTEXT, PROMPT, TURNS, STEPS = 1000, 8192, 3, 12
FP8_KV = {WeightForm.FP8_CHANNEL: "fp8_channel, fp8 KV", WeightForm.PLAIN: "plain, fp8 KV"}  # names, by the weights
AIMS: dict[str, dict[Any, float]] = {  # of bfloat16's time
    WeightForm.FP8_CHANNEL: {1: 0.65, 32: 0.70, 128: 0.81, "prompt": 1.03},
    WeightForm.FP8_BLOCKS: {1: 0.70, 32: 0.78, 128: 0.90, "prompt": 1.03},
    WeightForm.INT4_GROUPS: {1: 0.50, 8: 0.68, 32: 0.75, "prompt": 1.03},
    FP8_KV[WeightForm.FP8_CHANNEL]: {128: 0.61, "prompt": 1.03},
}
BEGAN_AT = time.perf_counter()
REPORT: dict[str, Any] = {"benchmark": "quantized_gpu", "cases": {}, "failed": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", help="file for the report")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--seconds", type=float, default=240.0, help="no case is begun when so many have passed")
    parser.add_argument("--quick", action="store_true", help="products of a tiny layer alone")
    parser.add_argument("--form", choices=list(ALGOS), help="of the weights, beside bfloat16; default: each, and KV")
    parser.add_argument("--fp8-kv", action="store_true", help="with --form: keys and values in FP8, too")
    parser.add_argument("--products", action="store_true", help="no engines, products of every tile")
    options = parser.parse_args()
    if options.fp8_kv and options.form is None:
        parser.error("--fp8-kv: say --form, too")
    is_cuda = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if is_cuda else "CPU"
    REPORT.update(device=name, torch=torch.__version__, shape=options.shape)
    print(f"{name}, torch {torch.__version__}", flush=True)
    if is_cuda and not options.quick and not options.products:
        with tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder:
            config = write_config(folder, options.shape)
            measure_engines(folder, config, options.form, "fp8" if options.fp8_kv else "auto")
    measure_products(options)
    if is_cuda and options.shape == "8b" and not options.quick and not options.products:
        tell_aims()
    REPORT["seconds"] = round(time.perf_counter() - BEGAN_AT, 1)
    if options.out:
        Path(options.out).write_text(json.dumps(REPORT, indent=1))
    print(json.dumps(REPORT))


@contextmanager
def case(name: str) -> Iterator[None]:
    """Go on after what is wrong in here, and tell it."""
    try:
        yield
    except (Exception, SystemExit) as error:
        lines = traceback.format_exc().strip().splitlines()[-6:]
        REPORT["failed"][name] = lines
        print(f"FAILED {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)


def told(name: str, value: Any) -> None:
    REPORT["cases"][name] = value
    print(f"{time.perf_counter() - BEGAN_AT:6.1f} s  {name}: {value}", flush=True)


class Engine(Bench):
    """One engine of a form, with graphs of these rows alone."""

    def __init__(self, folder: str, config: Any, form: WeightForm, kv_dtype: str = "auto") -> None:
        from bireme.engines.torch.forward import warmup
        from bireme.engines.torch.loading import LoadedEngine

        self.name = str(form) if kv_dtype == "auto" else FP8_KV[form]
        self._shape, self._steps = config, STEPS
        self.errors: dict[str, float] = {}
        compare = warmup._compare

        def watched(what: str, expected: Tensor, found: Tensor, most_error: float) -> None:
            right = expected.to(found.device).float()
            self.errors[what] = round(float((found.float() - right).norm() / right.norm()), 4)
            compare(what, expected, found, most_error)

        warmup._compare = watched
        try:
            settings = EngineConfig(
                max_batch_size=max(ROWS),
                max_seq_len=PROMPT + 100,
                kv_cache_config=KvCacheConfig(
                    tokens_per_block=32, max_tokens=164_000, enable_block_reuse=False, dtype=kv_dtype
                ),
                load_format="dummy",
                cuda_graph_config=CudaGraphConfig(batch_sizes=ROWS),
                quant_config=QuantConfig(quant_algo=ALGOS.get(form)),
            )
            began = time.perf_counter()
            context = EngineContext("bench", "decode", folder, settings, Registry("bench"))
            self._loaded = LoadedEngine(context, lambda act: act())
        finally:
            warmup._compare = compare
        self._core = self._loaded.core
        resident = self._core._parts.forward.resident
        while resident is not None and resident.make_next_graph():
            pass
        self._gate = Gate("decode", self._loaded.capacity, Limits(), b"")
        self._random, self._count = np.random.default_rng(2), 0
        gib = torch.cuda.memory_allocated() / 2**30
        told(
            f"{self.name} started",
            {
                "s": round(time.perf_counter() - began, 1),
                "paths": list(self._loaded.capacity.step_paths),
                "errors": self.errors,
                "allocated_gib": round(gib, 1),
            },
        )

    def begin(self, rows: int) -> None:
        """Have so many requests decode."""
        for _ in range(rows):
            self._submit(CONTEXT, TURNS * STEPS + 200)
        while any(not sequence.first_token_at for sequence in self._core.requests.running.values()):
            self._step()
        for _ in range(4):
            self._step()

    def steps_ms(self) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(STEPS):
            self._step()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began) / STEPS

    def end(self) -> None:
        for key in list(self._core.requests.running):
            self._core.requests.abort(key)
        self._core.take_outputs()

    def prompt_ms(self) -> float:
        torch.cuda.synchronize()
        self._submit(PROMPT, 1)
        return 1e3 * sum(self._drain()[0])


def measure_engines(folder: str, config: Any, only: str | None, kv_of_only: str) -> None:
    plain = None
    with case("plain"):
        plain = Engine(folder, config, WeightForm.PLAIN)
    wanted = (*((form, "auto") for form in ALGOS), *((form, "fp8") for form in FP8_KV))
    for form, kv_dtype in wanted if only is None else ((WeightForm(only), kv_of_only),):
        with case(f"{form} {kv_dtype}"):
            other = Engine(folder, config, form, kv_dtype)
            if "resident" not in other._loaded.capacity.step_paths:
                raise RuntimeError("its steps are computed by the modules: they are not measured")
            name = other.name
            for rows in ROWS:
                with case(f"{name} {rows} rows"):
                    decode_in_turns([engine for engine in (plain, other) if engine], name, rows)
            with case(f"{name} prompt"):
                prompts_in_turns([engine for engine in (plain, other) if engine], name)
        other = None
        gc.collect()
        torch.cuda.empty_cache()
    del plain
    gc.collect()
    torch.cuda.empty_cache()


def decode_in_turns(engines: list[Engine], name: str, rows: int) -> None:
    found: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for engine in engines:
        engine.begin(rows)
    for _ in range(TURNS):
        for engine in engines:
            found[engine.name].append(engine.steps_ms())
    replays = {engine.name: engine._replay_seconds(rows) for engine in engines}
    for engine in engines:
        engine.end()
    steps = {one: round(statistics.median(times), 3) for one, times in found.items()}
    replay_ms = {one: None if s is None else round(1e3 * s, 3) for one, s in replays.items()}
    told(f"{name} {rows} rows", {"step_ms": steps, "replay_ms": replay_ms, "ratio": ratio(steps, name)})


def prompts_in_turns(engines: list[Engine], name: str) -> None:
    found: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for _ in range(TURNS + 1):
        for engine in engines:
            found[engine.name].append(engine.prompt_ms())
    times = {one: round(statistics.median(own[1:]), 1) for one, own in found.items()}
    told(f"{name} prompt", {"ms": times, "ratio": ratio(times, name)})


def ratio(times: dict[str, float], name: str) -> float | None:
    return round(times[name] / times[WeightForm.PLAIN], 3) if WeightForm.PLAIN in times else None


class Layers:
    """The four matrices of some layers, in each form."""

    def __init__(self, sizes: dict[str, tuple[int, int]], count: int, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.count, self.dtype, self.device = count, dtype, device
        self.weights: dict[str, list[dict[WeightForm, Any]]] = {}
        for name, (rows, columns) in sizes.items():
            self.weights[name] = []
            for _ in range(count):
                plain = torch.randn(rows, columns, dtype=dtype, device=device)
                values = plain.to(torch.float8_e4m3fn)
                blocks = torch.rand(-(-rows // BLOCK), -(-columns // BLOCK), device=device)
                forms = {
                    WeightForm.PLAIN: plain,
                    WeightForm.FP8_CHANNEL: Fp8Weight(values, torch.rand(rows, device=device)),
                    WeightForm.FP8_BLOCKS: Fp8Weight(values, blocks),
                    WeightForm.INT4_GROUPS: int4_weight(plain),
                }
                self.weights[name].append(forms)

    def run(self, form: WeightForm, product: Callable[[Tensor, Any], Any], inputs: dict[int, Any]) -> None:
        for layer in range(self.count):
            for one in self.weights.values():
                weight = one[layer][form]
                product(inputs[weight.shape[1]], weight)


def check_int4(device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weight = int4_weight(torch.randn(1024, 512, device=device))
    x, whole = torch.randn(40, 512, device=device, dtype=dtype), weight.dequantized()
    for name, product, rows in (
        ("one row", few_rows_int4, 1),
        ("few rows", few_rows_int4, 9),
        ("40 rows", few_rows_int4, 40),
        ("made plain", plain_product, 40),
    ):
        with case(f"int4 {name} is right"):
            expected = x[:rows].float() @ whole.t()
            error = float((product(x[:rows], weight).float() - expected).norm() / expected.norm())
            told(f"int4 {name} is off by", round(error, 5))


def check_products(device: torch.device) -> None:
    """Tell how far each product is off its dequantized reference, relative; bfloat16's rounding alone is 0.002."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    columns = 512
    values = torch.randn(1024, columns, device=device).to(torch.float8_e4m3fn)
    scales = {WeightForm.FP8_CHANNEL: torch.rand(1024, device=device) + 0.5}
    scales[WeightForm.FP8_BLOCKS] = torch.rand(1024 // BLOCK, columns // BLOCK, device=device) + 0.5
    norm, bias = (torch.rand(size, device=device, dtype=dtype) for size in (columns, 1024))
    for form, own in scales.items():
        weight = Fp8Weight(values, own)
        whole, x = weight.dequantized(), torch.randn(40, columns, device=device, dtype=dtype)
        inner = torch.nn.functional.rms_norm(x.float(), (columns,), norm.float(), 1e-5)
        both = inner[:1] @ whole.t()
        gated = torch.nn.functional.silu(both[:, :512]) * both[:, 512:]
        rows, its = row_wise.rounded_rows(x, form, norm, 1e-5)
        exact = restored(rows, its) @ whole.t() + bias.float()
        found = {
            "one row": (partial(one_row_fp8.one_row_fp8, x[:1], weight, None, norm, 1e-5, is_gated=True), gated),
            "rounding": (lambda rows=rows, its=its: restored(rows, its), restored(*rounded(inner.to(dtype), form))),
            "ours": (partial(rounded_linear.ours, rows, its, weight, dtype, bias), exact),
        }
        if device.type == "cuda":
            found["torch"] = partial(rounded_linear.torchs, rows, its, weight, dtype, bias), exact
        for name, (product, expected) in found.items():
            with case(f"{form} {name} is right"):
                error = float((product().float() - expected).norm() / expected.norm())
                told(f"{form} {name} is off by", round(error, 5))
    if device.type == "cuda":
        told("torch takes blocks", rounded_linear._takes_blocks(0))


def measure_products(options: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with case("products are right"):
        check_products(device)
        check_int4(device)
    hidden, inner, _, heads, kv_heads, _ = SHAPES["tiny" if options.quick else options.shape][1]
    kv = hidden // heads * kv_heads
    sizes = {"qkv": (hidden + 2 * kv, hidden), "output": (hidden, hidden)}
    sizes |= {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    layers = Layers(sizes, 1 if options.quick else 6, device)
    for name, rows, form, product in product_cases(options.quick, device.type == "cuda"):
        if time.perf_counter() - BEGAN_AT > options.seconds:
            REPORT.setdefault("left_out", []).append(name)
            continue
        with case(name):
            plain = {size: torch.randn(rows, size, dtype=layers.dtype, device=device) for size in (hidden, inner)}
            inputs: dict[int, Any] = plain
            if name.endswith("rounded"):
                inputs = {size: row_wise.rounded_rows(x, form) for size, x in plain.items()}
            seconds = graph_seconds(partial(layers.run, form, product, inputs), device)
            told(name, round(1e3 * seconds * 32 / layers.count, 3))


def product_cases(is_quick: bool, is_cuda: bool) -> Iterator[tuple[str, int, WeightForm, Callable[[Any, Any], Any]]]:
    """Yield name, rows, form and product, the ones that decide most first."""
    dtype = torch.bfloat16 if is_cuda else torch.float32
    forms = (WeightForm.FP8_CHANNEL, WeightForm.FP8_BLOCKS)

    def taken(product: Callable[..., Any], **how: Any) -> Callable[[Any, Any], Any]:
        return lambda x, weight: product(*x, weight, dtype, **how)

    if is_quick:
        for form in forms:
            yield f"{form} 1 row", 1, form, one_row_fp8.one_row_fp8
            yield f"{form} 20 rows rounded", 20, form, taken(rounded_linear.ours)
        yield from int4_cases((1, 3, 20))
        return
    yield "plain 1 row", 1, WeightForm.PLAIN, one_row_linear.one_row_linear
    for form in forms:
        yield f"{form} 1 row", 1, form, one_row_fp8.one_row_fp8
    yield from int4_cases((1, 8, 32, 128, 512, 2048))
    for rows in (2, 8, 32, 128, 2048):
        yield f"plain {rows} rows cublas", rows, WeightForm.PLAIN, torch.nn.functional.linear
        for form in forms:
            yield f"{form} {rows} rows torch rounded", rows, form, taken(rounded_linear.torchs)
            if rows <= 64:
                yield f"{form} {rows} rows ours rounded", rows, form, taken(rounded_linear.ours)
    for rows in (32, 128, 2048):  # what rounds, beside what is there anyway
        for form in forms:
            yield f"{form} {rows} rows of what rounds", rows, form, partial(rounding, form)
    for tiles in ((2, 512, 4), (4, 1024, 8), (2, 1024, 4), (4, 512, 8)):
        yield f"fp8_channel 1 row {tiles}", 1, forms[0], partial(one_row, tiles)
    for rows, tiles in (
        (8, (16, 32, 256, 4, 5)),
        (8, (16, 128, 128, 4, 5)),
        (32, (32, 32, 256, 4, 4)),
        (32, (32, 64, 128, 4, 6)),
        (32, (32, 128, 128, 4, 5)),
        (128, (128, 64, 128, 4, 5)),
    ):
        for form in forms:
            yield f"{form} {rows} rows ours {tiles} rounded", rows, form, taken(rounded_linear.ours, tiles=tiles)


def int4_cases(counts: tuple[int, ...]) -> Iterator[tuple[str, int, WeightForm, Callable[[Any, Any], Any]]]:
    """Yield the product that a step of so many rows has. benchmarks/int4_products.py measures what else there is."""
    form = WeightForm.INT4_GROUPS
    for rows in counts:
        if rows <= MOST_INT4_ROWS:
            yield f"{form} {rows} rows few", rows, form, few_rows_int4
        else:
            yield f"{form} {rows} rows made plain", rows, form, plain_product


def one_row(tiles: tuple[int, int, int] | None, x: Tensor, weight: Any) -> None:
    chosen = one_row_fp8._tiles
    if tiles is not None:
        one_row_fp8._tiles = lambda width, words, is_gated: tiles
    try:
        one_row_fp8.one_row_fp8(x, weight)
    finally:
        one_row_fp8._tiles = chosen


def rounding(form: WeightForm, x: Tensor, weight: Any) -> None:
    """Round a row before each matrix, that of `down` by the gate."""
    if x.shape[1] > weight.shape[0]:
        row_wise.rounded_gate(torch.empty(len(x), 2 * x.shape[1], dtype=x.dtype, device=x.device), form)
    else:
        row_wise.rounded_rows(x, form, x[0], 1e-5, x)


def tell_aims() -> None:
    for form, aims in AIMS.items():
        for what, most in aims.items():
            found = REPORT["cases"].get(f"{form} prompt" if what == "prompt" else f"{form} {what} rows") or {}
            share = found.get("ratio")
            word = "not measured" if share is None else "ok" if share <= most else "BELOW"
            print(f"aim: {form} {what} {share} of bfloat16's time, {most} asked for: {word}", flush=True)


if __name__ == "__main__":
    main()
