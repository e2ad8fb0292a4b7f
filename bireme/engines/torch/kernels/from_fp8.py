"""8-bit floats (E4M3) as bfloat16, in few instructions: Triton's own conversion goes through slow ones.

Not in the interpreter, which has Triton's (`IS_GPU` false). A NaN, which no weights have, becomes 480.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def as_bfloat16(x, IS_GPU: tl.constexpr) -> tl.tensor:
    """Sign, exponent and mantissa are moved to their places, which leaves a value 2 ** 120 times too small."""
    if IS_GPU:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 p, q, s, t, f, z;
            prmt.b32 p, $2, 0, 0x1404;
            prmt.b32 q, $2, 0, 0x3424;
            and.b32 s, p, 0x7f007f00;
            and.b32 t, q, 0x7f007f00;
            shr.u32 s, s, 4;
            shr.u32 t, t, 4;
            lop3.b32 p, p, 0x80008000, s, 0xea;
            lop3.b32 q, q, 0x80008000, t, 0xea;
            mov.b32 f, 0x7b807b80;
            mov.b32 z, 0x80008000;
            fma.rn.bf16x2 $0, p, f, z;
            fma.rn.bf16x2 $1, q, f, z;
            }
            """,
            "=r,=r,r",
            [x.to(tl.int8, bitcast=True)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return x.to(tl.bfloat16)


@triton.jit  # type: ignore[untyped-decorator]
def halves_as_bfloat16(pairs, IS_GPU: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the first and the second of pairs that were loaded as int16, both 2 ** 120 times too small.

    Without the multiplication: tensor cores take subnormal bfloat16. In the interpreter float32.
    """
    if IS_GPU:
        first, second = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 p, q, s;
            shl.b32 p, $2, 8;
            shl.b32 s, $2, 4;
            shr.u32 q, $2, 4;
            and.b32 s, s, 0x07f007f0;
            and.b32 q, q, 0x07f007f0;
            lop3.b32 $0, p, 0x80008000, s, 0xea;
            lop3.b32 $1, $2, 0x80008000, q, 0xea;
            }
            """,
            "=r,=r,r",
            [pairs],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
        return first, second
    else:
        first = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        second = ((pairs >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return first.to(tl.float32) * 2.0**-120, second.to(tl.float32) * 2.0**-120
