"""A step's parts as NVTX ranges, so that Nsight Systems shows what the host does while kernels run.

Off unless BIREME_NVTX is 1 in the engine's environment (a worker's `env`) and torch was built with CUDA.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable

import torch

logger = logging.getLogger("bireme.engines.torch")
VARIABLE = "BIREME_NVTX"
StepRange = Callable[[str], contextlib.AbstractContextManager[None]]
_NOTHING = contextlib.nullcontext()


def step_range_of(value: str | None, device: torch.device) -> StepRange:
    """Return what marks a part of a step by name; `value`: of the variable."""
    if value == "1" and device.type == "cuda":
        return torch.cuda.nvtx.range  # type: ignore[no-any-return]
    if value not in (None, "", "0"):
        reason = "the engine runs on a CPU" if value == "1" else f"{VARIABLE} is {value!r}: 1 or 0"
        logger.warning("nvtx_off reason=%s", reason)
    return lambda name: _NOTHING


def step_range(device: torch.device) -> StepRange:
    return step_range_of(os.environ.get(VARIABLE), device)
