"""Values of MXFP4 (e2m1) and their powers of two (e8m0), from bytes that hold two values, the low half first.

Source: OCP Microscaling Formats 1.0. A value is a sign, two bits of exponent and one of mantissa. Both come out exact.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def low_values(codes, IS_GPU: tl.constexpr) -> tl.tensor:
    """Return the values in the low halves of bytes, in bfloat16.

    On a GPU the bits are put where E4M3 has them, and go on as in from_fp8.py: 2 ** 126 times too small.
    """
    if IS_GPU:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 x, p, q, s, t, f, z;
            shl.b32 x, $2, 4;
            shl.b32 t, $2, 2;
            and.b32 t, t, 0x1c1c1c1c;
            lop3.b32 x, x, 0x80808080, t, 0xea;
            prmt.b32 p, x, 0, 0x1404;
            prmt.b32 q, x, 0, 0x3424;
            and.b32 s, p, 0x7f007f00;
            and.b32 t, q, 0x7f007f00;
            shr.u32 s, s, 4;
            shr.u32 t, t, 4;
            lop3.b32 p, p, 0x80008000, s, 0xea;
            lop3.b32 q, q, 0x80008000, t, 0xea;
            mov.b32 f, 0x7e807e80;
            mov.b32 z, 0x80008000;
            fma.rn.bf16x2 $0, p, f, z;
            fma.rn.bf16x2 $1, q, f, z;
            }
            """,
            "=r,=r,r",
            [codes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return _value(codes & 15)


@triton.jit  # type: ignore[untyped-decorator]
def high_values(codes, IS_GPU: tl.constexpr) -> tl.tensor:
    """Return those in the high halves."""
    if IS_GPU:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 x, p, q, s, t, f, z;
            shr.u32 t, $2, 2;
            and.b32 t, t, 0x1c1c1c1c;
            lop3.b32 x, $2, 0x80808080, t, 0xea;
            prmt.b32 p, x, 0, 0x1404;
            prmt.b32 q, x, 0, 0x3424;
            and.b32 s, p, 0x7f007f00;
            and.b32 t, q, 0x7f007f00;
            shr.u32 s, s, 4;
            shr.u32 t, t, 4;
            lop3.b32 p, p, 0x80008000, s, 0xea;
            lop3.b32 q, q, 0x80008000, t, 0xea;
            mov.b32 f, 0x7e807e80;
            mov.b32 z, 0x80008000;
            fma.rn.bf16x2 $0, p, f, z;
            fma.rn.bf16x2 $1, q, f, z;
            }
            """,
            "=r,=r,r",
            [codes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return _value(codes >> 4)


@triton.jit  # type: ignore[untyped-decorator]
def _value(code) -> tl.tensor:
    size = (code & 7).to(tl.float32)
    odd = (code & 1).to(tl.float32)
    exponent = ((code & 7) >> 1).to(tl.float32)
    value = tl.where(size < 2, 0.5 * size, (1 + 0.5 * odd) * tl.exp2(exponent - 1))
    return tl.where(code > 7, -value, value).to(tl.bfloat16)


@triton.jit  # type: ignore[untyped-decorator]
def powers(exponents) -> tl.tensor:
    """Return 2 ** (exponent - 127), float32, of bytes below 255: its bits are the exponent, but for the smallest."""
    wide = exponents.to(tl.int32)
    return tl.where(wide == 0, 1 << 22, wide << 23).to(tl.float32, bitcast=True)
