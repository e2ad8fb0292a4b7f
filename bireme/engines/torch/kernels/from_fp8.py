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
