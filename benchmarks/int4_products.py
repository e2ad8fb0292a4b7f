"""Products with 4-bit weights on a GPU, tile by tile, beside cuBLAS's of bfloat16 and what reading bytes takes.

The four matrices of a layer of the 8B shape, by themselves, at 1 to 2,048 rows. Each is in a CUDA graph of as many
copies as a GPU's cache does not hold. In 4 bits gate_up has the gate within, in bfloat16 it has none. Forms of the
kernel are compiled and compared with the dequantized product first, by as many processes as there are processors: a
form that is wrong, or brings its process down, is told and left out.

    python3 benchmarks/int4_products.py OUT.json   # 60 seconds
    python3 benchmarks/int4_products.py --one-row  # that product alone, and layers' products as a step has them
    python3 benchmarks/int4_products.py --quick    # also without a GPU, small, to see that it runs

The last table has the best of each number of rows: what `int4_linear.TILES` and `MOST_ROWS`, and for one row
`one_row_int4.chosen_row_tiles`, are to be chosen by.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from bireme.engines.torch.kernels.int4_linear import (
    TILES,
    Int4Tiles,
    chosen_tiles,
    few_rows_int4,
    make_counters,
    plain_weight,
)
from bireme.engines.torch.kernels.launch import MOST_ROWS as MOST_CHAINED
from bireme.engines.torch.kernels.one_row_int4 import RowTiles, chosen_row_tiles, one_row_int4
from bireme.engines.torch.kernels.one_row_linear import one_row_linear
from bireme.engines.torch.kernels.row_wise import rms_norm
from bireme.engines.torch.storage import PACKED, Int4Weight, StoredAs
from bireme.engines.torch.weights.stored_linear import empty_weight, round_into

GROUP, LAYERS = 128, 32
SHAPES = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
SMALL = {"qkv": (192, 256), "output": (128, 256), "gate_up": (256, 256), "down": (128, 640)}
CANDIDATES = {  # by the most rows of x
    8: (Int4Tiles(8, 64, 4, 5), Int4Tiles(8, 32, 2, 6), Int4Tiles(16, 64, 4, 5), Int4Tiles(16, 64, 4, 6)),
    16: (Int4Tiles(16, 64, 4, 5), Int4Tiles(16, 64, 4, 8), Int4Tiles(16, 32, 2, 6), Int4Tiles(16, 128, 8, 5)),
    32: (Int4Tiles(32, 64, 4, 4), Int4Tiles(32, 64, 4, 6), Int4Tiles(32, 128, 8, 4)),
    64: (Int4Tiles(64, 64, 4, 4), Int4Tiles(64, 64, 4, 3), Int4Tiles(64, 128, 8, 4)),
    512: (Int4Tiles(128, 128, 8, 3), Int4Tiles(128, 64, 4, 3), Int4Tiles(64, 128, 8, 4)),
}
ROW_CANDIDATES = tuple(RowTiles(8, *own) for own in ((1, 80), (2, 64), (2, 80), (2, 96), (3, 80), (4, 96)))
ROW_CANDIDATES += tuple(RowTiles(16, *own) for own in ((1, 64), (2, 64), (2, 80), (3, 64)))
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
PLAIN_FROM = 20  # rows from which a weight that is made plain first is measured
BYTES_PER_S = 3.0e12  # that an H100 reads and writes
EPS = 1e-5
CACHE = 160e6  # bytes that are read before a matrix is read again: three times an H100's L2
MOST_ERROR = 0.01  # relative; bfloat16's rounding alone is 0.002
MADE_PLAIN, MAKING_PLAIN = "made plain", "making it plain"
Product = Callable[[Tensor, Any], Any]
BEGAN_AT = time.perf_counter()
REPORT: dict[str, Any] = {"benchmark": "int4_products", "us": {}, "failed": {}}


class Form(NamedTuple):
    """A form of a kernel, as it is compiled."""

    rows: int
    size: int  # K
    is_gated: bool
    tiles: Int4Tiles | RowTiles
    is_added: bool = False  # of RowTiles: added to what is there, else with a norm

    def __str__(self) -> str:
        gated = " gated" if self.is_gated else ""
        return f"{self.rows} rows of {self.size}{gated}, {tuple(self.tiles)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", help="file for the report")
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="nothing is begun when so many have passed, checks take 65%% of them at most",
    )
    parser.add_argument("--quick", action="store_true", help="small matrices, few rows")
    parser.add_argument("--one-row", action="store_true", help="that product alone, then chains of layers' products")
    parser.add_argument("--check", help=argparse.SUPPRESS)  # forms, as JSON: what a process of its own does
    options = parser.parse_args()
    if options.check:
        check([form_of(*own) for own in json.loads(options.check)])
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    REPORT.update(device=name, torch=torch.__version__)
    print(f"{name}, torch {torch.__version__}", flush=True)
    shapes, counts = (SMALL, (20,)) if options.quick else (SHAPES, ROWS)
    counts = (1,) if options.one_row else counts
    wanted = list(dict.fromkeys(form for _, form in forms(shapes, counts)))
    sound = checked(wanted, 0.65 * options.seconds, options.quick)
    measure(shapes, counts, sound, device, options.seconds)
    tell(shapes, counts)
    if options.one_row:
        measure_layers(shapes, sound, device)
    REPORT["seconds"] = round(time.perf_counter() - BEGAN_AT, 1)
    if options.out:
        Path(options.out).write_text(json.dumps(REPORT, indent=1))
    print(f"{REPORT['seconds']} s", flush=True)


def form_of(rows: int, size: int, is_gated: bool, tiles: list[Any], is_added: bool) -> Form:
    of = Int4Tiles if len(tiles) == len(Int4Tiles._fields) else RowTiles
    return Form(rows, size, is_gated, of(*tiles), is_added)


def forms(shapes: dict[str, tuple[int, int]], counts: tuple[int, ...]) -> Iterator[tuple[str, Form]]:
    """Yield each matrix's name with each form that is to be measured, today's also with twice its splits."""
    for rows in counts:
        most = next((most for most in CANDIDATES if rows <= most), None)
        if most is None:
            continue
        for name, (total, size) in shapes.items() if rows == 1 else ():
            others = ROW_CANDIDATES if shapes is SHAPES else ()
            for row_tiles in dict.fromkeys((chosen_row_tiles(total), *others)):
                yield name, Form(1, size, name == "gate_up", row_tiles, name in ("output", "down"))
        today = next(own for top, own in TILES if rows <= top)
        for name, (total, size) in shapes.items():
            for tiles in dict.fromkeys((today, *(CANDIDATES[most] if rows > 1 else ()))):
                found = chosen_tiles(rows, total, size, torch.bfloat16, tiles)
                more = found._replace(splits=min(2 * found.splits, -(-size // (4 * PACKED))))
                for one in dict.fromkeys((found, more) if tiles == today else (found,)):
                    yield name, Form(rows, size, name == "gate_up", one)


def checked(all_forms: list[Form], seconds: float, is_quick: bool) -> set[Form]:
    """Return the forms that are right, each compiled and compared in some other process."""
    if is_quick:
        faults = {form: fault_of(form) for form in all_forms}
    else:
        faults = dict.fromkeys(all_forms, "not checked in time, or the process ended")
        share = max(1, min(14, (os.cpu_count() or 2) - 1))
        alike: dict[Any, list[Form]] = defaultdict(list)  # that are compiled once
        for form in all_forms:
            alike[form.size, form.is_gated, form.is_added, form.tiles, form.rows <= MOST_CHAINED].append(form)
        own = [[form for some in list(alike.values())[at::share] for form in some] for at in range(share)]
        command = [sys.executable, str(Path(__file__).resolve()), "--check"]
        children = [subprocess.Popen([*command, json.dumps(some)], stdout=subprocess.PIPE) for some in own if some]
        for child, some in zip(children, own, strict=False):
            try:
                lines, _ = child.communicate(timeout=max(1.0, BEGAN_AT + seconds - time.perf_counter()))
            except subprocess.TimeoutExpired:
                child.kill()
                lines, _ = child.communicate()
            told = [line[6:] for line in lines.decode(errors="replace").splitlines() if line.startswith("FORM: ")]
            faults |= zip(some, told, strict=False)
    for form, fault in faults.items():
        if fault:
            REPORT["failed"][str(form)] = fault
            print(f"FAILED {form}: {fault}", flush=True)
    sound = {form for form, fault in faults.items() if not fault}
    took = time.perf_counter() - BEGAN_AT
    print(f"{took:5.1f} s: {len(sound)} of {len(faults)} forms compiled and right", flush=True)
    return sound


def check(own: list[Form]) -> None:
    for form in own:
        print("FORM: " + fault_of(form), flush=True)


def fault_of(form: Form) -> str:
    """Return what is wrong with a form; empty: nothing."""
    try:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(1)
        count = 64 if isinstance(form.tiles, RowTiles) else 4 * form.tiles.n
        weight = int4_weight(torch.randn(count, form.size, device=device))
        x = torch.randn(form.rows, form.size, device=device).to(dtype)
        norm = torch.randn(form.size, device=device).to(dtype)
        inner = x.float()
        if isinstance(form.tiles, RowTiles) and not form.is_added:
            inner = torch.nn.functional.rms_norm(inner, (form.size,), norm.float(), EPS)
        expected = inner @ weight.dequantized().t()
        if form.is_gated:
            gate, up = expected.chunk(2, 1)
            expected = torch.nn.functional.silu(gate) * up
        found = []
        for _ in range(2):
            if isinstance(form.tiles, RowTiles):
                found.append(row_product(form, norm, torch.zeros_like(expected, dtype=dtype), x, weight).float())
            else:
                found.append(few_rows_int4(x, weight, form.is_gated, tiles=form.tiles).float())
        error = float((found[0] - expected).norm() / expected.norm())
        if not torch.equal(*found):
            return "twice the same gives two results"
        return "" if error < MOST_ERROR else f"off by {error:.4f}"
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def row_product(form: Form, norm: Tensor, added: Tensor, x: Tensor, weight: Int4Weight) -> Tensor:
    """What a step of one row does with a matrix."""
    assert isinstance(form.tiles, RowTiles)
    if form.is_added:
        return one_row_int4(x, weight, add_to=added, tiles=form.tiles)
    return one_row_int4(x, weight, None, norm, EPS, form.is_gated, tiles=form.tiles)


def int4_weight(plain: Tensor) -> Int4Weight:
    """Return the weight rounded to groups of 4-bit integers."""
    found = empty_weight(*plain.shape, StoredAs("W4A16_AWQ", GROUP, torch.float16), plain.device)
    assert isinstance(found, Int4Weight)
    round_into(plain, found)
    return found


def measure(
    shapes: dict[str, tuple[int, int]], counts: tuple[int, ...], sound: set[Form], device: torch.device, seconds: float
) -> None:
    """Measure matrix by matrix, rows that matter most first. What fails is told and the next one follows."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name, (total, size) in shapes.items():
        copies = 2 if device.type == "cpu" else max(2, -(-int(CACHE) // (total * size // 2)))
        one = torch.randn(total, size, dtype=dtype, device=device) / 64
        plains = [one, *(one.clone() for _ in range(max(1, copies // 4)))]
        few = [int4_weight(one)]
        few += [Int4Weight(*(part.clone() for part in few[0].tensors.values()), size) for _ in range(copies - 1)]
        for rows in counts:
            x = torch.randn(rows, size, dtype=dtype, device=device)
            own = [form for of, form in forms(shapes, (rows,)) if of == name and form in sound]
            for case, product in products(rows, own, make_counters(device, 4096), total):
                weights: Sequence[Any] = plains if case == "bf16" else few
                try:
                    if time.perf_counter() - BEGAN_AT > seconds:
                        raise TimeoutError("no time left")
                    each = graph_seconds(partial(run, product, x, weights), device) / len(weights)
                    REPORT["us"].setdefault(name, {}).setdefault(rows, {})[case] = round(1e6 * each, 2)
                except Exception as error:
                    REPORT["failed"][f"{name} {rows} {case}"] = f"{type(error).__name__}: {str(error)[:200]}"
                    print(f"FAILED {name} {rows} rows {case}: {type(error).__name__}: {str(error)[:200]}", flush=True)


def products(rows: int, own: list[Form], counters: Tensor, total: int) -> Iterator[tuple[str, Product]]:
    yield "bf16", one_row_linear if rows == 1 else torch.nn.functional.linear
    dtype = torch.bfloat16 if counters.is_cuda else torch.float32
    for form in own:
        if isinstance(form.tiles, RowTiles):
            norm, added = (torch.ones(size, dtype=dtype, device=counters.device) for size in (form.size, (1, total)))
            yield str(tuple(form.tiles)), partial(row_product, form, norm, added)
        else:
            yield (
                str(tuple(form.tiles)),
                partial(few_rows_int4, is_gated=form.is_gated, tiles=form.tiles, counters=counters),
            )
    if rows >= PLAIN_FROM:
        yield MADE_PLAIN, plain_product
    if rows == ROWS[-1]:
        yield MAKING_PLAIN, lambda x, weight: plain_weight(weight, x.dtype)


def measure_layers(shapes: dict[str, tuple[int, int]], sound: set[Form], device: torch.device) -> None:
    """Measure all products of layers one after the other, as a step of one row has them, with its norms and sums."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    copies = 2 if device.type == "cpu" else 8
    layers = [{name: int4_weight(torch.randn(*shape, device=device)) for name, shape in shapes.items()}]
    for _ in range(copies - 1):
        parts = {name: [part.clone() for part in one.tensors.values()] for name, one in layers[0].items()}
        layers.append({name: Int4Weight(*own, shapes[name][1]) for name, own in parts.items()})
    inputs = {name: torch.randn(1, size, dtype=dtype, device=device) for name, (_, size) in shapes.items()}
    norm = torch.ones(shapes["qkv"][1], dtype=dtype, device=device)
    added = torch.zeros(1, shapes["output"][0], dtype=dtype, device=device)
    counters = make_counters(device, 4096)

    def few_rows() -> None:
        for layer in layers:
            for name, weight in layer.items():
                is_added = name in ("output", "down")
                x = inputs[name] if is_added else rms_norm(inputs[name], norm, EPS)
                few_rows_int4(x, weight, name == "gate_up", add_to=added if is_added else None, counters=counters)

    def one_row(chosen: dict[str, Form]) -> None:
        for layer in layers:
            for name, weight in layer.items():
                row_product(chosen[name], norm, added, inputs[name], weight)

    own: dict[Any, dict[str, Form]] = defaultdict(dict)  # a form for each matrix
    for name, form in forms(shapes, (1,)):
        if form in sound and isinstance(form.tiles, RowTiles):
            own["all", tuple(form.tiles)][name] = form
            if form.tiles == chosen_row_tiles(shapes[name][0]):
                own["chosen"][name] = form
            times = REPORT["us"].get(name, {}).get(1, {})
            best = own["best of each"].setdefault(name, form)
            if times.get(str(tuple(form.tiles)), 1e9) < times.get(str(tuple(best.tiles)), 1e9):
                own["best of each"][name] = form
    cases: dict[str, Callable[[], None]] = {"few rows": few_rows}
    cases |= {str(case): partial(one_row, some) for case, some in own.items() if len(some) == len(shapes)}
    found = {}
    for case, call in cases.items():
        try:
            found[case] = round(1e3 * graph_seconds(call, device) * LAYERS / copies, 3)
        except Exception as error:
            REPORT["failed"][f"layers {case}"] = f"{type(error).__name__}: {str(error)[:200]}"
            print(f"FAILED layers {case}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    REPORT["layers_ms"] = dict(sorted(found.items(), key=lambda item: item[1]))
    told = "; ".join(f"{case} {ms}" for case, ms in REPORT["layers_ms"].items())
    print(f"\nproducts of one row in turns, ms of {LAYERS} layers: {told}", flush=True)


def plain_product(x: Tensor, weight: Int4Weight) -> Tensor:
    """What steps of many rows do: the weight is made plain first."""
    return torch.nn.functional.linear(x, plain_weight(weight, x.dtype))


def run(product: Product, x: Tensor, weights: Sequence[Any]) -> None:
    for weight in weights:
        product(x, weight)


def tell(shapes: dict[str, tuple[int, int]], counts: tuple[int, ...]) -> None:
    """Print the table, then the best of each number of rows: ms of a model's layers."""
    best: dict[int, dict[str, tuple[float, str]]] = defaultdict(dict)
    for name, (total, size) in shapes.items():
        num_bytes = total * size * (0.5 + 3 / GROUP)
        print(f"\n{name} ({total}, {size}): bytes alone take {1e6 * num_bytes / BYTES_PER_S:.1f} us")
        for rows in counts:
            found = REPORT["us"].get(name, {}).get(rows, {})
            ordered = sorted(found.items(), key=lambda item: item[1])
            print(f"  {rows:5} rows, us: " + "; ".join(f"{case} {each}" for case, each in ordered))
            ours = [(each, case) for case, each in ordered if case not in ("bf16", MAKING_PLAIN)]
            if ours and "bf16" in found:
                best[rows][name] = ours[0]
    print(f"\nall four matrices of {LAYERS} layers, ms: bf16 | best of each | share | chosen today | best")
    REPORT["best"] = {}
    for rows, own in best.items():
        if len(own) < len(shapes):
            continue
        plain = sum(REPORT["us"][name][rows]["bf16"] for name in own) * LAYERS / 1e3
        ours = sum(each for each, _ in own.values()) * LAYERS / 1e3
        today = "-"
        if rows <= TILES[-1][0]:
            keys = {name: str(tuple(chosen_tiles(rows, *shapes[name], torch.bfloat16))) for name in own}
            if all(key in REPORT["us"][name][rows] for name, key in keys.items()):
                today = f"{sum(REPORT['us'][name][rows][key] for name, key in keys.items()) * LAYERS / 1e3:.3f}"
        which = {name: case for name, (_, case) in own.items()}
        REPORT["best"][rows] = {"bf16_ms": round(plain, 3), "ms": round(ours, 3), "today_ms": today, "which": which}
        print(f"  {rows:5}: {plain:.3f} | {ours:.3f} | {ours / plain:.2f} | {today} | {which}", flush=True)


def graph_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of a replay of its graph, the median of several; on a CPU of one call."""
    call()
    if device.type == "cpu":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()
