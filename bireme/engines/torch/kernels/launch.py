"""How kernels follow each other without a pause: a kernel of a chain is launched while the one before it runs.

On Hopper and later (programmatic dependent launch). Each kernel of a chain calls `wait` before it touches what others
write, in all its programs, and may load weights before that.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MOST_ROWS = 32  # more gain nothing: programs that wait take room from those that work
# The most rows of each form that kernels have for few; all of more rows have one. A form that is met for the first time
# on a machine takes seconds to compile. What the host tells lies anywhere: its alignment is no part of a form.
MOST_OF_FORMS = (1, 7, 8, 16, 32)


@triton.jit  # type: ignore[untyped-decorator]
def wait(CHAINED: tl.constexpr, IS_ALONE: tl.constexpr = False) -> None:
    """Let the next kernel start, then wait until all that the kernels before have written can be read.

    Alone: `start_next` lets it start. For kernels whose programs all run at once, and those before them: programs of
    later kernels would take places beside them that are not the same on each multiprocessor, and keep them.
    """
    if CHAINED:
        if not IS_ALONE:
            gdc_launch_dependents()
        gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def start_next(CHAINED: tl.constexpr) -> None:
    """Let the next kernel start: it waits for what this one still does."""
    if CHAINED:
        gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def prefetch(at: tl.tensor, NUM_BYTES: tl.constexpr) -> None:
    """Fetch what begins at these pointers into the L2 cache, up to 256 bytes each. Not in the interpreter."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; prefetch.global.L2 [$1 + 128]; mov.u32 $0, 0;"
        if NUM_BYTES > 128
        else "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@functools.cache
def _is_chained(index: int) -> bool:
    major, _ = torch.cuda.get_device_capability(index)
    return bool(major >= 9)


def chain(x: Tensor) -> dict[str, Any]:
    """Return the arguments of a launch for these rows that make its kernel part of a chain."""
    if not x.is_cuda or len(x) > MOST_ROWS or not _is_chained(x.device.index or 0):
        return {"CHAINED": False}
    return {"CHAINED": True, "launch_pdl": True}
