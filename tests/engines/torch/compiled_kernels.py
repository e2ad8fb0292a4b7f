"""Compiles kernels for GPUs, down to their machine code, without one.

    python -m tests.engines.torch.compiled_kernels REFUSALS

The interpreter takes what the compiler refuses: loops whose variables change their shape, assembly, more shared memory
than there is. REFUSALS, a file of JSON, gets what the compiler said by family of kernels. One process compiles all:
importing torch and the compiler costs more than most kernels.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHARED = 227 << 10  # bytes of a Hopper's multiprocessor, for one program
SMALL = 99 << 10  # of an Ada's
BF16, FP16, FP32, FP8, BYTES, INTS = "*bf16", "*fp16", "*fp32", "*fp8e4nv", "*u8", "*i32"


def build(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    target: int = 90,
    is_aligned: bool = False,
    shared: int = SHARED,
    **options: int,
) -> Any:
    """Return what becomes of a kernel; `types` has those of its arguments, and may have more. `shared`: bytes at most.

    `is_aligned`: pointers are multiples of 16, as those of whole tensors are.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    pointers = [at for at, name in enumerate(kernel.arg_names) if is_aligned and signature[name].startswith("*")]
    attrs = {(at,): [["tt.divisibility", 16]] for at in pointers}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": 4, "num_stages": 3} | options
    made = compile(source, target=GPUTarget("cuda", target, 32), options=options)
    assert made.metadata.shared <= shared, f"{made.metadata.shared} bytes of shared memory"
    return made


def int4() -> None:
    """Products with 4-bit integers, in tiles of `few_rows_int4`: no thread has weights that another one multiplies."""
    from bireme.engines.torch.kernels import int4_linear

    def rows_kernel(
        tiles: int4_linear.Int4Tiles, more: dict[str, Any], target: int = 90, out: str = BF16, shared: int = SHARED
    ) -> str:
        names = {"TILE_ROWS": tiles.rows, "TILE_N": tiles.n, "WARPS": tiles.warps, "SPLITS": tiles.splits}
        names |= {"IS_JOINED": tiles.rows > 8, "GROUP": 128, "IS_GPU": True, "CHAINED": target >= 90}
        how = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        constants = own | names | {"PRECISION": "tf32"} | more
        made = build(int4_linear._rows_kernel, types | {"out": out}, constants, target, True, shared, **how)
        return str(made.asm["ptx"])

    own = {"K": 4096, "PACKED": 128, "HAS_BIAS": False, "IS_GATED": True, "IS_GELU": False, "IS_ADDED": False}
    types = dict.fromkeys(("x", "bias"), BF16) | {"weight": "*i16", "scales": FP16, "zeros": BYTES}
    types |= {"rows": "i32", "N": "i32", "parts": FP32, "counters": INTS}
    for _, tiles in int4_linear.TILES[::2]:
        assembly = rows_kernel(tiles, {})
        assert assembly.count("fma.rn.bf16x2") * 2 * 32 * tiles.warps == tiles.n * 128, "weights are dequantized twice"
        assert assembly.count("st.shared") < 16, "weights go through shared memory"
    few = int4_linear.TILES[0][1]
    for group in (16, 64):
        rows_kernel(few, {"GROUP": group})
    rows_kernel(few._replace(splits=4), {"IS_GATED": False})
    rows_kernel(few, {}, target=80)
    for _, tiles in int4_linear.TILES[-2:]:  # an L4's
        rows_kernel(int4_linear.fitting(tiles, SMALL), {}, target=89, shared=SMALL)
    types |= dict.fromkeys(("x", "bias"), FP32)
    rows_kernel(int4_linear._EXACT_TILES, {"IS_GPU": False, "PRECISION": "ieee"}, out=FP32)
    plain = {"K": 4096, "PACKED": 128, "GROUP": 128, "TILE_N": 64, "IS_GPU": True}
    build(int4_linear._plain_kernel, types | {"out": BF16}, plain)


def int4_row() -> None:
    """Products of one row with 4-bit integers: each weight is dequantized once, by the thread that multiplies it."""
    from bireme.engines.torch.kernels import one_row_int4

    def row_kernel(dtype: str, more: dict[str, Any], target: int = 90, total: int = 28672) -> str:
        warps, ahead, registers = one_row_int4.chosen_row_tiles(total)
        names = {"WARPS": warps, "AHEAD": ahead, "IS_GPU": dtype == BF16, "IS_EXACT": dtype == FP32}
        given = types | dict.fromkeys(("x", "bias", "norm", "out"), dtype)
        how = {"num_warps": warps, "num_stages": 1, "maxnreg": registers}
        made = build(one_row_int4._row_kernel, given, own | names | more, target, True, SMALL, **how)
        return str(made.asm["ptx"])

    own = {"K": 4096, "PACKED": 128, "GROUP": 128, "HAS_BIAS": False, "HAS_NORM": True, "IS_GELU": False}
    own |= {"IS_GATED": True, "IS_ADDED": False, "CHAINED": True}
    types = {"weight": "*i16", "scales": FP16, "zeros": BYTES, "eps": "fp32", "N": "i32"}
    added = {"HAS_NORM": False, "IS_GATED": False, "IS_ADDED": True}
    assembly = row_kernel(BF16, {"K": 14336} | added, total=4096)
    assert assembly.count("fma.rn.bf16x2") * 2 * 32 * 16 == 16 * 14336, "weights are dequantized twice"
    assert assembly.count("st.shared") < 8, "weights go through shared memory"
    row_kernel(BF16, {"CHAINED": False}, target=80)
    row_kernel(FP32, {"K": 640})


def mxfp4() -> None:
    """Experts in MXFP4, whose assembly is there, and plain ones of one row."""
    from bireme.engines.torch.kernels import experts
    from bireme.engines.torch.kernels import mxfp4_experts as kernels

    shape = {"K": 2880, "HAS_BIAS": True, "LIMIT": 7.0, "ALPHA": 1.702, "IS_GPU": True, "CHAINED": True}
    tiles = shape | {"PAIRS": 4, "TILE_K": 64, "IS_GROUPED": True, "IS_GATED": True, "PRECISION": "tf32"}
    row = shape | {"TILE_N": 8, "TILE_K": 512}
    plain = {"K": 2880, "TILE_N": 2, "TILE_K": 2048, "IS_GELU": False, "HAS_BIAS": True, "CHAINED": True}
    plain |= {"LIMIT": 0.0, "ALPHA": 0.0}
    added = {name: value for name, value in row.items() if name not in ("LIMIT", "ALPHA")} | {"TOP": 4}
    types = dict.fromkeys(("x", "inner", "weight", "norm", "bias", "out"), BF16)
    types |= {"values": BYTES, "scales": BYTES, "shares": FP32, "experts": INTS, "pairs": INTS, "chosen": INTS}
    types |= {"num_pairs": "i32", "N": "i32", "eps": "fp32"}
    for kernel, constants, warps in (
        (kernels._tiles_kernel, tiles | {"ROWS": 16, "TILE_N": 64}, 4),
        (kernels._tiles_kernel, tiles | {"ROWS": 64, "TILE_N": 128}, 8),
        (kernels._gated_row_kernel, row, 4),
        (kernels._add_row_kernel, added, 4),
        (experts._gated_row_kernel, plain, 4),
        (experts._gated_row_kernel, plain | {"LIMIT": 7.0}, 4),
    ):
        made = build(kernel, types, constants, num_warps=warps)
        assert ("fma.rn.bf16x2" in made.asm["ptx"]) is ("values" in kernel.arg_names)


def fp8() -> None:
    """Products with 8-bit floats, and the kernels that round rows for them."""
    from bireme.engines.torch.kernels import one_row_fp8, rounded_linear, row_wise

    bounds = {"LARGEST": "fp32", "SMALLEST": "fp32", "scales": FP32}
    for block in (0, 128):
        own = {"K": 4096, "BLOCK": block, "IS_GATED": True, "IS_GELU": False, "CHAINED": True, "IS_GPU": True}
        one = own | {"TILE_N": 2, "TILE_J": 512, "HAS_BIAS": False, "HAS_NORM": True, "IS_ADDED": False}
        types = {"x": BF16, "weight": INTS, "bias": FP32, "norm": BF16, "scales": FP32, "out": BF16}
        build(one_row_fp8._fp8_kernel, types | {"eps": "fp32", "N": "i32"}, one)
        types = {"x": FP8, "x_scales": FP32, "weight": FP8, "scales": FP32, "bias": BF16, "out": BF16}
        tiles = {"K": 4096, "TILE_ROWS": 128, "TILE_N": 128, "TILE_K": 128, "BLOCK": block, "HAS_BIAS": True}
        types |= {"rows": "i32", "N": "i32"}
        build(rounded_linear._rounded_kernel, types, tiles | {"CHAINED": False}, num_warps=8, num_stages=4)
        types = bounds | {"x": BF16, "more": BF16, "weight": BF16, "out": FP8, "eps": "fp32"}
        rows = {"K": 4096, "PAD_K": 4096, "BLOCK": block, "CHAINED": True}
        build(row_wise._rounded_norm_kernel, types, rows | {"HAS_MORE": True, "HAS_NORM": True}, num_warps=8)
        rows |= {"K": 14336, "PAD_K": 16384, "IS_GELU": False}
        build(row_wise._rounded_gate_kernel, bounds | {"gate_up": BF16, "out": FP8}, rows, num_warps=16)


def fp8_kv() -> None:
    """The attention of decode steps to keys and values in 8-bit floats."""
    from bireme.engines.torch.kernels.decode_attention import _attention_kernel as kernel

    types = dict.fromkeys(kernel.arg_names, "fp32") | {"table_stride": "i32", "window": "i32"}
    types |= dict.fromkeys(("keys", "values"), FP8) | dict.fromkeys(("cos_sin", "partial", "weights"), FP32)
    types |= dict.fromkeys(("qkv", "q_norm", "k_norm", "out", "sinks"), BF16)
    types |= dict.fromkeys(("parts", "table", "counters"), INTS)
    constants = {"H": 8, "N": 2, "K": 64, "PAD_K": 64, "TILE": 64, "BLOCK_SIZE": 32, "PAD_G": 16, "MOST_PARTS": 16}
    constants |= {"PAD_HEADS": 4, "AT_ONCE": 1, "PRECISION": "tf32", "IS_GPU": True, "CHAINED": True, "IS_ALONE": True}
    constants |= dict.fromkeys(("HAS_NORM", "HAS_SOFTCAP", "HAS_SINKS"), False)
    made = build(kernel, types, constants, is_aligned=True, maxnreg=128)
    assert ".shared.b8" not in made.asm["ptx"], "values are loaded a byte at a time"
    for other in (FP32, FP16):
        build(kernel, types | dict.fromkeys(("qkv", "q_norm", "k_norm", "out", "sinks"), other), constants)


def draws() -> None:
    """The draws of a step's tokens."""
    from bireme.engines.torch.kernels.draw import _draw_kernel

    types = {"logits": BF16} | dict.fromkeys(("steps", "requests", "last", "tokens"), INTS)
    types |= dict.fromkeys(("step_stride", "row_stride", "size"), "i32")
    build(_draw_kernel, types, {"TILE": 8192, "CHAINED": True}, num_warps=32)


FAMILIES: tuple[Callable[[], None], ...] = (int4, int4_row, mxfp4, fp8, fp8_kv, draws)


def refusal(family: Callable[[], None]) -> str:
    """Return what the compiler said of the first kernel that it refused, or nothing."""
    try:
        family()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps({family.__name__: refusal(family) for family in FAMILIES}))
